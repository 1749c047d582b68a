"""What is wrong with a proposer or an attention backend is said by name, with what to do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from specdec import LLM, SamplingParams
from specdec.attention.sdpa import SdpaBackend
from specdec.errors import EngineDeadError, PluginContractError, PluginUnsuitableError
from specdec.testing import RandomProposer, tiny_model

VOCAB = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model") / "llama", vocab_size=VOCAB)


def start(model: Path, proposer: Any = None) -> LLM:
    speculative = None if proposer is None else {"num_speculative_tokens": 3, "speculation": "always"}
    return LLM(
        str(model),
        proposer=proposer,
        speculative_config=speculative,
        attention_backend="sdpa",
        max_model_len=64,
        kv_cache_memory="1MiB",
        stat_loggers=(),
    )


def generate(llm: LLM) -> None:
    llm.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True), use_tqdm=False)


def test_a_class_in_place_of_a_proposer(model: Path) -> None:
    with pytest.raises(
        PluginContractError, match=r"proposer is the class RandomProposer, .*: proposer=RandomProposer\("
    ):
        start(model, RandomProposer)


@pytest.mark.parametrize("given", ["ngram", object()])
def test_what_is_no_proposer(model: Path, given: Any) -> None:
    with pytest.raises(PluginContractError, match=r"which is not derived from specdec.drafting.Proposer; an installed"):
        start(model, given)


@pytest.mark.parametrize(("name", "wanted"), [("needs", "Needs"), ("capabilities", "ProposerCapabilities")])
def test_declarations_of_other_types(model: Path, name: str, wanted: str) -> None:
    proposer = RandomProposer(VOCAB)
    setattr(proposer, name, {"trees": True})
    told = f"{name} of the proposer RandomProposer is of the type dict, where a specdec.types.{wanted} is required"
    with pytest.raises(PluginContractError, match=told):
        start(model, proposer)


def test_a_proposer_that_fails_to_load_is_named(model: Path) -> None:
    class Unready(RandomProposer):
        def load(self, target: Any) -> None:
            target.no_such_part  # noqa: B018 - it fails

    with pytest.raises(
        PluginContractError, match=r"load\(\) of the proposer Unready raised AttributeError: .*, line "
    ) as it:
        start(model, Unready(VOCAB))
    assert isinstance(it.value.__cause__, AttributeError)


def test_what_load_refuses_is_shown_as_it_is(model: Path) -> None:
    class Picky(RandomProposer):
        def load(self, target: Any) -> None:
            raise PluginUnsuitableError("not for this target")

    with pytest.raises(PluginUnsuitableError, match="^not for this target$"):
        start(model, Picky(VOCAB))


def test_each_kind_of_fault_is_logged_once_with_its_method_and_place(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Forgetful(RandomProposer):
        def propose(self, batch: Any) -> Any:
            if len(batch.token_ids[0]) % 2:
                raise KeyError("pool")
            return super().propose(batch)

        def finish(self, request_id: str) -> None:
            raise ValueError(request_id)

    with start(model, Forgetful(VOCAB)) as llm, caplog.at_level(logging.WARNING, logger="specdec"):
        generate(llm)
        generate(llm)
        assert llm.stats().num_proposer_faults > 3
    told = [record.getMessage() for record in caplog.records if "failed in" in record.getMessage()]
    assert len(told) == 2
    assert "failed in propose(), this step runs without speculation: KeyError: 'pool' (" in told[0]
    assert "failed in finish(), requests go on: ValueError: " in told[1]
    assert all(f"{__name__}, line " in text for text in told)


@pytest.mark.parametrize("spoil", [lambda out: out[:1], lambda out: out.double(), lambda out: None])
def test_an_attention_output_of_another_form_stops_the_engine(
    model: Path, monkeypatch: pytest.MonkeyPatch, spoil: Any
) -> None:
    """One row would be broadcast over all tokens, and make other text without a word."""
    attend = SdpaBackend.attend
    monkeypatch.setattr(SdpaBackend, "attend", lambda *each, **more: spoil(attend(*each, **more)))
    with (
        start(model) as llm,
        pytest.raises(EngineDeadError, match=r"attend\(\) of the attention backend 'sdpa' returned"),
    ):
        generate(llm)
