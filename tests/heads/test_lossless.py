"""Random heads never change the text: chains and trees, greedy and sampled, in every scheduling situation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec import SamplingParams
from specdec.registry import Registry
from specdec.testing import tiny_model
from specdec.testing.heads import random_tensors, tiny_head, write_head
from tests.heads.conftest import VOCAB

PROMPTS = [
    [7] * 24,
    [*range(20, 40), *range(20, 40)],
    [5, 9, 5, 9, 11],
    [3],
    torch.randint(2, VOCAB, (70,), generator=torch.Generator().manual_seed(1)).tolist(),
    [7] * 24 + [8, 9],
]
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SAMPLED = SamplingParams(temperature=1.0, seed=11, max_tokens=20, ignore_eos=True)

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 3},
    "coupled": {"num_speculative_tokens": 3, "draft_sample_method": "coupled"},
    "static tree": {"num_speculative_tokens": 6, "speculative_token_tree": "[(0,),(1,),(0,0),(0,1),(1,0),(0,0,0)]"},
    "coupled tree": {
        "num_speculative_tokens": 4,
        "speculative_token_tree": "[(0,),(1,),(0,0),(1,0)]",
        "draft_sample_method": "coupled",
    },
    "dynamic tree": {"num_speculative_tokens": 9, "tree_top_k": 3, "tree_depth": 3},
}
SITUATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunked prefill": {"max_num_batched_tokens": 13},
    "preemption": {"kv_cache_memory": "400KiB"},
    "no prefix caching": {"enable_prefix_caching": False, "block_size": 4},
}
HARSH = {"max_num_batched_tokens": 29, "kv_cache_memory": "400KiB", "block_size": 8}
WANTED = ("eagle", "eagle3", "medusa", "mlp_speculator")
METHODS = [entry.name for entry in Registry().entries() if entry.kind == "proposer" and entry.name in WANTED]
METHOD_OF = {"peagle": "eagle3"} if "eagle3" in METHODS else {}
"""Kinds of heads whose method has another name; their drafts are chains."""
KINDS = [*METHODS, *METHOD_OF]
CASES = [(method, shape) for method in METHODS for shape in SHAPES if (method, shape) != ("medusa", "dynamic tree")]
CASES += [(kind, shape) for kind in METHOD_OF for shape in ("chain", "coupled")]


@pytest.fixture(scope="module")
def plain(model: str) -> list[list[list[int]]]:
    """Token ids of plain decoding, greedy and sampled."""
    return _plain(model)


def _plain(model: str | Path) -> list[list[list[int]]]:
    from specdec import LLM

    with LLM(str(model), dtype="float32", max_model_len=192, kv_cache_memory="4MiB", stat_loggers=()) as engine:
        return [_texts(engine, params) for params in (GREEDY, SAMPLED)]


def _texts(engine: Any, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize(("method", "shape"), CASES)
def test_text_is_that_of_plain_decoding(start, model, plain, tmp_path, method, shape):
    """With chunks, preemption and cached prefixes (the second greedy run) all at once."""
    _check(start, model, plain, method, tiny_head(method, model, tmp_path / "head"), shape, HARSH)


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS)
@pytest.mark.parametrize(("method", "shape"), CASES)
def test_text_in_each_situation(start, model, plain, tmp_path, method, shape, situation):
    """Each situation alone."""
    head = tiny_head(method, model, tmp_path / "head")
    _check(start, model, plain, method, head, shape, SITUATIONS[situation])


def _check(start, target, plain, method, head, shape, settings):
    options = {"method": METHOD_OF.get(method, method), "model": str(head), **SHAPES[shape]}
    engine = start(options, target, **settings)
    for params, expected in zip((GREEDY, SAMPLED, GREEDY), (*plain, plain[0]), strict=True):
        assert _texts(engine, params) == expected
    assert engine.stats().num_draft_tokens > 0


# --- a draft layer with a mixture of experts --------------------------------------------------------------


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a tiny DeepSeek-V3 whose second layer is a mixture."""
    path = tmp_path_factory.mktemp("deepseek") / "target"
    return tiny_model("deepseek_v3", path, vocab_size=VOCAB, eos_token_id=None, hidden_size=32)


@pytest.fixture(scope="module")
def deepseek_head(deepseek: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE head whose layer is the target's mixture, under the names that transformers writes."""
    config = json.loads((deepseek / "config.json").read_text())
    names = {"model.layers.1.": "layers.0.", "model.norm.": "norm."}
    stored = load_file(deepseek / "model.safetensors")
    copied = {
        name.replace(old, new): t for name, t in stored.items() for old, new in names.items() if name.startswith(old)
    }
    assert "layers.0.mlp.experts.7.down_proj.weight" in copied
    width = config["hidden_size"]
    own = random_tensors({"fc.weight": (width, 2 * width), "enorm.weight": (width,), "hnorm.weight": (width,)})
    return write_head(tmp_path_factory.mktemp("deepseek") / "head", config | {"num_hidden_layers": 1}, copied | own)


@pytest.fixture(scope="module")
def deepseek_plain(deepseek: Path) -> list[list[list[int]]]:
    return _plain(deepseek)


@pytest.mark.parametrize("shape", ["chain", *(pytest.param(s, marks=pytest.mark.slow) for s in SHAPES if s != "chain")])
@pytest.mark.skipif("eagle" not in METHODS, reason="specdec-eagle is not installed")
def test_with_a_mixture_of_experts(start, deepseek, deepseek_head, deepseek_plain, shape):
    _check(start, deepseek, deepseek_plain, "eagle", deepseek_head, shape, HARSH)


@pytest.mark.parametrize("method", KINDS)
def test_drafts_with_probabilities_suit_rejection(start, model, tmp_path, method):
    """Probabilistic drafts bring their laws; with rejection greedy text stays plain decoding's."""
    head = tiny_head(method, model, tmp_path / "head")
    options = {"draft_sample_method": "probabilistic", "num_speculative_tokens": 3}
    engine = start({"method": METHOD_OF.get(method, method), "model": str(head), **options}, verifier="rejection")
    texts = _texts(engine, SAMPLED)
    assert all(len(text) == 20 for text in texts)
    assert engine.stats().num_accepted_tokens > 0


@pytest.mark.parametrize("method", KINDS)
def test_the_head_is_found_by_its_checkpoint(start, model, tmp_path, method):
    """Without a method in the configuration, the tensors' names decide."""
    engine = start({"model": str(tiny_head(method, model, tmp_path / "head"))})
    engine.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    assert engine.stats().num_draft_tokens > 0
