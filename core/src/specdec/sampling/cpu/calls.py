"""Calls of the sampling regions: argument blocks, and the arrays that they point to."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.cpu.scratch import words
from specdec.cpu.team import Team
from specdec.sampling.codes import NAN_LOGITS
from specdec.sampling.cpu.job import BLOCK, Job
from specdec.types import Verdict

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows

_LONG_TOKENS = 1 << 19
"""From this many logits on a call takes long enough to let other Python threads run."""
_ROWS_PER_THREAD = 4
"""With fewer rows than this for each thread, rows are cut into ranges, so that no thread is left without work."""


class _Teams(threading.local):
    """A team for each Python thread: a team runs one region at a time."""

    def __init__(self) -> None:
        self.team = Team()


_teams = _Teams()


def _run(region: int, block: ctypes.Array[ctypes.c_int64], num_logits: int) -> None:
    """Run the region at an address on this Python thread's team."""
    team = _teams.team
    block[Job.TEAM] = team.address
    team.run(region, ctypes.addressof(block), long=num_logits >= _LONG_TOKENS)


def _num_parts(rows: int, vocab: int) -> int:
    """Ranges that each of some rows, all worked on at once, is cut into."""
    threads = torch.get_num_threads()
    return 1 if rows >= _ROWS_PER_THREAD * threads else max(1, min(threads, -(-vocab // BLOCK)))


def dense(logits: Tensor) -> Tensor:
    """The logits as the kernels read them: bfloat16 or float32, contiguous."""
    return (logits if logits.dtype == torch.bfloat16 else logits.float()).contiguous()


def array(tensor: Tensor, dtype: type) -> np.ndarray:
    """A tensor's values, contiguous."""
    return np.ascontiguousarray(tensor.numpy(), dtype=dtype)


class RowsCall:
    """One run of a region over E entries, each a row of logits."""

    def __init__(
        self,
        logits: Tensor,
        rows: Tensor | None,
        temperature: Tensor,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        purpose: int = 0,
    ) -> None:
        self._logits = dense(logits)
        self._temperature = array(temperature, np.float32)
        count, vocab = len(self._temperature), logits.shape[1]
        self._parts = _num_parts(count, vocab)
        self._scores = np.empty((count, self._parts), dtype=np.float64)
        self._sums = np.empty((count, self._parts), dtype=np.float64)
        self._tokens = np.empty((count, self._parts), dtype=np.int64)
        self._keep: list[Any] = []
        self._size = count * vocab
        self._block = words(
            Job,
            {
                Job.COUNT: count,
                Job.PARTS: self._parts,
                Job.VOCAB: vocab,
                Job.BFLOAT16: int(self._logits.dtype == torch.bfloat16),
                Job.LOGITS: self._logits.data_ptr(),
                Job.PURPOSE: int(purpose),
            },
        )
        for name, values in (
            (Job.TEMPERATURE, self._temperature),
            (Job.SCORES, self._scores),
            (Job.SUMS, self._sums),
            (Job.TOKENS, self._tokens),
        ):
            self.set(name, values)
        for name, tensor in ((Job.ROWS, rows), (Job.SEEDS, seeds), (Job.POSITIONS, positions)):
            if tensor is not None:
                self.set(name, array(tensor, np.int64))

    def set(self, name: Job, values: np.ndarray) -> None:
        """Point a word of the block to an array, which is kept alive."""
        self._keep.append(values)
        self._block[name] = values.ctypes.data

    def run(self, region: int) -> None:
        """Run the region at this address, once."""
        _run(region, self._block, self._size)

    def winners(self) -> np.ndarray:
        """int64 [E]: the token with the highest score of all ranges, or a code; the lowest token on ties."""
        if self._parts == 1:
            return self._tokens[:, 0]
        fault = (self._tokens == NAN_LOGITS).any(axis=1)
        best = np.where(fault[:, None], 0.0, self._scores).argmax(axis=1)
        tokens = np.take_along_axis(self._tokens, best[:, None], axis=1)[:, 0]
        return np.where(fault, NAN_LOGITS, tokens)

    def log_normalizers(self, tokens: np.ndarray) -> np.ndarray:
        """float64 [E] from `normalize_region`: log-sum-exp at the temperature, the largest logit at temperature 0."""
        nothing = tokens < 0
        ranges = np.where(nothing[:, None], 0.0, self._scores)
        largest = ranges.max(axis=1)
        temperature = self._temperature.astype(np.float64)
        random = temperature > 0
        scale = np.where(random, temperature, 1.0)
        sums = np.where(nothing[:, None] | ~random[:, None], 1.0, self._sums)
        with np.errstate(invalid="ignore"):  # +inf at temperature 0
            total = (sums * np.exp((ranges - largest[:, None]) / scale[:, None])).sum(axis=1)
        values = np.where(random, largest / scale + np.log(total), largest)
        return np.where(nothing, np.nan, values)


class StepCall:
    """One run of a region over the rows of a whole step, whose requests' drafts it verifies."""

    def __init__(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> None:
        """Prepare the argument block.

        Args:
            rows: the step's rows.
            draft: at least one draft token; chains or trees.
            sampling: the requests' temperatures and seeds.
        """
        logits = dense(rows.logits)
        requests, vocab = rows.num_requests, logits.shape[1]
        num_rows = rows.request_index.shape[0]
        most = int(draft.num_draft_tokens.max())
        width = (most if rows.max_draft_tokens is None else rows.max_draft_tokens) + 1
        parts = _num_parts(requests, vocab)
        self._size = num_rows * vocab
        self._out = torch.empty(requests, width, dtype=torch.int64)
        self._num_tokens = torch.empty(requests, dtype=torch.int32)
        self._path = None if draft.parents is None else torch.empty(requests, width - 1, dtype=torch.int32)
        known = torch.zeros(2 * num_rows + requests, dtype=torch.int64)
        self.states = known[:num_rows]
        """int64 [R]: what became of each row; see `specdec.sampling.cpu.steps`."""
        found = torch.empty(2 * num_rows * (parts + 1), dtype=torch.float64)
        tokens = torch.empty(num_rows * (parts + 1), dtype=torch.int64)
        self._tensors = {
            Job.LOGITS: logits,
            Job.TEMPERATURE: _typed(sampling.temperature, torch.float32),
            Job.SEEDS: _typed(sampling.seeds, torch.int64),
            Job.POSITIONS: _typed(rows.positions, torch.int64),
            Job.ROW_START: _typed(rows.row_start, torch.int32),
            Job.DRAFT: _typed(draft.token_ids, torch.int64),
            Job.PARENTS: _typed(draft.parents, torch.int32),
            Job.PROBS: _typed(draft.draft_probs, torch.float32),
            Job.STATES: self.states,
            Job.PENDING: known[num_rows:],
            Job.SCORES: found,
            Job.SUMS: found[num_rows * parts :],
            Job.NORMALIZERS: found[2 * num_rows * parts :],
            Job.TOKENS: tokens,
            Job.WINNERS: tokens[num_rows * parts :],
            Job.OUT: self._out,
            Job.NUM_TOKENS: self._num_tokens,
            Job.PATH: self._path,
        }
        numbers = {
            Job.REQUESTS: requests,
            Job.COUNT: (most + 1) * requests,
            Job.PARTS: parts,
            Job.VOCAB: vocab,
            Job.BFLOAT16: int(logits.dtype == torch.bfloat16),
            Job.WIDTH: width,
        }
        addresses = {name: tensor.data_ptr() for name, tensor in self._tensors.items() if tensor is not None}
        self._block = words(Job, numbers | addresses)

    def run(self, region: int) -> Verdict:
        """Run the region at this address, once."""
        _run(region, self._block, self._size)
        return Verdict(token_ids=self._out, num_tokens=self._num_tokens, accepted_nodes=self._path)


def _typed(tensor: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if tensor is None else tensor.to(dtype).contiguous()
