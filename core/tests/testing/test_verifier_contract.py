"""The contract of verifiers passes a sound one, chain by chain in plain Python, and catches every planted fault."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from specdec.sampling.batch import SamplingBatch
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.sampler import sample
from specdec.testing.contracts import VerifierContract
from specdec.testing.reference import match_reference
from specdec.types import Draft, Rows, Verdict
from specdec.verify.base import Verifier

torch.set_num_threads(1)


class Sound(Verifier):
    """Match verification, one request at a time; its parts are what the faults below replace."""

    name: ClassVar[str] = "sound"
    accepts_trees: ClassVar[bool] = True

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        counts = draft.num_draft_tokens.tolist()
        samples = [row.tolist() for row in torch.split(self.samples(rows, sampling), [n + 1 for n in counts])]
        drafts = [row.tolist() for row in torch.split(draft.token_ids, counts)]
        trees: list[Any] = [None] * len(counts)
        if draft.parents is not None:
            trees = [row.tolist() for row in torch.split(draft.parents, counts)]
        paths = [self.path(*parts) for parts in zip(samples, drafts, trees, strict=True)]
        width = max([len(path) for path in paths], default=0)
        tokens = torch.full((len(counts), width + 1), -1)
        nodes = torch.full((len(counts), width), -1, dtype=torch.int32)
        for request, path in enumerate(paths):
            last = samples[request][path[-1] + 1 if path else 0]
            tokens[request, : len(path) + 1] = torch.tensor([*(drafts[request][node] for node in path), last])
            nodes[request, : len(path)] = torch.tensor(path)
        return Verdict(
            token_ids=tokens,
            num_tokens=torch.tensor([len(path) + 1 for path in paths], dtype=torch.int32),
            accepted_nodes=None if draft.parents is None else nodes,
        )

    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        return sample(rows.logits, rows, sampling)

    def path(self, samples: list[int], draft: list[int], parents: list[int] | None) -> list[int]:
        return match_reference(samples, draft, parents)


class TestSound(VerifierContract):
    num_samples = 5_000

    @pytest.fixture
    def verifier(self) -> Sound:
        return Sound()


class Rejection(Verifier):
    """A sound verifier of drafts with probabilities: the textbook rule, noise keyed by seed and position."""

    name: ClassVar[str] = "rejection"
    needs_draft_probs: ClassVar[bool] = True
    keep_all: ClassVar[bool] = False
    """The planted fault: recover from the target's law instead of the residual one."""

    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        assert draft.draft_probs is not None
        starts, first = rows.row_start.tolist(), 0
        emitted = []
        for request, count in enumerate(draft.num_draft_tokens.tolist()):
            span = slice(first, first + count)
            first += count
            logits = rows.logits[starts[request] : starts[request + 1]].double()
            greedy = sampling.temperature[request] == 0
            laws = torch.nn.functional.one_hot(logits.argmax(1), logits.shape[1]) if greedy else logits.softmax(1)
            laws = laws.double()
            for row in (logits != logits.clamp(min=-1e30)).all(dim=1).nonzero()[:, 0]:
                laws[row], laws[row, 0] = logits[row], torch.nan
            rng = np.random.default_rng([int(sampling.seeds[request]), int(rows.positions[starts[request]])])
            tokens, probs = draft.token_ids[span].tolist(), draft.draft_probs[span].double().numpy()
            emitted.append(self.one(laws.numpy(), tokens, probs, rng))
        width = max(len(row) for row in emitted)
        return Verdict(
            token_ids=torch.tensor([row + [-1] * (width - len(row)) for row in emitted]),
            num_tokens=torch.tensor([len(row) for row in emitted], dtype=torch.int32),
        )

    def one(self, laws: np.ndarray, tokens: list[int], probs: np.ndarray, rng: np.random.Generator) -> list[int]:
        for place, (token, law) in enumerate(zip(tokens, laws, strict=False)):
            if np.isnan(law).any():
                return [*tokens[:place], self.draw(law, rng)]
            if rng.random() * probs[place, token] >= law[token]:
                rest = law if self.keep_all else np.maximum(law - probs[place], 0)
                return [*tokens[:place], self.draw(rest, rng)]
        return [*tokens, self.draw(laws[len(tokens)], rng)]

    @staticmethod
    def draw(law: np.ndarray, rng: np.random.Generator) -> int:
        if law[0] != law[0]:
            return NO_TOKEN_LEFT if np.isneginf(law[1]) else NAN_LOGITS
        return int(np.searchsorted(np.cumsum(law), rng.random() * law.sum(), side="right"))


class TestRejection(VerifierContract):
    num_samples = 5_000

    @pytest.fixture
    def verifier(self) -> Rejection:
        return Rejection()


# --- faults ------------------------------------------------------------------------------------


class Nameless(Sound):
    name: ClassVar[str] = ""


class KeepsEverything(Sound):
    def path(self, samples: list[int], draft: list[int], parents: list[int] | None) -> list[int]:
        return list(range(len(draft)))


class KeepsTheFirst(Sound):
    def path(self, samples: list[int], draft: list[int], parents: list[int] | None) -> list[int]:
        return super().path(samples, draft, parents) or [0][: len(draft)]


class NeverKeeps(Sound):
    def path(self, samples: list[int], draft: list[int], parents: list[int] | None) -> list[int]:
        return []


