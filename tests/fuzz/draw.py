"""What the fuzz may draw: a target, an engine, a method, requests, and what happens to them.

Everything follows from one seed, so that a failure is found again by its number.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from attrs import frozen

from tests.fuzz.checkpoints import HEADS, VOCAB, WIDE_VOCAB, Checkpoints

MAX_LEN = 96
TARGETS = (
    *["llama"] * 4, "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss",
    "llama4", "phi3", "gpt2", "cohere2",
)  # fmt: skip
ENDS = ((5, 61), (17, 30, 99))
"""End tokens, where a target has some."""
TREE = "[(0,),(1,),(2,),(0,0),(0,1),(1,0),(0,0,0),(0,0,1)]"
GRAMMARS = (
    {"choice": ["yes", "no", "yesterday"]},
    {"regex": "[a-c]{3,9}-[0-9]{2}"},
    {
        "json": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 6},
                "n": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["name", "n"],
        },
        "disable_any_whitespace": True,
    },
    {"grammar": 'root ::= "(" (root | "x" | "long text") ")"'},
)
METHODS = (
    "ngram", "ngram_gpu", "suffix", "token_recycling", "draft_self", "draft_other", "draft_wide", "draft_parallel",
    *HEADS, *HEADS, "composite", "composite", "composite",
)  # fmt: skip


@frozen(kw_only=True)
class Target:
    """A checkpoint to decode with."""

    architecture: str
    path: str
    vocab_size: int


def draw_target(random: Random, checkpoints: Checkpoints) -> Target:
    """A tiny model of some architecture."""
    architecture = random.choice(TARGETS)
    fields = {"num_hidden_layers": 4} if architecture in ("llama", "llama4") else {}
    vocab_size = WIDE_VOCAB if random.random() < 0.15 else VOCAB
    ends = random.choice(ENDS) if random.random() < 0.25 else ()
    path = checkpoints.model(architecture, seed=random.choice([0, 1]), vocab_size=vocab_size, ends=ends, **fields)
    return Target(architecture=architecture, path=path, vocab_size=vocab_size)


def draw_prompts(random: Random, vocab_size: int) -> list[list[int]]:
    """Shared prefixes, repetitions, few tokens, one token, nearly the longest text, anything."""

    def tokens(count: int, end: int = vocab_size) -> list[int]:
        return [random.randrange(2, end) for _ in range(count)]

    prefix = tokens(random.choice([8, 16, 33]))
    kinds: tuple[tuple[float, Callable[[], list[int]]], ...] = (
        (0.30, lambda: prefix + tokens(random.randint(0, 10))),
        (0.50, lambda: (tokens(random.randint(1, 4)) * 20)[: random.randint(3, 40)]),
        (0.70, lambda: tokens(random.randint(1, 50), 8)),
        (0.80, lambda: tokens(1)),
        (0.85, lambda: tokens(MAX_LEN - random.randint(1, 7))),
        (1.00, lambda: tokens(random.randint(2, 60))),
    )
    found = []
    for _ in range(random.randint(2, 8)):
        at = random.random()
        found.append(next(make for share, make in kinds if at < share)())
    return found


def draw_params(random: Random, vocab_size: int, plain: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Sampling parameters of one request.

    Args:
        random: the source.
        vocab_size: the target's.
        plain: decodes the prompt with given parameters, for stops that the text really holds.
    """
    found: dict[str, Any] = {
        "max_tokens": random.choice([1, 3, 8, 16, 24, 32]),
        "temperature": random.choice([0, 0, 0, 0.7, 1.0, 1.3]),
        "ignore_eos": random.random() < 0.3,
    }
    if found["temperature"]:
        found["seed"] = random.randrange(10**6)
    at = random.random()
    if at < 0.5:
        found |= _processors(random, vocab_size, found["max_tokens"])
        if random.random() < 0.2 and found["temperature"]:
            found["n"] = 2
    elif at < 0.7:
        found["structured_outputs"] = random.choice(GRAMMARS)
        found["max_tokens"] = max(found["max_tokens"], 16)
        if random.random() < 0.3:
            found["logprobs"] = 2
    elif at < 0.9:
        found |= _stops(random, found, plain(found))
    return found


