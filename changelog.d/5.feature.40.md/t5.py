import torch, time, numpy as np, sys
from torch import nn
from specdec.target.linear import *
dt=torch.bfloat16
shapes=[(960,576),(576,576),(3072,576),(576,1536)]
with torch.inference_mode():
  for n,k in shapes:
    l=nn.Linear(k,n,bias=False,dtype=dt); p=PackedLinear(PackedWeight.of([l]))
    for m in (96,128,256,512):
        x=torch.randn(m,k,dtype=dt)
        r=[]
        for _ in range(8):
            s=time.perf_counter(); p(x); r.append(time.perf_counter()-s)
        r2=[]
        for _ in range(8):
            s=time.perf_counter(); l(x); r2.append(time.perf_counter()-s)
        print(n,k,m,f"{min(r)*1e3:.2f} ms {2*m*n*k/min(r)/1e9:.0f} GF   F.linear {2*m*n*k/min(r2)/1e9:.0f}", )
