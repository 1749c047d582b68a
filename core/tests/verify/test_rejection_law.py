"""`rejection` end to end: what comes out over several steps has the target's law, and planted faults are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from specdec.drafting.sampling import DraftSampler
from specdec.sampling.noise import Purpose
from specdec.sampling.sampler import backend_of, draw, use_backend
from specdec.testing.laws import Simulation, TwoLaws, deviations
from specdec.types import Draft
from specdec.verify.match import MatchVerifier
from specdec.verify.rejection import RejectionVerifier

LAWS = TwoLaws.random(8)
K = 2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def found(count: int, **changes: Any) -> list[str]:
    settings: dict[str, Any] = {"laws": LAWS, "verifier": RejectionVerifier(), "num_draft_tokens": K} | changes
    texts = Simulation(**settings).texts(count, K + 1)
    return deviations(texts, settings["laws"].law_of_texts(K + 1))


def test_drafts_with_probabilities() -> None:
    assert found(20_000) == []


@pytest.mark.slow
@pytest.mark.parametrize("method", ["probabilistic", "coupled", "greedy"])
@pytest.mark.parametrize("verifier", [RejectionVerifier, MatchVerifier])
def test_every_draft_method(verifier: type, method: str) -> None:
    """200,000 texts each."""
    assert found(200_000, verifier=verifier(), sampler=DraftSampler(method)) == []


@pytest.mark.slow
@pytest.mark.parametrize("k", [1, 4])
def test_several_steps(k: int) -> None:
    """Five tokens over a vocabulary of three, in two to five steps."""
    laws = TwoLaws.random(3, seed=4, agreement=0.4)
    texts = Simulation(laws=laws, verifier=RejectionVerifier(), num_draft_tokens=k).texts(200_000, 5)
    assert deviations(texts, laws.law_of_texts(5)) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zeros", "uniform draft", "equal", "nearly equal", "one-hot target"])
def test_adversarial_laws(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    target, draft = LAWS.target.clone(), LAWS.draft.clone()
    if kind == "zeros":
        target[torch.rand(target.shape, generator=generator) < 0.4] = 0
        draft[torch.rand(draft.shape, generator=generator) < 0.4] = 0
        for law in (target, draft):
            law[law.sum(-1) == 0] = 1.0
            law /= law.sum(-1, keepdim=True)
    elif kind == "uniform draft":
        draft = torch.full_like(draft, 1 / 8)
    elif kind == "equal":
        draft = target.clone()
    elif kind == "nearly equal":
        draft = target * (1 + 1e-6 * torch.rand(target.shape, generator=generator))
        draft /= draft.sum(-1, keepdim=True)
    else:
        target = torch.nn.functional.one_hot(target.argmax(-1), 8).double()
    assert found(50_000, laws=TwoLaws(target=target, draft=draft)) == []


def test_a_draft_like_the_target_is_always_kept() -> None:
    laws = TwoLaws(target=LAWS.target, draft=LAWS.target)
    kept = []

    class Watching(RejectionVerifier):
        def verify(self, *args: Any) -> Any:
            verdict = super().verify(*args)
            kept.append(float((verdict.num_tokens == K + 1).float().mean()))
            return verdict

    found(2_000, laws=laws, verifier=Watching())
    assert min(kept) > 0.9999  # but for the rounding of draft_probs


# --- planted faults: each must be found -------------------------------------------------------


class Reported(DraftSampler):
    """Draws from a law and reports another."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__("probabilistic")
        self._change = change

    def choose(self, logits: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        _, law = super().choose(logits, *rest, **named)
        tokens, _ = super().choose(self._change(logits), *rest, **named)
        return tokens, law


def top_three(logits: Tensor) -> Tensor:
    return logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf)


class RecoveryNoise(DraftSampler):
    """Draws with the noise that recovery will use."""

    def __init__(self) -> None:
        super().__init__("probabilistic")

    def choose(self, logits: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor | None]:
        _, law = super().choose(logits, *rest, **named)
        return draw(logits, *rest[:3], Purpose.RECOVER), law


