"""Sampling on CPU cores: compiled kernels on torch's threads."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.cpu.scratch import words
from specdec.cpu.team import Team
from specdec.sampling.backend import RowStatistics, SamplingBackend
from specdec.sampling.cpu import penalize, truncate  # noqa: F401
from specdec.sampling.cpu.accept import accept_tokens
from specdec.sampling.cpu.bits import BLOCK
from specdec.sampling.cpu.choose import choose_region
from specdec.sampling.cpu.memory import Job
from specdec.sampling.cpu.weigh import normalize_region, recover_region
from specdec.sampling.noise import Purpose
from specdec.sampling.outcome import NAN_LOGITS

_LONG_TOKENS = 1 << 19
"""From this many logits on a call takes long enough to let other Python threads run."""
_ROWS_PER_THREAD = 4
"""With fewer rows than this for each thread, rows are cut into ranges, so that no thread is left without work."""


class _Teams(threading.local):
    """A team for each Python thread: a team runs one region at a time."""

    def __init__(self) -> None:
        self.team = Team()


_teams = _Teams()


class CpuSampling(SamplingBackend):
    """See `SamplingBackend`. Draws are exactly those of `TorchSampling`; normalizers are right to 1e-7."""

    name = "cpu"
    priority = 10

    def supports(self, device: str) -> list[str]:
        """Serves CPUs."""
        return [] if device == "cpu" else [f"runs on the CPU, the engine on {device}"]

    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        purpose: int = Purpose.SAMPLE,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingBackend.draw`."""
        call = _Call(logits, rows, temperature, seeds, positions, purpose)
        call.run(choose_region)
        return torch.from_numpy(call.winners())

    def statistics(self, logits: Tensor, temperature: Tensor, rows: Tensor | None = None) -> RowStatistics:
        """See `SamplingBackend.statistics`."""
        call = _Call(logits, rows, temperature)
        call.run(normalize_region)
        tokens = call.winners()
        return RowStatistics(
            log_normalizers=torch.from_numpy(call.log_normalizers(tokens)), tokens=torch.from_numpy(tokens)
        )

    def accept(
        self,
        logits: Tensor,
        statistics: RowStatistics,
        token_ids: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        draft_probs: Tensor | None = None,
        draft_rows: Tensor | None = None,
        purpose: int = Purpose.ACCEPT,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingBackend.accept`."""
        count = len(token_ids)
        probs, prob_rows = _draft_laws(draft_probs, draft_rows, count)
        rows = torch.arange(count) if rows is None else rows
        is_token = (token_ids >= 0) & (token_ids < logits.shape[1])
        chosen = logits[rows, token_ids.where(is_token, 0)].double()
        accepted = np.empty(count, dtype=np.bool_)
        accept_tokens(
            chosen.numpy(),
            _array(token_ids.where(is_token, -1), np.int64),
            _array(statistics.tokens, np.int64),
            _array(statistics.log_normalizers, np.float64),
            _array(temperature, np.float32),
            _array(seeds, np.int64),
            _array(positions, np.int64),
            np.uint32(purpose),
            probs,
            prob_rows,
            accepted,
        )
        return torch.from_numpy(accepted)

    def recover(
        self,
        logits: Tensor,
        statistics: RowStatistics,
        rejected: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        *,
        draft_probs: Tensor | None = None,
        draft_rows: Tensor | None = None,
        purpose: int = Purpose.RECOVER,
        rows: Tensor | None = None,
    ) -> Tensor:
        """See `SamplingBackend.recover`."""
        count = len(rejected)
        probs, prob_rows = _draft_laws(draft_probs, draft_rows, count)
        rows = torch.arange(count) if rows is None else rows
        usable = (temperature > 0) & (rejected >= 0) & ~statistics.log_normalizers.isnan()
        chosen = usable.nonzero()[:, 0]
        tokens = torch.full((count,), -1, dtype=torch.int64)
        if len(chosen):
            call = _Call(logits, rows[chosen], temperature[chosen], seeds[chosen], positions[chosen], purpose)
            largest = logits[rows[chosen], statistics.tokens[chosen]]
            call.set(Job.LARGEST, _array(largest.float(), np.float32))
            call.set(Job.NORMALIZERS, _array(statistics.log_normalizers[chosen], np.float64))
            call.set(Job.PROBS, probs)
            call.set(Job.PROB_ROWS, prob_rows[chosen.numpy()])
            call.set(Job.EXCLUDED, np.where(prob_rows < 0, _array(rejected, np.int64), -1)[chosen.numpy()])
            call.run(recover_region)
            tokens[chosen] = torch.from_numpy(call.winners())
        plain = (tokens < 0).nonzero()[:, 0]
        if len(plain):
            tokens[plain] = self.draw(
                logits, temperature[plain], seeds[plain], positions[plain], purpose, rows=rows[plain]
            )
        return tokens


class _Call:
    """One run of a region over E entries: its argument block, and the arrays that the block points to."""

    def __init__(
        self,
        logits: Tensor,
        rows: Tensor | None,
        temperature: Tensor,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        purpose: int = 0,
    ) -> None:
        self._logits = _dense(logits)
        self._temperature = _array(temperature, np.float32)
        count, vocab = len(self._temperature), logits.shape[1]
        threads = torch.get_num_threads()
        blocks = -(-vocab // BLOCK)
        self._parts = 1 if count >= _ROWS_PER_THREAD * threads else max(1, min(threads, blocks))
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
        for name, array in (
            (Job.TEMPERATURE, self._temperature),
            (Job.SCORES, self._scores),
            (Job.SUMS, self._sums),
            (Job.TOKENS, self._tokens),
        ):
            self.set(name, array)
        for name, tensor in ((Job.ROWS, rows), (Job.SEEDS, seeds), (Job.POSITIONS, positions)):
            if tensor is not None:
                self.set(name, _array(tensor, np.int64))

    def set(self, name: Job, array: np.ndarray) -> None:
        """Point a word of the block to an array, which is kept alive."""
        self._keep.append(array)
        self._block[name] = array.ctypes.data

    def run(self, region: Any) -> None:
        """Run the region on this Python thread's team."""
        team = _teams.team
        self._block[Job.TEAM] = team.address
        self._block[Job.TICKET] = 0
        team.run(region.address, ctypes.addressof(self._block), long=self._size >= _LONG_TOKENS)

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
        total = (sums * np.exp((ranges - largest[:, None]) / scale[:, None])).sum(axis=1)
        values = np.where(random, largest / scale + np.log(total), largest)
        return np.where(nothing, np.nan, values)


def _dense(logits: Tensor) -> Tensor:
    """The logits as the kernels read them: bfloat16 or float32, contiguous."""
    return (logits if logits.dtype == torch.bfloat16 else logits.float()).contiguous()


def _array(tensor: Tensor, dtype: type) -> np.ndarray:
    return np.ascontiguousarray(tensor.numpy(), dtype=dtype)


def _draft_laws(draft_probs: Tensor | None, draft_rows: Tensor | None, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The draft's laws [N, V], and which of them each entry has; -1 for none."""
    if draft_probs is None:
        return np.empty((0, 0), dtype=np.float32), np.full(count, -1, dtype=np.int64)
    rows = np.arange(count) if draft_rows is None else _array(draft_rows, np.int64)
    return np.ascontiguousarray(draft_probs.float().numpy()), rows
