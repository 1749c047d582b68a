"""Learns a model's attention layers by running it once on a few tokens.

Every attention call of the tiny forward pass is recorded: which module, how many heads of what size, window, soft cap,
sinks. What the backends cannot reproduce becomes a reason to refuse the model. Then the packed forward is compared with
the model's own attention on two sequences, which finds whatever the record cannot show (biases inside the attention
module, layers that look at neighbouring tokens).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

from specdec.attention.dense import dense_attention, visible
from specdec.target import bridge
from specdec.target.masks import MaskNotes, MaskPattern
from specdec.types import AttentionLayer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor, nn

TRACED_TOKENS = 8

IGNORED_OPTIONS = frozenset(
    {
        "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "input_ids",
        "position_embeddings", "s_aux", "dropout",
    }
)  # fmt: skip
"""Tensors among an attention call's options that say nothing new about who sees whom."""

CHECKED_LENGTHS = (5, 7)

CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.25}
"""Relative error allowed between packed logits and the model's own: of every token in float32, of the median token in
half precision, where a mixture may choose other experts for some."""

LEAK_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.02}
"""Relative change allowed in a sequence's logits when the sequence beside it changes: rounding only."""


@frozen(eq=False)
class Trace:
    """What was learned."""

    layers: tuple[AttentionLayer, ...]
    index_of: Mapping[nn.Module, int]
    """Which attention module is which layer."""
    query_scales: Mapping[int, bridge.QueryScale]
    """Layers whose queries are scaled by position."""
    vocab_size: int
    reasons: tuple[str, ...]
    """Why the model cannot be served; empty when it can."""


class TraceContext:
    """Records attention calls while computing them densely; one sequence of tokens from position 0."""

    def __init__(self, config: Any, max_position: int) -> None:
        self._config = config
        self.masks = MaskNotes(max_position)
        self.layers: list[AttentionLayer] = []
        self.modules: list[nn.Module] = []
        self.reasons: dict[str, list[int]] = {}

    def attend(self, layer_index: int, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None) -> Tensor:
        """Fused layers do not exist yet when a model is traced."""
        raise RuntimeError("a fused layer was called while the model was traced")

    def attend_module(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None,
        options: Mapping[str, Any],
    ) -> Tensor:
        """See `specdec.target.bridge.AttentionContext.attend_module`."""
        index = len(self.layers)
        pattern = self.masks.pattern_of(mask) or self._pattern_without_mask(index, module, options)
        sinks = options.get("s_aux")
        layer = AttentionLayer(
            index=index,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_dim=query.shape[2],
            v_head_dim=value.shape[2],
            scaling=query.shape[2] ** -0.5 if scaling is None else float(scaling),
            sliding_window=pattern.sliding_window,
            chunk_size=pattern.chunk_size,
            softcap=options.get("softcap"),
            sinks=sinks is not None,
        )
        for reason in self._problems(module, query, key, pattern, options):
            self.reasons.setdefault(reason, []).append(index)
        self.layers.append(layer)
        self.modules.append(module)
        if query.shape[0] != key.shape[0]:
            return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
        positions = torch.arange(query.shape[0], device=query.device)
        allowed = visible(positions, positions, layer.sliding_window, layer.chunk_size)
        return dense_attention(query, key, value, allowed, layer.scaling, layer.softcap, sinks)

    def _problems(
        self, module: nn.Module, query: Tensor, key: Tensor, pattern: MaskPattern, options: Mapping[str, Any]
    ) -> list[str]:
        problems = [] if pattern.problem is None else [pattern.problem]
        if query.shape[0] != key.shape[0]:
            problems.append("it attends to something other than the sequence itself (cross-attention)")
        if any(module is known for known in self.modules):
            problems.append("several layers share one attention module")
        unknown = [k for k, v in options.items() if isinstance(v, torch.Tensor) and k not in IGNORED_OPTIONS]
        if unknown:
            problems.append(f"its attention takes inputs that backends do not know: {', '.join(unknown)}")
        return problems

    def _pattern_without_mask(self, index: int, module: nn.Module, options: Mapping[str, Any]) -> MaskPattern:
        """For models that build no mask through transformers: what the call or the configuration says."""
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            return MaskPattern(problem="its attention is bidirectional")
        types = getattr(self._config, "layer_types", None) or ()
        kind = types[index] if index < len(types) else None
        window = options.get("sliding_window")
        if window is None and kind == "sliding_attention":
            window = self._config.sliding_window
        chunk = getattr(self._config, "attention_chunk_size", None) if kind == "chunked_attention" else None
        return MaskPattern(sliding_window=window, chunk_size=chunk)


def mask_for_trace(*_: Any, **arguments: Any) -> Tensor | None:
    """The mask function registered under `bridge.TRACE_NAME`."""
    context = bridge.current()
    return context.masks.make(arguments) if isinstance(context, TraceContext) else None


