"""How a model-based proposer picks its draft tokens: the option `draft_sample_method`.

What a proposer reports as ``draft_probs`` must be the law its tokens were really drawn from; a wrong one biases the
output of verifiers that rely on it, and no test of shapes notices. So law and choice are made here, together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.sampling.noise import Purpose
from specdec.sampling.sampler import draw
from specdec.types import DRAFT_SAMPLE_METHODS

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdec.types import ProposalInput


def sampling_tensors(batch: ProposalInput, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Temperatures, float32 [B], 0 for greedy requests, and seeds, int64 [B], of the requests of a proposal."""
    temperature = torch.tensor([0.0 if p.greedy else p.temperature for p in batch.sampling], dtype=torch.float32)
    seeds = torch.from_numpy(np.array([seed & (2**64 - 1) for seed in batch.seeds], dtype=np.uint64).view(np.int64))
    return temperature.to(device), seeds.to(device)


class DraftSampler:
    """Picks draft tokens from a proposer's logits.

    The methods:

    ``greedy``
        The largest logit; the draft is one-hot.
    ``probabilistic``
        A draw from ``softmax(logits / temperature)`` at the request's temperature, with noise of the proposer's own,
        reported as ``draft_probs``: what the verifiers `rejection` and `block` accept most of.
    ``coupled``
        A draw with the very noise that the target's own sample of that position will use (Gumbel coupling, Daliri et
        al. 2024), so that `match` accepts more at temperature above 0; for the verifier the draft is one-hot.

    Requests at temperature 0 take the largest logit with every method.
    """

    def __init__(self, method: str) -> None:
        """Choose the method.

        Raises:
            ConfigError: it is none of `DRAFT_SAMPLE_METHODS`.
        """
        if method not in DRAFT_SAMPLE_METHODS:
            raise ConfigError(
                f"{method!r} is not one of {', '.join(DRAFT_SAMPLE_METHODS)}", path="speculative.draft_sample_method"
            )
        self.method = method

    @property
    def needs_probs(self) -> bool:
        """Whether `choose` returns the laws, for `ProposerCapabilities.draft_probs`."""
        return self.method == "probabilistic"

    def choose(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        to_target_ids: Callable[[Tensor], Tensor] | None = None,
        *,
        draft_position: int | Tensor,
        vocab_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Pick one draft token per row.

        Args:
            logits: [R, draft vocabulary], any float dtype, not divided by the temperature.
            temperature: float32 [R]; 0 for greedy requests.
            seeds: int64 [R], the bits of the requests' seeds; see `sampling_tensors`.
            positions: int64 [R], the position in its sequence of the token to be drafted.
            to_target_ids: maps int64 draft-vocabulary ids to target ids, as `DraftHead.to_target_ids`; different ids
                to different ids. None: the two vocabularies have the same ids.
            draft_position: index of the token within its draft (its depth, for trees), for all rows or int64 [R].
                ``positions - draft_position`` tells one step of a request from another: a verifier may have looked at
                the draft behind the tokens it kept, so their noise must not return in the next step.
            vocab_size: width of the target's logits; None: that of ``logits``. With ``to_target_ids`` None, draft
                tokens beyond it are never chosen.

        Returns:
            The tokens, int64 [R] in target ids, and float32 [R, vocab_size] laws in target ids, or None for methods
            whose drafts are one-hot. A row of NaN or without any token gives a negative id.
        """
        width = logits.shape[1] if vocab_size is None else vocab_size
        if to_target_ids is None:
            logits = logits[:, :width]
        if self._takes_likeliest(temperature):
            tokens = draw(logits, torch.zeros_like(temperature), seeds, positions)
            return tokens if to_target_ids is None else _mapped(tokens, to_target_ids), None
        logits = _widened(logits, to_target_ids, width)
        if self.method == "coupled":
            return draw(logits, temperature, seeds, positions, Purpose.SAMPLE), None
        first = positions - draft_position
        tokens = draw(logits, temperature, seeds, positions | (first << 32), Purpose.DRAFT)
        return tokens, _law(logits, temperature, tokens)

    def choose_children(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        num_children: int,
        to_target_ids: Callable[[Tensor], Tensor] | None = None,
        *,
        draft_position: int | Tensor,
        vocab_size: int | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Pick several different tokens per row: the children of the nodes of draft trees.

        "greedy" takes the largest logits. The other methods draw without replacement (Gumbel top-k of Kool, van Hoof
        and Welling 2019): child j comes from the law of its node without the children before it, normalised, and with
        "probabilistic" that is what is reported, for `rejection` with ``tree_rule`` "recursive". Draft trees of a
        request must list children in this order. Nodes of one depth share their noise: a verifier looks at the
        children of one of them only.

        Args:
            logits: [R, draft vocabulary], one row for each node, with at least ``num_children`` tokens above -inf.
            temperature: float32 [R]; requests at temperature 0 get the largest logits, with one-hot laws.
            seeds: int64 [R].
            positions: int64 [R], the position of the children in their sequence.
            num_children: how many for each node.
            to_target_ids: as for `choose`.
            draft_position: as for `choose`.
            vocab_size: as for `choose`.

        Returns:
            The tokens, int64 [R, num_children] in target ids, and float32 [R, num_children, vocab_size] laws in target
            ids, or None for methods whose drafts are one-hot.
        """
        width = logits.shape[1] if vocab_size is None else vocab_size
        if to_target_ids is None:
            logits = logits[:, :width]
        if self._takes_likeliest(temperature):
            ranked = logits.topk(num_children, dim=-1).indices
            return (ranked if to_target_ids is None else to_target_ids(ranked)), None
        logits = _widened(logits, to_target_ids, width)
        coupled = self.method == "coupled"
        keys = positions if coupled else positions | ((positions - draft_position) << 32)
        purpose = Purpose.SAMPLE if coupled else Purpose.DRAFT
        tokens, laws = [], []
        for _ in range(num_children):
            # Of the same noise, without the winners before: the next place of the race.
            winners = draw(logits, temperature, seeds, keys, purpose).clamp(min=0)
            tokens.append(winners)
            if not coupled:
                laws.append(_law(logits, temperature, winners))
            logits = logits.scatter(1, winners[:, None], -torch.inf)
        return torch.stack(tokens, dim=1), torch.stack(laws, dim=1) if laws else None

    def _takes_likeliest(self, temperature: Tensor) -> bool:
        """Whether all rows take the largest logits and are one-hot: then nothing is mapped to the target's width.

        Elsewhere than on the CPU the host would have to wait for the temperatures.
        """
        if self.method == "coupled" and temperature.device.type == "cpu":
            return not bool(temperature.any())
        return self.method == "greedy"


def _mapped(tokens: Tensor, to_target_ids: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.where(tokens < 0, tokens, to_target_ids(tokens.clamp(min=0)))


def _widened(logits: Tensor, to_target_ids: Callable[[Tensor], Tensor] | None, width: int) -> Tensor:
    """The logits by target id; ids that the draft vocabulary lacks are -inf."""
    if to_target_ids is None and logits.shape[1] == width:
        return logits
    ids = torch.arange(logits.shape[1], device=logits.device)
    if to_target_ids is not None:
        ids = to_target_ids(ids)
    wide = logits.new_full((logits.shape[0], width), -torch.inf)
    return wide.index_copy_(1, ids, logits)


def _law(logits: Tensor, temperature: Tensor, tokens: Tensor) -> Tensor:
    """float32 [R, V]: the law of each row's draw; one-hot at temperature 0."""
    greedy = (temperature == 0)[:, None]
    values = logits.float()
    # Relative to the largest before the division, so that low temperatures do not round the odds away.
    values = values - values.amax(dim=-1, keepdim=True)
    law = (values / temperature[:, None].masked_fill(greedy, 1.0)).softmax(dim=-1)
    chosen = torch.zeros_like(law).scatter_(1, tokens.clamp(min=0)[:, None], 1.0)
    return torch.where(greedy, chosen, law)
