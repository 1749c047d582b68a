"""OpenVINO GenAI as an engine under test. It reads the GGUF file itself and keeps the weights as they are there."""

from protocol import Peer, serve

KV_CACHE_GIB = 1


class OpenVinoPeer(Peer):
    def load(self, settings):
        import openvino
        import openvino_genai

        if settings["gguf"] is None:
            raise ValueError("OpenVINO GenAI is compared on a model that is a GGUF file")
        self.concurrency = settings["concurrency"]
        self.speculative = settings.get("speculative_config")
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.cache_size = KV_CACHE_GIB
        scheduling.max_num_seqs = settings["concurrency"]
        scheduling.enable_prefix_caching = False
        options = {"prompt_lookup": True} if self.speculative else {}
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(
            settings["gguf"], scheduling, "CPU", {"INFERENCE_NUM_THREADS": settings["threads"], **options}
        )
        return {"versions": {"openvino": openvino.__version__, "openvino-genai": openvino_genai.__version__}}

    def generate(self, prompts, settings):
        import numpy
        import openvino
        import openvino_genai

        if settings["temperature"]:
            raise ValueError("only greedy decoding is compared with OpenVINO GenAI")
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = settings["max_tokens"]
        config.ignore_eos = settings["ignore_eos"]
        if self.speculative:
            config.num_assistant_tokens = self.speculative["num_speculative_tokens"]
            config.max_ngram_size = self.speculative["prompt_lookup_max"]
        inputs = [openvino.Tensor(numpy.array([ids], dtype=numpy.int64)) for ids in prompts]
        outputs = []
        for start in range(0, len(inputs), self.concurrency):  # max_num_seqs alone does not keep requests waiting
            some = inputs[start : start + self.concurrency]
            outputs += [list(r.m_generation_ids[0]) for r in self.pipeline.generate(some, [config] * len(some))]
        return outputs


if __name__ == "__main__":
    serve(OpenVinoPeer())
