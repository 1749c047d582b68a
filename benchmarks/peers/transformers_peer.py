"""`transformers.generate` as an engine under test: batches of equal size, padded on the left."""

from protocol import Peer, serve


class TransformersPeer(Peer):
    def load(self, settings):
        import torch
        import transformers

        torch.set_num_threads(settings["threads"])
        self.concurrency = settings["concurrency"]
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["checkpoint"], dtype=getattr(torch, settings["dtype"])
        ).eval()
        self.generation = transformers.GenerationConfig.from_model_config(self.model.config)
        self.eos = getattr(self.model.generation_config, "eos_token_id", None)
        self.lookup = _lookup(settings.get("speculative_config"))
        versions = {"torch": torch.__version__, "transformers": transformers.__version__}
        return {"versions": versions, "threads": torch.get_num_threads()}

    def generate(self, prompts, settings):
        outputs = []
        for start in range(0, len(prompts), self.concurrency):
            outputs += self._batch(prompts[start : start + self.concurrency], settings)
        return outputs

    def _batch(self, prompts, settings):
        import torch

        if settings["temperature"]:
            raise ValueError("only greedy decoding is compared with transformers")
        eos = None if settings["ignore_eos"] else self.eos
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
        with torch.inference_mode():
            result = self.model.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=settings["max_tokens"],
                eos_token_id=eos,
                pad_token_id=0,
                **self.lookup,
            )
        return [_until(row[width:].tolist(), eos) for row in result]


def _lookup(speculative):
    """The options of prompt lookup that do what n-gram speculation is asked for."""
    if not speculative:
        return {}
    return {
        "prompt_lookup_num_tokens": speculative["num_speculative_tokens"],
        "max_matching_ngram_size": speculative["prompt_lookup_max"],
    }


def _until(token_ids, eos):
    """Cut what a batch adds after a row's end token."""
    ends = {eos} if isinstance(eos, int) else set(eos or ())
    for position, token_id in enumerate(token_ids):
        if token_id in ends:
            return token_ids[: position + 1]
    return token_ids


if __name__ == "__main__":
    serve(TransformersPeer())
