"""Options of the method `draft_model`, with vLLM's names where it has them."""

from __future__ import annotations

from typing import ClassVar, Literal

from attrs import field, frozen
from attrs.validators import optional

from specdec.config import validators as check
from specdec.types import DEFAULT_DRAFT_SAMPLE_METHOD, DRAFT_SAMPLE_METHODS


@frozen(kw_only=True)
class DraftModelConfig:
    """Which model drafts, and how."""

    SECTION: ClassVar[str] = "speculative"

    model: str = field(validator=check.text())
    """The drafter, for example a small model of the target's family: a directory, a model id, a .gguf file or a bundled
    name such as demo:qwen2.5-coder-0.5b."""
    draft_sample_method: str = field(default=DEFAULT_DRAFT_SAMPLE_METHOD, validator=check.choice(*DRAFT_SAMPLE_METHODS))
    """How draft tokens are picked at temperature above 0: drawn with the target's own noise ("coupled", of which the
    verifier match keeps most), drawn from the draft's own law ("probabilistic", for verifiers that use draft
    probabilities), or the likeliest ("greedy")."""
    confidence_threshold: float = field(default=0.0, validator=check.number(0, 1))
    """A draft ends before the first token of which the drafter is less sure than this; 0 never ends a draft early."""
    use_heterogeneous_vocab: bool = field(default=False, validator=check.boolean())
    """Draft with another tokenizer than the target's: only tokens that both have are drafted."""
    parallel_drafting: bool | None = field(default=None, validator=optional(check.boolean()))
    """Draft all tokens in one forward pass, which only models trained for it can (PARD); by default the checkpoint
    decides."""
    max_model_len: int | None = field(default=None, validator=optional(check.integer(2)))
    """Longest text the drafter is used for; the drafter's own limit when not set."""
    draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] | None = field(
        default=None, validator=optional(check.choice("auto", "float32", "bfloat16", "float16"))
    )
    """Type of the drafter's weights; the target's when not set, auto takes the checkpoint's."""
    draft_device: str | None = field(
        default=None, validator=optional(check.text(r"auto|[a-z]+(:\d+)?", "'auto', 'cpu', 'cuda' or 'cuda:N'"))
    )
    """Where the drafter runs; where the target runs when not set."""
    draft_num_threads: int | None = field(default=None, validator=optional(check.integer(1, 4096)))
    """CPU threads of the drafter; as many as the target has when not set."""
