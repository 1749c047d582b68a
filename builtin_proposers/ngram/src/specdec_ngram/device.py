"""The n-gram proposer on the device: all requests at once, in tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.types import Draft

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specdec.types import ProposalInput, RequestInfo

_LEAST_WIDTH = 64


def look_up(
    tokens: Tensor, lengths: Tensor, limits: Tensor, *, shortest: int, longest: int, k: int
) -> tuple[Tensor, Tensor]:
    """The drafts of `specdec_ngram.ngram.NgramProposer`, by comparing every place with the latest tokens.

    Shapes depend on shapes alone and nothing is read on the host, so it can be compiled whole and captured in a graph.
    Work and memory are proportional to S * L, time to ``longest`` as well.

    Args:
        tokens: int32 [S, L], one text per row; what lies behind its end plays no part.
        lengths: int64 [S]: tokens of each text.
        limits: int64 [S]: the most draft tokens of each, at most ``k``.
        shortest: length of the shortest suffix that counts as a match.
        longest: length of the longest suffix looked up.
        k: the most draft tokens of any.

    Returns:
        int64 [S, k] drafts, padded with -1, and int32 [S] how many tokens each has.
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    last = lengths - 1
    alive = places < last[:, None]
    matched = torch.zeros_like(tokens)
    shifted = tokens
    for back in range(longest):
        wanted = tokens.gather(1, (last - back).clamp(min=0)[:, None])
        alive = alive & (shifted == wanted) & (places >= back)
        matched = matched + alive
        shifted = shifted.roll(1, dims=1)
    best = matched.amax(dim=1)
    candidates = (matched == best[:, None]) & (matched >= shortest)
    full = candidates & (places <= (last - limits)[:, None])
    latest_full = torch.where(full, places, -1).amax(dim=1)
    earliest = torch.where(candidates, places, width).amin(dim=1)
    source = torch.where(latest_full >= 0, latest_full, earliest)
    counts = torch.minimum(limits, last - source).clamp(min=0)
    offsets = torch.arange(k, device=tokens.device)
    copied = tokens.gather(1, (source[:, None] + 1 + offsets).clamp(max=width - 1)).long()
    return torch.where(offsets < counts[:, None], copied, -1), counts.int()


class NgramDeviceProposer(Proposer):
    """N-gram lookup with the texts on the device: the drafts are those of the method ``ngram``.

    The tokens of up to ``max_num_seqs`` requests lie in one matrix on the device, to which each step's new tokens are
    sent; `look_up` then serves all requests without waiting for the device. Only the last line of `propose` waits:
    a `Draft` is packed, and its size is known when the counts are. A request that has no row, because others ran in
    between, is sent again as a whole.
    """

    def __init__(
        self,
        *,
        prompt_lookup_min: int,
        prompt_lookup_max: int,
        num_speculative_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        device: str,
    ) -> None:
        self._shortest = prompt_lookup_min
        self._longest = prompt_lookup_max
        self._k = num_speculative_tokens
        self._device = torch.device(device)
        self._tokens = torch.zeros(max_num_seqs, max_model_len, dtype=torch.int32, device=self._device)
        self._row_of: dict[str, int] = {}
        """Request id -> row, the longest unused first."""
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._sent = np.zeros(max_num_seqs, dtype=np.int64)
        self._last = np.zeros(max_num_seqs, dtype=np.int64)
        """How many tokens of each row were sent, and the last of them."""

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`."""
        self.finish(request.request_id)

    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        rows = self._rows(batch.request_ids)
        self._send(rows, batch.token_ids)
        num_rows = max(rows, default=-1) + 1
        width = max((len(text) for text in batch.token_ids), default=0)
        lengths, limits = np.zeros((2, num_rows), dtype=np.int64)
        lengths[rows] = [len(text) for text in batch.token_ids]
        limits[rows] = np.minimum(batch.max_draft_tokens, self._k)
        drafts, counts = look_up(
            self._tokens[:num_rows, : self._bucket(width)],
            self._to_device(lengths),
            self._to_device(limits),
            shortest=self._shortest,
            longest=self._longest,
            k=self._k,
        )
        order = self._to_device(np.array(rows, dtype=np.int64))
        drafts, counts = drafts[order], counts[order]
        return Draft(token_ids=drafts[drafts >= 0], num_draft_tokens=counts)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        row = self._row_of.pop(request_id, None)
        if row is not None:
            self._sent[row] = 0
            self._free.append(row)

    def memory(self) -> Mapping[str, int]:
        """Bytes of the token matrix, which is allocated once."""
        return {"tokens": self._tokens.nbytes}

    def _rows(self, request_ids: Sequence[str]) -> list[int]:
        rows = [self._row_of.pop(request_id, None) for request_id in request_ids]
        for i, row in enumerate(rows):
            if row is None:
                if not self._free:
                    self.finish(next(iter(self._row_of)))
                rows[i] = self._free.pop()
        found = [row for row in rows if row is not None]
        self._row_of |= zip(request_ids, found, strict=True)
        return found

    def _send(self, rows: Sequence[int], texts: Sequence[np.ndarray]) -> None:
        """Bring the matrix up to date with what is new in each text."""
        begins = [self._known(row, text) for row, text in zip(rows, texts, strict=True)]
        counts = [len(text) - begin for text, begin in zip(texts, begins, strict=True)]
        if not sum(counts):
            return
        at_row = np.repeat(np.array(rows, dtype=np.int64), counts)
        at_place = np.concatenate([np.arange(begin, len(text)) for text, begin in zip(texts, begins, strict=True)])
        values = np.concatenate([text[begin:] for text, begin in zip(texts, begins, strict=True)]).astype(np.int32)
        places = (self._to_device(at_row), self._to_device(at_place))
        self._tokens.index_put_(places, self._to_device(values))
        for row, text in zip(rows, texts, strict=True):
            self._sent[row] = len(text)
            self._last[row] = text[-1] if len(text) else 0

    def _known(self, row: int, text: np.ndarray) -> int:
        """How many leading tokens of a text are in its row; none when it is another text than before."""
        sent = int(self._sent[row])
        return sent if 0 < sent <= len(text) and text[sent - 1] == self._last[row] else 0

    def _bucket(self, width: int) -> int:
        """A power of two that holds so many tokens, so that there are few shapes."""
        return min(max(_LEAST_WIDTH, 1 << max(width - 1, 0).bit_length()), self._tokens.shape[1])

    def _to_device(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)