def dropped(draft: Draft) -> Draft:
    """Drops draft tokens that the draft's law finds unlikely, and those behind them."""
    assert draft.draft_probs is not None
    kept = draft.draft_probs[torch.arange(len(draft.token_ids)), draft.token_ids] >= 0.1
    kept = kept.view(-1, K).long().cumprod(dim=1).bool()
    return Draft(
        token_ids=draft.token_ids[kept.flatten()],
        num_draft_tokens=kept.sum(dim=1).int(),
        draft_probs=draft.draft_probs[kept.flatten()],
    )


class ShortRows(RejectionVerifier):
    """Verifies the shortened draft on the rows it has left."""

    def verify(self, rows: Any, draft: Draft, sampling: Any) -> Any:
        start = rows.row_start[:-1].long()
        counts = draft.num_draft_tokens.long() + 1
        request = torch.repeat_interleave(torch.arange(len(counts)), counts)
        first = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        index = start[request] + torch.arange(len(request)) - first[request]
        shorter = attrs.evolve(
            rows,
            logits=rows.logits[index],
            row_start=first.int(),
            request_index=request,
            positions=rows.positions[index],
        )
        return super().verify(shorter, draft, sampling)


class ShiftedBonus(RejectionVerifier):
    """Takes the bonus token from the row before."""

    def verify(self, rows: Any, draft: Draft, sampling: Any) -> Any:
        last = rows.row_start[1:].long() - 1
        logits = rows.logits.clone()
        logits[last] = logits[last - 1]
        return super().verify(attrs.evolve(rows, logits=logits), draft, sampling)


@pytest.mark.parametrize(
    ("count", "changes"),
    [
        (15_000, {"sampler": Reported(lambda logits: logits / 0.8)}),
        (4_000, {"sampler": Reported(top_three)}),
        (4_000, {"change_draft": dropped, "verifier": ShortRows()}),
        (4_000, {"verifier": ShiftedBonus()}),
    ],
    ids=["another temperature", "top three", "dropped when unlikely", "bonus row off by one"],
)
def test_fault_is_found(count: int, changes: dict[str, Any]) -> None:
    assert found(count, **changes) != []


@pytest.mark.slow
def test_draft_noise_used_again_for_recovery_is_found() -> None:
    laws = TwoLaws.random(8, agreement=0.4)
    assert found(300_000, sampler=RecoveryNoise(), laws=laws) != []
    assert found(300_000, laws=laws) == []


@pytest.fixture
def backend() -> Iterator[Any]:
    """The CPU's sampling backend, asked for the parts of a step, to be spoilt by a test."""
    real = backend_of("cpu")

    class Spoilt:
        """The backend, with some answers replaced."""

        def reject(self, *_: Any) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    spoilt = Spoilt()
    use_backend("cpu", spoilt)  # type: ignore[arg-type]
    yield spoilt
    use_backend("cpu", real)


def test_a_step_by_its_parts(backend: Any) -> None:
    """As on devices whose backend does not verify whole steps."""
    assert found(8_000) == []


def test_recovery_from_the_target_is_found(backend: Any) -> None:
    def recover(logits: Tensor, statistics: Any, rejected: Tensor, *keys: Tensor, rows: Tensor, **_: Any) -> Tensor:
        return backend.draw(logits, *keys, Purpose.RECOVER, rows=rows)

    backend.recover = recover
    assert found(12_000) != []


def test_recovery_as_if_one_hot_is_found(backend: Any) -> None:
    real = backend.recover

    def recover(*args: Any, draft_probs: Tensor, draft_rows: Tensor, **rest: Any) -> Tensor:
        return real(*args, draft_probs=None, **rest)

    backend.recover = recover
    assert found(15_000) != []


def test_one_uniform_for_both_positions_is_found(backend: Any) -> None:
    real = backend.accept

    def accept(*args: Any, **rest: Any) -> Tensor:
        *others, positions = args
        return real(*others, positions.view(-1, K)[:, :1].expand(-1, K).flatten(), **rest)

    backend.accept = accept
    assert found(60_000, laws=TwoLaws.random(8, agreement=0.3)) != []


def test_acceptance_without_the_drafts_law_is_found(backend: Any) -> None:
    real = backend.accept

    def accept(*args: Any, draft_probs: Tensor, **rest: Any) -> Tensor:
        return real(*args, draft_probs=None, **rest)

    backend.accept = accept
    assert found(8_000) != []
