"""What computes the draws and the statistics of logits rows on a device.

All backends give the same tokens: the noise of a row is a pure function of its key (`specdec.sampling.noise`), the
winner of a race does not depend on the order of its runners, and ties go to the lowest token id. Where a backend
computes in less than float64, scores closer than about 1e-6 relative may come out in another order.

Rows are chosen by index, so that nothing of the size of the logits is copied: E entries, entry e being row ``rows[e]``
of the logits with its own temperature, seed and position.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from attrs import frozen
from torch import Tensor

from specdec.sampling.noise import Purpose

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows, Verdict


@frozen(eq=False, kw_only=True)
class RowStatistics:
    """Statistics of E rows of logits, at their temperatures."""

    log_normalizers: Tensor
    """float64 [E]: the log-sum-exp of logits / temperature, so that ``logit / temperature - log_normalizer`` is a
    token's log-probability. NaN for rows that give no token; at temperature 0 the largest logit."""
    tokens: Tensor
    """int64 [E]: the first index of the largest logit, or a code of `specdec.sampling.outcome`."""

    def at(self, entries: Tensor) -> RowStatistics:
        """The statistics of some of the entries, int64 [n]."""
        return RowStatistics(log_normalizers=self.log_normalizers[entries], tokens=self.tokens[entries])


class SamplingBackend(ABC):
    """Draws tokens from rows of logits, and answers what rejection sampling asks of them.

    No method synchronises with the device or changes its arguments. All tensors are on the logits' device.
    """

    name: str = ""
    """What messages call it: the entry point's name."""
    priority: int = 0
    """Among the backends that serve a device, "auto" takes the highest."""

    @abstractmethod
    def supports(self, device: str) -> list[str]:
        """Every reason why this backend cannot serve a device type ('cpu', 'cuda', …); empty when it can."""

    def warm_up(self) -> None:  # noqa: B027
        """Compile, or load from a cache, what the first request will need."""

    @abstractmethod
    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        purpose: int = Purpose.SAMPLE,
        rows: Tensor | None = None,
    ) -> Tensor:
        """One token per entry: a draw from softmax(logits / temperature), at temperature 0 the first largest logit.

        Args:
            logits: [R, V], any float dtype.
            temperature: float32 [E].
            seeds: int64 [E], the bits of the requests' seeds.
            positions: int64 [E].
            purpose: the noise stream.
            rows: int64 [E]; None for rows 0 .. R - 1.

        Returns:
            int64 [E]: token ids, or codes of `specdec.sampling.outcome` for rows with NaN (or +inf, at a temperature
            above 0) or without any token left.
        """

    @abstractmethod
    def statistics(self, logits: Tensor, temperature: Tensor, rows: Tensor | None = None) -> RowStatistics:
        """Normalizers and largest tokens; arguments as for `draw`."""

    @abstractmethod
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
        """Decide on one draft token per entry.

        A draft token X is accepted when ``u <= P(X) / Q(X)``, with the target's law P, the draft's Q and the uniform u
        of `specdec.sampling.noise.uniforms`, which is never 0; at temperature 0 when it is the first largest logit.

        Args:
            logits: [R, V].
            statistics: of the same entries.
            token_ids: int64 [E], the draft tokens; ids that are no token of the vocabulary are rejected.
            temperature: float32 [E].
            seeds: int64 [E].
            positions: int64 [E].
            draft_probs: float32 [N, V], the laws the tokens were drawn from; None when every draft is one-hot.
            draft_rows: int64 [E], the row of ``draft_probs`` of each entry, -1 for a one-hot draft; None for
                0 .. E - 1.
            purpose: the noise stream.
            rows: int64 [E], rows of ``logits``; None for 0 .. R - 1.

        Returns:
            bool [E]; False where Q(X) is 0 and for rows that give no token.
        """

    @abstractmethod
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
        """Draw the token that takes a rejected draft token's place.

        From ``norm((P - Q)+)``; for a one-hot draft from P without the rejected token; from P where nothing else is
        left (only rounding leads there) and for entries without a rejected token; the first largest logit at
        temperature 0.

        Args:
            logits: [R, V].
            statistics: of the same entries.
            rejected: int64 [E], the draft tokens that were rejected; -1 for entries without one, which are plain draws.
            temperature: float32 [E].
            seeds: int64 [E].
            positions: int64 [E].
            draft_probs: as for `accept`.
            draft_rows: as for `accept`.
            purpose: the noise stream.
            rows: int64 [E], rows of ``logits``; None for 0 .. R - 1.

        Returns:
            int64 [E], as `draw`.
        """

    def match(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict | None:
        """Verify a whole step by the rule of `match`, if this backend has a faster way than drawing every row.

        The runs are those that `draw` of every row, with `Purpose.SAMPLE`, leads to: each request's longest drafted
        path that equals the samples, then the sample of its last row. Rows that no path reaches need not be looked at.

        Args:
            rows: the step's rows.
            draft: at least one draft token; chains or trees.
            sampling: the requests' temperatures and seeds.

        Returns:
            The verdict; None from backends without such a way: a verifier then draws every row.
        """
        return None

    def reject(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict | None:
        """Verify a whole step of chains by the rule of `rejection`, if this backend has a faster way than its parts.

        The runs are those that `accept` of every draft token leads to: each request's draft tokens before the first
        rejection, and the token that `recover` gives in the rejected one's place; after a draft kept whole the `draw`
        of the last row. Rows behind a rejection need not be looked at.

        Args:
            rows: the step's rows.
            draft: at least one draft token; chains, with ``draft_probs`` or one-hot.
            sampling: the requests' temperatures and seeds.

        Returns:
            The verdict; None from backends without such a way: a verifier then asks for the parts.
        """
        return None
