import threading
def limit():
    from specdec.cpu import team as T
    from specdec.cpu.compile import region
    from specdec.cpu.simd import put_int64
    import numpy as np
    @region
    def nothing(block: int) -> None:
        put_int64(block, 1)
    a=np.zeros(64,np.int64); rt=T._runtime(); done=threading.Event()
    def run():
        rt.start(nothing.address,a.ctypes.data,2,0); done.set(); threading.Event().wait()
    threading.Thread(target=run,daemon=True).start(); done.wait()
limit()
