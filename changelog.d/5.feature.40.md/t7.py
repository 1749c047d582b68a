import torch, time, sys, numpy as np
torch.set_num_threads(2)
t=time.time()
from specdec_attention_cpu.backend import CpuBackend
print("import/compile",time.time()-t)
from specdec.testing.attention import *
from specdec.attention.dense import dense_attention, visible
def reference(c):
    b=c.batch; out=[]
    st=b.query_start_loc.tolist(); bs=c.cache.block_size
    L=c.cache.layers[c.layer.index]
    for r,n in enumerate(b.seq_lens.tolist()):
        q0,q1=st[r],st[r+1]; nq=q1-q0; cached=n-nq
        blk=b.block_tables[r].tolist()
        sl=[blk[p//bs]*bs+p%bs for p in range(cached)]
        k=torch.cat([L.keys[sl],c.key[q0:q1]]); v=torch.cat([L.values[sl],c.value[q0:q1]])
        pos=b.positions[q0:q1]; kp=torch.cat([torch.arange(cached),pos])
        al=visible(pos,kp,c.layer.sliding_window,c.layer.chunk_size)
        if b.parents is not None:
            par=b.parents[q0:q1].tolist(); m=torch.zeros(nq,nq,dtype=torch.bool)
            for i,p in enumerate(par):
                if p>=0: m[i]=m[p]
                m[i,i]=True
            al[:,cached:]&=m
        else:
            al[:,cached:]&=torch.ones(nq,nq,dtype=torch.bool).tril()
        out.append(dense_attention(c.query[q0:q1],k,v,al,c.layer.scaling,c.layer.softcap,c.sinks))
    return torch.cat(out)
def check(lengths,dtype=torch.float32,bs=4,parents=None,seed=0,**kw):
    l=attention_layer(**kw); c=attention_case(lengths,l,block_size=bs,parents=parents,dtype=dtype,seed=seed)
    ref=reference(c); be=CpuBackend(); p=be.plan(c.batch,c.cache)
    out=be.attend(c.query,c.key,c.value,c.layer,p,c.sinks)
    e=(out-ref).abs().max().item()
    print(f"{e:.2e}", lengths,dtype,kw, "BAD" if not e<(1e-5 if dtype==torch.float32 else 2e-2) else "")
check([(0,1)]); check([(5,3)]); check([(0,40),(17,1),(300,6)])
check([(255,1)]); check([(256,1)]); check([(1000,5)]); check([(4097,6)],bs=16)
for dt in (torch.float32,torch.bfloat16):
    for D in (8,16,24,64,80,96,128,192,256):
        check([(0,40),(700,6)],dtype=dt,head_dim=D,bs=16)
    check([(0,40),(700,6)],dtype=dt,head_dim=192,v_head_dim=128)
    check([(0,300),(700,6)],dtype=dt,num_heads=9,num_kv_heads=3,head_dim=64)
    check([(0,300),(700,6)],dtype=dt,num_heads=4,num_kv_heads=4,head_dim=64)
    check([(0,300),(700,6)],dtype=dt,num_heads=8,num_kv_heads=1,head_dim=64)
    check([(0,600),(1700,6),(3,1)],dtype=dt,sliding_window=100)
    check([(0,600),(1700,6),(3,1)],dtype=dt,sliding_window=3)
    check([(0,600),(1700,6),(3,1)],dtype=dt,chunk_size=128)
    check([(0,600),(700,6),(3,1)],dtype=dt,softcap=20.)
    check([(0,600),(700,6),(3,1)],dtype=dt,sinks=True)
    check([(500,9),(0,5)],dtype=dt,parents=[[-1,0,0,1,1,2,2,3,5],[-1,0,1,2,3]],sliding_window=None)
    check([(500,9),(0,5)],dtype=dt,parents=[[-1,0,0,1,1,2,2,3,5],[-1,0,1,1,3]],sliding_window=4)
    check([(252,9),(2000,5)],dtype=dt,parents=[[-1,0,0,1,1,2,2,3,5],[-1,0,1,1,3]],sliding_window=400)
