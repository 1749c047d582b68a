import torch, time, numpy as np, sys, subprocess
from torch import nn
from specdec.target.linear import *
torch.manual_seed(0); torch.set_num_threads(2)
exec(open("/tmp/f/hack.py").read())
dt=torch.bfloat16
shapes=[(960,576),(576,576),(3072,576),(576,1536)]
lin=[nn.Linear(k,n,bias=False,dtype=dt) for _ in range(30) for n,k in shapes]
packed=[PackedLinear(PackedWeight.of([l])) for l in lin]
x={k:torch.randn(1,k,dtype=dt) for k in (576,1536)}
def t(mods,n=6):
    r=[]
    for _ in range(n):
        s=time.perf_counter()
        for l in mods: l(x[l.in_features])
        r.append(time.perf_counter()-s)
    return f"min {min(r)*1e3:.1f} med {np.median(r)*1e3:.1f} max {max(r)*1e3:.1f}"
with torch.inference_mode():
    print('quiet  F.linear',t(lin),' packed',t(packed))
    for nb in (1,):
        ps=[subprocess.Popen([sys.executable,'-c','import time\ne=time.time()+25\nwhile time.time()<e: pass']) for _ in range(nb)]
        time.sleep(.5)
        print(nb,'busy  F.linear',t(lin),' packed',t(packed)); print(nb,'busy  F.linear',t(lin),' packed',t(packed))
        for p in ps: p.kill()
