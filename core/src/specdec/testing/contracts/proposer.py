"""The contract of `specdec.drafting.Proposer`."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
import numpy as np
import pytest
import torch

from specdec.sampling.params import SamplingParams
from specdec.testing.contracts.base import PluginContract
from specdec.testing.holders import reaches_string
from specdec.types import ComputedStep, Draft, PackedBatch, ProposalInput, RequestInfo, TargetOutput

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from specdec.drafting.base import Proposer
    from specdec.types import ProposerCapabilities


class ProposerContract(PluginContract):
    """What every proposer must hold to. A subclass gives the fixture `proposer`, a proposer that is ready to draft.

    A proposer that follows every step is given hidden states and logits that are random and depend on the tokens alone;
    override `proposal_input` when it needs more than that. Before drafts are compared it is shown the texts once, so
    that what it learns of them for all requests is settled.
    """

    vocab_size: ClassVar[int] = 64
    """Ids in the texts, and in drafts, lie below this."""
    num_speculative_tokens: ClassVar[int] = 4
    """The limit the proposer was built for."""
    max_model_len: ClassVar[int] = 128
    hidden_size: ClassVar[int] = 32
    block_size: ClassVar[int] = 4
    num_blocks: ClassVar[int] = 2048
    """Blocks that exist for proposers with K/V of their own; see `block_table`."""
    shortest_text: ClassVar[int] = 1
    """Set it to 2 for a proposer that is given the computed step: the newest token of a text is never computed, and at
    least one is."""

    @pytest.fixture
    def proposer(self) -> Proposer:
        """The proposer to check, loaded."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'proposer'")

    # --- what a step looks like -------------------------------------------------------------------

    def sampling_params(self) -> SamplingParams:
        """Parameters of every request."""
        return SamplingParams(temperature=0.0, max_tokens=64)

    def proposal_input(
        self, proposer: Proposer, texts: Mapping[str, np.ndarray], limits: Sequence[int], fresh: Mapping[str, int]
    ) -> ProposalInput:
        """What the proposer sees in one step.

        Args:
            proposer: its ``needs`` decide what is given.
            texts: committed tokens by request id, read-only.
            limits: the most draft tokens of each request.
            fresh: how many of each request's last tokens the proposer has not seen yet.
        """
        needs, computed = proposer.needs, None
        if needs.follows_target:
            computed = self._computed_step(proposer, texts, fresh)
        max_draft_tokens = np.array(limits, dtype=np.int32)
        max_draft_tokens.flags.writeable = False
        return ProposalInput(
            request_ids=tuple(texts),
            token_ids=tuple(texts.values()),
            max_draft_tokens=max_draft_tokens,
            sampling=tuple(self.sampling_params() for _ in texts),
            seeds=tuple(_seed_of(request_id) for request_id in texts),
            computed=computed,
        )

    def _computed_step(
        self, proposer: Proposer, texts: Mapping[str, np.ndarray], fresh: Mapping[str, int]
    ) -> ComputedStep:
        """The step that computed each text up to its newest token, from where an earlier one had left it.

        Request i of the contract's lifetime owns its own run of blocks; see `block_table`.
        """
        ends = np.array([len(text) - 1 for text in texts.values()], dtype=np.int32)
        starts = np.array([max(0, len(text) - fresh[name] - 1) for name, text in texts.items()], dtype=np.int32)
        spans = [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        empty = np.empty(0, dtype=np.int64)
        rows = [text[span] for text, span in zip(texts.values(), spans, strict=True)]
        tokens = torch.from_numpy(np.concatenate([*rows, empty]))
        positions = np.concatenate([*spans, empty])
        lengths = ends - starts
        offsets = np.cumsum([0, *lengths]).astype(np.int32)
        tables = np.stack([self.block_table(name) for name in texts] or [np.empty(0, dtype=np.int32)])
        owners = np.repeat(np.arange(len(texts)), lengths)
        slots = tables[owners, positions // self.block_size].astype(np.int64) * self.block_size
        batch = PackedBatch(
            input_ids=tokens,
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots + positions % self.block_size),
            query_start_loc=torch.from_numpy(offsets),
            seq_lens=torch.from_numpy(ends),
            block_tables=torch.from_numpy(tables),
            logits_indices=torch.arange(len(tokens)),
            max_query_len=int(lengths.max(initial=0)),
            max_seq_len=int(ends.max(initial=0)),
        )
        return ComputedStep(
            batch=batch,
            target=self._target_output(proposer, tokens),
            request_ids=tuple(texts),
            token_ids=tuple(texts.values()),
            num_computed=ends,
            first_position=starts,
            num_preemptions=np.zeros(len(texts), dtype=np.int32),
            kept=np.arange(len(tokens)),
            kept_start=offsets,
            samples=np.ones(len(texts), dtype=bool),
            finished=np.zeros(len(texts), dtype=bool),
        )

    def _target_output(self, proposer: Proposer, tokens: torch.Tensor) -> TargetOutput:
        """Random hidden states and logits, which depend on the tokens alone."""
        needs = proposer.needs
        generator = torch.Generator().manual_seed(7)
        tables = torch.randn(1 + len(needs.aux_layers), self.vocab_size, self.hidden_size, generator=generator)
        hidden = [table[tokens] for table in tables]
        return TargetOutput(
            logits=torch.randn(self.vocab_size, self.vocab_size, generator=generator)[tokens],
            hidden_states=hidden[0] if needs.hidden_states else None,
            aux_hidden_states=tuple(hidden[1:]) if needs.aux_layers else None,
        )

    def block_table(self, request_id: str) -> np.ndarray:
        """int32: the blocks of a request, enough for ``max_model_len`` and the lookahead; all ids lie below
        ``num_blocks``."""
        known: dict[str, int] = self.__dict__.setdefault("_blocks_of", {})
        index = known.setdefault(request_id, len(known))
        width = -(-(self.max_model_len + self.num_speculative_tokens + 1) // self.block_size)
        assert (index + 1) * width <= self.num_blocks, "num_blocks is too small for the contract's requests"
        return np.arange(index * width, (index + 1) * width, dtype=np.int32)[::-1].copy()

    def start(self, proposer: Proposer, request_id: str, prompt: np.ndarray) -> None:
        """Begin a request."""
        proposer.start(
            RequestInfo(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=self.sampling_params(),
                seed=_seed_of(request_id),
            )
        )

    def step(
        self,
        proposer: Proposer,
        texts: Mapping[str, np.ndarray],
        limits: Sequence[int] | None = None,
        seen: Mapping[str, int] | None = None,
    ) -> Draft:
        """Ask for a draft and check its form.

        Args:
            proposer: asked.
            texts: committed tokens by request id.
            limits: the most draft tokens of each request; all ``num_speculative_tokens`` when absent.
            seen: how many of a request's tokens earlier steps have shown; 0 when absent.
        """
        seen = seen or {}
        limits = [self.num_speculative_tokens] * len(texts) if limits is None else limits
        fresh = {request_id: len(text) - seen.get(request_id, 0) for request_id, text in texts.items()}
        batch = self.proposal_input(proposer, texts, limits, fresh)
        draft = self._timed(proposer, batch)
        check_draft(draft, batch, self.vocab_size, proposer.capabilities)
        return draft

    def _timed(self, proposer: Proposer, batch: ProposalInput) -> Draft:
        begin = time.perf_counter()
        draft = proposer.propose(batch)
        self.note_time(time.perf_counter() - begin)
        return draft

    def note_time(self, seconds: float) -> None:
        """Told how long a call of `propose` took, for a report: nothing is asserted about times."""

    def draft_alone(self, proposer: Proposer, request_id: str, text: np.ndarray, limit: int | None = None) -> Draft:
        """The draft of a request that starts, is asked once, alone, and ends."""
        self.start(proposer, request_id, text)
        draft = self.step(proposer, {request_id: text}, None if limit is None else [limit])
        proposer.finish(request_id)
        return draft

    def texts(self, count: int) -> dict[str, np.ndarray]:
        """Requests of several lengths and kinds: random, repeating, one token long."""
        rng = np.random.default_rng(count)
        texts = {}
        for i in range(count):
            length = int(rng.integers(2, self.max_model_len // 2))
            text = rng.integers(0, self.vocab_size, length)
            if i % 3 == 1:
                text = np.resize(text[: 1 + length // 4], length)
            texts[f"contract-{i}"] = _frozen(text[: self.shortest_text] if i % 5 == 4 else text)
        return texts

    def _settled(self, proposer: Proposer, texts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Texts of which a proposer that follows every step has learned what they teach."""
        if proposer.needs.every_step:
            for text in texts.values():
                self.draft_alone(proposer, "contract-settling", text)
        return texts

    # --- checks -----------------------------------------------------------------------------------

    def test_empty_batch(self, proposer: Proposer) -> None:
        """No request, no draft."""
        self.step(proposer, {})

    def test_well_formed(self, proposer: Proposer) -> None:
        """Shapes, dtypes, counts, ids, parents and probabilities of a batch of many kinds of text."""
        texts = self.texts(8)
        for request_id, text in texts.items():
            self.start(proposer, request_id, text)
        self.step(proposer, texts)

    @pytest.mark.parametrize("limits", [[0, 0, 0], [0, 1, 2], [4, 0, 1], [1, 1, 1]])
    def test_limits(self, proposer: Proposer, limits: list[int]) -> None:
        """A draft is never longer than its request's limit, which changes from step to step and may be 0."""
        limits = [min(limit, self.num_speculative_tokens) for limit in limits]
        texts = self.texts(3)
        for request_id, text in texts.items():
            self.start(proposer, request_id, text)
        self.step(proposer, texts, limits)
        self.step(proposer, _grown(texts, 1), limits[::-1], {key: len(text) for key, text in texts.items()})

    def test_one_token_prompt(self, proposer: Proposer) -> None:
        """The shortest text can be drafted for."""
        self.draft_alone(proposer, "contract-one", _frozen(np.array([3, 5][: self.shortest_text])))

    def test_near_the_length_limit(self, proposer: Proposer) -> None:
        """A text that almost fills the model's length is drafted for within what is left."""
        rng = np.random.default_rng(1)
        for left in (1, 2):
            text = _frozen(np.resize(rng.integers(0, self.vocab_size, 5), self.max_model_len - left))
            self.draft_alone(proposer, f"contract-{left}-left", text, left - 1)

    def test_inputs_unchanged(self, proposer: Proposer) -> None:
        """Texts, limits and the target's tensors are only read."""
        texts = self.texts(4)
        for request_id, text in texts.items():
            self.start(proposer, request_id, text)
        fresh = {request_id: len(text) for request_id, text in texts.items()}
        batch = self.proposal_input(proposer, texts, [self.num_speculative_tokens] * 4, fresh)
        before = _snapshot(batch)
        self._timed(proposer, batch)
        after = _snapshot(batch)
        assert before.keys() == after.keys()
        changed = [name for name in before if not np.array_equal(before[name], after[name])]
        assert not changed, f"propose() changed {', '.join(changed)}"

    def test_same_input_same_draft(self, proposer: Proposer) -> None:
        """A request that is served again from the start gets the same draft."""
        for request_id, text in self._settled(proposer, self.texts(6)).items():
            first = self.draft_alone(proposer, request_id, text)
            _assert_same(first, self.draft_alone(proposer, request_id, text), request_id)

    def test_neighbours_do_not_matter(self, proposer: Proposer) -> None:
        """A batch of n gives what n batches of one give, in any order."""
        texts = self._settled(proposer, self.texts(7))
        alone = {request_id: self.draft_alone(proposer, request_id, text) for request_id, text in texts.items()}
        for order in (list(texts), list(texts)[::-1]):
            batch = {request_id: texts[request_id] for request_id in order}
            for request_id, text in batch.items():
                self.start(proposer, request_id, text)
            together = split_by_request(self.step(proposer, batch))
            for request_id, draft in zip(order, together, strict=True):
                _assert_same(alone[request_id], draft, f"{request_id} in a batch of {len(order)}")
                proposer.finish(request_id)

    def test_growing_text(self, proposer: Proposer) -> None:
        """Seen token by token, a text gets the same draft as seen at once."""
        full = self._settled(proposer, self.texts(5))
        seen = {request_id: max(1, len(text) // 2) for request_id, text in full.items()}
        for request_id, text in full.items():
            self.start(proposer, request_id, text[: seen[request_id]])
        shown: dict[str, int] = {}
        last: dict[str, Draft] = {}
        for gain in itertools.chain([0], itertools.cycle((1, 3, 1, self.num_speculative_tokens + 1))):
            now = {key: text[: seen[key] + gain] for key, text in full.items() if shown.get(key) != len(text)}
            if not now:
                break
            last |= zip(now, split_by_request(self.step(proposer, now, None, shown)), strict=True)
            seen |= {key: len(text) for key, text in now.items()}
            shown |= seen
        for request_id in full:
            proposer.finish(request_id)
        for request_id, text in full.items():
            _assert_same(self.draft_alone(proposer, request_id, text), last[request_id], request_id)

    def test_absent_requests(self, proposer: Proposer) -> None:
        """A request may be left out of some steps (it was preempted, or had no room for a draft) and come back."""
        texts = self._settled(proposer, self.texts(3))
        first, *others = texts
        for request_id, text in texts.items():
            self.start(proposer, request_id, text)
        self.step(proposer, texts)
        shown = {request_id: len(text) for request_id, text in texts.items()}
        later = _grown(texts, 4)
        self.step(proposer, {request_id: later[request_id] for request_id in others}, None, shown)
        draft = self.step(proposer, {first: later[first]}, None, shown)
        for request_id in texts:
            proposer.finish(request_id)
        _assert_same(self.draft_alone(proposer, first, later[first]), draft, first)

    def test_request_id_used_again(self, proposer: Proposer) -> None:
        """A request that has an ended one's id has nothing else of it."""
        first, second = list(self._settled(proposer, self.texts(3)).values())[1:]
        self.draft_alone(proposer, "contract-again", first)
        again = self.draft_alone(proposer, "contract-again", second)
        _assert_same(self.draft_alone(proposer, "contract-again#other", second), again, "contract-again")

    def test_start_then_finish(self, proposer: Proposer) -> None:
        """A request may end before the first draft is asked for."""
        self.start(proposer, "contract-short", _frozen(np.array([1, 2, 3])))
        proposer.finish("contract-short")

    def test_nothing_kept_after_finish(self, proposer: Proposer) -> None:
        """When requests end, the memory they took and all mention of them go."""
        before = dict(proposer.memory())
        texts = self.texts(6)
        for request_id, text in texts.items():
            self.start(proposer, request_id, text)
        self.step(proposer, texts)
        for request_id in texts:
            proposer.finish(request_id)
        assert dict(proposer.memory()) == before
        kept = [request_id for request_id in texts if reaches_string(proposer, request_id)]
        assert not kept, f"the proposer still refers to ended requests {kept}"

    def test_completed_requests(self, proposer: Proposer) -> None:
        """What completed requests leave is declared, refers to none of them, and later drafts are well-formed."""
        before = dict(proposer.memory())
        texts = self.texts(6)
        for request_id, text in texts.items():
            self.start(proposer, request_id, text[: len(text) // 2])
        self.step(proposer, texts)
        for request_id, text in texts.items():
            proposer.complete(request_id, _grown({request_id: text}, 1)[request_id])
            proposer.finish(request_id)
        if not proposer.capabilities.keeps_finished_requests:
            assert dict(proposer.memory()) == before, "capabilities.keeps_finished_requests is False"
        kept = [request_id for request_id in texts if reaches_string(proposer, request_id)]
        assert not kept, f"the proposer still refers to completed requests {kept}"
        for request_id, text in texts.items():
            self.draft_alone(proposer, f"{request_id}#again", text)

    def test_memory_is_reported(self, proposer: Proposer) -> None:
        """`memory` maps purposes to bytes, also while requests run."""
        texts = self.texts(3)
        for request_id, text in texts.items():
            self.start(proposer, request_id, text)
        self.step(proposer, texts)
        for purpose, size in proposer.memory().items():
            assert isinstance(purpose, str)
            assert isinstance(size, int)
            assert size >= 0

    def test_close(self, proposer: Proposer) -> None:
        """An engine may stop while requests run."""
        self.start(proposer, "contract-open", _frozen(np.array([1, 2, 1, 2])))
        proposer.close()


def check_draft(draft: Any, batch: ProposalInput, vocab_size: int, capabilities: ProposerCapabilities) -> None:
    """Assert that a draft has the form that `Proposer.propose` promises for this input."""
    assert isinstance(draft, Draft), f"propose() returned {type(draft).__name__}, not a Draft"
    _check_tensor("token_ids", draft.token_ids, torch.int64, 1)
    _check_tensor("num_draft_tokens", draft.num_draft_tokens, torch.int32, 1)
    counts, tokens = draft.num_draft_tokens.tolist(), draft.token_ids.tolist()
    limits = batch.max_draft_tokens.tolist()
    assert len(counts) == len(batch.request_ids), f"{len(counts)} counts for {len(batch.request_ids)} requests"
    assert all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True)), (
        f"num_draft_tokens {counts} exceeds max_draft_tokens {limits}"
    )
    assert sum(counts) == len(tokens), f"num_draft_tokens sums to {sum(counts)} for {len(tokens)} token_ids"
    assert all(0 <= token < vocab_size for token in tokens), f"token_ids leave the vocabulary of {vocab_size}"
    _check_parents(draft, counts, capabilities)
    _check_probs(draft, vocab_size, capabilities)
    if draft.confidence is not None:
        _check_tensor("confidence", draft.confidence, torch.float32, 1)
        assert len(draft.confidence) == len(tokens)


def _check_tensor(name: str, value: Any, dtype: torch.dtype, dimensions: int) -> None:
    assert isinstance(value, torch.Tensor), f"{name} is a {type(value).__name__}, not a tensor"
    assert value.dtype == dtype, f"{name} is {value.dtype}, not {dtype}"
    assert value.dim() == dimensions, f"{name} has shape {list(value.shape)}"


def _check_parents(draft: Draft, counts: list[int], capabilities: ProposerCapabilities) -> None:
    if draft.parents is None:
        return
    assert capabilities.trees, "the draft has parents, but capabilities.trees is False"
    _check_tensor("parents", draft.parents, torch.int32, 1)
    assert len(draft.parents) == sum(counts), f"{len(draft.parents)} parents for {sum(counts)} nodes"
    for row in torch.split(draft.parents, counts):
        assert all(-1 <= parent < node for node, parent in enumerate(row.tolist())), f"parents {row.tolist()}"


def _check_probs(draft: Draft, vocab_size: int, capabilities: ProposerCapabilities) -> None:
    probs = draft.draft_probs
    if probs is None:
        return
    assert capabilities.draft_probs, "the draft has draft_probs, but capabilities.draft_probs is False"
    _check_tensor("draft_probs", probs, torch.float32, 2)
    assert probs.shape == (len(draft.token_ids), vocab_size), f"draft_probs has shape {list(probs.shape)}"
    assert bool((probs >= 0).all()), "draft_probs has negative or NaN entries"
    torch.testing.assert_close(probs.sum(-1), torch.ones(len(probs)), rtol=0, atol=1e-4)
    drawn = probs.gather(1, draft.token_ids[:, None])
    assert bool((drawn > 0).all()), "a drafted token has probability 0 in draft_probs"


def split_by_request(draft: Draft) -> list[Draft]:
    """A draft of B requests as B drafts of one request."""
    counts = draft.num_draft_tokens.tolist()

    def split(value: torch.Tensor | None) -> list[Any]:
        return [None] * len(counts) if value is None else list(torch.split(value, counts))

    parts = zip(
        split(draft.token_ids), split(draft.parents), split(draft.draft_probs), split(draft.confidence), strict=True
    )
    return [
        Draft(
            token_ids=tokens,
            num_draft_tokens=torch.tensor([len(tokens)], dtype=torch.int32),
            parents=parents,
            draft_probs=probs,
            confidence=confidence,
        )
        for tokens, parents, probs, confidence in parts
    ]


def _assert_same(expected: Draft, got: Draft, what: str) -> None:
    assert got.token_ids.tolist() == expected.token_ids.tolist(), f"another draft for {what}"
    parents = [None if draft.parents is None else draft.parents.tolist() for draft in (expected, got)]
    assert parents[0] == parents[1], f"other parents for {what}"
    if not len(got.token_ids):
        return  # the form of nothing does not matter
    assert (got.draft_probs is None) == (expected.draft_probs is None)
    if got.draft_probs is not None and expected.draft_probs is not None:
        torch.testing.assert_close(got.draft_probs, expected.draft_probs, rtol=1e-4, atol=1e-5)


def _frozen(tokens: np.ndarray) -> np.ndarray:
    copy = np.array(tokens, dtype=np.int64)
    copy.flags.writeable = False
    return copy


def _grown(texts: Mapping[str, np.ndarray], gain: int) -> dict[str, np.ndarray]:
    """Each text with ``gain`` tokens of its own beginning appended."""
    return {key: _frozen(np.concatenate([text, np.resize(text, gain)])) for key, text in texts.items()}


def _seed_of(request_id: str) -> int:
    """A seed for the request; what follows a # in its id plays no part."""
    return sum(byte << (8 * (i % 7)) for i, byte in enumerate(request_id.partition("#")[0].encode()))


def _snapshot(batch: ProposalInput) -> dict[str, np.ndarray]:
    """Copies of every array and tensor of a proposal input, by name."""
    values: dict[str, Any] = {"max_draft_tokens": batch.max_draft_tokens}
    values |= {f"token_ids[{i}]": tokens for i, tokens in enumerate(batch.token_ids)}
    if batch.computed is not None:
        for part in (batch.computed, batch.computed.batch, batch.computed.target):
            values |= attrs.asdict(part, recurse=False)
    for i, hidden in enumerate(values.pop("aux_hidden_states", None) or ()):
        values[f"aux_hidden_states[{i}]"] = hidden
    values = {name: value.numpy() if isinstance(value, torch.Tensor) else value for name, value in values.items()}
    return {name: value.copy() for name, value in values.items() if isinstance(value, np.ndarray)}
