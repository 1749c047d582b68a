"""prototype microkernel"""
import numba as nb, numpy as np
from numba import types
from numba.extending import intrinsic
from llvmlite import ir

class BF(ir.Type):
    def _to_string(self): return "bfloat"
    def __eq__(self,o): return isinstance(o,BF)
    def __hash__(self): return hash(BF)
    intrinsic_name="bf16"
bf=BF()
f32=ir.FloatType(); i64=ir.IntType(64); i32=ir.IntType(32); i16=ir.IntType(16); i8=ir.IntType(8)
v16f=ir.VectorType(f32,16); v16i=ir.VectorType(i32,16); v32b=ir.VectorType(bf,32)

def make_micro(MR,NC,pf=0):
    """a(int32 ptr addr, row stride in i32), b packed [K2][NC*16] i32, c f32 ptr [MR][ldc]"""
    @intrinsic
    def micro(tyctx, a, lda, b, k2, c, ldc):
        sig=types.void(types.intp,types.intp,types.intp,types.intp,types.intp,types.intp)
        def codegen(ctx,builder,sig,args):
            a,lda,b,k2,c,ldc=args
            mod=builder.module
            fn=mod.globals.get("llvm.x86.avx512bf16.dpbf16ps.512")
            if fn is None:
                fn=ir.Function(mod,ir.FunctionType(v16f,[v16f,v32b,v32b]),"llvm.x86.avx512bf16.dpbf16ps.512")
            zero=ir.Constant(v16f,None)
            pre=builder.block
            loop=builder.append_basic_block("k"); end=builder.append_basic_block("e")
            builder.branch(loop)
            builder.position_at_end(loop)
            k=builder.phi(i64); acc=[[builder.phi(v16f) for _ in range(NC)] for _ in range(MR)]
            k.add_incoming(ir.Constant(i64,0),pre)
            bp=builder.add(b,builder.mul(k,ir.Constant(i64,NC*64)))
            if pf:
                pfn=mod.globals.get("llvm.prefetch.p0")
                if pfn is None: pfn=ir.Function(mod,ir.FunctionType(ir.VoidType(),[ir.PointerType(),i32,i32,i32]),"llvm.prefetch.p0")
                for n in range(NC):
                    p=builder.inttoptr(builder.add(bp,ir.Constant(i64,64*n+pf)),ir.PointerType())
                    builder.call(pfn,[p,ir.Constant(i32,0),ir.Constant(i32,3),ir.Constant(i32,1)])
            bv=[]
            for n in range(NC):
                p=builder.inttoptr(builder.add(bp,ir.Constant(i64,64*n)),ir.PointerType(v16i))
                l=builder.load(p,align=64,typ=v16i) if True else None
                bv.append(builder.bitcast(l,v32b))
            for m in range(MR):
                ap=builder.add(a,builder.shl(builder.add(builder.mul(lda,ir.Constant(i64,m)),k),ir.Constant(i64,2)))
                s=builder.load(builder.inttoptr(ap,ir.PointerType(i32)),align=4,typ=i32)
                v=builder.insert_element(ir.Constant(v16i,ir.Undefined),s,ir.Constant(i32,0))
                v=builder.shuffle_vector(v,ir.Constant(v16i,ir.Undefined),ir.Constant(v16i,None))
                v=builder.bitcast(v,v32b)
                for n in range(NC):
                    r=builder.call(fn,[acc[m][n],v,bv[n]])
                    acc[m][n].add_incoming(zero,pre); acc[m][n].add_incoming(r,loop)
            kn=builder.add(k,ir.Constant(i64,1)); k.add_incoming(kn,loop)
            builder.cbranch(builder.icmp_signed("<",kn,k2),loop,end)
            builder.position_at_end(end)
            for m in range(MR):
                for n in range(NC):
                    last=[v for v,b_ in acc[m][n].incomings if b_ is loop][0]
                    cp=builder.add(c,builder.shl(builder.add(builder.mul(ldc,ir.Constant(i64,m)),ir.Constant(i64,16*n)),ir.Constant(i64,2)))
                    builder.store(last,builder.inttoptr(cp,ir.PointerType(v16f)),align=4)
            return ctx.get_dummy_value()
        return sig,codegen
    return micro
