import os
def rss(tag):
    d={l.split(':')[0]:l.split()[1] for l in open('/proc/self/status') if l.startswith(('VmRSS','RssAnon','RssFile','VmHWM'))}
    print(tag,{k:int(v)//1024 for k,v in d.items()},flush=True)
rss('start')
import numpy; rss('numpy')
import torch; rss('torch')
torch.set_num_threads(2)
import transformers; rss('transformers')
from transformers import AutoModelForCausalLM; rss('auto')
import numba; rss('numba')
import specdec.cpu.regions; rss('regions')
import specdec_attention_cpu.backend; rss('attention')
from specdec.config import EngineConfig
from specdec.target.model import load_target
tm=load_target(EngineConfig(model="demo:smollm2")); rss('loaded')
import gc; gc.collect(); rss('gc')
import ctypes; ctypes.CDLL(None).malloc_trim(0); rss('trim')
big=sorted([(t.numel()*t.element_size()>>20,tuple(t.shape),t.dtype) for t in gc.get_objects() if isinstance(t,torch.Tensor) and t.numel()>1e6],key=lambda x:-x[0])
print(len(big),sum(b[0] for b in big),big[:6])
