"""The configuration of an engine. The fields hold the only defaults; files and flags follow from them."""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.config.problems import InvalidValueError, SettingsConflictError, UnknownSettingError, closest
from specdec.config.sizes import Size

MAX_SPECULATIVE_TOKENS = 64
DEFAULT_SPECULATIVE_TOKENS = 4


@frozen(kw_only=True)
class SpeculativeConfig:
    """How draft tokens are proposed: the table ``[speculative]``, or ``speculative_config`` in Python.

    Keys that are not fields here belong to the method; they are kept in ``options`` and checked by the method's own
    configuration class.
    """

    SECTION: ClassVar[str] = "speculative"

    method: str | None = field(default=None, validator=optional(check.text()))
    """Name of the proposer, as `specdec plugins` lists it; without it the checkpoint in `model` decides."""
    model: str | None = field(default=None, validator=optional(check.text()))
    """Draft model or head: a directory or a model id; for methods that need one."""
    num_speculative_tokens: int | None = field(
        default=None, validator=optional(check.integer(1, MAX_SPECULATIVE_TOKENS))
    )
    """Most draft tokens per request and step (k). Not set: 4, or as many as the method's heads draft if fewer."""
    speculation: Literal["auto", "always"] = field(default="auto", validator=check.choice("auto", "always"))
    """auto drafts as many tokens as pay, from measured times and acceptance, none while none pay; always drafts k."""
    num_speculative_tokens_per_batch_size: Any = field(default=None)
    """Lower k for larger batches: [[from, to, k], ...] or {batch size: k}, by number of decoding requests."""
    options: dict[str, Any] = field(factory=dict, converter=check.as_dict, validator=check.table())
    """The method's own options; in files and JSON they stand beside the keys above."""

    @num_speculative_tokens_per_batch_size.validator
    def _check_schedule(self, attribute: Any, value: Any) -> None:
        if value is None:
            return
        from specdec.control.schedule import Schedule

        try:
            Schedule.parse(value, self.most_draft_tokens)
        except ValueError as error:
            raise InvalidValueError(f"speculative.{attribute.name}", value, str(error)) from None

    def __attrs_post_init__(self) -> None:
        legacy = re.fullmatch(r"\[(\w+)\]", self.model or "")
        if legacy:
            raise InvalidValueError(
                "speculative.model",
                self.model,
                "a checkpoint, not a method in brackets",
                hint=f'Write "method": "{legacy[1]}" and leave "model" out.',
            )
        if self.method is None and self.model is None:
            for name in self.options:
                if closest(name, ("method", "model")):
                    raise UnknownSettingError(f"speculative.{name}", ("method", "model"))
            given = ", ".join([f"num_speculative_tokens={self.most_draft_tokens}", *sorted(self.options)])
            raise SettingsConflictError(
                f"speculative is given ({given}) without 'method' or 'model', so nothing could propose. "
                "Set speculative.method, for example 'ngram', or remove the section for plain decoding.",
                path="speculative.method",
            )

    @property
    def most_draft_tokens(self) -> int:
        """``num_speculative_tokens``, or what stands for it until the method is known."""
        return self.num_speculative_tokens or DEFAULT_SPECULATIVE_TOKENS


@frozen(kw_only=True)
class PluginsConfig:
    """Which plugins may be used: the table ``[plugins]``."""

    SECTION: ClassVar[str] = "plugins"

    prefer: dict[str, str] = field(factory=dict, converter=check.as_dict, validator=check.table(str))
    """Name of a plugin -> distribution that shall provide it, where two offer the same name."""
    allow: tuple[str, ...] | None = field(default=None, converter=check.as_tuple, validator=optional(check.names()))
    """Only these plugin names or distributions may be loaded; all when not set."""
    block: tuple[str, ...] = field(default=(), converter=check.as_tuple, validator=check.names())
    """Plugin names or distributions that are never loaded."""


