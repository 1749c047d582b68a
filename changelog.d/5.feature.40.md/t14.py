import torch,time,sys,cProfile,pstats
torch.set_num_threads(int(sys.argv[1]))
from specdec.testing.models import tiny_module
from specdec.target.model import TargetModel
from specdec.types import *
from specdec_attention_cpu.backend import CpuBackend
m=tiny_module("llama",num_hidden_layers=30).bfloat16()
tm=TargetModel.from_model(m,name="x"); be=CpuBackend(); c=tm.allocate_kv_cache(64,16); tm.bind(be,c,Needs())
T=1
b=PackedBatch(input_ids=torch.tensor([5]),positions=torch.tensor([20]),slot_mapping=torch.tensor([20]),query_start_loc=torch.tensor([0,1],dtype=torch.int32),seq_lens=torch.tensor([21],dtype=torch.int32),block_tables=torch.tensor([[0,1]],dtype=torch.int32),logits_indices=torch.tensor([0]),max_query_len=1,max_seq_len=21)
ts=[]
for _ in range(300):
    s=time.perf_counter(); tm.forward(b); ts.append(time.perf_counter()-s)
print(min(ts)*1e6,sorted(ts)[150]*1e6)
if len(sys.argv)>2:
    p=cProfile.Profile(); p.enable()
    for _ in range(300): tm.forward(b)
    p.disable(); pstats.Stats(p).sort_stats('tottime').print_stats(18)
