"""Feed-forward parts of DeepSeek's decoder layers for draft heads: dense, or a mixture of experts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Protocol

import torch
from attrs import frozen

from specdec.drafting.layers import ACTIVATIONS
from specdec.drafting.modules import linear
from specdec.errors import ModelLoadError
from specdec.wording import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from specdec.drafting.checkpoint import HeadCheckpoint, Shape


class FeedForward(Protocol):
    """What follows a layer's second norm."""

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[T, h] -> [T, h]."""


class FeedForwardSizes(Protocol):
    """Knows the tensors of a feed-forward part."""

    def shapes(self, prefix: str, hidden_size: int) -> dict[str, Shape]:
        """Names and shapes of the tensors of the part called ``prefix``."""

    def build(self, tensors: Mapping[str, Tensor], prefix: str, activation: str) -> FeedForward:
        """The part, from tensors of these names; the activation is a key of `ACTIVATIONS`."""


# --- dense --------------------------------------------------------------------------------------------


@frozen
class DenseSizes:
    """Width of a dense part."""

    inner: int

    def shapes(self, prefix: str, hidden_size: int) -> dict[str, Shape]:
        """See `FeedForwardSizes`."""
        return {
            f"{prefix}.gate_proj.weight": (self.inner, hidden_size),
            f"{prefix}.up_proj.weight": (self.inner, hidden_size),
            f"{prefix}.down_proj.weight": (hidden_size, self.inner),
        }

    def build(self, tensors: Mapping[str, Tensor], prefix: str, activation: str) -> Dense:
        """See `FeedForwardSizes`."""
        gate, up, down = (tensors[f"{prefix}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return Dense(linear(torch.cat([gate, up])), linear(down), activation)


class Dense:
    """``down(activation(gate(x)) * up(x))``."""

    def __init__(self, gate_up: nn.Module, down: nn.Module, activation: str) -> None:
        """Put it together; the first linear gives the gate's columns, then those that it gates."""
        self._gate_up = gate_up
        self._down = down
        self._activation = ACTIVATIONS[activation]

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[T, h] -> [T, h]."""
        gate, up = self._gate_up(hidden_states).chunk(2, dim=-1)
        result: Tensor = self._down(self._activation(gate) * up)
        return result


# --- a mixture of experts -----------------------------------------------------------------------------

SCORINGS: dict[str, Callable[[Tensor], Tensor]] = {"sigmoid": torch.sigmoid, "softmax": partial(torch.softmax, dim=-1)}
"""Scores from a router's logits [T, E], by the names of ``scoring_func``."""

TOPK_METHODS = ("noaux_tc", "group_limited_greedy", "greedy")
"""Ways to choose experts, by the names of ``topk_method``; see `RouterRule`."""


