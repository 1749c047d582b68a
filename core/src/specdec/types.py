"""The frozen values that stages of a step hand to one another.

Shapes use these letters: B requests of the step, T packed tokens, R rows with logits, N draft tokens (or tree nodes), V
vocabulary, H hidden size. Packed means: requests one after another without padding; request r owns
tokens ``query_start_loc[r] .. query_start_loc[r + 1] - 1``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from specdec.sampling.codes import PLACEHOLDER_TOKEN_ID as PLACEHOLDER_TOKEN_ID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from torch import Tensor

    from specdec.registry import Registry
    from specdec.sampling.params import SamplingParams
    from specdec.speculation import RequestSpeculation


@frozen(eq=False, kw_only=True)
class Draft:
    """What a proposer suggests for the next step of each request.

    A draft of a request is a chain, or a tree when ``parents`` is given.
    """

    token_ids: Tensor
    """int64 [N]: the draft tokens of all requests, one request after another."""
    num_draft_tokens: Tensor
    """int32 [B]: how many of them belong to each request; sums to N."""
    parents: Tensor | None = None
    """int32 [N] for trees: index of the parent among the request's own nodes, -1 for the last committed token;
    parents come before children. None for chains."""
    draft_probs: Tensor | None = None
    """float32 [N, V]: the law each token was really drawn from, or None when the choice was deterministic.

    Where a draft ends may depend on the tokens before, never on the last one or on what would have followed: a draft
    that is kept for its tokens, cut for them or preferred to another one for them was not drawn from these laws."""
    confidence: Tensor | None = None
    """float32 [N]: the proposer's own estimate of acceptance, or None."""


@frozen(eq=False, kw_only=True)
class RequestInfo:
    """What a proposer learns about a request when it starts (`Proposer.start`)."""

    request_id: str
    """Unique among the running requests; an ended one's may come again."""
    prompt_token_ids: np.ndarray
    """int64 [prompt length], read-only."""
    sampling: SamplingParams
    """What the request asks of its sampling."""
    seed: int
    """The 64-bit seed of the request's noise (`specdec.sampling.noise`)."""
    speculation: RequestSpeculation | None = None
    """What the request asks of its speculation. ``max_draft_tokens`` respects it already; a proposer made of several
    reads ``speculation.method``."""


@frozen(eq=False, kw_only=True)
class DraftOutcome:
    """What became of the drafts that a step verified (`Proposer.record`), requests that ended in it included."""

    request_ids: tuple[str, ...]
    """The requests whose draft was verified, in no particular order. A draft that was dropped before its step (no room,
    preemption) is not mentioned."""
    num_draft_tokens: np.ndarray
    """int32 [B]: verified draft tokens, at least 1; fewer than proposed where the scheduler cut the draft."""
    num_accepted_tokens: np.ndarray
    """int32 [B]: of these, kept in the output; for trees the length of the accepted path."""
    parents: tuple[Sequence[int] | None, ...]
    """Of each request's verified tree its parents as in `Draft`, None for a chain."""


@frozen(eq=False, kw_only=True)
class PackedBatch:
    """The input of one target forward pass: T tokens of B requests, packed."""

    input_ids: Tensor
    """int64 [T]."""
    positions: Tensor
    """int64 [T]: index of each token in its sequence (for trees: committed length + depth)."""
    slot_mapping: Tensor
    """int64 [T]: where each token's K/V goes, ``block_id * block_size + offset``."""
    query_start_loc: Tensor
    """int32 [B + 1]: prefix sums of the query lengths."""
    seq_lens: Tensor
    """int32 [B]: K/V entries each request has once this batch is written."""
    block_tables: Tensor
    """int32 [B, blocks]: the requests' block ids; wide enough for ``max_seq_len`` and the lookahead slots. Entries past
    a request's own blocks mean nothing."""
    logits_indices: Tensor
    """int64 [R]: which of the T tokens need logits."""
    max_query_len: int
    """The most tokens of one request in this batch."""
    max_seq_len: int
    """The largest of ``seq_lens``."""
    parents: Tensor | None = None
    """int32 [T] for trees: parent of each token among the request's own tokens of this batch, -1 for one that follows
    what was cached before: the first one, and others where a head grows a tree. None when every request is a chain or
    a prefill chunk."""
    cached_parents: Tensor | None = None
    """int32 [B, N] for trees that earlier batches have begun: the last N tokens that each request had cached are nodes,
    and these are their parents, counted as above among themselves. ``parents`` then count these nodes first: index N is
    a request's first token of this batch. The position of a cached node is that of its depth: a root's is the number
    of tokens cached before the nodes."""


