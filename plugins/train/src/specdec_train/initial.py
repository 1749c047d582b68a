"""The head that a training run starts from, instead of from the target's own layers (``--init``)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from specdec.drafting.checkpoint import HeadCheckpoint, resolve_head
from specdec.drafting.vocabulary import target_ids_of
from specdec.errors import ConfigError
from specdec_train.heads.base import TrainableHead
from specdec_train.options import TrainingOptions

OUTPUT = "lm_head.weight"
"""The name of an output linear of the head's own."""
_MAPS = ("d2t", "t2d")
_SIZELESS = ("architectures", "max_position_embeddings", "top_k_tokens_per_head", "n_candidates")
"""Keys of configurations that differ without making another head."""
_OTHER_HEADS = ("norm_before_residual", "norm_output", "fc_norm", "norm_before_fc")
"""Switches of published heads that compute what is not trained here."""


@frozen(eq=False)
class InitialHead:
    """Weights and draft vocabulary of a head in a published layout."""

    directory: Path
    config: dict[str, Any]
    """What is to be trained, with the sizes that are the head's own."""
    tensors: dict[str, Tensor]
    """By the names of `TrainableHead.tensors`, as stored."""
    draft_token_ids: Tensor
    """int64 [draft vocabulary], ascending: the target ids that it drafts."""
    output_rows: Tensor | None
    """Its own output linear [draft vocabulary, width], if it has one."""

    def load_into(self, head: TrainableHead) -> None:
        """Copy the weights."""
        with torch.no_grad():
            for name, tensor in head.tensors().items():
                tensor.copy_(self.tensors[name])
        head.output_rows = self.output_rows


def open_initial(name: str, kind: type[TrainableHead], config: dict[str, Any], vocab_size: int) -> InitialHead:
    """Read a head and make sure that it is of the kind and size to be trained.

    Args:
        name: a directory, a model id or a bundled name.
        kind: of the head to be trained.
        config: its configuration, as the checkpoint will have it but for sizes of the head's own.
        vocab_size: the target's.

    Raises:
        ModelNotFoundError: there is no such checkpoint.
        ConfigError: its configuration says another thing than ``config``; both values are named.
        ModelLoadError: its tensors are others, or of other shapes, which are named.
    """
    directory = resolve_head(name)
    checkpoint = HeadCheckpoint(directory, kind.published_name)
    config = config | {key: checkpoint.config[key] for key in kind.own_sizes if key in checkpoint.config}
    _compare(checkpoint, config)
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in kind(config).tensors().items()}
    optional = {name: shape for name, shape in checkpoint.shapes.items() if name in _MAPS}
    size = optional["d2t"][0] if "d2t" in optional else vocab_size
    if kind.reduces_vocabulary:
        optional[OUTPUT] = (size, int(config["hidden_size"]))
    tensors = checkpoint.take(shapes, optional)
    ids = target_ids_of(tensors, size, vocab_size, directory)
    weights = {name: tensor for name, tensor in tensors.items() if name in shapes}
    ids = torch.arange(vocab_size) if ids is None else ids
    return InitialHead(directory, config, weights, ids, tensors.get(OUTPUT))


def check_draft_vocabulary(initial: InitialHead, wanted: int | None, vocab_size: int) -> None:
    """Refuse a ``--draft-vocab-size`` that is not the initial head's, if that has an output linear of its own.

    Raises:
        ConfigError: names both sizes.
    """
    own = len(initial.draft_token_ids)
    if wanted is not None and initial.output_rows is not None and own != (wanted or vocab_size):
        raise ConfigError(
            f"--draft-vocab-size is {wanted}, but {initial.directory} drafts {own} tokens with an output linear of its "
            "own, which --init keeps: leave the option out",
            path="draft_vocab_size",
        )


def check_start(folder: Path, options: TrainingOptions, draft_token_ids: Tensor) -> None:
    """Write down in the folder of a run what it starts from; refuse to go on with a run that started otherwise.

    Raises:
        ConfigError: names what is different.
    """
    start = {"head": options.head, "init": options.init, "draft_vocab_size": len(draft_token_ids)}
    file = folder / "start.json"
    if not file.is_file():
        file.write_text(json.dumps(start) + "\n")
        return
    before = json.loads(file.read_text())
    different = [
        f"{key} was {before.get(key)} and is {value}" for key, value in start.items() if before.get(key) != value
    ]
    if different:
        raise ConfigError(
            f"{folder} holds a run that started otherwise: {'; '.join(different)}. Give it the same options, or "
            "another --output",
            path="out",
        )


def _compare(checkpoint: HeadCheckpoint, config: dict[str, Any]) -> None:
    own = checkpoint.config
    different = [
        f"{key} {own[key]} instead of {value}"
        for key, value in config.items()
        if key in own and key not in _SIZELESS and not isinstance(value, str) and not _same(own[key], value)
    ]
    different += [f"{key} {own[key]}, which is not trained here" for key in _OTHER_HEADS if own.get(key)]
    if different:
        raise ConfigError(
            f"--init: {checkpoint.directory} is another head than the one to be trained: {'; '.join(different)}",
            path="init",
        )


def _same(own: Any, value: Any) -> bool:
    numbers = isinstance(own, int | float) and isinstance(value, int | float)
    return math.isclose(own, value, rel_tol=1e-6) if numbers else bool(own == value)