@frozen(kw_only=True)
class RouterRule:
    """How experts are chosen for a token, and with what weights, from one score for each.

    The groups with the best scores are chosen, then the best experts within them. What is compared is the score, with
    ``noaux_tc`` plus a trained correction; a group counts by its best expert, with ``noaux_tc`` by its two best.
    """

    scoring: str
    """A key of `SCORINGS`."""
    method: str
    """One of `TOPK_METHODS`; ``greedy`` knows no groups."""
    num_chosen: int
    num_groups: int = 1
    num_chosen_groups: int = 1
    normalised: bool = True
    """Whether the weights of the chosen are divided by their sum."""
    factor: float = 1.0
    """On the weights, normalised or not."""

    def choose(self, logits: Tensor, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        """Choose experts.

        Args:
            logits: float32 [T, E].
            correction: float32 [E], with ``noaux_tc``.

        Returns:
            Experts int64 [T, num_chosen] and their weights float32, of the same shape.
        """
        scores = SCORINGS[self.scoring](logits)
        compared = self._within_groups(scores if correction is None else scores + correction)
        experts = compared.topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.normalised:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return experts, weights * self.factor

    def _within_groups(self, scores: Tensor) -> Tensor:
        """Scores [T, E], -inf outside the best groups."""
        if self.num_groups == 1:
            return scores
        groups = scores.unflatten(-1, (self.num_groups, -1))
        counted = min(2 if self.method == "noaux_tc" else 1, groups.shape[-1])
        best = groups.topk(counted, dim=-1).values.sum(dim=-1).topk(self.num_chosen_groups, dim=-1).indices
        outside = torch.ones(groups.shape[:-1], dtype=torch.bool, device=scores.device).scatter_(-1, best, value=False)
        return groups.masked_fill(outside[..., None], float("-inf")).flatten(-2)


@frozen(kw_only=True)
class MixtureSizes:
    """Counts and widths of a mixture of experts, with its rule."""

    num_experts: int
    expert: DenseSizes
    shared: DenseSizes | None
    """The experts that every token gets, as one; None: there are none."""
    rule: RouterRule

    @staticmethod
    def of(checkpoint: HeadCheckpoint) -> MixtureSizes:
        """Read them from a configuration with DeepSeek's keys.

        Raises:
            ModelLoadError: a key is missing, or values are unknown or contradict each other.
        """
        config, require = checkpoint.config, checkpoint.require
        inner, shared = int(require("moe_intermediate_size")), int(config.get("n_shared_experts") or 0)
        num_experts = int(require("n_routed_experts"))
        rule = _rule(checkpoint)
        _check_counts(checkpoint, rule, num_experts)
        return MixtureSizes(
            num_experts=num_experts,
            expert=DenseSizes(inner),
            shared=DenseSizes(inner * shared) if shared else None,
            rule=rule,
        )

    def shapes(self, prefix: str, hidden_size: int) -> dict[str, Shape]:
        """See `FeedForwardSizes`."""
        shapes: dict[str, Shape] = {f"{prefix}.gate.weight": (self.num_experts, hidden_size)}
        if self.rule.method == "noaux_tc":
            shapes[f"{prefix}.gate.e_score_correction_bias"] = (self.num_experts,)
        if self.shared is not None:
            shapes |= self.shared.shapes(f"{prefix}.shared_experts", hidden_size)
        for i in range(self.num_experts):
            shapes |= self.expert.shapes(f"{prefix}.experts.{i}", hidden_size)
        return shapes

    def build(self, tensors: Mapping[str, Tensor], prefix: str, activation: str) -> Mixture:
        """See `FeedForwardSizes`."""
        experts = (self.expert.build(tensors, f"{prefix}.experts.{i}", activation) for i in range(self.num_experts))
        shared = None
        if self.shared is not None:
            shared = self.shared.build(tensors, f"{prefix}.shared_experts", activation)
        correction = tensors.get(f"{prefix}.gate.e_score_correction_bias")
        router = linear(tensors[f"{prefix}.gate.weight"].float())
        return Mixture(self.rule, router, correction, list(experts), shared)


class Mixture:
    """``shared(x) + sum of weight * expert(x)`` over the experts that a router chooses for each row."""

    def __init__(
        self,
        rule: RouterRule,
        router: nn.Module,
        correction: Tensor | None,
        experts: Sequence[Dense],
        shared: Dense | None,
    ) -> None:
        """Put it together.

        Args:
            rule: chooses.
            router: float32 [T, h] -> [T, E].
            correction: float32 [E]; see `RouterRule.choose`.
            experts: to choose from.
            shared: what every row gets besides.
        """
        self._rule = rule
        self._router = router
        self._correction = correction
        self._experts = experts
        self._shared = shared

    def __call__(self, hidden_states: Tensor) -> Tensor:
        """[T, h] -> [T, h]; weighted and added in float32."""
        experts, weights = self._rule.choose(self._router(hidden_states.float()), self._correction)
        total = (self._outputs(hidden_states, experts).float() * weights[..., None]).sum(dim=1)
        if self._shared is not None:
            total = total + self._shared(hidden_states)
        return total.to(hidden_states.dtype)

    def _outputs(self, hidden_states: Tensor, experts: Tensor) -> Tensor:
        """Outputs [T, k, h] of the experts int64 [T, k]: every expert that got rows runs once, over all of them."""
        pairs = experts.flatten()
        order = pairs.argsort(stable=True)
        used, counts = pairs.unique(return_counts=True)
        inputs = hidden_states[order // experts.shape[1]].split(counts.tolist())
        outputs = torch.cat([self._experts[i](rows) for i, rows in zip(used.tolist(), inputs, strict=True)])
        return torch.empty_like(outputs).index_copy_(0, order, outputs).unflatten(0, experts.shape)


def mixtures_of(checkpoint: HeadCheckpoint, target_layers: int) -> dict[str, MixtureSizes]:
    """The layers of a head whose feed-forward part is a mixture, by name: ``layers.0`` and so on.

    ``first_k_dense_replace`` and ``moe_layer_freq`` say which they are. Some heads count their layers from 0, others go
    on from the target's last one; where that makes a difference, a layer is what it is stored as.

    Args:
        checkpoint: with DeepSeek's names; without ``n_routed_experts`` there are no mixtures.
        target_layers: number of layers of the target.

    Raises:
        ModelLoadError: see `MixtureSizes.of`.
    """
    if not checkpoint.config.get("n_routed_experts"):
        return {}
    names = [f"layers.{i}" for i in range(max(1, checkpoint.number_of("layers")))]
    mixed = [name for i, name in enumerate(names) if _is_mixture(checkpoint, name, (i, target_layers + i))]
    return dict.fromkeys(mixed, MixtureSizes.of(checkpoint)) if mixed else {}


def _is_mixture(checkpoint: HeadCheckpoint, name: str, numbers: tuple[int, int]) -> bool:
    config = checkpoint.config
    first, every = int(config.get("first_k_dense_replace") or 0), int(config.get("moe_layer_freq") or 1)
    answers = {number >= first and number % every == 0 for number in numbers}
    if len(answers) == 1:
        return answers.pop()
    parts = tuple(f"{name}.mlp.{part}." for part in ("gate", "experts", "shared_experts"))
    return any(stored.startswith(parts) for stored in checkpoint.shapes)


def _rule(checkpoint: HeadCheckpoint) -> RouterRule:
    config, require = checkpoint.config, checkpoint.require
    method = _known(checkpoint, "topk_method", TOPK_METHODS)
    groups = 1 if method == "greedy" else int(config.get("n_group") or 1)
    return RouterRule(
        scoring=_known(checkpoint, "scoring_func", tuple(SCORINGS)),
        method=method,
        num_chosen=int(require("num_experts_per_tok")),
        num_groups=groups,
        num_chosen_groups=1 if groups == 1 else int(require("topk_group")),
        normalised=bool(require("norm_topk_prob")),
        factor=float(require("routed_scaling_factor")),
    )


def _known(checkpoint: HeadCheckpoint, key: str, known: Sequence[str]) -> str:
    value = str(checkpoint.require(key))
    if value not in known:
        raise ModelLoadError(f"{checkpoint.directory}: {key} is {shown(value)}, heads know {', '.join(known)}")
    return value


def _check_counts(checkpoint: HeadCheckpoint, rule: RouterRule, num_experts: int) -> None:
    """Refuse counts that no choice can meet."""
    counts = f"n_routed_experts is {num_experts}, n_group {rule.num_groups}, topk_group {rule.num_chosen_groups}"
    eligible = num_experts // rule.num_groups * rule.num_chosen_groups
    problem = None
    if num_experts % rule.num_groups:
        problem = f"{counts}: experts must fall into groups of one size"
    elif rule.num_chosen_groups > rule.num_groups:
        problem = f"{counts}: the chosen groups are more than there are"
    elif rule.num_chosen > eligible:
        problem = f"num_experts_per_tok is {rule.num_chosen}, but the chosen groups hold {eligible} experts ({counts})"
    if problem is not None:
        raise ModelLoadError(f"{checkpoint.directory}: {problem}")
