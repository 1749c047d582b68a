import torch, time, numpy as np, sys
from torch import nn
from specdec.target.linear import *
torch.manual_seed(0)
th=int(sys.argv[1]) if len(sys.argv)>1 else 2
torch.set_num_threads(th)
shapes=[(960,576),(576,576),(3072,576),(576,1536)]
for dt in (torch.bfloat16,torch.float32):
    L=30
    layers=[[nn.Linear(k,n,bias=False,dtype=dt) for n,k in shapes] for _ in range(L)]
    head=nn.Linear(576,49152,bias=False,dtype=dt)
    lin=[l for ls in layers for l in ls]+[head]
    x={(m,k):torch.randn(m,k,dtype=dt) for k in (576,1536) for m in (1,6,16,96)}
    packed=[PackedLinear(PackedWeight.of([l])) for l in lin]
    with torch.inference_mode():
        for m in (1,5,96,300):
            xx=torch.randn(m,576,dtype=dt)
            a=lin[2](xx); b=packed[2](xx); print(m,(a-b).abs().max().item(), (b.float()-xx.float()@lin[2].weight.float().T).abs().max().item())
        def t(mods,m,n):
            r=[]
            for _ in range(n):
                s=time.perf_counter()
                for l in mods: l(x[m,l.in_features])
                r.append(time.perf_counter()-s)
            return f"{min(r)*1e3:.1f}/{np.median(r)*1e3:.1f}"
        mk=[torch.ops.mkldnn._reorder_linear_weight(l.weight.data.to_mkldnn() if dt==torch.float32 else l.weight.data,6) for l in lin] if dt==torch.bfloat16 else None
        for m in (1,6,16,96):
            n=10 if m<90 else 2
            s=f"{dt} M={m}: F.linear {t(lin,m,n)} packed {t(packed,m,n)}"
            if mk:
                class O:
                    def __init__(s,w,k): s.w=w; s.in_features=k
                    def __call__(s,x): return torch.ops.mkldnn._linear_pointwise(x,s.w,None,'none',[],'')
                s+=f" onednn {t([O(w,l.in_features) for w,l in zip(mk,lin)],m,n)}"
            print(s)
