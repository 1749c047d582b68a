"""The proposer: what the target has computed goes into the table, and drafts are read off it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from specdec.drafting import Proposer
from specdec.drafting.token_trees import check_size
from specdec.sampling.ranking import first_tokens
from specdec.types import Draft, Needs, ProposerCapabilities
from specdec_token_recycling.table import KERNELS, NOTHING, SuccessorTable, TreeReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdec.types import ComputedStep, EngineContext, ProposalInput
    from specdec_token_recycling.config import TokenRecyclingConfig


def check(config: TokenRecyclingConfig, engine: EngineContext) -> ProposerCapabilities:
    """What the drafts will be like.

    Raises:
        ConfigError: the tree is larger than a draft may be.
    """
    check_size(config.speculative_token_tree or (), engine.num_speculative_tokens)
    return ProposerCapabilities(trees=config.speculative_token_tree is not None)


class TokenRecyclingProposer(Proposer):
    """Token Recycling (Luo et al. 2024, arXiv 2408.08696).

    All requests share one table, which holds for each token what the target found likeliest behind it the last time,
    be it in a text or in a draft that was rejected, and the same for each pair of tokens, which the paper does not
    have. A draft is a chain or a tree of one shape, read off the table from the end of the text on. Prompts are
    computed without logits; of them each token's follower goes first into the token's row and the pair's.
    """

    needs = Needs(every_step=True)

    def __init__(self, config: TokenRecyclingConfig, engine: EngineContext) -> None:
        """Make an empty table.

        Args:
            config: the method's options.
            engine: facts about the engine.
        """
        self.capabilities = check(config, engine)
        self._reader = TreeReader(config.paths(engine.num_speculative_tokens))
        self._table = SuccessorTable(engine.target_info.vocab_size, self._reader.width)

    def load(self, target: Any) -> None:
        """Load what `propose` runs, so that no request waits for it."""
        KERNELS.load()

    @torch.inference_mode()
    def propose(self, batch: ProposalInput) -> Draft:
        """See `Proposer.propose`."""
        assert batch.computed is not None
        self._learn(batch.computed)
        limits = np.ascontiguousarray(batch.max_draft_tokens, dtype=np.int32)
        last_two = np.array([_last_two(text) for text in batch.token_ids], dtype=np.int64).reshape(-1, 2)
        token_ids, parents, counts = self._reader.read(self._table, last_two, limits)
        return Draft(
            token_ids=torch.from_numpy(token_ids),
            num_draft_tokens=torch.from_numpy(counts),
            parents=torch.from_numpy(parents) if self.capabilities.trees else None,
        )

    def memory(self) -> Mapping[str, int]:
        """Bytes of the table."""
        return {"table": self._table.nbytes}

    def _learn(self, computed: ComputedStep) -> None:
        token_ids = computed.batch.input_ids.numpy(force=True)
        rows = computed.batch.logits_indices.numpy(force=True)
        if len(rows) < len(token_ids):
            self._learn_texts(computed)
        if len(rows):
            likeliest = first_tokens(computed.target.logits, self._table.width)
            before = _tokens_before(computed, token_ids)
            self._table.learn(before[rows], token_ids[rows], likeliest.numpy(force=True))

    def _learn_texts(self, computed: ComputedStep) -> None:
        """Learn what follows each token of a step with prompts. What the logits of some of them say comes after it."""
        for r, text in enumerate(computed.token_ids):
            first, end = int(computed.first_position[r]), int(computed.num_computed[r])
            begin = max(first - 1, 0)
            self._table.learn_text(text[begin : end + 1], first - begin)


def _last_two(text: np.ndarray) -> tuple[int, int]:
    return (text[-2] if len(text) > 1 else NOTHING), text[-1]


def _tokens_before(computed: ComputedStep, token_ids: np.ndarray) -> np.ndarray:
    """int64 [T]: the token before each of a step's, in a tree its parent; negative where there is none."""
    before = np.empty_like(token_ids)
    before[1:] = token_ids[:-1]
    starts = computed.batch.query_start_loc.numpy(force=True)
    parents = None if computed.batch.parents is None else computed.batch.parents.numpy(force=True)
    for r, text in enumerate(computed.token_ids):
        start, end, first = starts[r], starts[r + 1], computed.first_position[r]
        if parents is not None:
            before[start:end] = token_ids[start + parents[start:end]]
        before[start : min(start + 1, end)] = text[first - 1] if first > 0 else NOTHING
    return before
