import torch
torch.set_num_threads(1); torch.manual_seed(0)
from specdec.testing.models import tiny_module
from specdec.target.norm import *
from specdec.target.cpu_kit import CpuKit
from specdec.target import bridge; bridge.register()
from specdec.target.probe import observe
from specdec.target.llama_like import _layer_weights
from specdec.target.fused_layer import FusedDecoderLayer
with torch.inference_mode():
    for a in ("llama","olmo2"):
        m=tiny_module(a).bfloat16(); m.set_attn_implementation("specdec")
        n=m.model.norm; f=fast_norm(n); x=torch.randn(50,64).bfloat16()
        print(a,'norm',((f(x)-n(x))!=0).float().mean())
        l=m.model.layers[0]; mlp=l.mlp; fm=CpuKit().gated_mlp(mlp)
        print('mlp',((fm(x)-mlp(x))!=0).float().mean())
        print('gateup',((fm.gate_up_proj(x)-torch.nn.functional.silu(mlp.gate_proj(x))*mlp.up_proj(x))!=0).float().mean())
    m=tiny_module("llama").bfloat16(); m.set_attn_implementation("specdec"); l=m.model.layers[0]
    F=FusedDecoderLayer(_layer_weights(l,0),l)
    h=torch.randn(1,20,64).bfloat16(); pe=m.model.rotary_emb(h,torch.arange(20)[None])
    (a,sa),(b,sb)=observe(l,h,position_embeddings=pe),observe(F,h,position_embeddings=pe)
    for x,y,n in zip([a,*sa],[b,*sb],"oqkv"): print(n,(x!=y).float().mean().item(),(x-y).abs().max().item())
