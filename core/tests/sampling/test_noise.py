"""The keyed noise: published answers, the law, and what it depends on."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from specdec.sampling import noise
from specdec.sampling.noise import Purpose

# kat_vectors of Random123: counter, key, result of philox4x32-10.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[torch.Tensor]:
    return [torch.tensor(int(word, 16)) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: str, key: str, answer: str) -> None:
    found = noise.philox(tuple(words(counter)), tuple(words(key)))  # type: ignore[arg-type]
    assert [f"{int(word):08x}" for word in found] == answer.split()


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_compiled_philox_known_answers(counter: str, key: str, answer: str) -> None:
    from specdec.sampling.cpu.choose import philox

    arguments = [np.uint32(int(word, 16)) for word in (counter + " " + key).split()]
    with np.errstate(over="ignore"):
        found = philox.py_func(*arguments)
    assert [f"{int(word):08x}" for word in found] == answer.split()


def test_the_key_and_counter_are_laid_out_as_documented() -> None:
    seed, position = 0x0123456789ABCDEF, 0x1122334455667788
    found = noise.random_words(torch.tensor([seed]), torch.tensor([position]), 12, purpose=7)[0]
    counter = (torch.tensor(2), torch.tensor(position & 0xFFFFFFFF), torch.tensor(position >> 32), torch.tensor(7))
    expected = noise.philox(counter, (torch.tensor(seed & 0xFFFFFFFF), torch.tensor(seed >> 32)))
    assert found[8:12].tolist() == [int(word) for word in expected]


def test_noise_depends_on_each_part_of_its_key_and_on_nothing_else() -> None:
    def draw(seed: int, position: int, purpose: int, size: int = 16) -> list[int]:
        return noise.random_words(torch.tensor([seed]), torch.tensor([position]), size, purpose)[0].tolist()

    base = draw(5, 9, Purpose.SAMPLE)
    others = [
        draw(6, 9, 0),
        draw(5 + 2**32, 9, 0),
        draw(5 - 2**63, 9, 0),
        draw(5, 10, 0),
        draw(5, 9 + 2**32, 0),
        *(draw(5, 9, purpose) for purpose in Purpose if purpose),
    ]
    assert all(not set(base) & set(other) for other in others)
    rows = noise.random_words(torch.tensor([1, 5, 2]), torch.tensor([3, 9, 9]), 7, Purpose.SAMPLE)
    assert rows[1].tolist() == base[:7]


def test_uniforms_are_uniform(chi_square_fits: Callable[[np.ndarray, np.ndarray], bool]) -> None:
    rows, size = 64, 4096
    values = noise.uniforms(torch.arange(rows) * 977, torch.arange(rows), size, Purpose.SAMPLE).numpy().ravel()
    counts = np.bincount((values * 256).astype(np.int64), minlength=256)
    assert chi_square_fits(counts, np.full(256, 1 / 256))
    assert not chi_square_fits(np.bincount((values**1.02 * 256).astype(np.int64)), np.full(256, 1 / 256))
    # Neighbouring positions and token ids are independent: pairs fill the square evenly.
    grid = (values.reshape(rows, size) * 16).astype(np.int64)
    for first, second in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:])):
        pairs = np.bincount((first * 16 + second).ravel(), minlength=256)
        assert chi_square_fits(pairs, np.full(256, 1 / 256))


def test_exponentials_have_the_exponential_law(chi_square_fits: Callable[[np.ndarray, np.ndarray], bool]) -> None:
    values = noise.exponentials(torch.arange(64), torch.arange(64) + 100, 4096).numpy().ravel()
    edges = np.array([0, 1e-3, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 8])
    counts = np.histogram(values, bins=[*edges, np.inf])[0]
    probabilities = -np.diff([*np.exp(-edges), 0.0])
    assert chi_square_fits(counts, probabilities)


def test_the_extreme_words_give_finite_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[0, 2**32 - 1]])
    monkeypatch.setattr(noise, "random_words", lambda *arguments: extremes)
    values = noise.exponentials(torch.tensor([0]), torch.tensor([0]), 2)
    assert (values > 0).all()
    assert values.isfinite().all()
    assert values.log().isfinite().all()
    assert values[0, 0] == pytest.approx(2.0**-33)


def test_race_is_a_draw_from_the_softmax(chi_square_fits: Callable[[np.ndarray, np.ndarray], bool]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf, 1.5])
    count = 100_000
    for temperature in (0.5, 1.0, 2.0):
        tokens, _ = noise.race(
            logits.expand(count, -1), torch.full((count,), temperature), torch.full((count,), 3), torch.arange(count)
        )
        counts = np.bincount(tokens.numpy(), minlength=7)
        assert counts[5] == 0
        law = torch.softmax(logits.double() / temperature, 0).numpy()
        assert chi_square_fits(np.delete(counts, 5), np.delete(law, 5))


def test_rows_in_chunks_give_what_they_give_together(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(10, 33)
    arguments = (torch.ones(10), torch.arange(10), torch.arange(10) * 7)
    whole = noise.race(logits, *arguments)
    monkeypatch.setattr(noise, "_CHUNK_BYTES", 8 * 33 * 3)
    parts = noise.race(logits, *arguments)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


def test_derived_seeds_differ() -> None:
    seeds = {noise.derive_seed(base, part) for base in range(50) for part in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert noise.derive_seed(1, 2, 3) != noise.derive_seed(1, 3, 2)