@frozen(eq=False, kw_only=True)
class TargetOutput:
    """What the target model returns for a `PackedBatch`."""

    logits: Tensor
    """[R, V] in the model's dtype, raw."""
    hidden_states: Tensor | None = None
    """[T, H] final hidden states (after the last norm), when a proposer needs them."""
    aux_hidden_states: tuple[Tensor, ...] | None = None
    """one [T, H] per tapped layer, in the order asked for."""


@frozen(eq=False, kw_only=True)
class ComputedStep:
    """The target's last step as a proposer sees it after commit, with B' requests: all that were in it.

    These are the requests that sampled, those that computed a prefill chunk, and those that ended in this step. An
    ended request's blocks have been released, but nothing writes to them before the next step is scheduled; until then
    they may be found by their block tables, as the cached blocks that other requests will share.

    "Kept" are the tokens of ``batch`` that are part of the text now: known tokens (prefill, the last committed token)
    and accepted draft tokens. In a tree these are the nodes of the accepted path, whose slots in ``batch`` are not
    those of their positions: K/V of position p belongs into slot
    ``block_tables[r, p // block_size] * block_size + p % block_size``.
    """

    batch: PackedBatch
    """The batch that was run. Its block tables reach over the lookahead slots of requests that sampled."""
    target: TargetOutput
    """The target's output for ``batch``."""
    request_ids: tuple[str, ...]
    """The B' requests, in the order of ``batch``."""
    token_ids: tuple[np.ndarray, ...]
    """int64 [n_r] per request, read-only views: prompt and output, this step's tokens included."""
    num_computed: np.ndarray
    """int32 [B']: leading positions of each request with valid K/V of the target."""
    first_position: np.ndarray
    """int32 [B']: the first position that this step computed. A new request's is above 0 when cached blocks hold its
    beginning."""
    num_preemptions: np.ndarray
    """int32 [B']: how often the request has been preempted; when it has grown, the request has other blocks."""
    kept: np.ndarray
    """int64 [K]: indices into the T tokens of ``batch`` of those that are kept, request after request, by position: for
    request r positions ``first_position[r]`` to ``num_computed[r] - 1``."""
    kept_start: np.ndarray
    """int32 [B' + 1]: request r has ``kept[kept_start[r] : kept_start[r + 1]]``."""
    samples: np.ndarray
    """bool [B']: whether the request emitted tokens (a prefill chunk but the last does not)."""
    finished: np.ndarray
    """bool [B']: whether it ended in this step."""


@frozen(eq=False, kw_only=True)
class ProposalInput:
    """What a proposer sees once per step, after commit: the requests that can take a draft."""

    request_ids: tuple[str, ...]
    """The B requests; the fields below have an entry for each, in this order."""
    token_ids: tuple[np.ndarray, ...]
    """int64 [n_r] per request, read-only views: prompt and output committed so far."""
    max_draft_tokens: np.ndarray
    """int32 [B]: the most tokens each request can use, of trees the most nodes; a longer draft breaks the contract.
    Nodes that are deeper than the text may still grow are left out when the draft comes."""
    sampling: tuple[SamplingParams, ...] = ()
    """What each request asks of its sampling."""
    seeds: tuple[int, ...] = ()
    """The 64-bit seed of each request's noise."""
    computed: ComputedStep | None = None
    """What the target computed in the step just committed; present when the proposer needs every step, hidden states or
    tapped layers."""
    token_pointers: np.ndarray | None = None
    """int64 [B]: address of the first of each request's `token_ids`, when the engine knows it without asking NumPy."""
    num_tokens: np.ndarray | None = None
    """int64 [B]: the lengths of `token_ids`; given together with ``token_pointers``."""
    step_seconds: float | None = None
    """Wall time of the step just committed, without drafting, for proposers that weigh what drafting costs; None when
    it also held prompt tokens and so is not what a decoding step takes."""

    def token_buffers(self) -> tuple[np.ndarray, np.ndarray]:
        """Addresses and lengths of `token_ids`, for compiled code that serves all requests in one call.

        Returns:
            int64 [B] addresses, each of that many contiguous int64 tokens, and int64 [B] lengths. The addresses are
            valid while this value lives and must only be read from.

        Raises:
            TypeError: an entry of `token_ids` is not a contiguous int64 array.
        """
        if self.token_pointers is not None and self.num_tokens is not None:
            return self.token_pointers, self.num_tokens
        import numpy as np

        kind = np.dtype(np.int64).str
        pointers = np.empty(len(self.token_ids), dtype=np.int64)
        for i, tokens in enumerate(self.token_ids):
            memory = tokens.__array_interface__
            if memory["typestr"] != kind or memory["strides"] is not None:
                raise TypeError(f"token_ids must be contiguous int64 arrays, not {tokens.dtype} {tokens.strides}")
            pointers[i] = memory["data"][0]
        return pointers, np.array([len(tokens) for tokens in self.token_ids], dtype=np.int64)


