"""specdec as an engine under test."""

from protocol import Peer, serve


class SpecdecPeer(Peer):
    def load(self, settings):
        import torch
        import transformers

        from specdec import LLM, __version__

        options = dict(settings.get("engine", {}))
        self.llm = LLM(
            settings["model"],
            dtype=settings["dtype"],
            max_model_len=settings["max_model_len"],
            max_num_seqs=settings["concurrency"],
            num_threads=settings["threads"],
            enable_prefix_caching=False,
            speculative_config=settings.get("speculative_config"),
            **options,
        )
        versions = {"specdec": __version__, "torch": torch.__version__, "transformers": transformers.__version__}
        return {"versions": versions, "threads": torch.get_num_threads(), "checkpoint": self._checkpoint()}

    def _checkpoint(self):
        """The directory the weights came from; other engines load the same."""
        return str(self.llm._engine.context.target_info.path)

    def tokenise(self, conversations):
        from specdec.target.tokenizer import apply_chat_template

        tokenizer, model = self.llm.get_tokenizer(), self.llm.config.model
        return [apply_chat_template(tokenizer, conversation, model=model) for conversation in conversations]

    def generate(self, prompts, settings):
        from specdec import SamplingParams

        params = [
            SamplingParams(
                temperature=settings["temperature"],
                max_tokens=settings["max_tokens"],
                ignore_eos=settings["ignore_eos"],
                seed=number,
            )
            for number in range(len(prompts))
        ]
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False, speculation=settings.get("speculation"))
        return [list(o.outputs[0].token_ids) for o in outputs]

    def stats(self):
        stats = self.llm.stats()
        return {
            "num_steps": stats.num_steps,
            "num_drafts": stats.num_drafts,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_tokens": stats.num_accepted_tokens,
            "num_accepted_tokens_per_pos": list(stats.num_accepted_tokens_per_pos),
            "propose_seconds": stats.propose_seconds,
            "target_seconds": stats.target_seconds,
            "verify_seconds": stats.verify_seconds,
            "rest_seconds": stats.rest_seconds,
        }


if __name__ == "__main__":
    serve(SpecdecPeer())
