"""What is drafted, checked against plain transformers; and what an engine with a draft model gives."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.errors import CapacityError, ConfigError, SpecdecError
from specdec.registry import Registry
from specdec.testing import load_module, tiny_model
from specdec.types import ProposalInput

Start = Callable[..., LLM]
PROMPTS = [[7] * 24, [*range(20, 60)], [3], [5, 9, 5, 9, 5, 9, 11]]
GREEDY = SamplingParams(temperature=0, max_tokens=20)
SAMPLED = SamplingParams(temperature=1, seed=11, max_tokens=20, ignore_eos=True)


def proposer_of(engine: LLM) -> Any:
    drafting = engine._engine.core.parts.drafting
    assert drafting is not None
    return drafting.proposer


def watched(engine: LLM, check: Callable[[ProposalInput, list[list[int]]], None]) -> None:
    """Hand every proposal and the drafts it got to ``check``."""
    proposer = proposer_of(engine)
    propose = proposer.propose

    def watch(batch: ProposalInput) -> Any:
        draft = propose(batch)
        check(batch, [row.tolist() for row in torch.split(draft.token_ids, draft.num_draft_tokens.tolist())])
        return draft

    proposer.propose = watch


def output(engine: LLM, params: SamplingParams, prompts: list[list[int]] = PROMPTS) -> list[list[int]]:
    return [one.outputs[0].token_ids for one in engine.generate(prompts, params, use_tqdm=False)]


@pytest.fixture(scope="session")
def parallel(folder: Path, other: str) -> str:
    """The model `other`, declared to draft in parallel with the mask id 9."""
    path = shutil.copytree(other, folder / "parallel")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pard_token": 9}))
    return str(path)


def test_drafts_are_what_the_model_says(start: Start, other: str) -> None:
    """Token by token, the drafter's greedy continuation of the text so far."""
    engine, model, seen = start(other, k=3), load_module(other), []

    @torch.inference_mode()
    def check(batch: ProposalInput, drafts: list[list[int]]) -> None:
        for text, limit, draft in zip(batch.token_ids, batch.max_draft_tokens.tolist(), drafts, strict=True):
            tokens = text.tolist()
            for _ in range(limit):
                tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
            assert draft == tokens[len(text) :]
            seen.append(len(draft))

    watched(engine, check)
    assert output(engine, GREEDY) == output(start(), GREEDY)
    assert sum(seen) > 50


def test_parallel_drafts_are_one_pass_over_masks(start: Start, parallel: str) -> None:
    """The newest token and one mask for every further draft token; nothing else is run."""
    engine, model, seen = start(parallel, k=4), load_module(parallel), []
    passes: list[int] = []
    drafter = proposer_of(engine).drafter
    forward = drafter.forward
    drafter.forward = lambda batch: (passes.append(1), forward(batch))[1]

    @torch.inference_mode()
    def check(batch: ProposalInput, drafts: list[list[int]]) -> None:
        assert len(passes) <= 1
        passes.clear()
        for text, limit, draft in zip(batch.token_ids, batch.max_draft_tokens.tolist(), drafts, strict=True):
            logits = model(input_ids=torch.tensor([[*text.tolist(), *[9] * (limit - 1)]])).logits[0]
            assert draft == logits[len(text) - 1 :].argmax(dim=-1).tolist()
            seen.append(len(draft))

    watched(engine, check)
    assert output(engine, GREEDY) == output(start(), GREEDY)
    assert sum(seen) > 50
    sampling = start(parallel, k=4)
    assert output(sampling, SAMPLED) == output(start(), SAMPLED)


def test_parallel_drafting_can_be_switched_off(start: Start, parallel: str) -> None:
    assert proposer_of(start(parallel, options={"parallel_drafting": False})).drafter.mask_token_id is None
    assert proposer_of(start(parallel)).drafter.mask_token_id == 9


@pytest.mark.parametrize("method", ["greedy", "coupled", "probabilistic"])
def test_the_target_as_its_own_drafter_is_always_right(start: Start, target: str, method: str) -> None:
    """Greedy: whatever the method. At temperature 1 with the target's own noise, too."""
    engine = start(target, options={"draft_sample_method": method})
    output(engine, GREEDY)
    if method == "coupled":
        assert output(engine, SAMPLED) == output(start(), SAMPLED)
    assert engine.stats().acceptance_rate == 1.0


