import torch, time, sys, numpy as np
torch.set_num_threads(2)
t=time.time()
from specdec_attention_cpu.backend import CpuBackend
print("import",time.time()-t)
from specdec.testing.attention import *
L=30
for lengths in ([(255,1)],[(250,6)],[(8000,1)],[(8000,6)],[(300,1)]*16,[(300,6)]*16):
    l=attention_layer(num_heads=9,num_kv_heads=3,head_dim=64); c=attention_case(lengths,l,block_size=16,dtype=torch.bfloat16,num_layers=1)
    kvs=[copy_cache(c.cache).layers[0] for _ in range(L)]
    from attrs import evolve
    from specdec.attention.interface import KVCache
    cache=KVCache(tuple(kvs),c.cache.num_blocks,16)
    ls=[evolve(l,index=i) for i in range(L)]
    qkv=torch.cat([c.query,c.key,c.value],1).contiguous()
    q,k,v=qkv[:,:9],qkv[:,9:12],qkv[:,12:]
    be=CpuBackend(); ts=[];ps=[]
    for _ in range(15 if len(q)<100 else 3):
        s=time.perf_counter(); p=be.plan(c.batch,cache); e=time.perf_counter()
        for x in ls: be.attend(q,k,v,x,p)
        ts.append(time.perf_counter()-e); ps.append(e-s)
    T=max(len(q),1); fl=sum(4*n*(cch+n/2)*9*64 for cch,n in lengths)*L
    by=sum((cch+n)*384*2 for cch,n in lengths)*L
    print(lengths[:1],len(lengths),f"plan {min(ps)*1e6:.0f}us  30 layers {min(ts)*1e3:.2f}/{np.median(ts)*1e3:.2f} ms {fl/min(ts)/1e9:.0f} GF {by/min(ts)/1e9:.1f} GB/s")
