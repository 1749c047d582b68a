"""`synthetic` keeps draft tokens at the rates it was given, and says what it is."""

from __future__ import annotations

import pytest
import torch

from specdec.errors import ConfigError
from specdec.sampling.sampler import sample
from specdec.testing.contracts.verifier import VerifierContract
from specdec.testing.laws import sampling_of, step_rows
from specdec.types import Draft, Verdict
from specdec_verify_synthetic.config import SyntheticConfig, conditional
from specdec_verify_synthetic.synthetic import SyntheticVerifier

V = 6
COUNT = 20_000


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class TestContract(VerifierContract):
    plugin = "specdec_verify_synthetic.plugin"
    distribution = "specdec-verify-synthetic"

    @pytest.fixture
    def verifier(self) -> SyntheticVerifier:
        return SyntheticVerifier((0.8, 0.5, 0.2))


def verify(rates: tuple[float, ...], k: int, temperature: float = 1.0, parents: list[int] | None = None) -> Verdict:
    draft = Draft(
        token_ids=torch.arange(k).repeat(COUNT) % V,
        num_draft_tokens=torch.full((COUNT,), k).int(),
        parents=None if parents is None else torch.tensor(parents).repeat(COUNT).int(),
    )
    depths = None
    if parents is not None:
        depth = [0]
        for parent in parents:
            depth.append(depth[parent + 1] + 1)
        depths = torch.tensor(depth).repeat(COUNT)
    logits = torch.zeros(COUNT * (k + 1), V)
    rows = step_rows(logits, draft, 5 + torch.arange(COUNT) % 3, depths)
    return SyntheticVerifier(rates).verify(rows, draft, sampling_of(torch.arange(COUNT), temperature))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("rates", [(0.8, 0.5, 0.2), (1.0, 1.0, 0.3), (0.5, 0.0, 0.0), (1.0, 1.0, 1.0)])
def test_rates(rates: tuple[float, ...], temperature: float) -> None:
    """Whatever the target thinks, and at temperature 0 too."""
    kept = verify(rates, 3, temperature).num_tokens - 1
    for place, rate in enumerate(rates):
        share = float((kept > place).float().mean())
        assert abs(share - rate) <= 4 * (rate * (1 - rate) / COUNT) ** 0.5


@pytest.mark.parametrize("schedule", ["geometric", "steady"])
@pytest.mark.parametrize("length", [1.0, 1.7, 2.5, 4.0])
def test_acceptance_length(length: float, schedule: str) -> None:
    config = SyntheticConfig(acceptance_length=length, schedule=schedule)  # type: ignore[arg-type]
    rates = config.rates(3)
    assert 1 + sum(rates) == pytest.approx(length, abs=1e-9)
    counts = verify(rates, 3).num_tokens.double()
    assert abs(float(counts.mean()) - length) <= 4 * float(counts.std()) / COUNT**0.5 + 1e-9


def test_steady_varies_less_than_geometric() -> None:
    steady = SyntheticConfig(acceptance_length=2.5, schedule="steady").rates(4)
    geometric = SyntheticConfig(acceptance_length=2.5).rates(4)
    assert steady == (1.0, 0.5, 0.0, 0.0)
    assert verify(steady, 4).num_tokens.float().std() < verify(geometric, 4).num_tokens.float().std()
    ratios = [b / a for a, b in zip((1.0, *geometric), geometric, strict=False)]
    assert ratios == pytest.approx([ratios[0]] * 4)


def test_drafted_tokens_come_as_they_are_and_then_the_ordinary_sample() -> None:
    verdict = verify((1.0, 1.0), 2)
    assert torch.equal(verdict.token_ids[:, :2], torch.tensor([0, 1]).expand(COUNT, 2))
    draft = Draft(token_ids=torch.zeros(2 * COUNT).long(), num_draft_tokens=torch.full((COUNT,), 2).int())
    rows = step_rows(torch.zeros(3 * COUNT, V), draft, 5 + torch.arange(COUNT) % 3)
    plain = sample(rows.logits, rows, sampling_of(torch.arange(COUNT)))
    assert torch.equal(verdict.token_ids[:, 2], plain[2::3])


def test_in_trees_first_children_are_tried() -> None:
    verdict = verify((1.0, 1.0), 4, parents=[-1, -1, 0, 0])
    assert verdict.accepted_nodes is not None
    assert torch.equal(verdict.accepted_nodes[:, :3].long(), torch.tensor([0, 2, -1]).expand(COUNT, 3))
    assert torch.equal(verdict.token_ids[:, :2], torch.tensor([0, 2]).expand(COUNT, 2))
    assert float((verify((0.5,), 4, parents=[-1, -1, 0, 0]).num_tokens == 2).float().mean()) == pytest.approx(
        0.5, abs=0.02
    )


def test_positions_without_a_rate_are_never_kept() -> None:
    assert int(verify((1.0,), 3).num_tokens.max()) == 2


def test_rates_become_chances() -> None:
    assert conditional((0.8, 0.4, 0.0, 0.0)) == pytest.approx((0.8, 0.5, 0.0, 0.0))


def test_it_says_what_it_is() -> None:
    assert not SyntheticVerifier.lossless
    assert SyntheticVerifier.benchmark_only
    assert "benchmarks only" in SyntheticConfig.NOTICE


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs either .*acceptance_rates or .*acceptance_length; neither is given"),
        ({"acceptance_rates": [0.5], "acceptance_length": 1.5}, "both are given"),
        ({"acceptance_rates": [0.5, 0.6]}, r"\[0.5, 0.6\]; it must be a list of numbers between 0 and 1"),
        ({"acceptance_rates": []}, r"acceptance_rates is \[\]"),
        ({"acceptance_rates": [1.5]}, "between 0 and 1"),
        ({"acceptance_rates": "0.5"}, "'0.5'; it must be a list"),
        ({"acceptance_length": 0.5}, "acceptance_length"),
        ({"acceptance_length": 1.5, "schedule": "linear"}, "schedule"),
    ],
)
def test_options_are_checked(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticConfig(**options)  # type: ignore[arg-type]


def test_more_than_a_step_can_give_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_speculative_tokens 3 a step gives at most 4"):
        SyntheticConfig(acceptance_length=4.5).rates(3)
    with pytest.raises(ConfigError, match="has 2 entries, but speculative.num_speculative_tokens is 1"):
        SyntheticConfig(acceptance_rates=[0.5, 0.1]).rates(1)  # type: ignore[arg-type]