def _processors(random: Random, vocab_size: int, max_tokens: int) -> dict[str, Any]:
    bad = [[random.randrange(vocab_size)], [random.randrange(2, 9), random.randrange(2, 9)]]
    options: tuple[dict[str, Any], ...] = (
        {"frequency_penalty": 2.0},
        {"frequency_penalty": -2.0},
        {"presence_penalty": 1.5, "repetition_penalty": 1.3},
        {"logit_bias": {7: -100.0, 21: 3.0}},
        {"min_p": 0.2},
        {"top_k": 3},
        {"top_p": 0.8},
        {"allowed_token_ids": [5, 6, 7, 8, 9, 40]},
        {"min_tokens": min(8, max_tokens)},
        {"logprobs": 3},
        {"logprobs": 0},
        {"prompt_logprobs": 2},
        {"bad_words_token_ids": bad},
    )
    found: dict[str, Any] = {}
    for _ in range(random.randint(1, 2)):
        found |= random.choice(options)
    return found


def _stops(random: Random, params: dict[str, Any], plain: Any) -> dict[str, Any]:
    """Stops somewhere in the text that plain decoding gives."""
    found: dict[str, Any] = {}
    if not plain.token_ids:
        return found
    at = random.randrange(len(plain.token_ids))
    if random.random() < 0.5:
        found["stop_token_ids"] = [plain.token_ids[at]]
    elif len(plain.text) > 2:
        start = random.randrange(len(plain.text) - 1)
        found["stop"] = [plain.text[start : start + random.randint(1, 3)]]
        found["include_stop_str_in_output"] = random.random() < 0.3
    if random.random() < 0.3:
        found["bad_words_token_ids"] = [plain.token_ids[at : at + 2]]
    if random.random() < 0.3:
        found["min_tokens"] = min(4, params["max_tokens"])
    if random.random() < 0.3:
        found["logprobs"] = 1
    return found


class MethodDraw:
    """Draws a method with its options for a target."""

    def __init__(self, random: Random, target: Target, checkpoints: Checkpoints, *, trees: bool) -> None:
        self._random = random
        self._target = target
        self._checkpoints = checkpoints
        self._trees = trees

    def draw(self, k: int, *, member: bool = False) -> tuple[dict[str, Any], int]:
        """The method's table and the k it needs.

        Args:
            k: draft tokens wished for.
            member: of a composite, and so none itself.
        """
        makers: dict[str, Callable[[int], tuple[dict[str, Any], int]]] = {
            "ngram": self._lookup("ngram"),
            "ngram_gpu": self._lookup("ngram_gpu"),
            "suffix": self._suffix,
            "token_recycling": self._recycling,
            "draft_self": lambda k: (self._draft_model(self._target.path), k),
            "draft_other": self._other,
            "draft_wide": self._other_vocabulary,
            "draft_parallel": self._parallel,
            "composite": self._composite,
            **{layout: self._head(layout) for layout in HEADS},
        }
        usable = [name for name in METHODS if self._serves(name) and not (member and name == "composite")]
        return makers[self._random.choice(usable)](k)

    def _serves(self, name: str) -> bool:
        if name in HEADS:
            return self._target.architecture in HEADS[name]
        return self._target.vocab_size == VOCAB or name not in ("draft_other", "draft_parallel")

    def _lookup(self, method: str) -> Callable[[int], tuple[dict[str, Any], int]]:
        def make(k: int) -> tuple[dict[str, Any], int]:
            least = self._random.randint(1, 3)
            most = least + self._random.randint(0, 3)
            return {"method": method, "prompt_lookup_min": least, "prompt_lookup_max": most}, k

        return make

    def _suffix(self, k: int) -> tuple[dict[str, Any], int]:
        choice = self._random.choice
        return {
            "method": "suffix",
            "suffix_trees": self._trees and choice([True, False]),
            "suffix_decoding_max_spec_factor": choice([1.0, 4.0]),
            "suffix_decoding_min_token_prob": choice([0.0, 0.1]),
            "suffix_decoding_max_cached_requests": choice([0, 2, 10000]),
            "suffix_max_cached_tokens": choice([50, 10**6]),
        }, k

    def _recycling(self, k: int) -> tuple[dict[str, Any], int]:
        if self._trees and self._random.random() < 0.6:
            return {"method": "token_recycling", "speculative_token_tree": TREE}, max(k, 8)
        return {"method": "token_recycling"}, k

    def _chain_options(self) -> dict[str, Any]:
        return {
            "draft_sample_method": self._random.choice(["greedy", "probabilistic", "coupled"]),
            "confidence_threshold": self._random.choice([0, 0, 0, 0.05]),
        }

    def _draft_model(self, model: str, **options: Any) -> dict[str, Any]:
        return {"method": "draft_model", "model": model, **self._chain_options(), **options}

    def _other(self, k: int) -> tuple[dict[str, Any], int]:
        narrow = self._checkpoints.model("qwen2", seed=3, num_hidden_layers=1)
        model = narrow if self._random.random() < 0.6 else self._checkpoints.model("mistral", seed=4)
        options = {"max_model_len": 40} if self._random.random() < 0.2 else {}
        return self._draft_model(model, **options), k

    def _other_vocabulary(self, k: int) -> tuple[dict[str, Any], int]:
        size = VOCAB if self._target.vocab_size == WIDE_VOCAB else WIDE_VOCAB
        model = self._checkpoints.model("qwen2", seed=5, vocab_size=size, num_hidden_layers=1)
        return self._draft_model(model, use_heterogeneous_vocab=True), k

    def _parallel(self, k: int) -> tuple[dict[str, Any], int]:
        return self._draft_model(self._checkpoints.parallel_drafter()), k

    def _head(self, layout: str) -> Callable[[int], tuple[dict[str, Any], int]]:
        def make(k: int) -> tuple[dict[str, Any], int]:
            most = {"medusa": 4, "mlp_speculator": 3}.get(layout, k)
            shape, k = self._shape(layout, min(k, most))
            method = "eagle3" if layout == "peagle" else layout
            return {"method": method, "model": self._checkpoints.head(layout, self._target.path), **shape}, k

        return make

    def _shape(self, layout: str, k: int) -> tuple[dict[str, Any], int]:
        """A chain, a fixed tree or a grown one."""
        at = self._random.random()
        if not self._trees or at < 0.45 or layout == "peagle" or (layout == "medusa" and at >= 0.7):
            return self._chain_options(), k
        if at < 0.7:
            return {"speculative_token_tree": TREE}, max(k, 8)
        shape = {"tree_top_k": self._random.randint(1, 4), "tree_depth": self._random.randint(1, 4)}
        return shape, self._random.choice([k, k + 5])

    def _composite(self, k: int) -> tuple[dict[str, Any], int]:
        members, longest = [], 0
        for _ in range(self._random.randint(2, 3)):
            member, needed = self.draw(k, member=True)
            if self._random.random() < 0.3 and "speculative_token_tree" not in member:
                member["num_speculative_tokens"] = self._random.randint(1, min(k, needed))
            members.append(member)
            longest = max(longest, needed)
        return {"method": "composite", "proposers": members, "choose": self._random.choice(["first", "best"])}, longest