def test_a_verifier_with_probabilities_accepts_all_of_the_targets_own_draft(start: Start, target: str) -> None:
    """The reported law is the drafter's at the request's temperature, so the ratio is 1 for every token."""
    if not any(entry.name == "rejection" for entry in Registry().entries() if entry.kind == "verifier"):
        pytest.skip("no verifier 'rejection' is installed")
    engine = start(target, options={"draft_sample_method": "probabilistic"}, verifier="rejection")
    for temperature in (0.5, 1.0, 1.7):
        output(engine, SamplingParams(temperature=temperature, seed=3, max_tokens=20, ignore_eos=True))
    assert engine.stats().acceptance_rate == 1.0
    assert engine.stats().num_draft_tokens > 100


def test_a_draft_ends_before_a_doubtful_token(start: Start, other: str) -> None:
    """Confidence is the law's largest probability, looked at before the token is drawn."""
    threshold, model = 0.04, load_module(other)
    engine, lengths = start(other, k=4, options={"confidence_threshold": threshold}), []

    @torch.inference_mode()
    def check(batch: ProposalInput, drafts: list[list[int]]) -> None:
        for text, limit, draft in zip(batch.token_ids, batch.max_draft_tokens.tolist(), drafts, strict=True):
            logits = model(input_ids=torch.tensor([[*text.tolist(), *draft]])).logits[0, len(text) - 1 :]
            sure = (logits.softmax(dim=-1).amax(dim=-1) >= threshold).tolist()
            assert all(sure[: len(draft)])
            assert len(draft) == limit or not sure[len(draft)]
            lengths.append(len(draft))

    watched(engine, check)
    assert output(engine, GREEDY) == output(start(), GREEDY)
    assert {0, 4} < set(lengths)


def test_texts_beyond_the_drafter_go_on_without_drafts(start: Start, other: str) -> None:
    """Known bug 49: nothing is drafted past the drafter's last position, and nothing fails there."""
    engine, furthest = start(other, k=3, options={"max_model_len": 50}), []

    def check(batch: ProposalInput, drafts: list[list[int]]) -> None:
        for text, draft in zip(batch.token_ids, drafts, strict=True):
            furthest.append(len(text) + len(draft) if draft else 0)

    watched(engine, check)
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    prompts = [*PROMPTS, [11] * 70]
    assert output(engine, params, prompts) == output(start(), params, prompts)
    assert max(furthest) == 51


def test_another_tokenizer_is_refused_before_loading(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = str(tiny_model("llama", folder / "wider", vocab_size=400, eos_token_id=None))
    draft = str(tiny_model("llama", folder / "narrower", vocab_size=128, eos_token_id=None, seed=2))
    monkeypatch.setattr("specdec.target.model.load_model", None)
    with pytest.raises(ConfigError, match=r"the drafter's tokenizer is not the target's: token \d+ is"):
        start(draft, model=target)


def test_another_tokenizer(start: Start, folder: Path) -> None:
    """Refused by default; with the option, drafts are tokens of both and the text stays the target's."""
    target = str(tiny_model("llama", folder / "wide", vocab_size=400, eos_token_id=None))
    draft = str(tiny_model("llama", folder / "narrow", vocab_size=128, eos_token_id=None, seed=2))
    with pytest.raises(ConfigError, match=r"the drafter's tokenizer is not the target's: token \d+ is"):
        start(draft, model=target)
    prompts = [[int(t) for t in np.random.default_rng(4).integers(2, 400, 30)], [390, 391, 5]]
    for method in ("greedy", "coupled", "probabilistic"):
        options = {"use_heterogeneous_vocab": True, "draft_sample_method": method}
        engine = start(draft, model=target, options=options)
        known = set(proposer_of(engine).drafter.vocabulary.target_ids.tolist())
        seen: list[int] = []

        def check(batch: ProposalInput, drafts: list[list[int]], seen: list[int] = seen) -> None:
            seen.extend(token for row in drafts for token in row)

        watched(engine, check)
        plain = start(model=target)
        for params in (GREEDY, SAMPLED):
            assert output(engine, params, prompts) == output(plain, params, prompts)
        assert seen
        assert set(seen) <= known


@pytest.mark.parametrize(("ours", "theirs"), [(128, 136), (136, 128)])
def test_padded_vocabularies(start: Start, folder: Path, ours: int, theirs: int) -> None:
    """Known bug 53: logits of other width than the target's are cut or padded; ids beyond either are survived."""
    models = []
    for name, size in (("ours", ours), ("theirs", theirs)):
        path = tiny_model("llama", folder / f"{name}-{size}", vocab_size=size, eos_token_id=None, seed=len(models))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_model("llama", folder / "t128", vocab_size=128) / file, path / file)
        models.append(str(path))
    for method in ("greedy", "coupled", "probabilistic"):
        engine = start(models[1], model=models[0], options={"draft_sample_method": method})
        plain = start(model=models[0])
        prompts = [[ours - 1, 5, ours - 2], [9] * 20]
        for params in (GREEDY, SAMPLED):
            assert output(engine, params, prompts) == output(plain, params, prompts)
        assert engine.stats().num_draft_tokens > 0