@frozen(kw_only=True)
class EngineConfig:
    """Everything an engine is configured with. Fields that are None are derived from the model or the machine."""

    SECTION: ClassVar[str] = ""

    model: str = field(validator=check.text())
    """Target model: a directory, a model id, a .gguf file, or a bundled name such as demo:smollm2."""
    tokenizer: str | None = field(default=None, validator=optional(check.text()))
    """Directory or id of the tokenizer, when it is not the model's own."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = field(
        default="auto", validator=check.choice("auto", "float32", "bfloat16", "float16")
    )
    """Type of weights and activations; auto takes the checkpoint's."""
    device: str = field(
        default="auto", validator=check.text(r"auto|[a-z]+(:\d+)?", "'auto', 'cpu', 'cuda' or 'cuda:N'")
    )
    """Where the model runs; auto takes a GPU when there is one."""
    max_model_len: int | None = field(default=None, validator=optional(check.integer(2)))
    """Most tokens of prompt and output together; the model's own limit when not set."""
    generation_config: Literal["auto", "none"] = field(default="auto", validator=check.choice("auto", "none"))
    """Where requests leave temperature, top_p, top_k, min_p or repetition_penalty open, auto takes what the
    checkpoint's generation_config.json says, none the defaults of `SamplingParams`."""
    trust_remote_code: bool = field(default=False, validator=check.boolean())
    """Run Python code that a checkpoint brings along."""
    speculative: SpeculativeConfig | None = field(
        default=None,
        validator=optional(check.instance(SpeculativeConfig, "a table with 'method' or 'model'")),
    )
    """How draft tokens are proposed; plain decoding when not set."""
    verifier: str = field(default="match", validator=check.text())
    """Plugin that decides which draft tokens stay."""
    verifier_options: dict[str, Any] = field(factory=dict, converter=check.as_dict, validator=check.table())
    """Options of the verifier plugin's own configuration class."""
    attention_backend: str = field(default="auto", validator=check.text())
    """Plugin that computes attention; auto takes the best one that serves the model."""
    sampling_backend: str = field(default="auto", validator=check.text())
    """Plugin that draws tokens from logits; auto takes the best one for the device. All give the same tokens."""
    grammar_backend: str = field(default="auto", validator=check.text())
    """Plugin that compiles grammars for structured output; auto takes the installed one when a request asks for it."""
    grammar_options: dict[str, Any] = field(factory=dict, converter=check.as_dict, validator=check.table())
    """Options of the grammar plugin's own configuration class."""
    logits_processors: tuple[str, ...] = field(default=(), converter=check.as_tuple, validator=check.names())
    """Plugins that change logits before tokens are chosen, in the order in which they run."""
    logits_processor_options: dict[str, dict[str, Any]] = field(
        factory=dict, converter=check.as_dict, validator=check.table()
    )
    """Options of the logits processors, a table for each name."""
    kv_cache_memory: Size = field(default="1GiB", validator=check.size())
    """Memory for keys and values, in bytes or with a unit."""
    block_size: int = field(default=16, validator=check.integer(1, 1024))
    """Tokens per KV block."""
    max_num_seqs: int = field(default=64, validator=check.integer(1, 65536))
    """Most requests that run at once."""
    max_num_batched_tokens: int = field(default=2048, validator=check.integer(1))
    """Most tokens of one step, prompt chunks and draft tokens included."""
    enable_prefix_caching: bool = field(default=True, validator=check.boolean())
    """Keep the KV blocks of finished requests for later prompts with the same beginning."""
    scheduling_policy: Literal["fcfs", "priority"] = field(default="fcfs", validator=check.choice("fcfs", "priority"))
    """Order of waiting requests: first come, first served, or by the requests' priority."""
    max_waiting_requests: int = field(default=1024, validator=check.integer(1))
    """Most requests that may wait; one more is refused."""
    seed: int = field(default=0, validator=check.integer(0, 2**64 - 1))
    """Seed of requests that bring none of their own."""
    logprobs_mode: Literal["raw", "processed"] = field(default="raw", validator=check.choice("raw", "processed"))
    """Log-probabilities before or after temperature, penalties and masks."""
    fuse: bool = field(default=True, validator=check.boolean())
    """Merge weights and replace layers by faster equal ones at load."""
    num_threads: int | None = field(default=None, validator=optional(check.integer(1, 4096)))
    """CPU threads of the model; torch decides when not set."""
    max_proposer_faults: int = field(default=3, validator=check.integer(1))
    """Speculation is switched off after this many faulty proposals in a row."""
    proposer_time_budget: float = field(default=1.0, validator=check.number(0))
    """Seconds a proposal may take before it counts as a fault; 0 means no limit. Methods that run a model of
    their own get as long as the target takes on top: a step's time for each draft token, and one for the text."""
    cache_dir: str | None = field(default=None, validator=optional(check.text()))
    """Where converted checkpoints and compiled kernels are kept; the user's cache directory when not set."""
    stat_loggers: tuple[str, ...] = field(default=("logging",), converter=check.as_tuple, validator=check.names())
    """Plugins that receive the statistics of every step."""
    log_stats_interval: float = field(default=10.0, validator=check.number(above=0))
    """Seconds between two lines of the logging stat logger."""
    plugins: PluginsConfig = field(factory=PluginsConfig, validator=check.instance(PluginsConfig, "a table"))
    """Which plugins may be used."""
