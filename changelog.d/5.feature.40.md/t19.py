import torch,time; torch.set_num_threads(2)
from specdec.config import EngineConfig
import specdec.target.model as M
from specdec.target import fusion
import specdec.target.llama_like, specdec.target.fused_stack
f=fusion.fuse
def w(m):
    s=time.process_time(),time.time(); import cProfile,pstats; p=cProfile.Profile(); p.enable(); r=f(m); p.disable(); pstats.Stats(p).sort_stats("tottime").print_stats(14); print('fuse cpu',time.process_time()-s[0],'wall',time.time()-s[1],r); return r
fusion.fuse=w
s=time.process_time(),time.time()
tm=M.load_target(EngineConfig(model="demo:smollm2")); print('load cpu',time.process_time()-s[0],'wall',time.time()-s[1])
