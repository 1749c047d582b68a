"""Hidden-state taps: forward hooks, installed only for what a proposer needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specdec.errors import UnsupportedModelError
from specdec.types import TargetOutput

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specdec.target.parts import ModelParts
    from specdec.types import Needs


class Taps:
    """Captures the final hidden states and chosen layers' outputs of each forward pass."""

    def __init__(self, parts: ModelParts, needs: Needs) -> None:
        """Install hooks for ``needs``.

        Raises:
            UnsupportedModelError: a layer index is out of range.
        """
        count = len(parts.layers)
        wrong = [index for index in needs.aux_layers if not 0 <= index < count]
        if wrong:
            raise UnsupportedModelError(
                f"hidden states of layers {wrong} were asked for, but the target has layers 0 to {count - 1}"
            )
        self._needs = needs
        self._final: Tensor | None = None
        self._aux: dict[int, Tensor] = {}
        self._handles = [
            parts.layers[index].register_forward_hook(self._keep(index)) for index in set(needs.aux_layers)
        ]
        if needs.hidden_states:
            self._handles.append(parts.decoder.register_forward_hook(self._keep_final))

    def _keep(self, index: int) -> Any:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            self._aux[index] = _hidden(output)

        return hook

    def _keep_final(self, module: nn.Module, args: object, output: Any) -> None:
        self._final = _hidden(output)

    def output(self, logits: Tensor) -> TargetOutput:
        """Put the pass's logits and captured hidden states together; the taps forget them."""
        if not self._handles:
            return TargetOutput(logits=logits)
        aux = tuple(self._aux[index] for index in self._needs.aux_layers) if self._needs.aux_layers else None
        final, self._final, self._aux = self._final, None, {}
        return TargetOutput(logits=logits, hidden_states=final, aux_hidden_states=aux)

    def remove(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []


def _hidden(output: Any) -> Tensor:
    """[1, T, H] out of a layer's output (tensor, tuple or model output) -> [T, H]."""
    if isinstance(output, tuple):
        output = output[0]
    hidden: Tensor = getattr(output, "last_hidden_state", output)
    return hidden[0]
