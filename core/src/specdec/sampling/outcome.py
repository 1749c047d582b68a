"""What stands in place of a token id when a row of logits gives no token.

A code travels through the verdict like a token (no draft token equals it, so a run always ends there), and the engine
fails that request alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec.sampling.codes import NAN_LOGITS as NAN_LOGITS
from specdec.sampling.codes import NO_TOKEN_LEFT as NO_TOKEN_LEFT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.sampling.params import SamplingParams


def failure_message(code: int, params: SamplingParams, processors: Sequence[str] = ()) -> str:
    """Why a request whose row gave ``code`` cannot go on.

    Args:
        code: one of the codes above.
        params: the request's.
        processors: names of the logits processors that apply to it.
    """
    if code == NAN_LOGITS:
        return (
            "The target model returned logits that are not numbers (NaN or infinity) for this request. Half precision "
            'may overflow with this model: try dtype "float32".'
        )
    options = [
        name
        for name, used in (
            ("allowed_token_ids", params.allowed_token_ids is not None),
            ("bad_words", bool(params.bad_words or params.bad_words_token_ids)),
            ("structured_outputs", params.structured_outputs is not None),
            ("min_tokens", params.min_tokens > 0),
        )
        if used
    ]
    options += [f"the {name}" for name in processors]
    if not options:
        return "No token can be chosen: the logits are -inf for the whole vocabulary."
    verb = "leaves" if len(options) == 1 else "together leave"
    return f"No token can be chosen: {' and '.join(options)} {verb} none of the vocabulary."
