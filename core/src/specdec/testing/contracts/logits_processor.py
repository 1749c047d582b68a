"""The contract of `specdec.sampling.processor.LogitsProcessor`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pytest
import torch

from specdec.sampling.batch import RowLayout, SamplingBatch
from specdec.sampling.params import SamplingParams
from specdec.sampling.processor import ProcessorRows
from specdec.sampling.rows import StepRows
from specdec.testing.contracts.base import PluginContract
from specdec.testing.contracts.verifier import FakeRequest
from specdec.testing.holders import reaches_string
from specdec.types import Draft

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.sampling.processor import LogitsProcessor

DRAFTS: tuple[list[int], ...] = ([3, 3, 8, 1], [], [5], [9, 3, 3])
"""Draft tokens of each request of a step."""
TREE = [-1, -1, 0, 0, 2, 1]
"""Parents of a draft with branches."""


class LogitsProcessorContract(PluginContract):
    """What every logits processor must hold to. A subclass gives the fixture `processor`.

    Checks need requests that the processor applies to: override `params` where they must bring arguments of its own.
    """

    vocab_size: ClassVar[int] = 64

    @pytest.fixture
    def processor(self) -> LogitsProcessor:
        """The processor to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'processor'")

    def params(self) -> SamplingParams:
        """Parameters of a request that the processor changes; its own arguments are in ``extra_args``."""
        return SamplingParams(temperature=0.0, max_tokens=64)

    def text(self, seed: int) -> np.ndarray:
        """int64: prompt and output of a request, with tokens that come again."""
        rng = np.random.default_rng(seed)
        text = np.resize(rng.integers(0, min(self.vocab_size, 12), 7), 9 + 4 * seed).astype(np.int64)
        text.flags.writeable = False
        return text

    # --- running ----------------------------------------------------------------------------------

    def process(
        self,
        processor: LogitsProcessor,
        texts: dict[str, np.ndarray],
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> list[torch.Tensor]:
        """The processed rows [1 + drafts, V] of each request; rows of the same text before them have equal logits."""
        counts = np.array([len(draft) for draft in drafts])
        tree = None if parents is None else np.array([node for row in parents for node in row], dtype=np.int64)
        layout = RowLayout.build(counts, np.array([len(text) for text in texts.values()]), parents=tree)
        draft = Draft(
            token_ids=torch.tensor([token for row in drafts for token in row], dtype=torch.int64),
            num_draft_tokens=torch.from_numpy(counts.astype(np.int32)),
            parents=None if tree is None else torch.from_numpy(tree.astype(np.int32)),
        )
        requests = [FakeRequest(name, 5, self.params(), text, num_prompt_tokens=4) for name, text in texts.items()]
        rows = ProcessorRows(StepRows(layout, draft, SamplingBatch.build(requests)), range(len(requests)))
        before = [rows.tokens_before(row) for row in range(rows.num_rows)]
        logits = torch.stack([self._logits(tokens) for tokens in before])
        returned: object = processor.process(logits, rows)
        assert returned is None, "process() changes logits in place and returns nothing"
        assert not bool(logits.isnan().any()), "process() made NaN of finite logits"
        return list(torch.split(logits, (counts + 1).tolist()))

    def alone(self, processor: LogitsProcessor, request_id: str, text: np.ndarray) -> torch.Tensor:
        """The row [V] that plain decoding has behind a text, in a request of its own."""
        row = self.process(processor, {request_id: text}, [[]])[0][0]
        processor.forget(request_id)
        return row

    def require(self, processor: LogitsProcessor) -> None:
        """Skip the test when the processor does not apply to the contract's requests."""
        if not processor.applies(self.params()):
            pytest.skip(
                "applies() is False for requests without arguments of its own: override params(), or give it options "
                "with which it applies to every request"
            )

    def _logits(self, before: np.ndarray) -> torch.Tensor:
        """Random logits that depend on the tokens before them alone."""
        seed = int.from_bytes(before.astype(np.int64).tobytes()[-64:], "little") % (1 << 31) + len(before)
        return 3 * torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(seed))

    # --- checks -----------------------------------------------------------------------------------

    def test_declares_what_it_is(self, processor: LogitsProcessor) -> None:
        """A name, and an answer to which requests it changes."""
        assert processor.name
        for params in (SamplingParams(), self.params()):
            assert isinstance(processor.applies(params), bool)

    def test_takes_good_parameters(self, processor: LogitsProcessor) -> None:
        """Requests without arguments for it, and those of the contract, are not refused."""
        processor.check(SamplingParams())
        processor.check(self.params())

    def test_changes_something(self, processor: LogitsProcessor) -> None:
        """Of some texts a row comes out otherwise than it went in."""
        self.require(processor)
        texts = {f"contract-{i}": self.text(i) for i in range(8)}
        rows = self.process(processor, texts, [[]] * len(texts))
        same = [torch.equal(row[0], self._logits(text)) for row, text in zip(rows, texts.values(), strict=True)]
        assert not all(same), (
            f"process() changed no row of eight texts of the token ids 0 to {min(self.vocab_size, 12) - 1}; if it acts "
            "on certain texts only, override text(), or give it options that make it act on these"
        )

    def test_rows_are_those_of_plain_decoding(self, processor: LogitsProcessor) -> None:
        """The row behind draft tokens is what it would be had they been emitted."""
        self.require(processor)
        for i, draft in enumerate(DRAFTS):
            text = self.text(i)
            rows = self.process(processor, {f"contract-{i}": text}, [draft])[0]
            processor.forget(f"contract-{i}")
            for count, row in enumerate(rows):
                told = _frozen([*text, *draft[:count]])
                self._same(row, self.alone(processor, f"contract-{i}-{count}", told), f"behind {count} draft tokens")

    def test_rows_of_trees(self, processor: LogitsProcessor) -> None:
        """The row of a node is what it would be had the tokens on the path to it been emitted."""
        self.require(processor)
        text, draft = self.text(1), [3, 4, 3, 5, 8, 3]
        rows = self.process(processor, {"contract-tree": text}, [draft], [TREE])[0]
        processor.forget("contract-tree")
        for node in range(-1, len(draft)):
            told = _frozen([*text, *(draft[step] for step in _path(node))])
            self._same(rows[node + 1], self.alone(processor, f"contract-node-{node}", told), f"node {node}")

    def test_rejected_drafts_leave_nothing(self, processor: LogitsProcessor) -> None:
        """A draft that is rejected has no part in the rows of later steps."""
        self.require(processor)
        text = self.text(2)
        self.process(processor, {"contract-r": text}, [[3, 3, 3, 3]])
        longer = _frozen([*text, 7])
        got = self.process(processor, {"contract-r": longer}, [[8, 3]])[0]
        processor.forget("contract-r")
        want = self.process(processor, {"contract-fresh": longer}, [[8, 3]])[0]
        processor.forget("contract-fresh")
        self._same(got, want, "after a rejected draft")

    def test_growing_text(self, processor: LogitsProcessor) -> None:
        """Seen step by step, a text gives the row it gives at once."""
        self.require(processor)
        text = self.text(5)
        for end in (5, 6, 9, 10, len(text)):
            row = self.process(processor, {"contract-grows": _frozen(text[:end])}, [[]])[0][0]
            self._same(row, self.alone(processor, f"contract-at-once-{end}", _frozen(text[:end])), f"{end} tokens")

    def test_neighbours_do_not_matter(self, processor: LogitsProcessor) -> None:
        """A batch gives each request what it gives it alone."""
        self.require(processor)
        texts = {f"contract-{i}": self.text(i) for i in range(len(DRAFTS))}
        together = self.process(processor, texts, DRAFTS)
        for name in texts:
            processor.forget(name)
        for (name, text), draft, rows in zip(texts.items(), DRAFTS, together, strict=True):
            self._same(self.process(processor, {f"{name}-alone": text}, [draft])[0], rows, name)
            processor.forget(f"{name}-alone")

    def test_request_id_used_again(self, processor: LogitsProcessor) -> None:
        """A request that has an ended one's id has nothing else of it."""
        self.require(processor)
        self.alone(processor, "contract-again", self.text(4))
        again = self.alone(processor, "contract-again", self.text(3))
        self._same(again, self.alone(processor, "contract-other", self.text(3)), "contract-again")

    def test_nothing_kept_after_the_end(self, processor: LogitsProcessor) -> None:
        """When requests end all mention of them goes; also of those that were never processed."""
        texts = {f"contract-kept-{i}": self.text(i) for i in range(4)}
        if processor.applies(self.params()):
            self.process(processor, texts, DRAFTS)
        processor.forget("contract-never-seen")
        for name in texts:
            processor.forget(name)
        kept = [name for name in texts if reaches_string(processor, name)]
        assert not kept, f"the processor still refers to ended requests {kept}"

    @staticmethod
    def _same(got: torch.Tensor, want: torch.Tensor, where: str) -> None:
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda text: f"{where}: {text}")


def _path(node: int) -> list[int]:
    """The nodes of `TREE` down to one of them."""
    return [] if node < 0 else [*_path(TREE[node]), node]


def _frozen(tokens: Sequence[int] | np.ndarray) -> np.ndarray:
    copy = np.array(tokens, dtype=np.int64)
    copy.flags.writeable = False
    return copy
