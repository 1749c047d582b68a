import torch, time, sys, numpy as np
torch.set_num_threads(1)
from specdec_attention_cpu.backend import CpuBackend
from specdec.testing.attention import *
for lengths in ([(255,1)],[(250,6)],[(2000,1)],[(2000,6)],[(300,1)]*16,[(0,512)]):
    l=attention_layer(num_heads=9,num_kv_heads=3,head_dim=64); c=attention_case(lengths,l,block_size=16,dtype=torch.bfloat16,num_layers=1)
    qkv=torch.cat([c.query,c.key,c.value],1).contiguous()
    q,k,v=qkv[:,:9],qkv[:,9:12],qkv[:,12:]
    be=CpuBackend(); p=be.plan(c.batch,c.cache)
    ts=[]
    for _ in range(60 if len(q)<100 else 10):
        s=time.thread_time(); be.attend(q,k,v,l,p); ts.append(time.thread_time()-s)
    n=sum(a+b for a,b in lengths)*3
    print(lengths[:1],len(lengths),f"{min(ts)*1e6:.1f}us  {min(ts)*2.9e9/n:.0f} cycles per token-head")
