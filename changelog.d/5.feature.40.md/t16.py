import torch, time, numpy as np, sys
from torch import nn
torch.set_num_threads(1)
from specdec.target.linear import *
dt=torch.bfloat16
out=[]
with torch.inference_mode():
  for n,k in ((3072,576),(576,1536)):
    l=nn.Linear(k,n,bias=False,dtype=dt); p=PackedLinear(PackedWeight.of([l]))
    g=PackedLinear(PackedWeight.gated(nn.Linear(k,n//2,bias=False,dtype=dt),nn.Linear(k,n//2,bias=False,dtype=dt)),'silu',n//2)
    for m in (1,6,8,16,96,256):
        x=torch.randn(m,k,dtype=dt)
        for nm,f in (('store',p),('gated',g)):
            r=[]
            for _ in range(40):
                s=time.thread_time(); f(x); r.append(time.thread_time()-s)
            out.append(f"{n}x{k} M{m} {nm} {min(r)*1e6:.0f}us {2*m*n*k/min(r)/1e9:.0f}GF")
for i in range(0,len(out),2): print(out[i],'   ',out[i+1])
