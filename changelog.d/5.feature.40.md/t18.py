import sys, re, time
src=open('/work/main/core/src/specdec/cpu/tiles.py').read()
import torch, numpy as np, numba as nb
from numba import types
torch.set_num_threads(1)
import specdec.cpu.tiles as T
from llvmlite import ir
from numba.extending import intrinsic
from specdec.cpu.simd import *
from specdec.cpu.simd import I64,I32,POINTER,at,function
def make(loc):
    def pf(builder,address,num):
        if loc is None: return
        prefetch=function(builder,"llvm.prefetch.p0",ir.VoidType(),[POINTER,I32,I32,I32])
        for line in range(0,num,64):
            builder.call(prefetch,[at(builder,T._offset(builder,address,line)),I32(0),I32(loc),I32(1)])
    def gen(builder,kind,rows,rest):
        old=T._prefetch; T._prefetch=pf
        try: T._generate(builder,kind,rows,rest)
        finally: T._prefetch=old
    def mk(MR):
        @intrinsic
        def t(ctx,left,stride,panel,pairs,out,ostride,ahead,step):
            def g(context,builder,_s,args):
                gen(builder,1,MR,args); return context.get_dummy_value()
            return types.void(*[types.intp]*8),g
        return t
    return mk
def build(MR,loc,ahead):
    t=make(loc)(MR)
    @nb.njit(nogil=True)
    def run(a,lda,b,k2,c,npan,ps):
        for p in range(npan):
            w=b+p*ps
            t(a,lda,w,k2,c,128,w+ahead,128)
    return run
N,K=49152,576
W=(torch.randn(N,K).bfloat16()/20)
P=W.view(N//32,32,K//2,2).permute(0,2,1,3).contiguous()
A=torch.randn(8,K+16); C=torch.empty(8,32)
cfg=[(MR,loc,ah) for MR in (1,6) for loc,ah in ((None,0),(3,2048),(3,4096),(3,8192),(3,16384),(2,8192),(2,16384),(2,36864))]
runs={c:build(*c) for c in cfg}
res={c:[] for c in cfg}
for r in range(7):
    for c in cfg:
        args=(A.data_ptr(),(K+16)*4,P.data_ptr(),K//2,C.data_ptr(),N//32,K//2*128)
        s=time.perf_counter(); runs[c](*args); res[c].append(time.perf_counter()-s)
for c in cfg: print(c,f"min {min(res[c][1:])*1e3:.2f} med {np.median(res[c][1:])*1e3:.2f} ms {P.nbytes/min(res[c][1:])/1e9:.1f} GB/s")
