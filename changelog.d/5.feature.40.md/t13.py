import torch,time
import torch.nn.functional as F
torch.set_num_threads(1)
for T in (512,2048):
    q=torch.randn(1,9,T,64).bfloat16(); k=torch.randn(1,3,T,64).bfloat16(); v=torch.randn(1,3,T,64).bfloat16()
    ts=[]
    for _ in range(5):
        s=time.thread_time(); F.scaled_dot_product_attention(q,k,v,is_causal=True,enable_gqa=True); ts.append(time.thread_time()-s)
    print('sdpa',T,min(ts)*1e3)
from specdec_attention_cpu.backend import CpuBackend
from specdec.testing.attention import *
for T in (512,2048):
    l=attention_layer(num_heads=9,num_kv_heads=3,head_dim=64); c=attention_case([(0,T)],l,block_size=16,dtype=torch.bfloat16)
    be=CpuBackend(); p=be.plan(c.batch,c.cache); ts=[]
    for _ in range(5):
        s=time.thread_time(); be.attend(c.query,c.key,c.value,l,p); ts.append(time.thread_time()-s)
    print('ours',T,min(ts)*1e3)
