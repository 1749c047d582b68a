"""What a checkpoint says about how its model is to be sampled."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequestError
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

logger = logging.getLogger(__name__)

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `SamplingParams` that mean the same in a `generation_config.json`."""


def model_defaults(generation_config: Any, model: str) -> Mapping[str, Any]:
    """Values for parameters that a request leaves open.

    As in vLLM, ``do_sample`` counts for nothing: requests say that they are greedy by their temperature.

    Args:
        generation_config: transformers' object, or None.
        model: as the user named it, for a warning.

    Returns:
        values by field; only those that the model's authors set. None at all where one of them is not allowed.
    """
    found = {name: value for name in FIELDS if (value := getattr(generation_config, name, None)) is not None}
    try:
        SamplingParams(**found)
    except InvalidRequestError as error:
        logger.warning("generation_config.json of %s is not used for sampling: %s", model, error)
        return {}
    return found
