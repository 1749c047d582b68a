"""prototype: bf16 pair layout, fp32 FMA. A fp32 row major with lda, or interleaved"""
import numba as nb, numpy as np
from numba import types
from numba.extending import intrinsic
from llvmlite import ir
f32=ir.FloatType(); i64=ir.IntType(64); i32=ir.IntType(32)
v16f=ir.VectorType(f32,16); v16i=ir.VectorType(i32,16)
PTR=ir.PointerType()
def C(x): return ir.Constant(i64,x)
def fmafn(mod):
    fn=mod.globals.get("llvm.fma.v16f32")
    if fn is None: fn=ir.Function(mod,ir.FunctionType(v16f,[v16f]*3),"llvm.fma.v16f32")
    return fn
def make_micro(MR,NC,pf=0,f32w=False):
    @intrinsic
    def micro(tyctx, a, lda, b, k2, c, ldc):
        sig=types.void(*[types.intp]*6)
        def codegen(ctx,builder,sig,args):
            a,lda,b,k2,c,ldc=args
            mod=builder.module; fma=fmafn(mod)
            zero=ir.Constant(v16f,None)
            shl=ir.Constant(v16i,[16]*16); msk=ir.Constant(v16i,[0xffff0000]*16)
            pre=builder.block
            rows=[builder.add(a,builder.shl(builder.mul(lda,C(m)),C(2))) for m in range(MR)]
            loop=builder.append_basic_block("k"); end=builder.append_basic_block("e")
            builder.branch(loop); builder.position_at_end(loop)
            k=builder.phi(i64); acc=[[builder.phi(v16f) for _ in range(NC)] for _ in range(MR)]
            cur=[[acc[m][n] for n in range(NC)] for m in range(MR)]
            k.add_incoming(C(0),pre)
            step=NC*64*(2 if f32w else 1)
            bp=builder.add(b,builder.mul(k,C(step)))
            if pf:
                pfn=mod.globals.get("llvm.prefetch.p0")
                if pfn is None: pfn=ir.Function(mod,ir.FunctionType(ir.VoidType(),[PTR,i32,i32,i32]),"llvm.prefetch.p0")
                for n in range(step//64):
                    builder.call(pfn,[builder.inttoptr(builder.add(bp,C(64*n+pf)),PTR),ir.Constant(i32,0),ir.Constant(i32,3),ir.Constant(i32,1)])
            lo=[];hi=[]
            if f32w:
                ld=lambda o: builder.load(builder.inttoptr(builder.add(bp,C(o)),PTR),align=64,typ=v16f)
                lo=[ld(64*n) for n in range(NC)]; hi=[ld(NC*64+64*n) for n in range(NC)]
            else:
              for n in range(NC):
                l=builder.load(builder.inttoptr(builder.add(bp,C(64*n)),PTR),align=64,typ=v16i)
                lo.append(builder.bitcast(builder.shl(l,shl),v16f)); hi.append(builder.bitcast(builder.and_(l,msk),v16f))
            for h,bv in ((0,lo),(1,hi)):
              for m in range(MR):
                ap=builder.add(rows[m],builder.add(builder.shl(k,C(3)),C(4*h)))
                s=builder.load(builder.inttoptr(ap,PTR),align=4,typ=f32)
                v=builder.insert_element(ir.Constant(v16f,ir.Undefined),s,ir.Constant(i32,0))
                v=builder.shuffle_vector(v,ir.Constant(v16f,ir.Undefined),ir.Constant(v16i,None))
                for n in range(NC):
                    cur[m][n]=builder.call(fma,[v,bv[n],cur[m][n]])
            for m in range(MR):
                for n in range(NC):
                    acc[m][n].add_incoming(zero,pre); acc[m][n].add_incoming(cur[m][n],loop)
            kn=builder.add(k,C(1)); k.add_incoming(kn,loop)
            builder.cbranch(builder.icmp_signed("<",kn,k2),loop,end)
            builder.position_at_end(end)
            for m in range(MR):
                for n in range(NC):
                    cp=builder.add(c,builder.shl(builder.add(builder.mul(ldc,C(m)),C(16*n)),C(2)))
                    builder.store(cur[m][n],builder.inttoptr(cp,PTR),align=4)
            return ctx.get_dummy_value()
        return sig,codegen
    return micro