def test_other_dtype_device_and_threads(start: Start, other: str) -> None:
    """The drafter's own; the process's number of threads is as before."""
    before = torch.get_num_threads()
    engine = start(other, options={"draft_dtype": "bfloat16", "draft_device": "cpu", "draft_num_threads": 2})
    assert output(engine, GREEDY) == output(start(), GREEDY)
    assert proposer_of(engine).drafter.model.dtype == torch.bfloat16
    assert torch.get_num_threads() == before


def test_memory_is_counted(start: Start, other: str) -> None:
    """kv_cache_memory pays for the drafter's K/V as well; weights are reported."""
    plain, engine = start(block_size=16), start(other, block_size=16)
    proposer = proposer_of(engine)
    own = proposer.kv_bytes_per_token()
    shared = engine._engine.core.parts.target.kv_bytes_per_token()
    assert own == 2 * 2 * 16 * 4
    assert engine.stats().total_blocks == 4 * 2**20 // (16 * (own + shared))
    assert plain.stats().total_blocks == 4 * 2**20 // (16 * shared)
    weights = sum(parameter.nbytes for parameter in load_module(other).parameters())
    memory = proposer.memory()
    assert memory["draft_kv"] == engine.stats().total_blocks * 16 * own
    assert weights <= memory["draft_weights"] <= 1.01 * weights
    with pytest.raises(CapacityError, match="holds 64 tokens, too few"):
        start(other, kv_cache_memory=59 * 1024, max_model_len=80)


def test_a_checkpoint_alone_selects_the_method(target: str, other: str) -> None:
    """Without ``method`` the checkpoint is recognised as a language model; heads are not."""
    settings = {"model": other, "num_speculative_tokens": 2}
    with LLM(target, dtype="float32", max_model_len=64, kv_cache_memory="4MiB", speculative_config=settings) as engine:
        assert type(proposer_of(engine)).__name__ == "DraftModelProposer"


def test_a_head_is_no_language_model(folder: Path) -> None:
    from safetensors.torch import save_file

    from specdec_draft_model.identify import identified

    head = folder / "head"
    head.mkdir()
    (head / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1}))
    save_file({"fc.weight": torch.zeros(2, 2)}, head / "model.safetensors")
    assert identified(head) is None
    (head / "model.safetensors").unlink()
    assert identified(head) is not None
    (head / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLMEagle3"]}))
    assert identified(head) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "/nowhere/at/all"}, ["speculative.model: no file or directory '/nowhere/at/all'"]),
        ({"max_model_len": 4096}, ["speculative.max_model_len is 4096", "2048 positions"]),
        ({"parallel_drafting": True}, ["speculative.parallel_drafting", "pard_token", "leave parallel_drafting out"]),
        ({"draft_device": "cuda:7"}, ["speculative.model", "cuda:7"]),
    ],
)
def test_what_cannot_draft_is_refused(start: Start, other: str, options: dict[str, Any], words: list[str]) -> None:
    if "draft_device" in options and torch.cuda.device_count() > 7:
        pytest.skip("this machine has the device")
    with pytest.raises(SpecdecError) as caught:
        start(options.pop("model", other), options=options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_mask_outside_the_vocabulary_is_refused(start: Start, folder: Path, other: str) -> None:
    path = shutil.copytree(other, folder / "badmask")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"pard_token": 4000}))
    with pytest.raises(ConfigError, match=r"mask id 4000 in config.json of .* lies outside its vocabulary of 128 ids"):
        start(str(path))
