import torch,time
x=torch.empty(64<<20,dtype=torch.int64) ; x.zero_()
for th in (1,2,1,2):
    torch.set_num_threads(th)
    b=[]
    for _ in range(5):
        s=time.perf_counter(); x.sum(); b.append(x.nbytes/(time.perf_counter()-s)/1e9)
    print(th,[round(v,1) for v in b])
