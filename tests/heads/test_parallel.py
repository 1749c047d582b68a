"""A head that drafts in parallel (P-EAGLE): its drafts are those of one plain pass over the whole text.

The pass has the text's rows with the target's hidden states, and behind them one row with the mask's for each further
draft token. It is written out here in plain torch, from the checkpoint's tensors.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import linear

from specdec import SamplingParams
from specdec.errors import ConfigError
from specdec.testing import load_module
from specdec.testing.heads import tiny_head
from specdec.testing.straight_line import attended, gated, norm, rotated
from tests.heads.conftest import VOCAB
from tests.heads.test_lossless import HARSH, PROMPTS

K = 5


class Plain:
    """The tiny target and its head, one text at a time, without a cache."""

    def __init__(self, model: str, head: Path) -> None:
        self.module = load_module(model)
        self.weights = load_file(head / "model.safetensors")
        self.config = json.loads((head / "config.json").read_text())
        self.layer = self.config["transformer_layer_config"]
        self.target_ids = self.weights["t2d"].nonzero().flatten()

    @torch.inference_mode()
    def logits(self, text: Tensor, count: int) -> Tensor:
        """Of the ``count`` draft tokens behind int64 [n], whose last token the target has not seen yet."""
        w, mask = self.weights, self.config["mask_token_id"]
        states = torch.cat([self._states(text[:-1]), w["mask_hidden"][0].expand(count - 1, -1)])
        tokens = torch.cat([text[1:], torch.full((count - 1,), mask)])
        g, e = linear(states, w["fc.weight"]), w["embed_tokens.weight"][tokens]
        both = torch.cat([self._norm(e, "layers.0.input_layernorm"), self._norm(g, "layers.0.hidden_norm")], -1)
        x = self._rest("layers.0", g + self._attention("layers.0", both))
        x = self._rest("layers.1", x + self._attention("layers.1", self._norm(x, "layers.1.input_layernorm")))
        return linear(self._norm(x[-count:], "norm"), w["lm_head.weight"])

    def law(self, logits: Tensor) -> Tensor:
        """[count, draft vocabulary] -> [count, V]: probabilities at temperature 1."""
        law = torch.zeros(len(logits), VOCAB)
        law[:, self.target_ids] = logits.softmax(-1)
        return law

    def _states(self, text: Tensor) -> Tensor:
        """[n, 3 H]: the residual stream behind the layers that the head reads."""
        kept: list[Tensor] = []
        layers = [self.module.model.layers[i - 1] for i in self.config["eagle_aux_hidden_state_layer_ids"]]
        handles = [layer.register_forward_hook(lambda _module, _in, out: kept.append(out[0])) for layer in layers]
        self.module.model(text[None])
        for handle in handles:
            handle.remove()
        return torch.cat(kept, -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return norm(x, self.weights[f"{name}.weight"], self.layer["rms_norm_eps"])

    def _attention(self, name: str, x: Tensor) -> Tensor:
        def heads(part: str) -> Tensor:
            projected = linear(x, self.weights[f"{name}.self_attn.{part}_proj.weight"])
            return projected.view(len(x), -1, self.layer["head_dim"])

        positions = torch.arange(len(x))
        q, k = (rotated(heads(part), positions, self.layer.get("rope_theta", 10000.0)) for part in "qk")
        return linear(attended(q, k, heads("v"), positions), self.weights[f"{name}.self_attn.o_proj.weight"])

    def _rest(self, name: str, x: Tensor) -> Tensor:
        parts = (f"{name}.mlp.{part}_proj.weight" for part in ("gate", "up", "down"))
        return x + gated(self.weights, *parts, self._norm(x, f"{name}.post_attention_layernorm"))


class Compared:
    """Wraps a proposer's `propose`: every draft is compared with the plain pass."""

    def __init__(self, proposer: Any, plain: Plain) -> None:
        self.proposer, self.plain, self.propose = proposer, plain, proposer.propose
        self.lengths: list[int] = []
        self.passes = 0
        self.furthest = 0.0
        """From the likeliest token in logits, or from the law in probability."""
        forward = proposer.head.forward

        def counted(*arguments: Any) -> Tensor:
            self.passes += 1
            return forward(*arguments)

        proposer.head.forward = counted

    def __call__(self, batch: Any) -> Any:
        before = self.passes
        draft = self.propose(batch)
        assert self.passes <= before + 1, "a draft took more than one pass"
        start = 0
        for text, limit, count in zip(batch.token_ids, batch.max_draft_tokens, draft.num_draft_tokens, strict=True):
            if count:
                assert count == limit
                self._compare(draft, slice(start, start + int(count)), torch.from_numpy(text.copy()))
                self.lengths.append(int(count))
            start += int(count)
        return draft

    def _compare(self, draft: Any, rows: slice, text: Tensor) -> None:
        tokens = draft.token_ids[rows]
        logits = self.plain.logits(text, len(tokens))
        if draft.draft_probs is None:
            chosen = torch.searchsorted(self.plain.target_ids, tokens)
            assert torch.equal(self.plain.target_ids[chosen], tokens)
            off = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        else:
            off = (draft.draft_probs[rows] - self.plain.law(logits)).abs()
        self.furthest = max(self.furthest, float(off.max()))


