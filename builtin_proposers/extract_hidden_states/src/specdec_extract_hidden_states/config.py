"""Options of the method `extract_hidden_states`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from attrs import field, frozen

from specdec.config.sizes import Size
from specdec.config.validators import Check, as_tuple, boolean, choice, size, text
from specdec.errors import ConfigError, PluginUnsuitableError

if TYPE_CHECKING:
    from specdec.types import TargetInfo


def _is_layers(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and all(isinstance(layer, int) and not isinstance(layer, bool) and layer >= 0 for layer in value)
        and len(set(value)) == len(value)
    )


@frozen(kw_only=True)
class ExtractConfig:
    """Which hidden states are written, how, and where."""

    SECTION: ClassVar[str] = "speculative"

    output_path: str = field(validator=text())
    """Directory for the shards and their manifest; made when absent, continued when it has some."""
    layers: tuple[int, ...] = field(
        default=(), converter=as_tuple, validator=Check(_is_layers, "a list of different layer numbers from 0")
    )
    """Decoder layers whose output is written, counted from 0."""
    final_hidden_states: bool = field(default=True, validator=boolean())
    """Write the final hidden states (after the last norm), which the logits are made of."""
    hidden_states_dtype: str = field(default="bfloat16", validator=choice("bfloat16", "float32"))
    """Type in which hidden states are written."""
    shard_size: Size = field(default="256MiB", validator=size())
    """A shard is written when the finished requests in memory have this many bytes."""

    def __attrs_post_init__(self) -> None:
        if not self.layers and not self.final_hidden_states:
            raise ConfigError(
                "speculative.layers is empty and speculative.final_hidden_states is false, so there is nothing to "
                "write: name layers, for example [2, 5], or set final_hidden_states to true.",
                path="speculative.layers",
            )


def check_layers(config: ExtractConfig, info: TargetInfo) -> None:
    """Refuse layers that the target does not have.

    Raises:
        PluginUnsuitableError: names them.
    """
    beyond = [layer for layer in config.layers if layer >= info.num_layers]
    if beyond:
        raise PluginUnsuitableError(
            f"speculative.layers has {', '.join(map(str, beyond))}, but {info.model!r} has layers 0 to "
            f"{info.num_layers - 1}.",
            kind="proposer",
            name="extract_hidden_states",
        )
