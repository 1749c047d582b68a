import torch, time, numpy as np, sys
from torch import nn
from specdec.target.linear import *
from specdec.target.fused_layer import *
import torch.nn.functional as F
torch.manual_seed(0)
torch.set_num_threads(int(__import__("os").environ.get("TH","2")))
dt=torch.bfloat16 if len(sys.argv)<2 else torch.float32
H,I,Hq,Hk,D,L=576,1536,9,3,64,30
def lin(n,k): return nn.Linear(k,n,bias=False,dtype=dt)
layers=[]; orig=[]
for i in range(L):
    q,o,g,u,d=lin(960,H),lin(H,H),lin(I,H),lin(I,H),lin(H,I)
    w1,w2=torch.rand(H)+.5,torch.rand(H)+.5
    orig.append((q,o,g,u,d,w1.to(dt),w2.to(dt)))
    layers.append(LayerWeights(index=i,num_heads=Hq,num_kv_heads=Hk,head_dim=D,input_norm=NormWeight(w1.to(dt),1e-5,rounds_first=True),qkv=PackedWeight.of([q]),query_norm=None,key_norm=None,
      output=PackedWeight.of([o]),post_norm=NormWeight(w2.to(dt),1e-5,rounds_first=True),gate_up=PackedWeight.gated(g,u),down=PackedWeight.of([d]),activation='silu'))
def att(i,q,k,v,s): return q.contiguous()
def ref(h,cos,sin):
    def rot(x): return torch.cat((-x[...,D//2:],x[...,:D//2]),-1)
    def norm(x,w): 
        x=x.float(); return w*(x*torch.rsqrt(x.pow(2).mean(-1,keepdim=True)+1e-5)).to(dt)
    for q,o,g,u,d,w1,w2 in orig:
        x=q(norm(h,w1)).view(-1,15,64)
        x=x[:,:12]*cos[:,None]+rot(x[:,:12])*sin[:,None]
        h=h+o(x[:,:9].flatten(1))
        x=norm(h,w2)
        h=h+d(F.silu(g(x))*u(x))
    return h
st=FusedLayers(layers)
with torch.inference_mode():
    for T in (1,6,40,300):
        h=torch.randn(T,H,dtype=dt); f=torch.rand(T,32)*6; f=torch.cat((f,f),-1); cos,sin=f.cos().to(dt),f.sin().to(dt)
        r=ref(h.clone(),cos,sin); x=h.clone(); st.run(x,cos,sin,att)
        print(T,(r-x).abs().max().item(), r.abs().max().item())
    head=PackedLinear(PackedWeight.of([lin(49152,H)]))
    for rep in range(2):
     for T in (1,2,6,8,16,96):
        h=torch.randn(T,H,dtype=dt); f=torch.rand(T,32)*6; f=torch.cat((f,f),-1); cos,sin=f.cos().to(dt),f.sin().to(dt)
        ts=[];hs=[]
        for _ in range(20 if T<90 else 4):
            s=time.perf_counter(); st.run(h,cos,sin,att); e=time.perf_counter(); head(h); ts.append(e-s); hs.append(time.perf_counter()-e)
        print(T,f"layers {min(ts)*1e3:.2f} / {np.median(ts)*1e3:.2f} ms  head {min(hs)*1e3:.2f}/{np.median(hs)*1e3:.2f} total {1e3*(min(ts)+min(hs)):.2f}")
