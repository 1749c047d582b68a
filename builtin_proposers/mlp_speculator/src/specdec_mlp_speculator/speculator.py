"""The proposer: the network runs from each request's last hidden state and newest token, along a chain or a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.drafting.checkpoint import check_head, read_head_config, resolve_head
from specdec.drafting.kit import ChainDrafter, DraftSampler
from specdec.drafting.last_states import last_states
from specdec.drafting.token_trees import check_size, in_order
from specdec.drafting.trees import DynamicShape, Keys, StaticShape, TreeShape, Vocabulary, draft_trees, no_drafts
from specdec.types import Needs, ProposerCapabilities
from specdec_mlp_speculator.network import check_network, load_network

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specdec.drafting.trees import Trees
    from specdec.types import Draft, EngineContext, ProposalInput
    from specdec_mlp_speculator.config import MlpSpeculatorConfig
    from specdec_mlp_speculator.network import MlpSpeculator

METHOD = "mlp_speculator"


def check(config: MlpSpeculatorConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the checkpoint is a network for the target, before anything is loaded.

    Raises:
        ModelNotFoundError: it does not exist.
        ModelLoadError: its files are missing or unreadable.
        PluginUnsuitableError: it was made for another target.
        ConfigError: it is another method's.
    """
    directory = check_head(METHOD, config.model, engine)
    settings = read_head_config(directory)
    check_network(directory, settings, engine.target_info)
    return _capabilities(config, settings.get("n_predict"), trees=config.has_trees)


def build(config: MlpSpeculatorConfig, engine: EngineContext) -> MlpSpeculatorProposer:
    """Load the network and make the proposer.

    Raises:
        ModelLoadError: the checkpoint's tensors do not fit.
        PluginUnsuitableError: it was made for another target.
        ConfigError: the tree is larger than a draft may be.
    """
    directory = resolve_head(config.model, engine.settings.get("cache_dir"))
    network = load_network(directory, engine.target)
    return MlpSpeculatorProposer(network, config, engine)


def _capabilities(config: MlpSpeculatorConfig, num_steps: int | None, *, trees: bool) -> ProposerCapabilities:
    """What drafts are like; chains have at most a token for each step of the network, where their number is known."""
    draws = DraftSampler(config.draft_sample_method).needs_probs
    return ProposerCapabilities(trees=trees, draft_probs=draws, max_draft_tokens=None if trees else num_steps)


class MlpSpeculatorProposer(Proposer):
    """Drafts with an MLP speculator. It keeps nothing between steps."""

    def __init__(self, network: MlpSpeculator, config: MlpSpeculatorConfig, engine: EngineContext) -> None:
        """Hold a loaded network.

        Args:
            network: for the engine's target.
            config: the method's options.
            engine: facts about the engine.
        """
        self.network = network
        self._shape = _shape(config, len(network.steps), engine)
        sampler = DraftSampler(config.draft_sample_method)
        self.needs = Needs(hidden_states=True)
        self.capabilities = _capabilities(config, len(network.steps), trees=self._shape is not None)
        self._chains = ChainDrafter(
            sampler, vocab_size=engine.target_info.vocab_size, confidence_threshold=config.confidence_threshold
        )

    @torch.inference_mode()
    def propose(self, batch: ProposalInput) -> Draft:
        """Draft from each request's last hidden state and newest token."""
        limits, shape = batch.max_draft_tokens.astype(np.int64), self._shape
        if shape is not None:

            def grow(members: np.ndarray, limit: int) -> Trees:
                return shape.grow(self._growth(batch, members), limit, Keys.of(batch, members))

            return draft_trees(limits, grow)
        limits = np.minimum(limits, len(self.network.steps))
        drafting = np.flatnonzero(limits)
        if not len(drafting):
            return no_drafts(len(limits))
        growth, of = self._growth(batch, drafting), drafting

        def next_logits(token_ids: Tensor, chosen: np.ndarray, depth: int) -> Tensor:
            nonlocal of
            if len(chosen) != len(of):
                growth.keep(torch.from_numpy(np.searchsorted(of, chosen)))
                of = chosen
            parents = torch.full_like(token_ids, growth.num_nodes - 1)[:, None]
            return growth.run(token_ids[:, None], parents, depth + 1)[:, 0]

        return self._chains.run(batch, limits, growth.root_logits(), next_logits).draft()

    def memory(self) -> Mapping[str, int]:
        """See `Proposer.memory`."""
        return {"weights": self.network.num_bytes}

    def _growth(self, batch: ProposalInput, members: np.ndarray) -> NetworkGrowth:
        hidden = last_states(batch, members)
        newest = torch.tensor([batch.token_ids[i][-1] for i in members.tolist()], dtype=torch.int64)
        return NetworkGrowth(self.network, hidden, newest.to(hidden.device))


class NetworkGrowth:
    """Trees (`specdec.drafting.trees.Growth`) whose nodes carry states of the network."""

    def __init__(self, network: MlpSpeculator, hidden: Tensor, newest: Tensor) -> None:
        """Run the root.

        Args:
            network: runs the nodes.
            hidden: [A, H], final hidden states of the target.
            newest: int64 [A], the tokens sampled behind them.
        """
        self._network = network
        self._states = network.steps[0](network.begin(hidden), newest)[:, None]  # [A, 1 + nodes, d], the root first

    @property
    def num_nodes(self) -> int:
        """Nodes run so far, of each request."""
        return self._states.shape[1] - 1

    def keep(self, rows: Tensor) -> None:
        """Go on with some of the requests, int64 [A']."""
        self._states = self._states.index_select(0, rows.to(self._states.device))

    def root_logits(self) -> Tensor:
        """[A, V]: of the token behind the text."""
        return self._network.steps[0].logits(self._states[:, 0])

    def run(self, token_ids: Tensor, parents: Tensor, depth: int) -> Tensor:
        """See `specdec.drafting.trees.Growth`."""
        width, shape = self._states.shape[-1], token_ids.shape
        above = self._states.gather(1, (parents + 1)[..., None].expand(-1, -1, width))
        step = self._network.steps[depth]
        states = step(above.flatten(0, 1), token_ids.flatten())
        self._states = torch.cat([self._states, states.view(*shape, width)], dim=1)
        return step.logits(states).view(*shape, -1)


def _shape(config: MlpSpeculatorConfig, num_steps: int, engine: EngineContext) -> TreeShape | None:
    """The shape of trees, no deeper than the network has steps; None for chains."""
    vocabulary = Vocabulary(engine.target_info.vocab_size)
    if config.static_tree is not None:
        paths = in_order([path for path in config.static_tree if len(path) <= num_steps])
        check_size(paths, engine.num_speculative_tokens)
        return StaticShape(paths, DraftSampler(config.draft_sample_method), vocabulary)
    if config.tree_top_k is None:
        return None
    return DynamicShape(config.tree_top_k, min(config.tree_depth, num_steps), vocabulary)
