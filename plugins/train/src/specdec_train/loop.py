"""The training loop: AdamW with warm-up and cosine decay, resumable, measured on held-out answers."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from attrs import asdict, define, field, frozen

from specdec_train.batches import Batch
from specdec_train.objective import Measured, Objective

WARM_UP_SHARE = 0.03
FINAL_RATE = 0.05
EVALUATE_EVERY = 100
PROGRESS = "progress.jsonl"


@frozen(kw_only=True)
class Schedule:
    """How long and how fast."""

    num_updates: int
    learning_rate: float
    gradient_clip: float = 1.0

    def rate(self, update: int) -> float:
        """Learning rate of an update: linear warm-up, then half a cosine down to a twentieth."""
        warm_up = max(1, round(WARM_UP_SHARE * self.num_updates))
        decay = 0.5 * (1 + math.cos(math.pi * min(1.0, update / self.num_updates)))
        return self.learning_rate * min(1.0, (update + 1) / warm_up) * (FINAL_RATE + (1 - FINAL_RATE) * decay)


@frozen(kw_only=True)
class Evaluation:
    """Held-out answers under the head, as written to ``progress.jsonl``."""

    update: int
    loss: float
    accuracy: list[float]
    acceptance_length: float


@define(eq=False)
class Trainer:
    """Trains one head; everything needed to go on after an interruption is in ``folder``."""

    objective: Objective
    accelerator: Accelerator
    schedule: Schedule
    folder: Path
    training: Callable[[random.Random], Iterator[Batch]]
    """Makes one pass over the training batches, in random order."""
    held_out: Callable[[], Iterator[Batch]]
    on_update: Callable[[int, Measured], None] = lambda update, measured: None
    on_evaluation: Callable[[Evaluation], None] = lambda evaluation: None
    _update: int = 0
    _model: Any = field(init=False)
    _optimizer: Any = field(init=False)

    def __attrs_post_init__(self) -> None:
        optimizer = torch.optim.AdamW(
            self.objective.head.parameters(), lr=self.schedule.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._resume(optimizer)
        self._model, self._optimizer = self.accelerator.prepare(self.objective, optimizer)

    @property
    def checkpoint(self) -> Path:
        """Weights, optimiser state and the number of updates done."""
        return self.folder / "training.pt"

    def run(self) -> Evaluation:
        """Train to the end of the schedule, from where an earlier run stopped.

        Returns:
            The last evaluation.
        """
        for batch in itertools.islice(self._passes(), self.schedule.num_updates - self._update):
            self._train(batch)
            if self._update % EVALUATE_EVERY == 0 or self._update == self.schedule.num_updates:
                self._save()
        return self.evaluate()

    @torch.no_grad()
    def evaluate(self) -> Evaluation:
        """Measure the held-out answers."""
        results = [self.objective(batch.to(self.accelerator.device)) for batch in self.held_out()]
        drafts = sum(result.num_drafts for result in results)
        accepted = sum(result.num_accepted_tokens for result in results)
        return Evaluation(
            update=self._update,
            loss=sum(float(result.loss) for result in results) / len(results),
            accuracy=_means([result.accuracy for result in results]),
            acceptance_length=1.0 + accepted / max(1, drafts),
        )

    def _passes(self) -> Iterator[Batch]:
        """This process's share of one pass after another; every process sees the same order."""
        order = random.Random(self._update)
        batches = itertools.chain.from_iterable(self.training(order) for _ in itertools.count())
        return itertools.islice(batches, self.accelerator.process_index, None, self.accelerator.num_processes)

    def _train(self, batch: Batch) -> None:
        for group in self._optimizer.param_groups:
            group["lr"] = self.schedule.rate(self._update)
        measured = self._model(batch.to(self.accelerator.device))
        self._optimizer.zero_grad()
        self.accelerator.backward(measured.loss)
        self.accelerator.clip_grad_norm_(self._model.parameters(), self.schedule.gradient_clip)
        self._optimizer.step()
        self._update += 1
        self.on_update(self._update, measured)

    def _save(self) -> None:
        """Measure, and write down where the training is."""
        if not self.accelerator.is_main_process:
            return
        evaluation = self.evaluate()
        with (self.folder / PROGRESS).open("a") as file:
            file.write(json.dumps(asdict(evaluation)) + "\n")
        self.on_evaluation(evaluation)
        state: dict[str, Any] = {
            "head": self.objective.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "update": self._update,
        }
        unfinished = self.checkpoint.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.checkpoint)

    def _resume(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.checkpoint.exists():
            return
        state = torch.load(self.checkpoint, weights_only=True, map_location="cpu")
        self.objective.head.load_state_dict(state["head"])
        optimizer.load_state_dict(state["optimizer"])
        self._update = state["update"]


def read_progress(folder: Path) -> list[Evaluation]:
    """The evaluations of a run so far, oldest first."""
    lines = (folder / PROGRESS).read_text().splitlines()
    return [Evaluation(**json.loads(line)) for line in lines]


def _means(rows: list[list[float]]) -> list[float]:
    return [sum(column) / len(rows) for column in zip(*rows, strict=True)]
