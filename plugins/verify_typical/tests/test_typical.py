"""`typical` keeps what the target finds plausible, and says that it is lossy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from specdec.errors import ConfigError
from specdec.sampling.sampler import sample
from specdec.testing.contracts.verifier import VerifierContract
from specdec.testing.laws import sampling_of, step_rows
from specdec.types import Draft, Verdict
from specdec_verify_typical.config import TypicalConfig
from specdec_verify_typical.typical import TypicalVerifier, typical

V = 6


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TestContract(VerifierContract):
    plugin = "specdec_verify_typical.plugin"
    distribution = "specdec-verify-typical"

    @pytest.fixture
    def verifier(self) -> TypicalVerifier:
        return TypicalVerifier(TypicalConfig())


def verdict_of(
    probs: torch.Tensor,
    tokens: Sequence[int],
    parents: Sequence[int] | None = None,
    *,
    temperature: float = 1.0,
    config: TypicalConfig | None = None,
) -> Verdict:
    draft = Draft(
        token_ids=torch.tensor(tokens),
        num_draft_tokens=torch.tensor([len(tokens)]).int(),
        parents=None if parents is None else torch.tensor(parents).int(),
    )
    depths = None
    if parents is not None:
        depth = [0]
        for parent in parents:
            depth.append(depth[parent + 1] + 1)
        depths = torch.tensor(depth)
    rows = step_rows(probs.log(), draft, torch.tensor([5]), depths)
    return TypicalVerifier(config or TypicalConfig()).verify(rows, draft, sampling_of(torch.tensor([3]), temperature))


def law(**probs: float) -> torch.Tensor:
    """Probabilities of tokens t0 … t5; what is missing is spread over the rest."""
    row = torch.zeros(V)
    for name, value in probs.items():
        row[int(name[1:])] = value
    rest = row == 0
    row[rest] = (1 - row.sum()) / rest.sum()
    return row


def test_the_threshold_is_the_published_one() -> None:
    """min(epsilon, delta * exp(-entropy)): epsilon rules where the target is sure, the entropy where it is not."""
    sure, unsure = law(t0=0.95), torch.full((V,), 1 / V)
    for row in (sure, unsure):
        entropy = -(row * row.log()).sum()
        threshold = min(0.09, 0.3 * float((-entropy).exp()))
        for p in (threshold * 0.999, threshold * 1.001):
            assert bool(typical(torch.tensor(p).log(), entropy, 0.09, 0.3)) == (p > threshold)
    assert verdict_of(torch.stack([unsure] * 3), [4, 5]).num_tokens.tolist() == [3]
    assert verdict_of(torch.stack([sure] * 3), [0, 5]).num_tokens.tolist() == [2]
    assert verdict_of(torch.stack([sure] * 3), [5, 0]).num_tokens.tolist() == [1]


def test_the_temperature_counts() -> None:
    row = law(t0=0.8, t1=0.12)
    assert verdict_of(torch.stack([row] * 2), [1]).num_tokens.tolist() == [2]
    assert verdict_of(torch.stack([row] * 2), [1], temperature=0.5).num_tokens.tolist() == [1]


def test_the_last_token_is_the_ordinary_sample() -> None:
    rows = torch.stack([law(t2=0.9), law(t1=0.5), law(t3=0.4)])
    verdict = verdict_of(rows, [2, 1])
    assert verdict.token_ids[0, :2].tolist() == [2, 1]
    draft = Draft(token_ids=torch.tensor([2, 1]), num_draft_tokens=torch.tensor([2]).int())
    plain = step_rows(rows.log(), draft, torch.tensor([5]))
    assert int(verdict.token_ids[0, 2]) == int(sample(plain.logits, plain, sampling_of(torch.tensor([3])))[2])


def test_thresholds_that_nothing_passes_give_plain_decoding() -> None:
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(4, V, generator=generator).softmax(dim=-1)
    verdict = verdict_of(probs, [0, 1, 2], config=TypicalConfig(epsilon=1.0, delta=1e6))
    assert verdict.num_tokens.tolist() == [1]


def test_fewer_pass_the_higher_the_threshold() -> None:
    generator = torch.Generator().manual_seed(1)
    log_probs = torch.rand(500, generator=generator).log()
    entropy = 2 * torch.rand(500, generator=generator)
    kept = [int(typical(log_probs, entropy, e, 0.6).sum()) for e in (0.01, 0.05, 0.1, 0.5)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[-1]


def test_of_a_tree_the_longest_path_and_then_the_likeliest() -> None:
    """Node 0 and 1 are siblings; 2 hangs under 0, 3 and 4 under 1, 5 under 4."""
    parents = [-1, -1, 0, 1, 1, 4]
    root = law(t0=0.5, t1=0.3)
    below = law(t2=0.2, t3=0.3, t4=0.4)
    rows = torch.stack([root, below, below, below, below, below, below])
    verdict = verdict_of(rows, [0, 1, 2, 3, 4, 2], parents)
    assert verdict.accepted_nodes is not None
    assert verdict.accepted_nodes[0, :4].tolist() == [1, 4, 5, -1]
    assert verdict.token_ids[0, :3].tolist() == [1, 4, 2]
    # Without the deepest node two paths of two: 0.5 * 0.2 against 0.3 * 0.4.
    verdict = verdict_of(rows[:6], [0, 1, 2, 3, 4], parents[:5])
    assert verdict.accepted_nodes is not None
    assert verdict.accepted_nodes[0, :3].tolist() == [1, 4, -1]


def test_a_chain_as_a_tree() -> None:
    rows = torch.stack([law(t2=0.9), law(t1=0.5), law(t3=0.97), law(t0=0.4)])
    chain, tree = verdict_of(rows, [2, 1, 0]), verdict_of(rows, [2, 1, 0], [-1, 0, 1])
    assert chain.token_ids.tolist() == tree.token_ids.tolist()
    assert chain.num_tokens.tolist() == tree.num_tokens.tolist() == [3]


def test_it_is_lossy_and_says_so() -> None:
    assert not TypicalVerifier.lossless
    assert "lossy" in TypicalConfig.NOTICE


@pytest.mark.parametrize("options", [{"epsilon": 1.5}, {"epsilon": -0.1}, {"delta": -1.0}])
def test_options_are_checked(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"verifier_options.{next(iter(options))}"):
        TypicalConfig(**options)
