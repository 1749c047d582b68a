"""The contract of sampling backends passes both built-in ones, and catches every planted fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.sampling.backend import RowStatistics, SamplingBackend
from specdec.sampling.batch import SamplingBatch
from specdec.sampling.noise import Purpose
from specdec.sampling.torch_backend import TorchSampling
from specdec.testing.contracts import SamplingBackendContract
from specdec.types import Draft, Rows, Verdict

torch.set_num_threads(1)


class TestCompiled(SamplingBackendContract):
    plugin = "specdec.sampling.plugin_cpu"
    distribution = "specdec-core"

    @pytest.fixture
    def backend(self) -> SamplingBackend:
        from specdec.sampling.cpu.backend import CpuSampling

        return CpuSampling()


class Nameless(TorchSampling):
    name = ""


class SaysOnlyNo(TorchSampling):
    def supports(self, device: str) -> Any:
        return device != "cpu"


class WarmsUpOnce(TorchSampling):
    warm = False

    def warm_up(self) -> None:
        assert not self.warm
        self.warm = True


class LosesCodes(TorchSampling):
    def draw(self, *arguments: Any, **more: Any) -> Tensor:
        return super().draw(*arguments, **more).clamp(min=0)


class OneStream(TorchSampling):
    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        purpose: int = Purpose.SAMPLE,
        rows: Tensor | None = None,
    ) -> Tensor:
        return super().draw(logits, temperature, seeds, positions, Purpose.SAMPLE, rows)


class NeedsIndices(TorchSampling):
    def draw(
        self,
        logits: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        positions: Tensor,
        purpose: int = Purpose.SAMPLE,
        rows: Tensor | None = None,
    ) -> Tensor:
        rows = torch.zeros_like(seeds) if rows is None else rows
        return super().draw(logits, temperature, seeds, positions, purpose, rows)


class LastOfEqual(TorchSampling):
    def draw(self, logits: Tensor, temperature: Tensor, *keys: Any, **more: Any) -> Tensor:
        return logits.shape[1] - 1 - logits.flip(1).argmax(1)


class ForgetsTemperature(TorchSampling):
    def statistics(self, logits: Tensor, temperature: Tensor, rows: Tensor | None = None) -> RowStatistics:
        return super().statistics(logits, temperature.clamp(max=1.0), rows)


class AcceptsEverything(TorchSampling):
    def accept(self, logits: Tensor, statistics: RowStatistics, token_ids: Tensor, *keys: Any, **more: Any) -> Tensor:
        return torch.ones_like(token_ids, dtype=torch.bool)


class RecoversTheRejected(TorchSampling):
    def recover(self, logits: Tensor, statistics: RowStatistics, rejected: Tensor, *keys: Any, **more: Any) -> Tensor:
        return rejected


class WritesLogits(TorchSampling):
    def draw(self, logits: Tensor, *arguments: Any, **more: Any) -> Tensor:
        found = super().draw(logits, *arguments, **more)
        logits.mul_(2)
        return found


class KeepsNothing(TorchSampling):
    """Verifies whole steps as if the first draft token had never been there."""

    def match(self, rows: Rows, draft: Draft, sampling: SamplingBatch) -> Verdict:
        first = rows.row_start[:-1].long()
        tokens = self.draw(
            rows.logits, sampling.temperature, sampling.seeds, rows.positions[first], Purpose.SAMPLE, rows=first
        )
        none = None if draft.parents is None else torch.empty(len(first), 0, dtype=torch.int32)
        ones = torch.ones(len(first), dtype=torch.int32)
        return Verdict(token_ids=tokens[:, None], num_tokens=ones, accepted_nodes=none)

    reject = match


FAULTS: list[tuple[type[TorchSampling], str, dict[str, Any]]] = [
    (Nameless, "test_declares_what_it_is", {}),
    (SaysOnlyNo, "test_declares_what_it_is", {}),
    (WarmsUpOnce, "test_warm_up", {}),
    (LosesCodes, "test_draws", {"vocab_size": 1000, "dtype": torch.float32}),
    (OneStream, "test_purposes_have_noise_of_their_own", {}),
    (NeedsIndices, "test_all_rows_without_indices", {}),
    (LastOfEqual, "test_ties_take_the_lowest_id", {}),
    (ForgetsTemperature, "test_statistics", {"vocab_size": 1000}),
    (AcceptsEverything, "test_accepts", {"vocab_size": 1000, "laws": True}),
    (AcceptsEverything, "test_impossible_drafts_are_rejected", {}),
    (RecoversTheRejected, "test_recovers", {"vocab_size": 1000, "laws": False}),
    (KeepsNothing, "test_matches_whole_steps", {"trees": False}),
    (KeepsNothing, "test_matches_whole_steps", {"trees": True}),
    (KeepsNothing, "test_rejects_whole_steps", {"laws": True}),
    (KeepsNothing, "test_rejects_whole_steps", {"laws": False}),
    (WritesLogits, "test_inputs_unchanged", {}),
]


@pytest.mark.parametrize(("fault", "check", "arguments"), FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_faults_are_caught(fault: type[TorchSampling], check: str, arguments: dict[str, Any]) -> None:
    getattr(SamplingBackendContract(), check)(TorchSampling(), **arguments)
    with pytest.raises(AssertionError):
        getattr(SamplingBackendContract(), check)(fault(), **arguments)


def test_every_check_catches_something() -> None:
    checks = {name for name in vars(SamplingBackendContract) if name.startswith("test_")}
    assert {check for _, check, _ in FAULTS} == checks
