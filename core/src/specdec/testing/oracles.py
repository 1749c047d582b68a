"""Proposers whose drafts are known in advance, to test an engine with: right, wrong, empty, random, late or broken.

A lossless engine gives the same output with any of them; what differs is how much is accepted. All keep no state unless
said, and each can be handed to an engine with `use_proposer`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.drafting.base import Proposer
from specdec.errors import ProposerError
from specdec.testing.models import load_module
from specdec.types import Draft, Needs, ProposerCapabilities

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from specdec.types import DraftOutcome, ProposalInput, RequestInfo


def use_proposer(proposer: Proposer, num_speculative_tokens: int = 4) -> dict[str, Any]:
    """Keyword arguments of `specdec.LLM` and `specdec.AsyncLLM` that make an engine use this very object.

    For tests and for programs that embed the engine: ``LLM(path, **use_proposer(WrongProposer(5)))``. The proposer
    needs no distribution and no entry point. It is always asked for drafts, whether they pay or not.

    Args:
        proposer: the object to use; one engine at a time.
        num_speculative_tokens: the most draft tokens per request and step.
    """
    speculative = {"num_speculative_tokens": num_speculative_tokens, "speculation": "always"}
    return {"proposer": proposer, "speculative_config": speculative}


def chain_draft(rows: Sequence[Sequence[int]]) -> Draft:
    """A `Draft` of chains from one list of token ids per request."""
    tokens = [token for row in rows for token in row]
    return Draft(
        token_ids=torch.tensor(tokens, dtype=torch.int64),
        num_draft_tokens=torch.tensor([len(row) for row in rows], dtype=torch.int32),
    )


class ChainProposer(Proposer):
    """Base of the proposers here: `draft_for` answers for one request at a time."""

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        """Draft tokens that follow ``token_ids`` (int64, prompt and output), at most ``max_draft_tokens``."""
        raise NotImplementedError

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        limits = batch.max_draft_tokens.tolist()
        return chain_draft(
            [
                list(self.draft_for(request_id, tokens, limit))[:limit] if limit > 0 else []
                for request_id, tokens, limit in zip(batch.request_ids, batch.token_ids, limits, strict=True)
            ]
        )


class OracleProposer(ChainProposer):
    """Replays saved runs: right for ``right`` draft tokens, then wrong ones up to the limit.

    The run that a request follows is the first one of which its tokens so far are a prefix; a request that follows none
    gets no draft. Where two runs share a beginning, drafts follow the first until the request has left it.
    """

    def __init__(self, runs: Iterable[Sequence[int]], *, vocab_size: int, right: int | None = None) -> None:
        """Keep the runs.

        Args:
            runs: prompt and output token ids of each run, in one sequence.
            vocab_size: wrong tokens are the right ones plus 1, modulo this.
            right: how many draft tokens are right; None for all of them, and then nothing is drafted past a run's end.
        """
        self._runs = [np.asarray(run, dtype=np.int64) for run in runs]
        self._vocab_size = vocab_size
        self._right = right
        self._following: dict[str, int] = {}

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        """See `ChainProposer.draft_for`."""
        run = self._run_of(request_id, token_ids)
        if run is None:
            return []
        draft: list[int] = run[len(token_ids) : len(token_ids) + max_draft_tokens].tolist()
        if self._right is None:
            return draft
        draft += [0] * (max_draft_tokens - len(draft))
        return draft[: self._right] + [(token + 1) % self._vocab_size for token in draft[self._right :]]

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._following.pop(request_id, None)

    def _run_of(self, request_id: str, token_ids: np.ndarray) -> np.ndarray | None:
        first = self._following.get(request_id, 0)
        for index in (*range(first, len(self._runs)), *range(first)):
            run = self._runs[index]
            if len(run) >= len(token_ids) and np.array_equal(run[: len(token_ids)], token_ids):
                self._following[request_id] = index
                return run
        return None


class SelfProposer(ChainProposer):
    """Drafts with the target model itself, greedily and without a cache: at temperature 0 everything is accepted.

    In float32 up to ties. Costs a full forward pass of a transformers model per draft token: for tiny models.
    """

    def __init__(self, model: Any) -> None:
        """Take a transformers causal language model, or the directory of one (loaded in float32)."""
        self._model = model if hasattr(model, "forward") else load_module(model)

    @torch.inference_mode()
    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        """See `ChainProposer.draft_for`."""
        tokens = token_ids.tolist()
        for _ in range(max_draft_tokens):
            logits = self._model(input_ids=torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
        return tokens[len(token_ids) :]


class WrongProposer(ChainProposer):
    """Always drafts one fixed id; choose one that the target never emits and nothing is accepted."""

    def __init__(self, token_id: int) -> None:
        self._token_id = token_id

    def draft_for(self, request_id: str, token_ids: np.ndarray, max_draft_tokens: int) -> Sequence[int]:
        """See `ChainProposer.draft_for`."""
        return [self._token_id] * max_draft_tokens


class RandomProposer(Proposer):
    """Random ids in drafts of random length, as chains or as trees; a pure function of seeds and text length."""

    def __init__(self, vocab_size: int, *, seed: int = 0, trees: bool = False) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self.capabilities = ProposerCapabilities(trees=trees)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        rows, parents = [], []
        seeds = batch.seeds or (0,) * len(batch.request_ids)
        for seed, tokens, limit in zip(seeds, batch.token_ids, batch.max_draft_tokens.tolist(), strict=True):
            rng = np.random.default_rng([self._seed, seed, len(tokens)])
            count = int(rng.integers(0, limit + 1))
            rows.append(rng.integers(0, self._vocab_size, count).tolist())
            parents += [int(rng.integers(-1, node)) for node in range(count)]
        draft = chain_draft(rows)
        if not self.capabilities.trees:
            return draft
        return Draft(
            token_ids=draft.token_ids,
            num_draft_tokens=draft.num_draft_tokens,
            parents=torch.tensor(parents, dtype=torch.int32),
        )


class WrappedProposer(Proposer):
    """Base of the proposers that spoil another one: everything passes through."""

    def __init__(self, inner: Proposer) -> None:
        self.inner = inner

    @property
    def needs(self) -> Needs:  # type: ignore[override]
        """What the inner proposer needs."""
        return self.inner.needs

    @property
    def capabilities(self) -> ProposerCapabilities:  # type: ignore[override]
        """What the inner proposer can return."""
        return self.inner.capabilities

    def load(self, target: Any) -> None:
        """See `Proposer.load`."""
        self.inner.load(target)

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`."""
        self.inner.start(request)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        return self.inner.propose(batch)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self.inner.finish(request_id)

    def close(self) -> None:
        """See `Proposer.close`."""
        self.inner.close()

    def record(self, outcome: DraftOutcome) -> None:
        """See `Proposer.record`."""
        self.inner.record(outcome)

    def memory(self) -> Mapping[str, int]:
        """See `Proposer.memory`."""
        return self.inner.memory()

    def stats(self) -> Mapping[str, Any]:
        """See `Proposer.stats`."""
        return self.inner.stats()


