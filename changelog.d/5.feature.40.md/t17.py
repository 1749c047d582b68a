import numpy as np, numba as nb, time, torch
from numba import types
torch.set_num_threads(1)
from specdec.cpu.tiles import tile
@nb.njit
def run(kind,MR,a,lda,b,k2,c,ldc,npan,ps,nt,mode):
    for p in range(npan):
        for t in range(nt):
            w=b+p*ps
            ah,st=w,0
            if mode==1: ah,st=w+8192,128
            if mode==2: ah,st=w+ps+t*ps//nt,128//nt
            if mode==3: ah,st=w,128
            tile(kind,MR,a+t*MR*lda,lda,w,k2,c+t*MR*128,128,ah,st)
for K in (576,):
  N=3072
  W=torch.randn(N,K).bfloat16()/20
  P=W.view(N//32,32,K//2,2).permute(0,2,1,3).contiguous()
  for M in (96,):
    A=torch.randn(M,K+16); C=torch.empty(M,32)
    for MR in (6,8):
        for mode in (0,1,2,3):
            args=(1,MR,A.data_ptr(),(K+16)*4,P.data_ptr(),K//2,C.data_ptr(),128,N//32,K//2*128,M//MR,mode); run(*args)
            ts=[]
            for _ in range(20):
                s=time.thread_time(); run(*args); ts.append(time.thread_time()-s)
            print(K,M,MR,mode,f"{2*M*N*K/min(ts)/1e9:.0f} GF")