@frozen(eq=False, kw_only=True)
class Rows:
    """The logits rows of a verify step: request r owns rows ``row_start[r] .. row_start[r + 1] - 1``.

    The first row of a request follows its last committed token; row i follows draft token i - 1 (for trees: node
    i - 1). A request without a draft has one row.
    """

    logits: Tensor
    """[R, V]: processed logits, float32, or the model's dtype when no option changed them. They are not divided by the
    temperature: the law of a row is ``softmax(logits / temperature)``, and the argmax at temperature 0."""
    row_start: Tensor
    """int32 [B + 1]."""
    request_index: Tensor
    """int64 [R]: which request each row belongs to."""
    positions: Tensor
    """int64 [R]: the sequence position of the token that the row chooses."""
    num_requests: int
    """B."""
    max_draft_tokens: int | None = None
    """The most draft tokens of any request, for shapes needed without asking the device; None: not known."""


@frozen(eq=False, kw_only=True)
class Verdict:
    """What a verifier decided: 1 to k + 1 tokens per request."""

    token_ids: Tensor
    """int64 [B, K + 1]: the accepted draft tokens and the recovered or bonus token, padded with -1. In place of the
    last one a code of `specdec.sampling.outcome` (below -1) says that its row gave no token."""
    num_tokens: Tensor
    """int32 [B]: how many of them count; accepted draft tokens + 1."""
    accepted_nodes: Tensor | None = None
    """int32 [B, K] for trees: the accepted path as node indices, padded with -1; None for chains."""


@frozen(kw_only=True)
class Needs:
    """What a proposer must be given, so that nothing is captured in vain."""

    hidden_states: bool = False
    """The target's final hidden states, in ``ProposalInput.computed.target``. The texts of the requests are always
    given."""
    every_step: bool = False
    """`Proposer.propose` is also called after steps in which no request can take a draft (B = 0), and every request is
    started before it is first computed: for proposers whose own K/V or state follows all tokens."""
    lookahead_slots: int = 0
    """KV slots beyond the scheduled tokens that the proposer writes to while it drafts. Of a request for which they
    could not be reserved no draft is asked."""
    next_token: bool = False
    """The proposer's K/V of a position also depends on the token after it (EAGLE): a request that shares cached blocks
    computes the last of them again, because another token may follow there."""
    aux_layers: tuple[int, ...] = ()
    """Indices of decoder layers whose output hidden states are tapped."""

    @property
    def follows_target(self) -> bool:
        """Whether the proposer is given what the target computed, `ProposalInput.computed`."""
        return self.every_step or self.hidden_states or bool(self.aux_layers)


@frozen(kw_only=True)
class ProposerCapabilities:
    """What a proposer can return; the engine pairs it with a verifier accordingly."""

    trees: bool = False
    """Whether drafts may have `Draft.parents`; the engine then takes a verifier and an attention backend for trees."""
    draft_probs: bool = False
    """Whether drafts bring `Draft.draft_probs`; a verifier that needs them refuses a proposer without."""
    max_draft_tokens: int | None = None
    """The most tokens that a draft can have, where what was loaded sets a limit (one token for each of its heads). A
    larger ``num_speculative_tokens`` is an error; where that is not set, it is the limit. None: no limit."""
    keeps_finished_requests: bool = False
    """Whether memory stays in use for what completed requests have left (`Proposer.complete`)."""


DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic", "coupled")
"""How a model-based proposer picks its draft tokens: the values of the option `draft_sample_method`; see
`specdec.drafting.sampling.DraftSampler`."""
DEFAULT_DRAFT_SAMPLE_METHOD = "coupled"
"""For every method: the verifier `match`, the default, keeps at temperature above 0 what agrees with its own draw, and
draws with the same noise agree most often. At temperature 0 all are greedy."""