class GappyProposer(WrappedProposer):
    """Passes on the inner proposer's draft on every ``every``-th call and returns an empty one otherwise."""

    def __init__(self, inner: Proposer, *, every: int = 2) -> None:
        super().__init__(inner)
        self._every = every
        self._calls = 0

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        self._calls += 1
        if self._calls % self._every == 0:
            return self.inner.propose(batch)
        return chain_draft([[] for _ in batch.request_ids])


class RaisingProposer(WrappedProposer):
    """Raises on every ``every``-th call of `propose`, and passes on the inner proposer's draft otherwise."""

    def __init__(
        self,
        inner: Proposer,
        *,
        every: int = 1,
        error: Callable[[], BaseException] = lambda: ProposerError("on purpose"),
    ) -> None:
        super().__init__(inner)
        self._every = every
        self._error = error
        self._calls = 0

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        self._calls += 1
        if self._calls % self._every == 0:
            raise self._error()
        return self.inner.propose(batch)


class SlowProposer(WrappedProposer):
    """Sleeps before it passes on the inner proposer's draft."""

    def __init__(self, inner: Proposer, seconds: float) -> None:
        super().__init__(inner)
        self._seconds = seconds

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        time.sleep(self._seconds)
        return self.inner.propose(batch)


class LyingProposer(Proposer):
    """Returns something that breaks the contract in one chosen way; `LIES` has them all."""

    def __init__(self, lie: str, *, vocab_size: int) -> None:
        """Choose the lie.

        Raises:
            ValueError: ``lie`` is not a key of `LIES`.
        """
        if lie not in LIES:
            raise ValueError(f"no lie named {lie!r}; there are {', '.join(sorted(LIES))}")
        self._lie = LIES[lie]
        self._vocab_size = vocab_size
        if lie.startswith("parents"):
            self.capabilities = ProposerCapabilities(trees=True)
        if lie.startswith("probs"):
            self.capabilities = ProposerCapabilities(draft_probs=True)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        counts = torch.from_numpy(batch.max_draft_tokens.astype(np.int32))
        tokens = torch.zeros(int(counts.sum()), dtype=torch.int64)
        draft: Draft = self._lie(tokens, counts, self._vocab_size)
        return draft


