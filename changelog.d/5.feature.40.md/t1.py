import numpy as np, numba as nb, time, torch, sys
from micro import make_micro
torch.set_num_threads(1)
def build(MR,NC,pf):
    mk=make_micro(MR,NC,pf)
    @nb.njit(fastmath=False)
    def run(a,lda,b,k2,c,ldc,npan,ps):
        for p in range(npan):
            mk(a,lda,b+p*ps,k2,c+p*NC*64,ldc)
    return run
K=576
for N,K in ((3072,576),(49152,576)):
  W=torch.randn(N,K).bfloat16()/20
  for NC in (2,4):
    P=W.view(N//(16*NC),16*NC,K//2,2).permute(0,2,1,3).contiguous()
    # align
    for MR in (1,2,4,6,8,12):
        if MR*NC>26: continue
        A=torch.randn(MR,K).bfloat16()
        C=torch.empty(MR,N)
        for pf in (0,1024,4096):
            t=time.time(); run=build(MR,NC,pf)
            args=(A.data_ptr(),K//2,P.data_ptr(),K//2,C.data_ptr(),N,N//(16*NC),K//2*NC*64)
            run(*args); tc=time.time()-t
            ref=A.float()@W.float().T
            err=(C-ref).abs().max().item()
            ts=[]
            for _ in range(30 if N<10000 else 8):
                t=time.perf_counter(); run(*args); ts.append(time.perf_counter()-t)
            t=min(ts); md=np.median(ts)
            print(f"N{N} K{K} NC{NC} MR{MR} pf{pf} compile {tc:.2f} err {err:.4f} min {t*1e6:.0f}us {2*N*K/t/1e9:.1f}GB/s {2*MR*N*K/t/1e9:.0f}GF  med {md*1e6:.0f}")
