"""The object behind the `verify` hook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from specdec.sampling.batch import SamplingBatch
    from specdec.types import Draft, Rows, Verdict


class Verifier(ABC):
    """Decides from the target's logits which draft tokens stay."""

    name: ClassVar[str] = ""
    """What messages call it: the entry point's name."""
    lossless: ClassVar[bool] = True
    """Whether the output has the target's distribution; a lossy verifier is labelled wherever its output shows."""
    accepts_trees: ClassVar[bool] = False
    """Whether drafts may be trees (`Draft.parents`). Its verdicts then have ``accepted_nodes``. A proposer of trees is
    refused for a verifier that takes chains alone."""
    needs_draft_probs: ClassVar[bool] = False
    """Whether every draft must bring ``draft_probs``; proposers that do not declare them are refused."""
    uses_draft_probs: ClassVar[bool] = False
    """Whether `draft_probs` change what is kept. For such a verifier a drawn draft token that a grammar refuses stays
    in the draft, with its law, so that its rejection leaves the right law for the token in its place; every token with
    a logit of -inf must then be rejected. Drafts for other verifiers end before such a token."""
    benchmark_only: ClassVar[bool] = False
    """Whether the output is worth nothing but its speed; a server refuses such a verifier unless told otherwise."""

    @abstractmethod
    def verify(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        """Choose the tokens of this step.

        `specdec.sampling.sampler.sample` draws each row's own token, as plain decoding would. What is drawn must depend
        on a request's own rows, draft, seed and positions alone. Noise that has been looked at must not return: a rule
        that looks only as far as its first rejection may key its noise by position; one that looks further must also
        key it by the step, for which the position of the request's first row stands (it grows with every step,
        whatever the batch does).

        Args:
            rows: processed logits; request r has ``draft.num_draft_tokens[r] + 1`` rows.
            draft: the draft tokens that were scored, possibly none; read-only.
            sampling: of each request ``temperature`` (float32 [B], 0 is greedy), ``seeds`` (int64 [B]) and ``requests``
                with the parameters. All but the temperature is in the logits already.

        Returns:
            A `Verdict` with at least one token for each request. Where a row that decides holds NaN or has no token
            left, the request's run ends with a code of `specdec.sampling.outcome`, and the others go on.

        Raises:
            Exception: the engine stops, as it does for what is no verdict; no text can be trusted then.
        """
