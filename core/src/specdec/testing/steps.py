"""Random verify steps, and what comes of them row by row: for backends that verify whole steps in one go."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import torch
from attrs import frozen
from torch import Tensor

from specdec.sampling.noise import Purpose
from specdec.testing.laws import sampling_of, step_rows
from specdec.testing.reference import match_reference
from specdec.types import Draft, Rows

if TYPE_CHECKING:
    from specdec.sampling.backend import SamplingBackend
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Verdict

MOST = 6
"""Draft tokens of a request."""
Run = tuple[list[int], list[int] | None]
"""A request's tokens, and the accepted nodes where drafts are trees."""


@frozen(eq=False, kw_only=True)
class RandomStep:
    """Requests with up to `MOST` draft tokens, greedy and sampled; now and then a row has a mask, NaN or nothing."""

    rows: Rows
    draft: Draft
    sampling: SamplingBatch

    @classmethod
    def of(
        cls,
        seed: int,
        vocab_size: int,
        *,
        trees: bool = False,
        laws: bool = False,
        num_requests: int = 9,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> RandomStep:
        """A step whose draft tokens are often right, at random.

        Args:
            seed: of everything.
            vocab_size: V.
            trees: drafts are trees.
            laws: draft tokens come with ``draft_probs``, which give them a chance; some are one-hot.
            num_requests: B.
            dtype: of the logits.
            device: where the tensors go.
        """
        generator = torch.Generator().manual_seed(seed)
        counts = torch.randint(0, MOST + 1, (num_requests,), generator=generator)
        counts[0] = max(int(counts[0]), 1)
        owner = torch.repeat_interleave(torch.arange(num_requests), counts)
        parents, depths = _random_trees(counts.tolist(), generator) if trees else (None, None)
        deciding = torch.arange(len(owner)) + owner
        if parents is not None:
            deciding = (counts + 1).cumsum(0)[owner] - counts[owner] - 1 + parents + 1
        logits = _random_logits(len(owner) + num_requests, vocab_size, generator)
        near = logits[deciding].nan_to_num(0.0, 9.0, -9.0) + torch.randn(len(owner), vocab_size, generator=generator)
        tokens, probs = _drawn(near, generator) if laws else (_often_largest(logits[deciding], generator), None)
        draft = Draft(token_ids=tokens, num_draft_tokens=counts.int(), parents=parents, draft_probs=probs)
        positions = torch.randint(0, 2**40, (num_requests,), generator=generator)
        heats = torch.tensor([0.0, 0.3, 1.0, 1.0, 2.0])[torch.randint(0, 5, (num_requests,), generator=generator)]
        seeds = torch.randint(-(2**62), 2**62, (num_requests,), generator=generator)
        deepest = int(counts.max() if depths is None else depths.max())
        rows = attrs.evolve(step_rows(logits.to(dtype), draft, positions, depths), max_draft_tokens=deepest + seed % 2)
        sampling = attrs.evolve(sampling_of(seeds, heats), all_greedy=False)
        return cls(rows=_on(rows, device), draft=_on(draft, device), sampling=_on(sampling, device))

    def matched(self, backend: SamplingBackend) -> list[Run]:
        """Every request's run by the rule of `match`, from a backend's draws of single rows."""
        heats, seeds = (values[self.rows.request_index] for values in (self.sampling.temperature, self.sampling.seeds))
        samples = backend.draw(self.rows.logits, heats, seeds, self.rows.positions, Purpose.SAMPLE).tolist()
        parents = None if self.draft.parents is None else self.draft.parents.tolist()
        found: list[Run] = []
        for first, node, count in self._spans():
            tokens = self.draft.token_ids[node : node + count].tolist()
            own = samples[first : first + count + 1]
            path = match_reference(own, tokens, None if parents is None else parents[node : node + count])
            run = [*(tokens[i] for i in path), own[path[-1] + 1 if path else 0]]
            found.append((run, None if parents is None else path))
        return found

    def rejected(self, backend: SamplingBackend) -> list[Run]:
        """Every request's run by the rule of `rejection`, from a backend's answers about single rows."""
        return [(self._rejected(backend, request, *span), None) for request, span in enumerate(self._spans())]

    def _rejected(self, backend: SamplingBackend, request: int, first: int, node: int, count: int) -> list[int]:
        logits, probs = self.rows.logits, self.draft.draft_probs
        heat, seed = self.sampling.temperature[request, None], self.sampling.seeds[request, None]
        run: list[int] = []
        for i in range(count):
            row, token = torch.tensor([first + i], device=logits.device), self.draft.token_ids[node + i, None]
            keys = (token, heat, seed, self.rows.positions[row])
            law = None if probs is None else probs[node + i, None]
            statistics = backend.statistics(logits, heat, rows=row)
            if not bool(backend.accept(logits, statistics, *keys, draft_probs=law, rows=row)):
                return [*run, int(backend.recover(logits, statistics, *keys, draft_probs=law, rows=row))]
            run.append(int(token))
        row = torch.tensor([first + count], device=logits.device)
        return [*run, int(backend.draw(logits, heat, seed, self.rows.positions[row], Purpose.SAMPLE, rows=row))]

    def _spans(self) -> list[tuple[int, int, int]]:
        """First row, first node and number of draft tokens of each request."""
        starts = self.rows.row_start.tolist()
        return [(first, first - r, starts[r + 1] - first - 1) for r, first in enumerate(starts[:-1])]


def runs_of(verdict: Verdict) -> list[Run]:
    """The runs of a verdict, whose padding must be -1."""
    found: list[Run] = []
    for r, count in enumerate(verdict.num_tokens.tolist()):
        tokens = verdict.token_ids[r].tolist()
        assert tokens[count:] == [-1] * (len(tokens) - count), "token_ids are not padded with -1"
        path = None
        if verdict.accepted_nodes is not None:
            nodes = verdict.accepted_nodes[r].tolist()
            path = nodes[: count - 1]
            assert nodes[count - 1 :] == [-1] * (len(nodes) - count + 1), "accepted_nodes are not padded with -1"
        found.append((tokens[:count], path))
    return found


def _random_logits(num_rows: int, vocab_size: int, generator: torch.Generator) -> Tensor:
    """float32 [R, V]: some rows with a mask, NaN, infinity or nothing."""
    logits = 3.0 * torch.randn(num_rows, vocab_size, generator=generator)
    fate = torch.randint(0, 30, (num_rows,), generator=generator)
    logits[fate < 4, ::2] = -torch.inf
    logits[fate == 4] = -torch.inf
    logits[fate == 5, vocab_size // 2] = torch.nan
    logits[fate == 6, vocab_size // 3] = torch.inf
    return logits


def _often_largest(logits: Tensor, generator: torch.Generator) -> Tensor:
    """int64 [N]: two in three the largest of their row, the others random."""
    others = torch.randint(0, logits.shape[1], (len(logits),), generator=generator)
    largest = torch.rand(len(logits), generator=generator) < 2 / 3
    return torch.where(largest, logits.nan_to_num(0.0).argmax(dim=1), others)


def _drawn(logits: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int64 [N] tokens and float32 [N, V] their laws, some of them one-hot."""
    probs = torch.softmax(logits, dim=1)
    tokens = torch.multinomial(probs, 1, generator=generator)[:, 0]
    one_hot = torch.rand(len(tokens), generator=generator) < 1 / 8
    probs[one_hot] = torch.nn.functional.one_hot(tokens[one_hot], logits.shape[1]).float()
    return tokens, probs


def _on(value: Any, device: str) -> Any:
    """An attrs value with its tensors on a device."""
    tensors = {
        field.name: getattr(value, field.name).to(device)
        for field in attrs.fields(type(value))
        if isinstance(getattr(value, field.name), Tensor)
    }
    return attrs.evolve(value, **tensors)


def _random_trees(counts: list[int], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """int32 [N] parents of nodes, and int64 [R] depths of the rows' nodes."""
    parents: list[int] = []
    depths: list[int] = []
    for count in counts:
        depth = {-1: 0}
        for node in range(count):
            parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else -1
            parents.append(parent)
            depth[node] = depth[parent] + 1
        depths.extend(depth.values())
    return torch.tensor(parents, dtype=torch.int32), torch.tensor(depths)
