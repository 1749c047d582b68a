"""What a training run is told. The fields hold the only defaults; the flags follow from them. Imports nothing heavy."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, Literal

from attrs import NOTHING, field, fields, frozen
from attrs.validators import optional

from specdec.config import EngineConfig
from specdec.errors import ConfigError

HEADS = ("eagle3", "eagle", "medusa", "mlp_speculator")
"""Kinds of heads that can be trained."""


def _within(low: float, high: float, words: str) -> Any:
    def check(instance: Any, attribute: Any, value: Any) -> None:
        if value is not None and not low <= value <= high:
            flag = "--" + attribute.name.replace("_", "-")
            raise ConfigError(f"{flag} is {value}, but must be {words}", path=attribute.name)

    return check


DRAFT_VOCAB_SIZE = 16384
"""Tokens that a head can draft, when neither ``--draft-vocab-size`` nor ``--init`` says it."""


@frozen(kw_only=True)
class TrainingOptions:
    """One run of ``specdec train``."""

    head: str
    model: str
    prompts: Path
    out: Path
    init: str | None = None
    answers: Path | None = None
    chat: bool = False
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", validator=fields(EngineConfig).dtype.validator
    )
    num_prompts: int | None = field(default=None, validator=optional(_within(1, 2**31, "at least 1")))
    max_tokens: int = field(default=256, validator=_within(2, 2**20, "at least 2"))
    temperature: float = field(default=0.0, validator=_within(0, 100, "at least 0"))
    num_steps: int = field(default=4, validator=_within(1, 16, "from 1 to 16"))
    draft_vocab_size: int | None = field(default=None, validator=_within(0, 2**24, "at least 0"))
    epochs: float = field(default=2.0, validator=_within(0.001, 10_000, "above 0"))
    learning_rate: float = field(default=1e-3, validator=_within(1e-9, 10, "above 0"))
    tokens_per_update: int = field(default=2048, validator=_within(16, 2**24, "at least 16"))
    held_out: float = field(default=0.03, validator=_within(0.001, 0.5, "from 0.001 to 0.5"))
    inner_dim: int = field(default=0, validator=_within(0, 2**16, "at least 0"))
    seed: int = field(default=0, validator=_within(0, 2**63 - 1, "at least 0"))


DEFAULTS: dict[str, Any] = {
    attribute.name: attribute.default for attribute in fields(TrainingOptions) if attribute.default is not NOTHING
}
"""Default of each option that has one."""


def options_from(arguments: argparse.Namespace) -> TrainingOptions:
    """The parsed command line as options.

    Raises:
        ConfigError: a value is out of its range, or the prompts are not there.
    """
    given = {attribute.name: getattr(arguments, attribute.name) for attribute in fields(TrainingOptions)}
    given["prompts"], given["out"] = Path(given["prompts"]), Path(given["out"])
    given["answers"] = None if given["answers"] is None else Path(given["answers"])
    if not given["prompts"].is_file():
        raise ConfigError(f"--prompts: there is no file {str(given['prompts'])!r}", path="prompts")
    return TrainingOptions(**given)