@pytest.fixture
def checkpoint(model: str, tmp_path: Path) -> Path:
    return tiny_head("peagle", model, tmp_path / "head")


def compared(engine: Any, model: str, checkpoint: Path) -> Compared:
    proposer = engine._engine.core.parts.drafting.proposer
    proposer.propose = Compared(proposer, Plain(model, checkpoint))
    return proposer.propose


def test_greedy_drafts_are_those_of_one_plain_pass(start, model, checkpoint):
    """Through prefill in chunks, preemption, cached prefixes (the second run), and at the end of texts."""
    engine = start({"model": str(checkpoint), "num_speculative_tokens": K}, **HARSH)
    found = compared(engine, model, checkpoint)
    for _ in range(2):
        params = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True)
        engine.generate(PROMPTS, params, use_tqdm=False)
    assert len(found.lengths) > 50
    assert set(found.lengths) == set(range(1, K + 1))
    assert found.furthest < 1e-4


def test_drawn_drafts_have_the_laws_of_one_plain_pass(start, model, checkpoint):
    """Drafts are accepted here, so that rows of draft tokens become rows of the text."""
    options = {"draft_sample_method": "probabilistic", "num_speculative_tokens": 3}
    engine = start({"model": str(checkpoint), **options}, verifier="rejection")
    found = compared(engine, model, checkpoint)
    engine.generate(PROMPTS, SamplingParams(seed=5, max_tokens=20, ignore_eos=True), use_tqdm=False)
    assert engine.stats().num_accepted_tokens > 0
    assert len(found.lengths) > 50
    assert found.furthest < 1e-5


def test_one_token_after_another_when_asked_for(start, checkpoint):
    """The mask's tensor is left alone, and trees are possible."""
    options = {"parallel_drafting": False, "tree_top_k": 2, "tree_depth": 2}
    engine = start({"model": str(checkpoint), "num_speculative_tokens": 4, **options})
    engine.generate(PROMPTS[:1], use_tqdm=False)
    assert engine._engine.core.parts.drafting.proposer.head.mask_row is None
    assert engine.stats().num_draft_tokens > 0


@pytest.mark.parametrize(
    "options", [{"tree_top_k": 2}, {"speculative_token_tree": "[(0,), (1,)]"}], ids=lambda options: next(iter(options))
)
def test_trees_are_refused(start, checkpoint, options):
    option = next(iter(options))
    with pytest.raises(ConfigError, match=f"speculative.{option} asks for trees.*its drafts are chains") as caught:
        start({"model": str(checkpoint), "num_speculative_tokens": 4, **options})
    assert caught.value.path == f"speculative.{option}"


def test_a_head_that_was_not_trained_for_it_is_refused(start, model, tmp_path):
    head = tiny_head("eagle", model, tmp_path / "head")
    with pytest.raises(ConfigError, match=r"speculative\.parallel_drafting is on, but the head .* was not trained"):
        start({"model": str(head), "parallel_drafting": True})