def draw_speculation(random: Random, k: int, members: list[str]) -> Any:
    """What a request says about its speculation; None: nothing."""
    at = random.random()
    if at < 0.1:
        return False
    if at < 0.3:
        return {"num_speculative_tokens": random.randint(0, k)}
    return {"method": random.choice(members)} if at < 0.4 and members else None


def draw_engine(random: Random, target: Target, bytes_per_token: int, k: int) -> dict[str, Any]:
    """Settings of an engine whose K/V may be just enough for one request, or for all.

    Args:
        random: the source.
        target: what decodes.
        bytes_per_token: of K/V, with the proposer's.
        k: draft tokens per step.
    """
    block_size = random.choice([1, 2, 4, 8, 16])
    spare = random.randint(0, 4) if random.random() < 0.5 else 400 // block_size
    num_blocks = MAX_LEN // block_size + 2 + (k + block_size) // block_size * 2 + spare
    return {
        "model": target.path,
        "dtype": "float32",
        "max_model_len": MAX_LEN,
        "stat_loggers": (),
        "proposer_time_budget": 0,
        "block_size": block_size,
        "kv_cache_memory": num_blocks * block_size * bytes_per_token,
        "max_num_seqs": random.choice([1, 2, 4, 64]),
        "max_num_batched_tokens": random.choice([2, 3, 5, 9, 17, 40, 2048, 2048]),
        "enable_prefix_caching": random.random() < 0.75,
        "attention_backend": random.choice(["sdpa", "cpu", "auto"]),
        "sampling_backend": random.choice(["cpu", "torch", "auto"]),
        "scheduling_policy": random.choice(["fcfs", "priority"]),
        "fuse": random.random() < 0.8,
    }
