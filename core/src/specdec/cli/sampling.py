"""Sampling options of commands, generated from the fields of `SamplingParams`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specdec.sampling.params import SamplingParams

_COLLECTED = "sampling_settings"


def add_sampling_flags(parser: argparse.ArgumentParser, *, skip: tuple[str, ...] = ()) -> None:
    """Add one option for each field of `SamplingParams`; ``--sampling.NAME`` where the engine has NAME too.

    Structured output has options of its own, see `specdec.cli.structured`.

    Args:
        parser: the command's parser.
        skip: fields that the command has no use for.
    """
    from specdec.cli.structured import add_structured_flags
    from specdec.config.flags import add_class_flags, flag_name
    from specdec.config.introspect import leaves
    from specdec.sampling.params import SamplingParams

    taken = parser._option_string_actions
    names = [leaf.path for leaf in leaves(SamplingParams)]
    rename = {name: flag_name(f"sampling.{name}") for name in names if flag_name(name) in taken}
    nested = tuple(name for name in names if "." in name)
    group = parser.add_argument_group("sampling")
    add_class_flags(group, SamplingParams, _COLLECTED, skip=(*nested, *skip), rename=rename)
    add_structured_flags(parser.add_argument_group("structured output, one of"))


def read_sampling(arguments: argparse.Namespace, **instead: Any) -> SamplingParams:
    """The sampling parameters that the options make.

    Args:
        arguments: parsed arguments.
        instead: values for fields that were not given, in place of the class's defaults.

    Raises:
        InvalidRequestError: a value is not allowed, or two contradict.
    """
    from specdec.cli.structured import read_structured
    from specdec.config.flags import read_class
    from specdec.sampling.params import SamplingParams

    structured = read_structured(arguments)
    if structured is not None:
        instead["structured_outputs"] = structured
    return read_class(arguments, lambda **given: SamplingParams(**{**instead, **given}), _COLLECTED)


def with_defaults(arguments: argparse.Namespace, params: SamplingParams, defaults: SamplingParams) -> SamplingParams:
    """The same parameters, with the model's own values for what was not typed.

    Args:
        arguments: parsed arguments.
        params: what `read_sampling` made of them, before there was a model.
        defaults: of the engine, `LLM.get_default_sampling_params`.
    """
    import attrs

    from specdec.sampling.model_defaults import FIELDS

    return attrs.evolve(params, **{name: getattr(defaults, name) for name in FIELDS if not was_given(arguments, name)})


def was_given(arguments: argparse.Namespace, field: str) -> bool:
    """Whether an option of the sampling group was typed."""
    return field in (getattr(arguments, _COLLECTED, None) or {})
