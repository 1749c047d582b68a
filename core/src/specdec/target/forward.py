"""The two ways to run a target: through its transformers modules, or through the stack that replaces them all.

Both return logits of the asked rows and the hidden states that a proposer needs, and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import UnsupportedModelError
from specdec.types import TargetOutput

if TYPE_CHECKING:
    from torch import Tensor, nn

    from specdec.target.fused_stack import FusedStack
    from specdec.target.parts import ModelParts
    from specdec.types import Needs


class Forward(Protocol):
    """Runs packed tokens inside an attention context."""

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> TargetOutput:
        """int64 [T] ids and positions, int64 [R] rows whose logits are wanted."""

    def close(self) -> None:
        """Take out what was installed in the model."""


def check_taps(needs: Needs, num_layers: int) -> None:
    """See that the layers a proposer wants to tap exist.

    Raises:
        UnsupportedModelError: a layer index is out of range.
    """
    wrong = [index for index in needs.aux_layers if not 0 <= index < num_layers]
    if wrong:
        raise UnsupportedModelError(
            f"it has layers 0 to {num_layers - 1}, but hidden states of {', '.join(map(str, wrong))} were asked for"
        )


class StackForward:
    """Runs a `FusedStack`."""

    def __init__(self, stack: FusedStack, needs: Needs) -> None:
        """Run ``stack`` with the taps that ``needs`` asks for."""
        self._stack = stack
        self._hidden = needs.hidden_states
        self._taps = needs.aux_layers

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> TargetOutput:
        """See `Forward`."""
        logits, final, aux = self._stack(input_ids, positions, rows, hidden=self._hidden, taps=self._taps)
        return TargetOutput(logits=logits, hidden_states=final, aux_hidden_states=aux if self._taps else None)

    def close(self) -> None:
        """Nothing is installed."""


class ModuleForward:
    """Runs the transformers model; taps are forward hooks, installed only for what is needed."""

    def __init__(self, parts: ModelParts, needs: Needs) -> None:
        """Install hooks for ``needs``."""
        self._parts = parts
        self._needs = needs
        self._final: Tensor | None = None
        self._aux: dict[int, Tensor] = {}
        self._handles = [parts.layers[i].register_forward_hook(self._keep(i)) for i in set(needs.aux_layers)]
        if needs.hidden_states:
            self._handles.append(parts.decoder.register_forward_hook(self._keep_final))

    def __call__(self, input_ids: Tensor, positions: Tensor, rows: Tensor) -> TargetOutput:
        """See `Forward`."""
        logits = self._parts.logits(input_ids, positions, rows)
        if not self._handles:
            return TargetOutput(logits=logits)
        aux = tuple(self._aux[index] for index in self._needs.aux_layers) if self._needs.aux_layers else None
        final, self._final, self._aux = self._final, None, {}
        return TargetOutput(logits=logits, hidden_states=final, aux_hidden_states=aux)

    def close(self) -> None:
        """Take the hooks out."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _keep(self, index: int) -> Any:
        def hook(module: nn.Module, args: object, output: Any) -> None:
            self._aux[index] = _hidden(output)

        return hook

    def _keep_final(self, module: nn.Module, args: object, output: Any) -> None:
        self._final = _hidden(output)


def _hidden(output: Any) -> Tensor:
    """[1, T, H] out of a layer's output (tensor, tuple or model output) -> [T, H]."""
    if isinstance(output, tuple):
        output = output[0]
    hidden: Tensor = getattr(output, "last_hidden_state", output)
    return hidden[0]
