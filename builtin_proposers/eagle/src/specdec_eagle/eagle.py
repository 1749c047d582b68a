"""The proposer: one pass of the head over the rows that the target has just computed, then chains or trees from its
own output; or, with a head trained for it, all tokens of a chain from that one pass.

After a step the target has hidden states of positions up to N - 1, and the token at N is known but not computed. The
first pass runs rows up to N - 1 with true hidden states, each with the token behind it; the last row predicts the token
at N + 1. Further rows (N, N + 1, …) are made of draft tokens and the head's own output; their K/V is overwritten by the
next first pass, also where the draft is accepted.

A head with a mask row (P-EAGLE) has these further rows in the first pass: each stands for a draft token that is not
known yet, so none of them depends on the others' tokens. Their K/V is overwritten in the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.drafting.checkpoint import check_head, check_sizes, read_head_config, resolve_head
from specdec.drafting.kit import ChainDrafter, DraftLayers, DraftSampler, SlotTable, Span, logits_in_parallel
from specdec.drafting.token_trees import check_size
from specdec.drafting.trees import Keys, Vocabulary, draft_trees, no_drafts, shape_of
from specdec.errors import ConfigError
from specdec.types import Needs, ProposerCapabilities
from specdec_eagle.growth import HeadGrowth

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specdec.drafting import DraftHead
    from specdec.drafting.packing import ChainSteps
    from specdec.drafting.trees import Trees
    from specdec.target.model import TargetModel
    from specdec.types import ComputedStep, Draft, EngineContext, ProposalInput
    from specdec_eagle.config import EagleConfig


def check(method: str, config: EagleConfig, engine: EngineContext) -> ProposerCapabilities:
    """Find the head for the target's architecture and see that the checkpoint is one, before anything is loaded.

    Args:
        method: ``eagle`` or ``eagle3``, the first part of the head's name.
        config: the method's options.
        engine: facts about the engine.

    Raises:
        PluginNotFoundError: no installed distribution has a head for the target's architecture.
        ModelNotFoundError: the checkpoint does not exist.
        ModelLoadError: its files are missing or unreadable.
        PluginUnsuitableError: it was made for another target.
        ConfigError: a tree is larger than a draft may be, or the checkpoint is another method's.
    """
    assert engine.registry is not None
    check_size(config.static_tree or (), engine.num_speculative_tokens)
    engine.registry.select("head", _head_name(method, engine))  # before anything is fetched
    directory = check_head(method, config.model, engine)
    check_sizes(directory, {**read_head_config(directory), **_overrides(config)}, engine.target_info)
    return _capabilities(config, trees=config.has_trees)


def build(method: str, config: EagleConfig, engine: EngineContext) -> EagleProposer:
    """Load the head and make the proposer; arguments are as for `check`.

    Raises:
        ModelLoadError: the checkpoint's tensors do not fit.
        PluginUnsuitableError: it was made for another target.
        ConfigError: the head cannot draft as the options say.
    """
    assert engine.registry is not None
    head = engine.registry.create(
        "head",
        _head_name(method, engine),
        "draft_head",
        checkpoint=resolve_head(config.model, engine.settings.get("cache_dir")),
        overrides=_overrides(config),
        engine=engine,
    )
    _check_way_of_drafting(head, config)
    return EagleProposer(head, config, engine)


def _head_name(method: str, engine: EngineContext) -> str:
    return f"{method}.{engine.target_info.model_type}"


def _overrides(config: EagleConfig) -> dict[str, Any]:
    """Keys of the head's configuration that shall be otherwise."""
    given = config.parallel_drafting
    return {**config.head_config, **({} if given is None else {"parallel_drafting": given})}


def _capabilities(config: EagleConfig, *, trees: bool) -> ProposerCapabilities:
    return ProposerCapabilities(trees=trees, draft_probs=DraftSampler(config.draft_sample_method).needs_probs)


def _check_way_of_drafting(head: DraftHead, config: EagleConfig) -> None:
    """Refuse options that a head cannot follow.

    Raises:
        ConfigError: says which and why.
    """
    if config.parallel_drafting and head.mask_row is None:
        raise ConfigError(
            f"speculative.parallel_drafting is on, but the head {config.model!r} was not trained for it: leave it out",
            path="speculative.parallel_drafting",
        )
    if config.has_trees and head.mask_row is not None:
        option = "speculative_token_tree" if config.static_tree is not None else "tree_top_k"
        raise ConfigError(
            f"speculative.{option} asks for trees, but the head {config.model!r} drafts all tokens in one pass "
            "(P-EAGLE), where no token depends on another, so that its drafts are chains: leave "
            f"{option} out, or set speculative.parallel_drafting = false to draft one token after another",
            path=f"speculative.{option}",
        )


