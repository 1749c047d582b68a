import ctypes, glob, os, torch, time, numpy as np, numba as nb
from numba import types, cfunc, njit
from numba.extending import intrinsic
from llvmlite import ir
i32=ir.IntType(32); i64=ir.IntType(64)
@intrinsic
def call_i32(tyctx, fp):
    sig=types.int32(types.intp)
    def cg(ctx,b,sig,args):
        fn=b.inttoptr(args[0], ir.PointerType(ir.FunctionType(i32,[])))
        return b.call(fn,[])
    return sig,cg
@intrinsic
def call_v(tyctx, fp):
    sig=types.void(types.intp)
    def cg(ctx,b,sig,args):
        fn=b.inttoptr(args[0], ir.PointerType(ir.FunctionType(ir.VoidType(),[])))
        b.call(fn,[]); return ctx.get_dummy_value()
    return sig,cg
lib=[l.split()[-1] for l in open('/proc/self/maps') if 'libgomp' in l][0]
print(lib)
P=ctypes.PyDLL(lib); Cd=ctypes.CDLL(lib)
addr=lambda n: ctypes.cast(getattr(Cd,n),ctypes.c_void_p).value
@cfunc(types.void(types.CPointer(types.int64)))
def region(p):
    t=call_i32(p[0]); 
    p[8+t]+=1
@cfunc(types.void(types.CPointer(types.int64)))
def region_b(p):
    for _ in range(p[3]):
        call_v(p[2])
for th in (1,2):
  for L in (P,Cd):
    L.GOMP_parallel.argtypes=[ctypes.c_void_p,ctypes.c_void_p,ctypes.c_uint,ctypes.c_uint]; L.GOMP_parallel.restype=None
    a=np.zeros(64,np.int64); a[0]=addr('omp_get_thread_num'); a[1]=addr('omp_get_num_threads'); a[2]=addr('GOMP_barrier'); a[3]=100
    g=L.GOMP_parallel; fa=region.address; ap=a.ctypes.data
    torch.set_num_threads(th)
    for rep in range(3):
        t=time.perf_counter()
        for _ in range(2000): g(fa,ap,th,0)
        print(th,L,(time.perf_counter()-t)/2000*1e6,'us/call',a[8:12])
    fb=region_b.address
    t=time.perf_counter()
    for _ in range(100): g(fb,ap,th,0)
    print('barrier',(time.perf_counter()-t)/1e4*1e6,'us')
x=torch.randn(100000)
print(torch.__config__.parallel_info())
