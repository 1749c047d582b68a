import os
exec(open('/tmp/f/mem.py').read().split("import numpy")[0])
import torch
torch.set_num_threads(2)
from specdec.config import EngineConfig
import specdec.target.model as M
from specdec.target import fusion, trace
for mod,name in ((M,'converted'),(M,'load_model'),(M,'own_logits'),(M,'trace'),(M,'check_packed'),(M,'load_tokenizer'),(M,'load_config'),(M,'text_part'),(fusion,'fuse')):
    f=getattr(mod,name)
    def w(*a,f=f,name=name,**k):
        rss('before '+name); r=f(*a,**k); rss('after '+name); return r
    setattr(mod,name,w)
from specdec.target import passes, llama_like
for mod,name in ((llama_like,'fuse_layers'),(passes,'join_projections'),(passes,'replace_linears')):
    f=getattr(mod,name)
    def w(*a,f=f,name=name,**k):
        rss('before '+name); r=f(*a,**k); rss('after '+name); return r
    setattr(mod,name,w)
tm=M.load_target(EngineConfig(model="demo:smollm2")); rss('loaded')