class EagleProposer(Proposer):
    """Drafts with a head of the EAGLE family."""

    def __init__(self, head: DraftHead, config: EagleConfig, engine: EngineContext) -> None:
        """Hold a loaded head.

        Args:
            head: built for the engine's target.
            config: the method's options.
            engine: facts about the engine.
        """
        self.head = head
        self._engine = engine
        self._k = engine.num_speculative_tokens
        sampler = DraftSampler(config.draft_sample_method)
        to_target_ids = None if head.target_ids is None else head.to_target_ids
        vocab_size = engine.target_info.vocab_size
        shape = shape_of(config, Vocabulary(vocab_size, to_target_ids))
        self.needs = Needs(
            hidden_states=not head.taps,
            aux_layers=head.taps,
            every_step=True,
            next_token=True,
            lookahead_slots=self._k - 1 if shape is None else shape.num_rows(self._k),
        )
        self.capabilities = _capabilities(config, trees=shape is not None)
        self._chains = ChainDrafter(
            sampler,
            vocab_size=vocab_size,
            confidence_threshold=config.confidence_threshold,
            to_target_ids=to_target_ids,
        )
        self._shape = shape
        self._mask: Tensor | None = None
        """[1, h]: what rows of draft tokens take in place of a fused hidden state, when they are in the first pass."""

    def load(self, target: TargetModel) -> None:
        """Allocate the head's K/V beside the target's."""
        self._device = target.device
        if self.head.mask_row is not None:
            with torch.inference_mode():
                self._mask = self.head.fuse(self.head.mask_row.hidden_states)
        self.layers = DraftLayers.build(
            self._engine,
            self.head.attention_layers,
            dtype=target.dtype,
            device=target.device,
            geometry=target.kv_geometry,
            query_scales=self.head.query_scales,
            trees=self._shape is not None,
        )
        # What the cache holds may be less than the engine's limit was when this was made.
        geometry = target.kv_geometry
        self._max_positions = min(self._engine.max_model_len, geometry.num_blocks * geometry.block_size)

    def kv_bytes_per_token(self) -> int:
        """See `Proposer.kv_bytes_per_token`."""
        size = torch.finfo(getattr(torch, self._engine.dtype)).bits // 8
        layers = self.head.attention_layers
        return sum(size * layer.num_kv_heads * (layer.head_dim + layer.v_head_dim) for layer in layers)

    @torch.inference_mode()
    def propose(self, batch: ProposalInput) -> Draft:
        """Run the new rows, then draft for the requests that ask for it."""
        computed = batch.computed
        assert computed is not None
        limits = batch.max_draft_tokens.astype(np.int64)
        row_of = {name: row for row, name in enumerate(computed.request_ids)}
        rows = np.array([row_of[name] for name in batch.request_ids], dtype=np.int64)
        # Nothing follows from a step that computed nothing of a request.
        limits = np.where(np.diff(computed.kept_start)[rows] > 0, limits, 0)
        tables = SlotTable(computed, self.layers.cache.block_size, self._device)
        wanted = np.zeros(len(computed.request_ids), dtype=np.int64)
        wanted[rows] = np.minimum(limits, 1) if self._mask is None else limits
        hidden = self._first_pass(computed, tables, wanted)
        if not limits.any():
            return no_drafts(len(rows))
        ends = computed.num_computed.astype(np.int64)[rows]
        drafting = np.flatnonzero(limits > 0)
        shape = self._shape
        if shape is not None:

            def grow(members: np.ndarray, limit: int) -> Trees:
                roots = hidden.index_select(0, torch.from_numpy(np.searchsorted(drafting, members)).to(hidden.device))
                growth = HeadGrowth(self.head, self.layers, tables, rows[members], ends[members], roots)
                room = self._max_positions - int(ends[members].max())
                return shape.grow(growth, limit, Keys.of(batch, members), room)

            return draft_trees(limits, grow)
        logits = self.head.logits(hidden)
        if self._mask is not None:
            return self._chains.run(batch, limits, *logits_in_parallel(logits, limits)).draft()
        run = _ChainRun(self.head, self.layers, tables, rows, ends, hidden, limits)
        return self._chains.run(batch, limits, logits, run).draft()

    def memory(self) -> Mapping[str, int]:
        """See `Proposer.memory`."""
        return {**self.head.memory(), "kv_cache": self.layers.num_bytes}

    def _first_pass(self, computed: ComputedStep, tables: SlotTable, wanted: np.ndarray) -> Tensor:
        """Run the rows with true hidden states, and behind them those of mask tokens.

        Args:
            computed: the step.
            tables: its slots.
            wanted: int64 [step's requests]: of how many rows the output is wanted. The first is the last one with a
                true hidden state, the others have mask tokens.

        Returns:
            [sum of wanted, h]: the head's output at these rows.
        """
        spans, pieces = [], []
        for row, tokens in enumerate(computed.token_ids):
            start, end = int(computed.first_position[row]), int(computed.num_computed[row])
            behind = tokens[start + 1 : end + 1]
            if len(behind):  # a text that a stop has cut ends with a token that nothing follows
                spans.append(Span(row, start, self._with_masks(behind, int(wanted[row])), num_wanted=int(wanted[row])))
                first = int(computed.kept_start[row])
                pieces.append(computed.kept[first : first + len(behind)])
        if not spans:
            return torch.empty(0, 0, device=self._device)
        packed = tables.batch_of_spans(spans)
        fused = self.head.fuse(self._states(computed, np.concatenate(pieces)))
        features = self._among_masks(fused, spans, pieces)
        with self.layers.attending(packed):
            hidden = self.head.forward(packed.input_ids, features, packed.positions, 0)
        return hidden.index_select(0, packed.logits_indices)

    def _with_masks(self, token_ids: np.ndarray, wanted: int) -> np.ndarray:
        """The tokens, and a mask token for each wanted row but the first."""
        if wanted < 2:
            return token_ids
        assert self.head.mask_row is not None
        return np.append(token_ids, np.full(wanted - 1, self.head.mask_row.token_id))

    def _among_masks(self, fused: Tensor, spans: Sequence[Span], pieces: Sequence[np.ndarray]) -> Tensor:
        """The fused hidden states of the true rows, and that of the mask in the rows behind them: of all spans."""
        lengths = np.array([len(span.token_ids) for span in spans])
        if lengths.sum() == len(fused):
            return fused
        assert self._mask is not None
        starts = np.repeat(np.cumsum(lengths) - lengths, [len(piece) for piece in pieces])
        true_rows = starts + np.concatenate([np.arange(len(piece)) for piece in pieces])
        features = self._mask.repeat(int(lengths.sum()), 1)
        features[torch.from_numpy(true_rows).to(features.device)] = fused
        return features

    def _states(self, computed: ComputedStep, kept: np.ndarray) -> tuple[Tensor, ...]:
        """The target's hidden states at these tokens of the step, each [len(kept), H]."""
        target = computed.target
        states = target.aux_hidden_states if self.head.taps else (target.hidden_states,)
        assert states is not None
        if len(kept) == len(computed.batch.input_ids):
            return tuple(state for state in states if state is not None)  # rows are in order, so all of them are these
        index = torch.from_numpy(kept).to(self._device)
        return tuple(state.index_select(0, index) for state in states if state is not None)


