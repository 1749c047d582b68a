import time, sys, os, json, torch
from specdec import LLM, SamplingParams
import glob
prompts=["Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday, Monday, Tuesday,","def fib(n):\n    if n < 2:\n        return n\n    return fib(n-1) + fib(n-2)\n\n# the same with memo:\n"]
for d in ("bfloat16","float32"):
    outs=[]
    for sp in (None,{"method":"ngram","num_speculative_tokens":5,"prompt_lookup_max":4,"prompt_lookup_min":2}):
        t=time.time()
        with LLM("demo:smollm2",dtype=d,speculative_config=sp,max_model_len=2048) as llm:
            t1=time.time()
            o=llm.generate(prompts,SamplingParams(temperature=0,max_tokens=100,ignore_eos=True),use_tqdm=False)
            t2=time.time(); st=llm.stats()
            print(d,sp and 'ngram',f"start {t1-t:.1f}s gen {t2-t1:.2f}s", st.target_seconds if hasattr(st,'target_seconds') else '', st.num_steps, llm.config.attention_backend)
            outs.append([x.outputs[0].token_ids for x in o])
    print('equal',outs[0]==outs[1])
