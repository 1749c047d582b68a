import numpy as np, numba as nb, time, torch
from micro2 import make_micro
torch.set_num_threads(1)
def build(MR,f32w):
    mk=make_micro(MR,2,0,f32w)
    @nb.njit
    def run(a,lda,b,k2,c,ldc,npan,ps,nt):
        for p in range(npan):
            for t in range(nt):
                mk(a+t*MR*lda*4,lda,b+p*ps,k2,c+t*MR*ldc*4+p*128,ldc)
    return run
for K in (576,1536):
  N=576
  W=torch.randn(N,K).bfloat16()/20
  for M in (96,240):
    A=torch.randn(M,K+16); C=torch.empty(M,N)
    for f32w in (False,True):
        P=W.view(N//32,32,K//2,2).permute(0,2,1,3).contiguous()
        if f32w: P=W.view(N//32,32,K).permute(0,2,1).float().contiguous()
        for MR in (6,8,12):
            run=build(MR,f32w); args=(A.data_ptr(),K+16,P.data_ptr(),K//2,C.data_ptr(),N,N//32,K//2*128*(2 if f32w else 1),M//MR); run(*args)
            ts=[]
            for _ in range(30):
                s=time.thread_time(); run(*args); ts.append(time.thread_time()-s)
            print(K,M,f32w,MR,f"{2*M*N*K/min(ts)/1e9:.0f} GF")