def _draft(tokens: Any, counts: Any, **rest: Any) -> Draft:
    return Draft(token_ids=tokens, num_draft_tokens=counts, **rest)


def _uniform(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    return torch.full((len(tokens), vocab_size), 1.0 / vocab_size)


LIES: Mapping[str, Callable[[torch.Tensor, torch.Tensor, int], Any]] = {
    "nothing": lambda tokens, counts, vocab: None,
    "not_a_draft": lambda tokens, counts, vocab: (tokens, counts),
    "ids_negative": lambda tokens, counts, vocab: _draft(tokens - 1, counts),
    "ids_beyond_vocabulary": lambda tokens, counts, vocab: _draft(tokens + vocab, counts),
    "ids_huge": lambda tokens, counts, vocab: _draft(tokens + (1 << 40), counts),
    "ids_float": lambda tokens, counts, vocab: _draft(tokens.float(), counts),
    "ids_two_dimensional": lambda tokens, counts, vocab: _draft(tokens[None], counts),
    "ids_list": lambda tokens, counts, vocab: _draft(tokens.tolist(), counts),
    "ids_too_few": lambda tokens, counts, vocab: _draft(tokens[:-1], counts),
    "ids_too_many": lambda tokens, counts, vocab: _draft(torch.cat([tokens, tokens]), counts),
    "counts_negative": lambda tokens, counts, vocab: _draft(tokens, -counts),
    "counts_over_limit": lambda tokens, counts, vocab: _draft(torch.cat([tokens, tokens]), 2 * counts),
    "counts_float": lambda tokens, counts, vocab: _draft(tokens, counts.float()),
    "counts_for_fewer_requests": lambda tokens, counts, vocab: _draft(tokens, counts[:-1]),
    "counts_for_more_requests": lambda tokens, counts, vocab: _draft(tokens, torch.cat([counts, counts[:1]])),
    "counts_none": lambda tokens, counts, vocab: _draft(tokens, None),
    "parents_after_children": lambda tokens, counts, vocab: _draft(
        tokens, counts, parents=torch.full((len(tokens),), len(tokens), dtype=torch.int32)
    ),
    "parents_below_minus_one": lambda tokens, counts, vocab: _draft(
        tokens, counts, parents=torch.full((len(tokens),), -2, dtype=torch.int32)
    ),
    "parents_too_few": lambda tokens, counts, vocab: _draft(tokens, counts, parents=tokens[:-1].int() - 1),
    "parents_float": lambda tokens, counts, vocab: _draft(tokens, counts, parents=tokens.float() - 1),
    "probs_wrong_width": lambda tokens, counts, vocab: _draft(
        tokens, counts, draft_probs=_uniform(tokens, vocab)[:, :-1]
    ),
    "probs_too_few": lambda tokens, counts, vocab: _draft(tokens, counts, draft_probs=_uniform(tokens, vocab)[:-1]),
    "probs_nan": lambda tokens, counts, vocab: _draft(
        tokens, counts, draft_probs=_uniform(tokens, vocab).fill_(float("nan"))
    ),
    "probs_negative": lambda tokens, counts, vocab: _draft(tokens, counts, draft_probs=-_uniform(tokens, vocab)),
    "probs_not_normalised": lambda tokens, counts, vocab: _draft(
        tokens, counts, draft_probs=3 * _uniform(tokens, vocab)
    ),
    "probs_integer": lambda tokens, counts, vocab: _draft(
        tokens, counts, draft_probs=torch.ones((len(tokens), vocab), dtype=torch.int64)
    ),
}
"""Every way of breaking the contract of `Proposer.propose` that an engine must survive, by name. Each takes well-formed
token ids (int64 [N], all 0), counts (int32 [B], at the limit) and the vocabulary size."""
