import time; t=time.time()
import torch; print('torch',time.time()-t); t=time.time()
import specdec.cpu.regions as R; print('import+compile',time.time()-t)
