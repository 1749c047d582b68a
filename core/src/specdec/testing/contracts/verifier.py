"""The contract of `specdec.verify.Verifier`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import field, frozen

from specdec.sampling.batch import SamplingBatch
from specdec.sampling.outcome import NAN_LOGITS, NO_TOKEN_LEFT
from specdec.sampling.params import SamplingParams
from specdec.testing.contracts.base import PluginContract
from specdec.testing.reference import match_reference
from specdec.types import Draft, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from specdec.types import Verdict
    from specdec.verify.base import Verifier


@frozen(eq=False)
class FakeRequest:
    """What a verifier's sampling batch is made of."""

    request_id: str
    seed: int
    params: SamplingParams
    token_ids: np.ndarray
    num_prompt_tokens: int = 1
    stop_token_ids: frozenset[int] = field(factory=frozenset)
    grammar: None = None


@frozen(eq=False, kw_only=True)
class VerifyCase:
    """The arguments of one call of `Verifier.verify`."""

    rows: Rows
    draft: Draft
    sampling: SamplingBatch


class VerifierContract(PluginContract):
    """What every verifier must hold to. A subclass gives the fixture `verifier`."""

    vocab_size: ClassVar[int] = 16
    num_samples: ClassVar[int] = 20_000
    """Requests of each statistical test."""

    @pytest.fixture
    def verifier(self) -> Verifier:
        """The verifier to check."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'verifier'")

    # --- making a case ----------------------------------------------------------------------------

    def case(
        self,
        logits: torch.Tensor,
        drafts: Sequence[Sequence[int]],
        *,
        temperature: float | Sequence[float] = 0.0,
        parents: Sequence[Sequence[int]] | None = None,
        draft_probs: torch.Tensor | None = None,
        first: int = 0,
    ) -> VerifyCase:
        """Rows and drafts of some requests.

        Args:
            logits: float32 [R, V], R = the sum over the requests of 1 + number of draft tokens.
            drafts: each request's draft tokens.
            temperature: of every request, or of each; at 1.0, the law of a row is the softmax of its logits.
            parents: for trees.
            draft_probs: float32 [N, V]; where absent and the verifier needs them, one-hot ones are made by `draft_of`.
            first: number of the first request, from which ids, seeds and lengths follow.
        """
        counts = torch.tensor([len(draft) for draft in drafts])
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), (counts + 1).cumsum(0)])
        request_index = torch.repeat_interleave(torch.arange(len(drafts)), counts + 1)
        offsets = torch.arange(len(request_index)) - starts[request_index]
        lengths = torch.tensor([5 + (first + r) % 7 for r in range(len(drafts))])
        depths = offsets if parents is None else torch.tensor([d for row in parents for d in _row_depths(row)])
        rows = Rows(
            logits=logits,
            row_start=starts.int(),
            request_index=request_index,
            positions=lengths[request_index] + depths,
            num_requests=len(drafts),
        )
        heats = [temperature] * len(drafts) if isinstance(temperature, float | int) else temperature
        params = {heat: SamplingParams(temperature=heat, max_tokens=64) for heat in heats}
        requests = [
            FakeRequest(f"verify-{r}", 1000 + r, params[heat], np.ones(5 + r % 7, dtype=np.int64))
            for r, heat in enumerate(heats, first)
        ]
        sampling = SamplingBatch.build(requests, torch.device("cpu"))
        return VerifyCase(rows=rows, draft=self.draft_of(drafts, parents, draft_probs), sampling=sampling)

    def draft_of(
        self,
        drafts: Sequence[Sequence[int]],
        parents: Sequence[Sequence[int]] | None = None,
        draft_probs: torch.Tensor | None = None,
    ) -> Draft:
        """The `Draft` of lists of tokens."""
        tokens = torch.tensor([token for draft in drafts for token in draft], dtype=torch.int64)
        if draft_probs is None and self._needs_probs:
            draft_probs = torch.nn.functional.one_hot(tokens, self.vocab_size).float()
        return Draft(
            token_ids=tokens,
            num_draft_tokens=torch.tensor([len(draft) for draft in drafts], dtype=torch.int32),
            parents=None
            if parents is None
            else torch.tensor([node for row in parents for node in row], dtype=torch.int32),
            draft_probs=draft_probs,
        )

    _needs_probs: bool = False

    @pytest.fixture(autouse=True)
    def _learn_needs(self, verifier: Verifier) -> None:
        self._needs_probs = verifier.needs_draft_probs

    def random_logits(self, num_rows: int, seed: int = 0) -> torch.Tensor:
        """float32 [num_rows, V]."""
        return 2 * torch.randn(num_rows, self.vocab_size, generator=torch.Generator().manual_seed(seed))

    def mixed_case(self, temperature: float | Sequence[float], *, with_probs: bool = False) -> VerifyCase:
        """Six requests with drafts of several lengths: right up to some token, wrong from it on, or none.

        Of those ``with_probs`` every second draft token comes with a law that allows others; the rest is one-hot.
        """
        lengths = [3, 0, 1, 4, 4, 2]
        logits = self.random_logits(sum(lengths) + len(lengths))
        best = logits.argmax(dim=1).tolist()
        drafts, row = [], 0
        for request, length in enumerate(lengths):
            right = [best[row + i] for i in range(length)]
            drafts.append([(t + (i >= request - 2)) % self.vocab_size for i, t in enumerate(right)])
            row += length + 1
        probs = None
        if with_probs:
            tokens = torch.tensor([token for draft in drafts for token in draft])
            probs = torch.nn.functional.one_hot(tokens, self.vocab_size).float()
            probs[::2] = 0.5 * probs[::2] + 0.5 * self.random_logits(len(probs[::2]), seed=7).softmax(dim=-1)
        return self.case(logits, drafts, temperature=temperature, draft_probs=probs)

    def verify(self, verifier: Verifier, case: VerifyCase) -> list[list[int]]:
        """Run the verifier, check the verdict's form and return the tokens of each request."""
        verdict = verifier.verify(case.rows, case.draft, case.sampling)
        check_verdict(verdict, case.draft)
        pairs = zip(verdict.token_ids.tolist(), verdict.num_tokens.tolist(), strict=True)
        return [tokens[:count] for tokens, count in pairs]

    # --- checks -----------------------------------------------------------------------------------

    def test_declares_what_it_is(self, verifier: Verifier) -> None:
        """A name, and whether its output has the target's law, belong to every verifier."""
        assert verifier.name
        facts = (verifier.lossless, verifier.accepts_trees, verifier.needs_draft_probs, verifier.benchmark_only)
        for fact in facts:
            assert isinstance(fact, bool)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_well_formed(self, verifier: Verifier, temperature: float) -> None:
        """One to k + 1 tokens per request; all but the last are a prefix of the draft; the rest is padding."""
        case = self.mixed_case(temperature)
        for tokens, draft in zip(self.verify(verifier, case), _rows_of(case.draft), strict=True):
            assert tokens[:-1] == draft[: len(tokens) - 1]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_no_drafts(self, verifier: Verifier, temperature: float) -> None:
        """Without drafts each request gets one token."""
        case = self.case(self.random_logits(4), [[], [], [], []], temperature=temperature)
        tokens = self.verify(verifier, case)
        assert [len(row) for row in tokens] == [1, 1, 1, 1]
        if temperature == 0:
            assert [row[0] for row in tokens] == case.rows.logits.argmax(dim=1).tolist()

    def test_greedy_is_the_argmax(self, verifier: Verifier) -> None:
        """At temperature 0 a draft is kept as far as it is what plain decoding would choose."""
        self._only_if(verifier.lossless, "lossy")
        case = self.mixed_case(0.0)
        starts = case.rows.row_start.tolist()
        best = case.rows.logits.argmax(dim=1).tolist()
        for request, (tokens, draft) in enumerate(zip(self.verify(verifier, case), _rows_of(case.draft), strict=True)):
            samples = best[starts[request] : starts[request + 1]]
            path = match_reference(samples, draft)
            assert tokens == [*(draft[node] for node in path), samples[len(path)]]

    def test_greedy_ties_take_the_lowest_id(self, verifier: Verifier) -> None:
        """Of equal logits the first wins, as in plain decoding."""
        self._only_if(verifier.lossless, "lossy")
        logits = torch.zeros(3, self.vocab_size)
        logits[:, [4, 9]] = 5.0
        assert self.verify(verifier, self.case(logits, [[4], []])) == [[4, 4], [4]]
        assert self.verify(verifier, self.case(logits, [[9], []])) == [[4], [4]]

    def test_impossible_draft_tokens(self, verifier: Verifier) -> None:
        """A drafted token whose logit is minus infinity (a processor forbids it) is never kept."""
        self._only_if(verifier.lossless, "lossy")
        for temperature in (0.0, 1.0):
            logits = self.random_logits(128)
            logits[:, 3] = -torch.inf
            for tokens in self.verify(verifier, self.case(logits, [[3]] * 64, temperature=temperature)):
                assert 3 not in tokens

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_inputs_unchanged(self, verifier: Verifier, temperature: float) -> None:
        """Rows and drafts are only read."""
        case = self.mixed_case(temperature)
        given = [case.rows.logits, case.rows.row_start, case.rows.request_index, case.rows.positions]
        given += [case.draft.token_ids, case.draft.num_draft_tokens]
        before = [tensor.clone() for tensor in given]
        verifier.verify(case.rows, case.draft, case.sampling)
        assert all(torch.equal(tensor, copy) for tensor, copy in zip(given, before, strict=True))

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_same_input_same_verdict(self, verifier: Verifier, temperature: float) -> None:
        """Chance comes from the requests' seeds and positions alone."""
        case = self.mixed_case(temperature)
        assert self.verify(verifier, case) == self.verify(verifier, case)

    @pytest.mark.parametrize("with_probs", [False, True], ids=["one-hot", "probs"])
    @pytest.mark.parametrize("mixed", [False, True], ids=["sampled", "some greedy"])
    def test_neighbours_do_not_matter(self, verifier: Verifier, mixed: bool, with_probs: bool) -> None:
        """A batch of n gives what n batches of one give, whatever its requests and drafts are like."""
        temperature = [0.0, 1.0, 0.7, 0.0, 1.3, 1.0] if mixed else [1.0] * 6
        case = self.mixed_case(temperature, with_probs=with_probs)
        together = self.verify(verifier, case)
        starts = case.rows.row_start.tolist()
        for request, draft in enumerate(_rows_of(case.draft)):
            logits = case.rows.logits[starts[request] : starts[request + 1]]
            probs = case.draft.draft_probs
            if probs is not None:
                probs = probs[starts[request] - request : starts[request + 1] - request - 1]
            alone = self.case(logits, [draft], temperature=temperature[request], first=request, draft_probs=probs)
            assert self.verify(verifier, alone) == [together[request]]

    def test_greedy_requests_beside_sampled_ones(self, verifier: Verifier) -> None:
        """A request at temperature 0 gets its argmax whoever shares the batch, even when its draft came with a law."""
        self._only_if(verifier.lossless, "lossy")
        temperature = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0]
        case = self.mixed_case(temperature, with_probs=True)
        starts = case.rows.row_start.tolist()
        best = case.rows.logits.argmax(dim=1).tolist()
        for request, (tokens, draft) in enumerate(zip(self.verify(verifier, case), _rows_of(case.draft), strict=True)):
            if temperature[request] == 0:
                samples = best[starts[request] : starts[request + 1]]
                path = match_reference(samples, draft)
                assert tokens == [*(draft[node] for node in path), samples[len(path)]]

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("bad", [torch.nan, -torch.inf])
    def test_rows_without_a_token(self, verifier: Verifier, temperature: float, bad: float) -> None:
        """A row that is NaN or masked throughout ends its request's run with a code, and only that request's."""
        self._only_if(verifier.lossless, "lossy")
        drafts = [[2, 3], [4], [], [5]]
        logits = torch.full((8, self.vocab_size), -60.0)
        logits[torch.arange(8), torch.tensor([2, 3, 9, 4, 8, 1, 5, 6])] = 60.0
        for row in (1, 5):
            logits[row] = bad
        case = self.case(logits, drafts, temperature=temperature)
        verdict = verifier.verify(case.rows, case.draft, case.sampling)
        tokens = [row[:n] for row, n in zip(verdict.token_ids.tolist(), verdict.num_tokens.tolist(), strict=True)]
        code = NO_TOKEN_LEFT if bad == -torch.inf else NAN_LOGITS
        assert tokens == [[2, code], [4, 8], [code], [5, 6]]

    @pytest.mark.parametrize("ranks", [[], [0], [1, 0], [0, 5]], ids=["no draft", "one", "two", "likely, unlikely"])
    def test_law(self, verifier: Verifier, ranks: list[int]) -> None:
        """At temperature 1 the tokens of a step, continued from the target where they end, have the target's law."""
        self._only_if(verifier.lossless, "lossy")
        self._only_if(not verifier.needs_draft_probs, "the verifier needs drafts drawn from draft_probs")
        by_rank = self._target_logits().argsort(dim=1, descending=True)
        draft = [int(by_rank[place, rank]) for place, rank in enumerate(ranks)]
        self._check_law(verifier, [draft] * self.num_samples, None)

    def test_law_with_draft_probs(self, verifier: Verifier) -> None:
        """The same for drafts drawn from a law of their own."""
        self._only_if(verifier.lossless, "lossy")
        rng = np.random.default_rng(3)
        laws = rng.dirichlet(np.ones(self.vocab_size), 2)
        drawn = np.stack([rng.choice(self.vocab_size, self.num_samples, p=law / law.sum()) for law in laws], axis=1)
        probs = torch.from_numpy(laws).float().repeat(self.num_samples, 1)
        self._check_law(verifier, drawn.tolist(), probs)

    def test_greedy_trees(self, verifier: Verifier) -> None:
        """At temperature 0 the path of the tree that plain decoding would take is kept."""
        self._only_if(verifier.accepts_trees and verifier.lossless, "no lossless verifier of trees")
        parents = [[-1, -1, 0, 0, 1, 2], [-1, 0, 0], [], [-1, -1, 1]]
        logits = self.random_logits(sum(len(row) + 1 for row in parents), seed=5)
        best = logits.argmax(dim=1).tolist()
        samples, row = [], 0
        for tree in parents:
            samples.append(best[row : row + len(tree) + 1])
            row += len(tree) + 1
        wrong = [(token + 1) % self.vocab_size for token in best]
        drafts = [
            [samples[0][0], wrong[0], wrong[1], samples[0][1], 0, samples[0][3]],
            [samples[1][0], wrong[7], samples[1][1]],
            [],
            [wrong[12], samples[3][0], samples[3][2]],
        ]
        case = self.case(logits, drafts, parents=parents)
        verdict = verifier.verify(case.rows, case.draft, case.sampling)
        check_verdict(verdict, case.draft)
        assert verdict.accepted_nodes is not None
        for request, (tree, draft) in enumerate(zip(parents, drafts, strict=True)):
            path = match_reference(samples[request], draft, tree)
            count = int(verdict.num_tokens[request])
            last = samples[request][path[-1] + 1 if path else 0]
            assert verdict.token_ids[request, :count].tolist() == [*(draft[node] for node in path), last]
            assert verdict.accepted_nodes[request, : len(path)].tolist() == path

    def test_law_of_trees(self, verifier: Verifier) -> None:
        """The same for trees whose tokens were chosen without chance: siblings, and a child of the second of them."""
        self._only_if(verifier.accepts_trees and verifier.lossless, "no lossless verifier of trees")
        self._only_if(not verifier.needs_draft_probs, "the verifier needs drafts drawn from draft_probs")
        by_rank = self._target_logits().argsort(dim=1, descending=True)
        draft = [int(by_rank[place, rank]) for place, rank in ((0, 1), (0, 0), (1, 0))]
        self._check_law(verifier, [draft] * self.num_samples, None, parents=[-1, -1, 1])

    # --- statistics -------------------------------------------------------------------------------

    def _target_logits(self) -> torch.Tensor:
        """float32 [3, V]: what the target thinks of three positions in a row, whatever the tokens before."""
        return self.random_logits(3, seed=2) / 1.5

    def _check_law(
        self,
        verifier: Verifier,
        drafts: list[list[int]],
        draft_probs: torch.Tensor | None,
        parents: list[int] | None = None,
    ) -> None:
        """Compare the law of the first two tokens with the target's, to about twice what chance alone makes of it."""
        count, rng = len(drafts), np.random.default_rng(11)
        logits = self._target_logits()
        first, second = torch.softmax(logits.double(), dim=1).numpy()[:2]
        places = range(len(drafts[0]) + 1) if parents is None else _row_depths(parents)
        rows = logits[list(places)].repeat(count, 1)
        trees = None if parents is None else [parents] * count
        emitted = self.verify(
            verifier, self.case(rows, drafts, temperature=1.0, draft_probs=draft_probs, parents=trees)
        )
        follow = rng.choice(self.vocab_size, count, p=second / second.sum()).tolist()
        pairs = [(row[0], row[1] if len(row) > 1 else after) for row, after in zip(emitted, follow, strict=True)]
        counts = np.zeros((self.vocab_size, self.vocab_size))
        np.add.at(counts, tuple(np.array(pairs).T), 1)
        compared = [("the first token", counts.sum(1), first), ("the second token", counts.sum(0), second)]
        compared += [(f"the token after {token}", counts[token], second) for token in np.argsort(first)[-3:].tolist()]
        for name, got, law in compared:
            distance = float(np.abs(got / got.sum() - law).sum() / 2)
            limit = 0.8 * (self.vocab_size / got.sum()) ** 0.5
            assert distance < limit, f"total variation of {name} from the target's law: {distance:.4f} > {limit:.4f}"

    @staticmethod
    def _only_if(condition: bool, reason: str) -> None:
        if not condition:
            pytest.skip(reason)


