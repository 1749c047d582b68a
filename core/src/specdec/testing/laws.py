"""Whether what a verifier emits has the target's law: a target and a draft law as tables, and tests of the counts.

The target and the proposer here are Markov chains of order two over a small vocabulary, so that the law of every
text is known exactly, and 200,000 requests are decoded in seconds as one batch. Continued over several steps, this
finds what no look at one step can: noise that is used twice, a wrong row for the bonus token, laws reported wrongly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from attrs import field, frozen
from torch import Tensor

from specdec.drafting.sampling import DraftSampler
from specdec.sampling.batch import SamplingBatch
from specdec.types import Draft, Rows

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from specdec.verify.base import Verifier

SIGNIFICANCE = 1e-6
"""A test this strict fails by chance once in a million seeds; power then comes from the number of samples."""
_FIRST_POSITION = 7


@frozen(eq=False, kw_only=True)
class TwoLaws:
    """What target and draft think: the law of the next token for each pair of last tokens."""

    target: Tensor
    """float64 [V, V, V]: by last but one token, last token, next token."""
    draft: Tensor
    """float64 [V, V, V]."""

    @classmethod
    def random(cls, vocab_size: int, *, seed: int = 0, agreement: float = 0.7) -> TwoLaws:
        """Target rows from Dirichlet(1), draft rows ``agreement`` times the target's and the rest noise."""
        rng = np.random.default_rng(seed)
        shape = (vocab_size, vocab_size)
        target, noise = (rng.dirichlet(np.ones(vocab_size), shape) for _ in range(2))
        draft = agreement * target + (1 - agreement) * noise
        return cls(target=torch.from_numpy(target), draft=torch.from_numpy(draft))

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.target.shape[-1]

    def law_of_texts(self, length: int) -> Tensor:
        """float64 [V] * ``length``: the target's probability of each text that follows the tokens 0, 0."""
        law = self.target[0, 0]
        if length > 1:
            law = law[:, None] * self.target[0]
        for _ in range(length - 2):
            law = law[..., None] * self.target
        return law


