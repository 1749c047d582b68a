"""The target's own answers with its hidden states: made by ``specdec extract``, read as training batches."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from specdec.errors import ConfigError, SpecdecError
from specdec.wording import reason_of
from specdec_extract_hidden_states.command import extract
from specdec_extract_hidden_states.shards import read_manifest, read_request
from specdec_train.batches import Batch
from specdec_train.options import TrainingOptions

MAX_ROWS = 1024
"""Longer sequences are cut."""

_WINDOW = 256
"""Sequences that are read and sorted by length at a time, which bounds the memory."""


class AnswersMissingError(SpecdecError):
    """The target gave too few answers to train on."""


@frozen(eq=False)
class Answer:
    """One prompt with its answer."""

    token_ids: Tensor
    """int64 [n]."""
    hidden: Tensor
    """bfloat16 [n - 1, F, H]: tapped layers, then the final hidden state."""
    num_prompt_tokens: int


def feature_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose outputs EAGLE-3 fuses: low, middle and high, as its authors chose them (Li et al. 2025).

    Args:
        num_layers: of the target, at least 3.
    """
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if not low < middle < high:
        low, middle, high = 1, max(2, (num_layers + 1) // 2), num_layers
    return low - 1, middle - 1, high - 1


@frozen(eq=False)
class Answers:
    """A directory of answers, split into those to train on and those to measure with."""

    folder: Path
    layers: tuple[int, ...]
    training: list[dict[str, Any]]
    held_out: list[dict[str, Any]]

    def batches(
        self, records: Sequence[dict[str, Any]], tokens: int, order: random.Random | None = None
    ) -> Iterator[Batch]:
        """One pass over some of the answers.

        Args:
            records: of `training` or `held_out`.
            tokens: rows of a batch, padding included; a longer sequence is a batch of its own.
            order: shuffles sequences and batches; None keeps them as they are.
        """
        records = list(records)
        if order is not None:
            order.shuffle(records)
        for begin in range(0, len(records), _WINDOW):
            window = [self.read(record) for record in records[begin : begin + _WINDOW]]
            groups = _grouped(sorted(window, key=lambda answer: len(answer.hidden)), tokens)
            if order is not None:
                order.shuffle(groups)
            yield from map(_padded, groups)

    def read(self, record: dict[str, Any]) -> Answer:
        """One answer from its shard."""
        tensors = read_request(self.folder, record)
        states = [tensors[f"layer_{layer}"] for layer in self.layers] + [tensors["final"]]
        return Answer(
            tensors["token_ids"][: MAX_ROWS + 1],
            torch.stack(states, dim=1)[:MAX_ROWS],
            int(record["num_prompt_tokens"]),
        )

    def tokens(self, records: Sequence[dict[str, Any]]) -> Iterator[Tensor]:
        """The token ids of some of the answers, without their prompts."""
        for record in records:
            yield read_request(self.folder, record)["token_ids"][int(record["num_prompt_tokens"]) :]


def collect(options: TrainingOptions, layers: tuple[int, ...]) -> Answers:
    """Let the target answer the prompts, as far as it has not yet, and split the answers.

    Raises:
        AnswersMissingError: fewer than two answers are long enough.
        ConfigError: the output folder cannot be written.
    """
    folder = options.answers or options.out / "answers"
    _make_folder(options.out)
    extract(
        argparse.Namespace(
            model=options.model,
            prompts=str(_first_prompts(options)),
            chat=options.chat,
            output=str(folder),
            layers=layers,
            no_final=False,
            hidden_dtype="bfloat16",
            shard_size="64MiB",
            dtype=options.dtype,
            max_model_len=None,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
            batch_size=64,
        )
    )
    needed = options.num_steps + 2
    answered = read_manifest(folder)[1]
    records = [
        record
        for record in answered
        if record["num_tokens"] - record["num_prompt_tokens"] >= needed
        and record["num_prompt_tokens"] + needed < MAX_ROWS
    ]
    if len(records) < len(answered) // 2:
        print(
            f"only {len(records)} of {len(answered)} answers have {needed} tokens or more; if the model is made for "
            "chat, its prompts need its template: give --chat and another --output",
            file=sys.stderr,
        )
    if len(records) < 2:
        raise AnswersMissingError(
            f"{len(records)} answers have the {needed} tokens that {options.num_steps} draft steps need; "
            "give more prompts or a larger --max-tokens"
        )
    random.Random(options.seed).shuffle(records)
    num_held_out = max(1, round(options.held_out * len(records)))
    return Answers(folder, layers, records[num_held_out:], records[:num_held_out])


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--output: {str(folder)!r} cannot be used: {reason_of(error)}", path="out") from error


def _first_prompts(options: TrainingOptions) -> Path:
    """The prompts file, or a copy of its beginning."""
    if options.num_prompts is None:
        return options.prompts
    lines = options.prompts.read_text(encoding="utf-8").splitlines(keepends=True)
    beginning = options.out / "prompts.jsonl"
    beginning.write_text("".join(lines[: options.num_prompts]), encoding="utf-8")
    return beginning


def _grouped(answers: Sequence[Answer], tokens: int) -> list[list[Answer]]:
    """Neighbours together, as many as fit when all are as long as the longest, which is the last."""
    groups: list[list[Answer]] = []
    for answer in answers:
        if groups and (len(groups[-1]) + 1) * len(answer.hidden) <= tokens:
            groups[-1].append(answer)
        else:
            groups.append([answer])
    return groups


def _padded(group: Sequence[Answer]) -> Batch:
    length = max(len(answer.hidden) for answer in group)
    token_ids = torch.zeros(len(group), length + 1, dtype=torch.int64)
    hidden = torch.zeros(len(group), length, *group[0].hidden.shape[1:])
    for i, answer in enumerate(group):
        token_ids[i, : len(answer.token_ids)] = answer.token_ids
        hidden[i, : len(answer.hidden)] = answer.hidden.float()
    return Batch(
        token_ids,
        hidden,
        torch.tensor([len(answer.hidden) for answer in group]),
        torch.tensor([answer.num_prompt_tokens for answer in group]),
    )
