import torch, time, sys, numpy as np, resource, os
torch.set_num_threads(2)
from specdec.config import EngineConfig
from specdec.target.model import load_target
from specdec.types import *
from specdec_attention_cpu.backend import CpuBackend
def rss(): return int([l for l in open('/proc/self/status') if 'VmRSS' in l][0].split()[1])//1024
t=time.time(); tm=load_target(EngineConfig(model="demo:smollm2",dtype=os.environ.get('DT','bfloat16'))); print('load',time.time()-t,'rss',rss(), 'stack',getattr(tm,'_stack',None) is not None)
be=CpuBackend(); print(be.supports(tm.requirements(16)))
cache=tm.allocate_kv_cache(2048,16); tm.bind(be,cache,Needs())
def batch(lens,rows):
    # rows tokens per request on context
    B=len(lens); nb=[(l+rows+15)//16 for l in lens]; tab=torch.zeros(B,max(nb),dtype=torch.int32); n=0; slots=[];pos=[]
    for i,l in enumerate(lens):
        tab[i,:nb[i]]=torch.arange(n,n+nb[i]); 
        for p in range(l,l+rows): slots.append((n+p//16)*16+p%16); pos.append(p)
        n+=nb[i]
    T=B*rows
    return PackedBatch(input_ids=torch.randint(0,49152,(T,)),positions=torch.tensor(pos),slot_mapping=torch.tensor(slots),query_start_loc=torch.arange(0,T+1,rows,dtype=torch.int32),seq_lens=torch.tensor([l+rows for l in lens],dtype=torch.int32),block_tables=tab,logits_indices=torch.arange(T),max_query_len=rows,max_seq_len=max(lens)+rows)
def med(b,n):
    ts=[]
    for _ in range(n):
        s=time.perf_counter(); tm.forward(b); ts.append(time.perf_counter()-s)
    return f"{min(ts)*1e3:.2f}/{np.median(ts)*1e3:.2f}"
for _ in range(2):
    print('T=1 @256',med(batch([256],1),30),' T=6 @256',med(batch([256],6),30),' B16 @300',med(batch([300]*16,1),10), 'T=1 @8000',med(batch([8000],1),10),'rss',rss())
print('prefill 512',med(batch([0],512),3), ' 2048', med(batch([0],2048),1))
