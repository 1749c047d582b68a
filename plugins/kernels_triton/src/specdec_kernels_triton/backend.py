"""The sampling backend: launches the kernels.."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor

from specdec.sampling.backend import RowStatistics, SamplingBackend
from specdec.sampling.noise import Purpose

INTERPRETED = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "yes", "on", "y")
"""Whether the kernels run in Triton's interpreter (TRITON_INTERPRET=1 before the first import), on CPU tensors."""
TILE = 4096
"""Tokens of a program."""
_DECISIONS = 128
"""Draft tokens decided on by a program."""


class TritonSampling(SamplingBackend):
    """See `SamplingBackend`. Draws are the reference's; normalizers are float32 sums, right to about 1e-6."""

    name = "triton"
    priority = -1 if INTERPRETED else 10

    def __init__(self, tile: int = TILE) -> None:
        """Use tiles of ``tile`` tokens, a power of two of at least 16."""
        self._tile = tile

    def supports(self, device: str) -> list[str]:
        """Serves CUDA and ROCm devices; CPUs in Triton's interpreter, which is for tests."""
        wanted = "cpu" if INTERPRETED else "cuda"
        return [] if device == wanted else [f"runs on {wanted}, the engine on {device}"]

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
        return self._race(logits, rows, temperature, seeds, positions, purpose)

    def statistics(self, logits: Tensor, temperature: Tensor, rows: Tensor | None = None) -> RowStatistics:
        """See `SamplingBackend.statistics`."""
        logits, count, vocab = _dense(logits), len(temperature), logits.shape[1]
        tile, tiles = self._tiles(vocab)
        device = logits.device
        largest = torch.empty(count, tiles, dtype=torch.float32, device=device)
        sums = torch.empty_like(largest)
        faults = torch.empty(count, tiles, dtype=torch.int32, device=device)
        normalizers = torch.empty(count, dtype=torch.float64, device=device)
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        row_list = tokens if rows is None else rows.contiguous()
        if count:
            common = (logits, logits.stride(0), vocab, row_list, temperature.contiguous(), largest, sums, faults)
            with _on(device):
                _kernels().normalize_tiles[(count, tiles)](*common, HAS_ROWS=rows is not None, TILE=tile)
                _kernels().normalize_join[(count,)](
                    *common,
                    normalizers,
                    tokens,
                    tiles,
                    HAS_ROWS=rows is not None,
                    TILE=tile,
                    TILES=_power_of_two(tiles),
                )
        return RowStatistics(log_normalizers=normalizers, tokens=tokens)

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
        logits, count = _dense(logits), len(token_ids)
        accepted = torch.empty(count, dtype=torch.bool, device=logits.device)
        probs, prob_rows = _draft_laws(draft_probs, draft_rows, token_ids)
        if count:
            with _on(logits.device):
                _kernels().accept_drafts[(_parts_of(count, _DECISIONS),)](
                    logits,
                    logits.stride(0),
                    logits.shape[1],
                    count,
                    token_ids if rows is None else rows.contiguous(),
                    temperature.contiguous(),
                    seeds.contiguous(),
                    positions.contiguous(),
                    statistics.log_normalizers,
                    statistics.tokens,
                    token_ids.contiguous(),
                    probs,
                    probs.stride(0),
                    prob_rows,
                    accepted,
                    purpose=int(purpose),
                    HAS_ROWS=rows is not None,
                    HAS_PROBS=draft_probs is not None,
                    BLOCK=_DECISIONS,
                )
        return accepted

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
        laws = _draft_laws(draft_probs, draft_rows, rejected)
        draft = (statistics.log_normalizers, rejected.contiguous(), *laws, draft_probs is not None)
        return self._race(logits, rows, temperature, seeds, positions, purpose, draft)

    def _race(
        self,
        logits: Tensor,
        rows: Tensor | None,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        purpose: int,
        draft: tuple[Tensor, Tensor, Tensor, Tensor, bool] | None = None,
    ) -> Tensor:
        """Run both kernels of the race; ``draft`` holds normalizers, rejected tokens, laws, their rows, whether any."""
        logits, count = _dense(logits), len(temperature)
        tile, tiles = self._tiles(logits.shape[1])
        scores = torch.empty(count, tiles, dtype=torch.float32, device=logits.device)
        faults = torch.empty(count, tiles, dtype=torch.int32, device=logits.device)
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        if not count:
            return tokens
        normalizers, rejected, probs, prob_rows, has_probs = draft or (scores, tokens, scores, tokens, False)
        weights = torch.empty_like(scores) if draft is not None else scores
        arguments: tuple[Any, ...] = (
            logits,
            logits.stride(0),
            logits.shape[1],
            tokens if rows is None else rows.contiguous(),
            temperature.contiguous(),
            seeds.contiguous(),
            positions.contiguous(),
            normalizers,
            rejected,
            probs,
            probs.stride(0),
            prob_rows,
            scores,
            weights,
            faults,
        )
        options = {
            "purpose": int(purpose),
            "HAS_ROWS": rows is not None,
            "HAS_DRAFT": draft is not None,
            "HAS_PROBS": has_probs,
            "TILE": tile,
        }
        with _on(logits.device):
            _kernels().race_tiles[(count, tiles)](*arguments, **options)
            _kernels().race_pick[(count,)](*arguments, tokens, tiles, **options, TILES=_power_of_two(tiles))
        return tokens

    def _tiles(self, vocab: int) -> tuple[int, int]:
        """Tokens of a tile, and the number of tiles."""
        tile = min(self._tile, max(16, _power_of_two(vocab)))
        return tile, _parts_of(vocab, tile)


def _dense(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()


def _draft_laws(draft_probs: Tensor | None, draft_rows: Tensor | None, entries: Tensor) -> tuple[Tensor, Tensor]:
    """The draft's laws [N, V] and which of them each entry has; stand-ins where there are none."""
    if draft_probs is None:
        return entries[:, None], entries
    probs = draft_probs if draft_probs.stride(1) == 1 else draft_probs.contiguous()
    if draft_rows is None:
        return probs, torch.arange(len(entries), device=entries.device)
    return probs, draft_rows.contiguous()


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def _kernels() -> Any:
    """The compiled kernels; imported when something is launched, so that engines on other devices pay nothing."""
    from specdec_kernels_triton import kernels

    return kernels


def _parts_of(total: int, size: int) -> int:
    """How many parts of ``size`` cover ``total``."""
    return -(-total // size)


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()