@frozen(kw_only=True)
class AttentionLayer:
    """One attention layer of the target, as seen by a backend."""

    index: int
    """Which of ``AttentionRequirements.layers`` and ``KVCache.layers``."""
    num_heads: int
    """Query heads; a multiple of ``num_kv_heads``, that many of which share a head of keys and values."""
    num_kv_heads: int
    """Heads of keys and values."""
    head_dim: int
    """Width of queries and keys."""
    v_head_dim: int
    """Width of values and of the output."""
    scaling: float
    """Factor on the scores."""
    sliding_window: int | None = None
    """A token attends to itself and the ``sliding_window - 1`` tokens before it."""
    chunk_size: int | None = None
    """Chunked attention (llama4): a token attends within its chunk of this many positions."""
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: bool = False
    """Attention sinks: one learned logit per head joins the softmax denominator."""


@frozen(kw_only=True)
class AttentionRequirements:
    """What an attention backend must be able to do for this engine."""

    layers: tuple[AttentionLayer, ...]
    """Every layer of the target."""
    dtype: str
    """'float32', 'bfloat16' or 'float16'."""
    device: str
    """'cpu', 'cuda', …: the device type."""
    block_size: int
    """Tokens of a KV block."""
    trees: bool = False
    """Whether drafts may be trees (`PackedBatch.parents`), because the proposer declares them."""


@frozen(kw_only=True)
class Identification:
    """A proposer's answer to `identify`: this checkpoint directory is mine."""

    method: str
    reason: str
    """What in the checkpoint says so, for the log and for error messages."""
    language_model: bool = False
    """Whether it holds a whole language model as well, so that it can be a target too."""


@frozen(eq=False, kw_only=True)
class TargetInfo:
    """Facts about the target model that plugins may rely on."""

    model: str
    """As the user named it."""
    model_type: str
    """`config.model_type` of the text part, for example 'llama'."""
    path: Path | None
    """The checkpoint directory, when there is one."""
    hf_config: Any
    """The transformers configuration of the text part."""
    vocab_size: int
    """Width of the logits."""
    hidden_size: int
    """Width of hidden states."""
    num_layers: int
    """Decoder layers."""
    max_position_embeddings: int
    """The longest text that the model takes."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an output; empty until the target is loaded."""


@frozen(eq=False, kw_only=True)
class EngineContext:
    """What the factories behind hooks learn about the engine that is starting."""

    target_info: TargetInfo
    """Facts about the target."""
    device: str
    """Device type of the target: 'cpu', 'cuda', …"""
    dtype: str
    """Of the target's weights. Before the target is loaded: as its configuration says, float32 where it says
    nothing."""
    max_model_len: int
    """The longest text of a request; for the factory of a proposer with K/V of its own an upper bound of it."""
    max_num_seqs: int
    """The most requests of one step."""
    num_speculative_tokens: int
    """The most draft tokens of a request and step (k); 0 when speculation is off."""
    block_size: int
    """Tokens of a KV block."""
    seed: int
    """Of the engine; requests have seeds of their own."""
    target: Any = None
    """The loaded target (`specdec.target.model.TargetModel`); None until it is loaded."""
    tokenizer: Any = None
    """The target's tokenizer (of transformers); None until the target is loaded, and for a target without one."""
    settings: Mapping[str, Any] = field(factory=dict)
    """The whole effective configuration as plain values, read-only."""
    registry: Registry | None = None
    """The engine's plugins, for a factory that builds others: a proposer made of proposers
    (``registry.plugin_config("proposer", name, options)``, then ``registry.create("proposer", name, "propose",
    config=..., engine=...)``) or one that runs heads (``registry.create("head", "eagle3.llama", "draft_head", ...)``).
    Call it in factories only; None where a factory runs without an engine."""


@frozen(kw_only=True)
class SpecStats:
    """Speculation of one request, or of an engine since its start."""

    num_drafts: int = 0
    """Drafts that were verified; one request in one step has at most one."""
    num_draft_tokens: int = 0
    """Draft tokens verified."""
    num_accepted_tokens: int = 0
    """Draft tokens kept."""
    num_accepted_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens kept at each draft position; of trees at each depth."""
    num_draft_tokens_per_pos: tuple[int, ...] = ()
    """Draft tokens verified at each draft position; of trees at each depth."""
    num_grammar_forced_tokens: int = 0
    """Tokens that the engine added behind drafts because a grammar left one continuation, verified. They are none of
    the counts above."""
    num_grammar_accepted_tokens: int = 0
    """Of these, tokens kept."""

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted, 0 when nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per verify step with a draft; includes the recovered or bonus token. 1.0 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def acceptance_rate_per_pos(self) -> tuple[float, ...]:
        """Accepted at draft position i / drafts (unconditional)."""
        if not self.num_drafts:
            return tuple(0.0 for _ in self.num_accepted_tokens_per_pos)
        return tuple(n / self.num_drafts for n in self.num_accepted_tokens_per_pos)
