"""One run of ``specdec train``: answers, draft vocabulary, training, checkpoint."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from specdec.errors import ConfigError
from specdec.target.cache import cache_root
from specdec.target.gguf import converted
from specdec.target.loading import GGUF_DTYPE, load_config, load_model
from specdec.target.resolve import resolve_model
from specdec_train.answers import MAX_ROWS, Answers, collect, feature_layers
from specdec_train.export import export
from specdec_train.heads.base import TrainableHead
from specdec_train.heads.eagle import Eagle
from specdec_train.heads.eagle3 import Eagle3
from specdec_train.heads.medusa import Medusa
from specdec_train.heads.mlp_speculator import MLPSpeculator
from specdec_train.initial import OUTPUT, InitialHead, check_draft_vocabulary, check_start, open_initial
from specdec_train.loop import Evaluation, Schedule, Trainer, read_progress
from specdec_train.objective import Measured, Objective
from specdec_train.options import DRAFT_VOCAB_SIZE, TrainingOptions
from specdec_train.plot import draw
from specdec_train.targets import FrozenTarget, frozen_target
from specdec_train.vocabulary import coverage, most_frequent, vocabulary_tensors

KINDS: dict[str, type[TrainableHead]] = {kind.name: kind for kind in (Eagle3, Eagle, Medusa, MLPSpeculator)}

SAMPLE = 500
"""Answers that a head may look at for its start."""


def train(options: TrainingOptions) -> Evaluation:
    """Train a head; the checkpoint is written to ``options.out / "checkpoint"``.

    Raises:
        SpecdecError: the model, the prompts or an option cannot be used.
    """
    kind = KINDS[options.head]
    checkpoint = _checkpoint_of(options)
    text_config = load_config(options.model, checkpoint, trust_remote_code=False).get_text_config()
    layers = _feature_layers(text_config.num_hidden_layers)
    config = kind.shape(text_config, {"num_steps": options.num_steps, "inner_dim": options.inner_dim})
    if kind.reads_layers:
        config["eagle_aux_hidden_state_layer_ids"] = [layer + 1 for layer in layers]
    initial = _initial(options, kind, config, text_config.vocab_size)
    config = config if initial is None else initial.config
    accelerator = Accelerator()
    with accelerator.main_process_first():
        answers = collect(options, layers)
    torch.manual_seed(options.seed)
    model = _load(options, checkpoint)
    vocab_size = model.config.vocab_size
    draft_token_ids = _draft_vocabulary(kind, options, initial, answers, vocab_size)
    if accelerator.is_main_process:
        check_start(options.out, options, draft_token_ids)
    target = frozen_target(model, draft_token_ids).to(accelerator.device)
    head = kind(config)
    if initial is None:
        sample = partial(answers.batches, answers.training[:SAMPLE], options.tokens_per_update)
        head.initialise(frozen_target(model, draft_token_ids), sample)
    else:
        initial.load_into(head)
    del model
    last = _run(options, answers, head, target, accelerator)
    if not accelerator.is_main_process:
        return last
    tensors = {}
    if kind.reduces_vocabulary:
        config["draft_vocab_size"] = len(draft_token_ids)
        tensors = vocabulary_tensors(draft_token_ids, vocab_size)
    if head.output_rows is not None:
        tensors[OUTPUT] = head.output_rows
    export(head, config, tensors, options.out / "checkpoint")
    draw(read_progress(options.out), options.out / "progress.png", f"{options.head} for {options.model}")
    _say(
        f"held-out acceptance length {last.acceptance_length:.2f} at temperature 0, with {options.num_steps} draft "
        f"steps; the head is in {options.out / 'checkpoint'}, the curves in {options.out / 'progress.png'}"
    )
    return last


def _feature_layers(num_layers: int) -> tuple[int, ...]:
    """`feature_layers` of a target that has enough of them.

    Raises:
        ConfigError: it has too few.
    """
    if num_layers < 3:
        raise ConfigError(f"--model: the target has {num_layers} layers; a head needs 3 or more", path="model")
    return feature_layers(num_layers)


def _initial(
    options: TrainingOptions, kind: type[TrainableHead], config: dict[str, Any], vocab_size: int
) -> InitialHead | None:
    """The head to start from, if there is one."""
    if options.init is None:
        return None
    initial = open_initial(options.init, kind, config, vocab_size)
    check_draft_vocabulary(initial, options.draft_vocab_size, vocab_size)
    return initial


def _run(
    options: TrainingOptions, answers: Answers, head: TrainableHead, target: FrozenTarget, accelerator: Accelerator
) -> Evaluation:
    rows = sum(min(record["num_tokens"], MAX_ROWS) for record in answers.training)
    num_updates = max(1, round(options.epochs * rows / options.tokens_per_update / accelerator.num_processes))
    with _bar(num_updates) as bar:

        def on_update(update: int, measured: Measured) -> None:
            bar.update(
                bar.task_ids[0],
                completed=update,
                loss=float(measured.loss.detach()),
                length=measured.acceptance_length,
            )

        def on_evaluation(evaluation: Evaluation) -> None:
            bar.console.print(
                f"{evaluation.update} of {num_updates} updates: held-out loss {evaluation.loss:.3f}, "
                f"acceptance length {evaluation.acceptance_length:.2f}"
            )

        return Trainer(
            objective=Objective(head, target, options.num_steps),
            accelerator=accelerator,
            schedule=Schedule(num_updates=num_updates, learning_rate=options.learning_rate),
            folder=options.out,
            training=lambda order: answers.batches(answers.training, options.tokens_per_update, order),
            held_out=lambda: answers.batches(answers.held_out, options.tokens_per_update),
            on_update=on_update,
            on_evaluation=on_evaluation,
        ).run()


def _checkpoint_of(options: TrainingOptions) -> Path:
    """The directory of the target's weights; a GGUF file is converted as the engine does it."""
    found = resolve_model(options.model, None)
    if found.kind != "gguf":
        return found.path
    return converted(found.path, GGUF_DTYPE if options.dtype == "auto" else options.dtype, cache_root(None))


