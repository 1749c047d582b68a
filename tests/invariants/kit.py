"""Prompts, proposers and types that the invariant tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, RequestOutput
from specdec.drafting import Proposer
from specdec.registry import Registry
from specdec.testing import GappyProposer, OracleProposer, RandomProposer, SelfProposer, WrongProposer
from specdec.testing.attention import attention_layer, attention_requirements
from specdec.testing.heads import tiny_head

VOCAB = 128
MAX_LEN = 256

PROMPTS = [
    [7] * 24,
    [*range(20, 40), *range(20, 40), *range(20, 30)],
    [5, 9, 5, 9, 5, 9, 11],
    [3],
    [int(t) for t in torch.randint(2, VOCAB, (70,), generator=torch.Generator().manual_seed(1))],
    [17, 18],
    [int(t) for t in torch.randint(2, 12, (45,), generator=torch.Generator().manual_seed(2))],
    [100, 101, 102, 103] * 8,
]
"""Repetition, a copied run, one token, random text of several lengths (past one block and one chunk)."""


Start = Callable[..., LLM]
Baseline = Callable[..., list[RequestOutput]]
Runs = Callable[..., list[list[int]]]
Speculation = Callable[[int], dict[str, Any]]


def oracle(runs: Runs, right: int | None = None, prompts: list[list[int]] | None = None) -> OracleProposer:
    return OracleProposer(runs(prompts or PROMPTS), vocab_size=VOCAB, right=right)


def proposer_named(name: str, model: str, runs: Runs) -> Proposer:
    """A proposer by the name used in the tests' parameters."""
    made: dict[str, Callable[[], Proposer]] = {
        "self": lambda: SelfProposer(model),
        "oracle": lambda: oracle(runs),
        "oracle_0": lambda: oracle(runs, 0),
        "oracle_1": lambda: oracle(runs, 1),
        "oracle_2": lambda: oracle(runs, 2),
        "wrong": lambda: WrongProposer(1),
        "random": lambda: RandomProposer(vocab_size=VOCAB),
        "gappy": lambda: GappyProposer(oracle(runs)),
    }
    return made[name]()


OBJECTS = ("self", "oracle", "oracle_0", "oracle_1", "oracle_2", "wrong", "random", "gappy")


def installed(kind: str) -> list[str]:
    """Names of the installed plugins of a kind that can be loaded."""
    return [entry.name for entry in Registry().entries() if entry.kind == kind and entry.status == "ok"]


def serves_this_machine(backend: str) -> bool:
    """Whether an attention backend serves a plain layer on the CPU."""
    wanted = attention_requirements([attention_layer()], block_size=16)
    made = Registry().create("attention_backend", backend, "attention_backend", requirements=wanted, engine=None)
    return not made.supports(wanted)


def head(layout: str, target: str) -> str:
    """Directory of a random head for the target, beside it."""
    path = Path(f"{target}-{layout}")
    return str(path if path.is_dir() else tiny_head(layout, target, path))


OPTIONS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "draft_model": lambda target, other: {"model": target},
    "composite": lambda target, other: {
        "proposers": [
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 4},
            {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
        ]
    },
    "composite, lookup and recycling": lambda target, other: {
        "num_speculative_tokens": 3,
        "proposers": [
            {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
            {
                "method": "token_recycling",
                "speculative_token_tree": "[(0,), (1,), (0, 0)]",
                "num_speculative_tokens": 3,
            },
        ],
    },
    "token_recycling": lambda target, other: {},
    "token_recycling, trees": lambda target, other: {
        "speculative_token_tree": "[(0,), (1,), (0, 0)]",
        "num_speculative_tokens": 3,
    },
    "suffix": lambda target, other: {},
    "suffix, trees": lambda target, other: {"suffix_trees": True, "suffix_decoding_max_spec_factor": 4.0},
    "extract_hidden_states": lambda target, other: {"output_path": f"{target}-hidden-states"},
    "eagle": lambda target, other: {"model": head("eagle", target)},
    "eagle3": lambda target, other: {"model": head("eagle3", target), "tree_top_k": 2, "tree_depth": 3},
    "eagle3, in parallel": lambda target, other: {"model": head("peagle", target)},
    "medusa": lambda target, other: {"model": head("medusa", target)},
    "mlp_speculator": lambda target, other: {"model": head("mlp_speculator", target), "tree_top_k": 2},
    "draft_model, another": lambda target, other: {"model": other, "draft_sample_method": "probabilistic"},
}
"""Options of methods that cannot do without, from the target and another tiny model. A method may be here several
times; what follows a comma is only a name."""


def methods() -> list[str]:
    """Names for the tests' parameters: every installed method, those that need options with each set of them."""
    found = installed("proposer")
    plain = [name for name in found if name not in {key.split(",")[0] for key in OPTIONS}]
    return [*plain, *(key for key in OPTIONS if key.split(",")[0] in found)]


def method_settings(name: str, k: int, target: str, other: str) -> dict[str, Any]:
    """Settings of an engine with a method, by the name that `methods` gives it."""
    options = OPTIONS[name](target, other) if name in OPTIONS else {}
    core = {"method": name.split(",")[0], "num_speculative_tokens": k, "speculation": "always"}
    return {"speculative_config": {**core, **options}}


METHODS = methods()
ESSENTIAL = ("oracle_1", "random", "gappy", *METHODS)
"""Accepted and rejected tokens in every draft, short drafts and none, and every installed method."""


def speculating(*by_default: str) -> pytest.MarkDecorator:
    """Run a test with each oracle and each installed method; those not named are slow tests."""
    names = [*OBJECTS, *METHODS]
    each = [name if name in by_default else pytest.param(name, marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("speculation", each, indirect=True)


def first_of(*values: Any) -> list[Any]:
    """Values of a parameter; all but the first are slow tests."""
    return [values[0], *(pytest.param(value, marks=pytest.mark.slow) for value in values[1:])]


BACKENDS = [name for name in installed("attention_backend") if serves_this_machine(name)]


def kv_bytes_per_token(engine: LLM) -> int:
    """Bytes of K/V of one token, layers of a proposer's own included."""
    parts = engine._engine.core.parts
    own = 0 if parts.drafting is None else parts.drafting.proposer.kv_bytes_per_token()
    return parts.target.kv_bytes_per_token() + own


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    """Token ids of every choice."""
    return [choice.token_ids for output in outputs for choice in output.outputs]


def reasons(outputs: list[RequestOutput]) -> list[tuple[str | None, int | str | None]]:
    """Why every choice ended."""
    return [(choice.finish_reason, choice.stop_reason) for output in outputs for choice in output.outputs]
