import torch, sys, time, warnings
torch.set_num_threads(1)
from specdec.testing.models import tiny_module, ARCHITECTURES
from specdec.target.parts import text_part
from specdec.target import bridge
from specdec.target.trace import trace, own_logits, check_packed
from specdec.target.fusion import fuse, FusedStack, embedding_weight
bridge.register()
archs=sys.argv[1:] or ARCHITECTURES
for dt in (torch.float32, torch.bfloat16):
  for a in archs:
    try:
        m=tiny_module(a).to(dt)
        p=text_part(m); cfg=p.config
        own=own_logits(p.model,cfg,p.device); tr=trace(p.model,p.logits,cfg,1024)
        if tr.reasons: print(a,'refused',tr.reasons); continue
        with bridge.using(bridge.ReferenceContext(tr.layers,tr.index_of,tr.query_scales)):
            n0=sum(x.numel() for x in p.model.parameters())
            ew=embedding_weight(p.model).clone()
            with torch.inference_mode(): ref=p.logits(torch.arange(9),torch.arange(9))
            done=fuse(p.model)
            with torch.inference_mode(): out=p.logits(torch.arange(9),torch.arange(9))
            st=FusedStack.build(p.model)
            assert torch.equal(embedding_weight(p.model),ew)
            left=[(n,type(x).__name__) for n,x in p.model.named_modules() if list(x._parameters) and any(v is not None for v in x._parameters.values())]
        e=((out-ref).norm()/ref.norm()).item()
        print(f"{a:12s} {str(dt)[6:]:9s} err {e:.1e} stack {st is not None}", done, sorted({t for _,t in left}), check_packed(tr,p.logits,cfg,own))
    except Exception as ex:
        import traceback; print(a, 'FAIL', repr(ex)[:300]); traceback.print_exc(limit=-4)
