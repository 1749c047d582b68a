import sys
exec(open('/tmp/f/mem.py').read().split("import numpy")[0])
import torch; torch.set_num_threads(2)
import collections
from specdec.config import EngineConfig
import specdec.target.model as M
from specdec.target.loading import load_config
from specdec.target.resolve import resolve_model
def tops(a): return collections.Counter('.'.join(m.split('.')[:2]) for m in a).most_common(28)
rss('a'); m0=set(sys.modules)
import glob,os
p=glob.glob(os.path.expanduser('~/.cache/specdec/**/config.json'),recursive=True)[0]; from pathlib import Path
c=load_config('x',Path(p).parent); rss('config'); print(tops(set(sys.modules)-m0))