def check_verdict(verdict: Any, draft: Draft) -> None:
    """Assert that a verdict has the form that `Verifier.verify` promises for this draft."""
    tokens, counts = verdict.token_ids, verdict.num_tokens
    num_drafted = draft.num_draft_tokens.tolist()
    assert tokens.dtype == torch.int64, f"token_ids is {tokens.dtype}"
    assert counts.dtype == torch.int32, f"num_tokens is {counts.dtype}"
    assert tokens.dim() == 2, f"token_ids has shape {list(tokens.shape)}"
    assert tokens.shape[0] == len(num_drafted), f"token_ids has {tokens.shape[0]} rows for {len(num_drafted)} requests"
    assert counts.shape == (len(num_drafted),), f"num_tokens has shape {list(counts.shape)}"
    for count, drafted in zip(counts.tolist(), num_drafted, strict=True):
        assert 1 <= count <= drafted + 1, f"{count} tokens for a draft of {drafted}"
    assert tokens.shape[1] >= max(counts.tolist(), default=0), "token_ids is too narrow for num_tokens"
    padding = torch.arange(tokens.shape[1]) >= counts[:, None]
    assert bool((tokens[padding] == -1).all()), "token_ids is not padded with -1"
    assert bool((tokens[~padding] >= 0).all()), "a token that counts is negative"
    if draft.parents is not None:
        _check_path(verdict, draft)


def _check_path(verdict: Verdict, draft: Draft) -> None:
    nodes = verdict.accepted_nodes
    assert nodes is not None, "accepted_nodes is None for trees"
    assert nodes.dtype == torch.int32, f"accepted_nodes is {nodes.dtype}"
    assert draft.parents is not None
    counts = draft.num_draft_tokens.tolist()
    split = zip(nodes.tolist(), verdict.num_tokens.tolist(), torch.split(draft.parents, counts), strict=True)
    for path, count, parents in split:
        assert all(node == -1 for node in path[count - 1 :]), "accepted_nodes is not padded with -1"
        for node, parent in zip(path[: count - 1], [-1, *path], strict=False):
            assert 0 <= node < len(parents)
            assert int(parents[node]) == parent, f"accepted_nodes {path} is no path of the tree"


def _rows_of(draft: Draft) -> list[list[int]]:
    return [row.tolist() for row in torch.split(draft.token_ids, draft.num_draft_tokens.tolist())]


def _row_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each logits row of a tree: 0 for the last committed token's, then each node's."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent + 1] + 1)
    return depths