@frozen(eq=False, kw_only=True)
class Simulation:
    """Many requests at once, at temperature 1, drafted from `TwoLaws.draft` and verified against `TwoLaws.target`."""

    laws: TwoLaws
    verifier: Verifier
    num_draft_tokens: int
    sampler: DraftSampler = field(factory=lambda: DraftSampler("probabilistic"))
    change_draft: Callable[[Draft], Draft] | None = None
    """Applied to every draft before it is verified, to plant faults."""

    def texts(self, count: int, length: int, *, seed: int = 0) -> Tensor:
        """Decode ``count`` requests until each has ``length`` tokens; int64 [count, length]."""
        generator = torch.Generator().manual_seed(seed)
        seeds = torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator)
        k = self.num_draft_tokens
        texts = torch.zeros(count, length + k + 3, dtype=torch.int64)
        lengths = torch.zeros(count, dtype=torch.int64)
        while len(running := (lengths < length).nonzero()[:, 0]):
            begin = torch.stack([texts[running, lengths[running]], texts[running, lengths[running] + 1]])
            tokens, counts = self._step(begin, seeds[running], lengths[running])
            place = torch.arange(k + 1)
            some, column = (place < counts[:, None]).nonzero(as_tuple=True)
            texts[running[some], lengths[running[some]] + 2 + column] = tokens[some, column]
            lengths[running] += counts
        return texts[:, 2 : 2 + length]

    def _step(self, last: Tensor, seeds: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """One step after the two last tokens, int64 [2, B]; the tokens, int64 [B, k + 1], and how many they are."""
        count, k = len(seeds), self.num_draft_tokens
        ones = torch.ones(count)
        context, tokens, probs = [last[0], last[1]], [], []
        for place in range(k):
            logits = self.laws.draft[context[-2], context[-1]].log().float()
            positions = lengths + _FIRST_POSITION + place
            token, law = self.sampler.choose(logits, ones, seeds, positions, draft_position=place)
            context.append(token)
            tokens.append(token)
            probs.append(law)
        contexts = torch.stack(context, dim=1)
        rows = self.laws.target[contexts[:, :-1], contexts[:, 1:]].log().float().flatten(0, 1)
        with_probs = all(law is not None for law in probs) and k > 0
        draft = Draft(
            token_ids=torch.stack(tokens, dim=1).flatten() if k else torch.empty(0, dtype=torch.int64),
            num_draft_tokens=torch.full((count,), k, dtype=torch.int32),
            draft_probs=torch.stack([law for law in probs if law is not None], dim=1).flatten(0, 1)
            if with_probs
            else None,
        )
        verdict = self.verifier.verify(
            step_rows(rows, draft, lengths + _FIRST_POSITION),
            self.change_draft(draft) if self.change_draft else draft,
            sampling_of(seeds),
        )
        return verdict.token_ids, verdict.num_tokens.long()


def step_rows(logits: Tensor, draft: Draft, positions: Tensor, depths: Tensor | None = None) -> Rows:
    """The rows of a step in which request r's first token takes ``positions[r]``.

    Args:
        logits: float32 [R, V].
        draft: the draft, before any change.
        positions: int64 [B].
        depths: int64 [R], depth of each row's node for trees; None for chains.
    """
    counts = draft.num_draft_tokens.long() + 1
    start = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    request = torch.repeat_interleave(torch.arange(len(counts)), counts)
    offset = torch.arange(len(request)) - start[request] if depths is None else depths
    return Rows(
        logits=logits,
        row_start=start.int(),
        request_index=request,
        positions=positions[request] + offset,
        num_requests=len(counts),
    )


def sampling_of(seeds: Tensor, temperature: Tensor | float = 1.0) -> SamplingBatch:
    """A batch of requests that differ in nothing but seeds (int64 [B]) and temperature (float32 [B])."""
    heat = temperature if isinstance(temperature, Tensor) else torch.full(seeds.shape, temperature)
    empty = SamplingBatch.build([])
    return attrs.evolve(empty, temperature=heat.float(), seeds=seeds, all_greedy=bool((heat == 0).all()))


def p_value(counts: Tensor, law: Tensor) -> float:
    """The chance that counts like these, or less likely ones, come from ``law`` (chi-square; rare cells are pooled).

    Args:
        counts: [cells].
        law: float64 [cells], sums to 1.
    """
    expected = law.double().flatten() * counts.sum()
    observed = counts.double().flatten()
    rare = expected < 5
    if bool((observed[expected == 0] > 0).any()):
        return 0.0
    if bool(rare.any()):
        pooled = expected[rare].sum(), observed[rare].sum()
        expected = torch.cat([expected[~rare], pooled[0][None]])
        observed = torch.cat([observed[~rare], pooled[1][None]])
    keep = expected > 0
    statistic = ((observed - expected)[keep] ** 2 / expected[keep]).sum()
    freedom = torch.tensor(max(int(keep.sum()) - 1, 1), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def total_variation(counts: Tensor, law: Tensor) -> tuple[float, float]:
    """The distance of counts from a law, and the most that chance makes of it at `SIGNIFICANCE`."""
    samples = float(counts.sum())
    distance = float((counts.double() / samples - law).abs().sum() / 2)
    expected = float((2 * law * (1 - law) / (np.pi * samples)).clamp(min=0).sqrt().sum() / 2)
    return distance, expected + float(np.sqrt(np.log(1 / SIGNIFICANCE) / (2 * samples)))


def deviations(texts: Tensor, law: Tensor) -> list[str]:
    """What about texts, int64 [N, length], does not fit their law, float64 [V] * length; empty when all does.

    Looks at whole texts, at each token, at pairs of neighbours, and at the last token given each first one.
    """
    length, vocab_size = texts.shape[1], law.shape[0]
    found = []
    views: list[Sequence[int]] = [
        range(length),
        *([i] for i in range(length)),
        *([i, i + 1] for i in range(length - 1)),
    ]
    if length > 2:
        views.append([0, length - 1])
    for view in views:
        others = [i for i in range(length) if i not in view]
        marginal = law.sum(dim=others) if others else law
        index = torch.zeros(texts.shape[0], dtype=torch.int64)
        for i in view:
            index = index * vocab_size + texts[:, i]
        counts = torch.bincount(index, minlength=vocab_size ** len(view)).view(marginal.shape)
        chance = p_value(counts, marginal)
        distance, limit = total_variation(counts, marginal)
        if chance < SIGNIFICANCE or distance > limit:
            found.append(f"tokens {list(view)}: p = {chance:.2g}, total variation {distance:.4f} (limit {limit:.4f})")
    return found