def _load(options: TrainingOptions, checkpoint: Path) -> Any:
    """The target in float32, for its weights.

    Raises:
        ConfigError: its layers are not Llama's, which these heads are trained from.
    """
    config = load_config(options.model, checkpoint, trust_remote_code=False)
    model = load_model(
        options.model, checkpoint, config, dtype="float32", device=torch.device("cpu"), trust_remote_code=False
    )
    if not all(hasattr(getattr(model, "model", None), part) for part in ("layers", "norm")):
        raise ConfigError(
            f"--model: heads can be trained for Llama-like targets, not for {type(model).__name__}", path="model"
        )
    return model


def _draft_vocabulary(
    kind: type[TrainableHead], options: TrainingOptions, initial: InitialHead | None, answers: Answers, size: int
) -> Tensor:
    """int64 [draft vocabulary]: the target ids that the head drafts."""
    wanted = options.draft_vocab_size
    if initial is not None and (wanted is None or initial.output_rows is not None):
        return initial.draft_token_ids
    wanted = DRAFT_VOCAB_SIZE if wanted is None else wanted
    if not kind.reduces_vocabulary or not 0 < wanted < size:
        return torch.arange(size)
    draft_token_ids = most_frequent(answers.tokens(answers.training), size, wanted)
    share = coverage(draft_token_ids, answers.tokens(answers.held_out))
    _say(f"{len(draft_token_ids)} of {size} tokens can be drafted, {share:.1%} of the held-out answers' tokens")
    return draft_token_ids


def _say(text: str) -> None:
    print(text, file=sys.stderr)


def _bar(total: int) -> Progress:
    bar = Progress(
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.2f}, acceptance length {task.fields[length]:.2f}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )
    bar.add_task("", total=total, loss=0.0, length=1.0)
    return bar