class EmitsNothing(Sound):
    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        verdict = super().verify(rows, draft, sampling)
        return Verdict(token_ids=verdict.token_ids, num_tokens=verdict.num_tokens - 1)


class PadsWithZero(Sound):
    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        verdict = super().verify(rows, draft, sampling)
        verdict.token_ids.clamp_(min=0)
        return verdict


class CountsInInt64(Sound):
    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        verdict = super().verify(rows, draft, sampling)
        return Verdict(token_ids=verdict.token_ids, num_tokens=verdict.num_tokens.long())


class TakesTheLastOfEqual(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        if not sampling.all_greedy:
            return super().samples(rows, sampling)
        return rows.logits.shape[1] - 1 - rows.logits.flip(1).argmax(dim=1)


class WritesLogits(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        samples = super().samples(rows, sampling)
        rows.logits.sub_(rows.logits.max())
        return samples


class NoiseOfItsOwn(Sound):
    calls = 0

    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        self.calls += 1
        if sampling.all_greedy:
            return super().samples(rows, sampling)
        generator = torch.Generator().manual_seed(self.calls)
        return torch.multinomial(rows.logits.softmax(1), 1, generator=generator)[:, 0]


class NoiseByRow(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        if sampling.all_greedy:
            return super().samples(rows, sampling)
        generator = torch.Generator().manual_seed(1)
        return torch.multinomial(rows.logits.softmax(1), 1, generator=generator)[:, 0]


class OneNoiseForAllRows(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        """Every row of a request uses the noise of its first one."""
        first = rows.positions[rows.row_start[:-1].long()][rows.request_index]
        shared = Rows(
            logits=rows.logits,
            row_start=rows.row_start,
            request_index=rows.request_index,
            positions=first,
            num_requests=rows.num_requests,
        )
        return sample(rows.logits, shared, sampling)


class TooWarm(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        return sample(rows.logits / 1.1, rows, sampling)


class KeepsAFewMore(Sound):
    """Keeps a rejected first token for one sample in eight: fluent text, wrong law."""

    def path(self, samples: list[int], draft: list[int], parents: list[int] | None) -> list[int]:
        path = super().path(samples, draft, parents)
        return [0] if draft and not path and (samples[0] * 7 + samples[-1]) % 8 == 0 else path


class ForgetsTheMask(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        return sample(rows.logits.clamp(min=9.0), rows, sampling)


class RejectionFromTheTarget(Rejection):
    keep_all: ClassVar[bool] = True


class OneTemperatureForAll(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        heat = sampling.temperature.max().expand_as(sampling.temperature).contiguous()
        return sample(rows.logits, rows, attrs.evolve(sampling, temperature=heat))


class EmitsTokenZeroForNaN(Sound):
    def samples(self, rows: Rows, sampling: SamplingBatch) -> torch.Tensor:
        return super().samples(rows, sampling).clamp(min=0)


class TreesAsChains(Sound):
    def path(self, samples: list[int], draft: list[int], parents: list[int] | None) -> list[int]:
        return match_reference(samples, draft)


FAULTS = [
    (Nameless, "test_declares_what_it_is"),
    (EmitsNothing, "test_well_formed"),
    (PadsWithZero, "test_well_formed"),
    (CountsInInt64, "test_well_formed"),
    (EmitsNothing, "test_no_drafts"),
    (KeepsEverything, "test_greedy_is_the_argmax"),
    (NeverKeeps, "test_greedy_is_the_argmax"),
    (TakesTheLastOfEqual, "test_greedy_ties_take_the_lowest_id"),
    (KeepsTheFirst, "test_impossible_draft_tokens"),
    (ForgetsTheMask, "test_impossible_draft_tokens"),
    (WritesLogits, "test_inputs_unchanged"),
    (NoiseOfItsOwn, "test_same_input_same_verdict"),
    (NoiseByRow, "test_neighbours_do_not_matter"),
    (TooWarm, "test_law"),
    (KeepsAFewMore, "test_law"),
    (OneNoiseForAllRows, "test_law"),
    (RejectionFromTheTarget, "test_law_with_draft_probs"),
    (TreesAsChains, "test_greedy_trees"),
    (KeepsAFewMore, "test_law_of_trees"),
    (OneTemperatureForAll, "test_greedy_requests_beside_sampled_ones"),
    (EmitsTokenZeroForNaN, "test_rows_without_a_token"),
]


@pytest.mark.parametrize(("fault", "check"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_fault_is_caught(fault: Callable[[], Verifier], check: str) -> None:
    """Each planted fault fails the check that is there for it."""
    contract = VerifierContract()
    contract._needs_probs = fault().needs_draft_probs
    function = getattr(contract, check)
    marks = [mark for mark in getattr(function, "pytestmark", []) if mark.name == "parametrize"]
    names = [mark.args[0] for mark in marks]

    def run_all() -> None:
        for values in itertools.product(*(mark.args[1] for mark in marks)):
            function(fault(), **dict(zip(names, values, strict=True)))

    with pytest.raises(AssertionError):
        run_all()


def test_every_check_catches_something() -> None:
    """No check is idle: each has a fault above, or is one of packaging."""
    checks = {name for name, _ in inspect.getmembers(VerifierContract, inspect.isfunction) if name.startswith("test_")}
    packaging = {"test_plugin_imports_without_torch", "test_hooks_are_declared", "test_core_version_range"}
    assert checks - packaging == {check for _, check in FAULTS}
