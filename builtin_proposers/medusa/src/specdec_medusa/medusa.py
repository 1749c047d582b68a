"""The proposer: the heads run once a step on each request's last hidden state; their tokens make a chain or a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.drafting.checkpoint import check_head, resolve_head
from specdec.drafting.kit import ChainDrafter, DraftSampler
from specdec.drafting.last_states import last_states
from specdec.drafting.token_trees import check_size, in_order
from specdec.drafting.trees import Keys, Trees, draft_trees, no_drafts
from specdec.types import Needs, ProposerCapabilities
from specdec_medusa.heads import WEIGHT_FILES, check_heads, load_heads

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from specdec.drafting.token_trees import Path
    from specdec.types import Draft, EngineContext, ProposalInput
    from specdec_medusa.config import MedusaConfig
    from specdec_medusa.heads import MedusaHeads

METHOD = "medusa"


def check(config: MedusaConfig, engine: EngineContext) -> ProposerCapabilities:
    """See that the checkpoint holds heads for the target, before anything is loaded.

    Raises:
        ModelNotFoundError: it does not exist.
        ModelLoadError: its files are missing or unreadable, or hold no heads.
        PluginUnsuitableError: it was made for another target.
        ConfigError: it is another method's.
    """
    directory = check_head(METHOD, config.model, engine, WEIGHT_FILES)
    return _capabilities(config, check_heads(directory, engine.target_info), trees=config.has_trees)


def build(config: MedusaConfig, engine: EngineContext) -> MedusaProposer:
    """Load the heads and make the proposer.

    Raises:
        ModelLoadError: the checkpoint's tensors do not fit.
        PluginUnsuitableError: it was made for another target.
        ConfigError: the tree is larger than a draft may be.
    """
    directory = resolve_head(config.model, engine.settings.get("cache_dir"))
    heads, num_bytes = load_heads(directory, engine.target)
    tree = None
    if config.static_tree is not None:
        tree = in_order([path for path in config.static_tree if len(path) <= len(heads)])
        check_size(tree, engine.num_speculative_tokens)
    return MedusaProposer(heads, config, engine, tree, num_bytes)


def _capabilities(config: MedusaConfig, num_heads: int, *, trees: bool) -> ProposerCapabilities:
    """What drafts are like; chains have at most a token for each head."""
    draws = DraftSampler(config.draft_sample_method).needs_probs
    return ProposerCapabilities(trees=trees, draft_probs=draws, max_draft_tokens=None if trees else num_heads)


class MedusaProposer(Proposer):
    """Drafts with Medusa heads (Cai et al. 2024). It keeps nothing between steps."""

    def __init__(
        self,
        heads: MedusaHeads,
        config: MedusaConfig,
        engine: EngineContext,
        tree: tuple[Path, ...] | None = None,
        num_bytes: int = 0,
    ) -> None:
        """Hold loaded heads.

        Args:
            heads: for the engine's target.
            config: the method's options.
            engine: facts about the engine.
            tree: nodes of a static tree, in order; None for chains.
            num_bytes: of the heads' weights.
        """
        self.heads = heads
        self._tree = tree
        self._num_bytes = num_bytes
        sampler = DraftSampler(config.draft_sample_method)
        self._sampler = sampler
        self._vocab_size = engine.target_info.vocab_size
        self._to_target_ids = None if heads.target_ids is None else heads.to_target_ids
        self.needs = Needs(hidden_states=True)
        self.capabilities = _capabilities(config, len(heads), trees=tree is not None)
        self._chains = ChainDrafter(
            sampler,
            vocab_size=self._vocab_size,
            confidence_threshold=config.confidence_threshold,
            to_target_ids=self._to_target_ids,
        )

    @torch.inference_mode()
    def propose(self, batch: ProposalInput) -> Draft:
        """Draft from each request's last hidden state."""
        limits = batch.max_draft_tokens.astype(np.int64)
        tree = self._tree
        if tree is not None:

            def grow(members: np.ndarray, limit: int) -> Trees:
                return self._grow(last_states(batch, members), tree[:limit], Keys.of(batch, members))

            return draft_trees(limits, grow)
        limits = np.minimum(limits, len(self.heads))
        drafting = np.flatnonzero(limits)
        if not len(drafting):
            return no_drafts(len(limits))
        logits = self.heads.logits(last_states(batch, drafting), int(limits.max()))

        def next_logits(token_ids: Tensor, chosen: np.ndarray, depth: int) -> Tensor:
            rows = torch.from_numpy(np.searchsorted(drafting, chosen)).to(token_ids.device)
            return logits[depth + 1].index_select(0, rows)

        return self._chains.run(batch, limits, logits[0], next_logits).draft()

    def memory(self) -> Mapping[str, int]:
        """See `Proposer.memory`."""
        return {"weights": self._num_bytes}

    def _grow(self, hidden: Tensor, tree: tuple[Path, ...], keys: Keys) -> Trees:
        """From [A, H]: node (r, s) is the s-th token of the second head, below whichever token."""
        width = 1 + max(max(path) for path in tree)
        depths, ranks = [len(path) - 1 for path in tree], [path[-1] for path in tree]
        tokens, laws = [], []
        for depth, logits in enumerate(self.heads.logits(hidden, len(tree[-1]))):
            chosen, drawn_from = self._sampler.choose_children(
                logits,
                keys.temperature.to(logits.device),
                keys.seeds.to(logits.device),
                keys.positions.to(logits.device) + depth,
                width,
                self._to_target_ids,
                draft_position=depth,
                vocab_size=self._vocab_size,
            )
            tokens.append(chosen)
            if drawn_from is not None:
                laws.append(drawn_from)
        index: dict[Path, int] = {path: i for i, path in enumerate(tree)} | {(): -1}
        parents = torch.tensor([index[path[:-1]] for path in tree], device=hidden.device)
        return Trees(
            token_ids=torch.stack(tokens)[depths, :, ranks].T,
            parents=parents.expand(len(hidden), -1),
            probs=torch.stack(laws)[depths, :, ranks].transpose(0, 1) if laws else None,
        )
