import os
exec(open('/tmp/f/t12.py').read().split("def med")[0])
import collections
from specdec.target import fused_stack as FS, fused_layer as FL
st=tm._stack
acc=collections.Counter(); pc=time.perf_counter
def wrap(obj,name,key):
    f=getattr(obj,name)
    def w(*a,**k):
        s=pc(); r=f(*a,**k); acc[key]+=pc()-s; return r
    return w
oa=be.attend; be.attend=wrap(be,'attend','attend'); tm.bind(be,cache,Needs())
st._layers._team.run=wrap(st._layers._team,'run','between')
class H:
    def __init__(s,h): s.h=h; s.normalized=wrap(h,'normalized','head')
st._embed_f=st._embed; st._embed=wrap(st._embed,'forward','embed'); r0=st._rotary; st._rotary=wrap(r0,'__call__','rotary'); st._lm_head=H(st._lm_head)
be.plan=wrap(be,'plan','plan')
for rep in range(2):
  for T in (1,6):
    b=batch([256],T); best=None
    for _ in range(40):
        acc.clear(); s=pc(); tm.forward(b); t=pc()-s
        if best is None or t<best[0]: best=(t,dict(acc))
    print(T,f"{best[0]*1e3:.2f}",{k:round(v*1e3,3) for k,v in best[1].items()}, 'other',round((best[0]-sum(best[1].values()))*1e3,3))
