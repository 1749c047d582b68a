import time,torch
import numba
def m(name,t=[time.process_time(),time.time()]):
    print(f"{name}: cpu {time.process_time()-t[0]:.2f} wall {time.time()-t[1]:.2f}"); t[0]=time.process_time(); t[1]=time.time()
import specdec.cpu.simd, specdec.cpu.tiles; m('simd')
import specdec.cpu.team; m("team")
import specdec.cpu.dense; m('dense')
import specdec.cpu.regions; m('regions')
import specdec_attention_cpu.packing; m('packing')
import specdec_attention_cpu.kernels; m('kernels')
import specdec_attention_cpu.planning; m('planning')