def trace(model: nn.Module, forward: Callable[[Tensor, Tensor], Tensor], config: Any, max_position: int) -> Trace:
    """Run the model on a few tokens and record its attention layers; leaves `bridge.ATTENTION_NAME` selected.

    Args:
        model: a transformers causal language model with its own attention selected.
        forward: runs the model: int64 [T] ids, int64 [T] positions -> [T, V] logits.
        config: configuration of the text part.
        max_position: the largest position of interest.
    """
    device = next(model.parameters()).device
    ids = _token_ids(config, TRACED_TOKENS, device)
    scales = take_over_query_scaling(model)
    context = TraceContext(config, max_position)
    _select(model, bridge.TRACE_NAME)
    with bridge.using(context), torch.inference_mode():
        logits = forward(ids, torch.arange(TRACED_TOKENS, device=device))
    _select(model, bridge.ATTENTION_NAME)
    reasons = [_with_layers(text, where, len(context.layers)) for text, where in context.reasons.items()]
    reasons += _count_reasons(config, len(context.layers))
    return Trace(
        layers=tuple(context.layers),
        index_of={module: index for index, module in enumerate(context.modules)},
        query_scales={i: scales[module] for i, module in enumerate(context.modules) if module in scales},
        vocab_size=logits.shape[-1],
        reasons=tuple(reasons),
    )


def own_logits(model: Any, config: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Logits of two short sequences as the model alone gives them, for `check_packed`; before the model is traced.

    No positions are given: where the model counts them in another way than from 0, the comparison shows it.
    """
    ids = _token_ids(config, sum(CHECKED_LENGTHS), device)
    with torch.inference_mode():
        first, second = (model(input_ids=part[None], use_cache=False).logits[0] for part in ids.split(CHECKED_LENGTHS))
    return first, second


def check_packed(
    trace: Trace, forward: Callable[[Tensor, Tensor], Tensor], config: Any, own: tuple[Tensor, Tensor]
) -> list[str]:
    """Pack two sequences and compare with what the model gave for each alone; then change one and watch the other.

    Returns:
        Reasons why packed tokens cannot be trusted; empty when they can.
    """
    device, dtype = own[0].device, own[0].dtype
    length, other_length = CHECKED_LENGTHS
    positions = torch.cat([torch.arange(length, device=device), torch.arange(other_length, device=device)])
    segments = (torch.arange(length + other_length, device=device) >= length).long()
    context = bridge.ReferenceContext(trace.layers, trace.index_of, trace.query_scales, positions, segments)
    ids = _token_ids(config, length + other_length, device)
    changed = torch.where(segments == 0, ids.flip(0), ids)
    with bridge.using(context), torch.inference_mode():
        packed, beside_another = forward(ids, positions), forward(changed, positions)
    errors = _relative_errors(packed, torch.cat(own))
    error = float(errors.max() if dtype == torch.float32 else errors.median())
    if not error <= CHECK_TOLERANCE[dtype]:
        return [
            f"packed tokens give other logits than single sequences (relative error {error:.3g}): "
            "its layers depend on more than attention over earlier tokens and their positions"
        ]
    leak = float(_relative_errors(beside_another[length:], packed[length:]).max())
    if not leak <= LEAK_TOLERANCE[dtype]:
        return [f"its layers depend on other sequences packed beside (relative error {leak:.3g})"]
    return []


def _relative_errors(found: Tensor, expected: Tensor) -> Tensor:
    """[T, V] each -> float32 [T]."""
    expected = expected.float()
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp(min=1e-6)


def take_over_query_scaling(model: nn.Module) -> dict[nn.Module, bridge.QueryScale]:
    """Switch off query scaling that attention modules compute from the place in the forward pass instead of the
    position.

    Llama 4's layers without rotary positions do so; packed tokens need the scale of their positions, which the bridge
    applies instead.
    """
    scales: dict[nn.Module, bridge.QueryScale] = {}
    module: Any
    for module in model.modules():
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            scales[module] = bridge.QueryScale(float(module.floor_scale), float(module.attn_scale))
            module.attn_temperature_tuning = False
    return scales


def _token_ids(config: Any, count: int, device: torch.device) -> Tensor:
    return (torch.arange(count, device=device) * 7 + 3) % config.vocab_size


def _select(model: Any, name: str) -> None:
    model.set_attn_implementation(name)


def _count_reasons(config: Any, calls: int) -> list[str]:
    layers = getattr(config, "num_hidden_layers", None)
    if layers is None or calls >= layers:
        return []
    if calls == 0:
        return ["its attention does not go through transformers' attention interface"]
    return [f"only {calls} of its {layers} layers use attention that can be replaced; the others keep another state"]


def _with_layers(text: str, indices: list[int], total: int) -> str:
    if len(indices) == total:
        return text
    shown = ", ".join(map(str, indices[:8])) + (", …" if len(indices) > 8 else "")
    return f"{text} (layers {shown})"