class _ChainRun:
    """Runs draft tokens one after another, each on the head's output of the one before."""

    def __init__(
        self,
        head: DraftHead,
        layers: DraftLayers,
        tables: SlotTable,
        rows: np.ndarray,
        ends: np.ndarray,
        hidden: Tensor,
        limits: np.ndarray,
    ) -> None:
        self._head, self._layers, self._tables = head, layers, tables
        self._rows, self._ends = rows, ends
        self._hidden, self._of = hidden, np.flatnonzero(limits > 0)
        self._most = int(limits.max()) - 1
        self._steps = self._prepare()

    def _prepare(self) -> ChainSteps | None:
        """The batches of all steps of the requests that still draft."""
        if not self._most:
            return None
        return self._tables.chain_steps(self._rows[self._of], self._ends[self._of], self._most)

    def __call__(self, token_ids: Tensor, chosen: np.ndarray, depth: int) -> Tensor:
        hidden = self._hidden
        if len(chosen) != len(self._of):
            kept = torch.from_numpy(np.searchsorted(self._of, chosen)).to(hidden.device)
            hidden, self._of = hidden.index_select(0, kept), chosen
            self._steps = self._prepare()
        assert self._steps is not None
        packed = self._steps.batch(depth, token_ids)
        with self._layers.attending(packed):
            self._hidden = self._head.forward(token_ids, hidden, packed.positions, depth + 1)
        return self._head.logits(self._hidden)
