"""Keys of vLLM's speculative configuration that do not exist here, and what to do instead. It serves error messages."""

from __future__ import annotations

_VERIFIER = (
    'Which draft tokens stay is decided by a verifier, named outside this table: verifier = "match" (the default), '
    '"rejection", or another that `specdec plugins` lists.'
)
_ONE_DEVICE = "The drafter runs where the target does, on one device: leave it out."
_FILES = "Put the files of the revision that you want into a directory, and give that as speculative.model."
_OWN_SETTING = "It holds for the whole engine, and is set outside this table."

_ADVICE: dict[str, tuple[str, ...]] = {
    _VERIFIER: (
        *("rejection_sample_method", "acceptance_method", "posterior_threshold", "posterior_alpha"),
        *("synthetic_acceptance_rate", "synthetic_acceptance_rates"),
    ),
    _ONE_DEVICE: ("draft_tensor_parallel_size", "tensor_parallel_size"),
    _FILES: ("revision", "code_revision"),
    _OWN_SETTING: ("attention_backend",),
    "Nothing is compiled into graphs, and kernels are chosen by themselves; leave it out.": (
        *("enforce_eager", "moe_backend"),
    ),
    'Use num_speculative_tokens_per_batch_size, for example {"16": 0}.': ("disable_by_batch_size",),
    "Checkpoints that are quantised load as .gguf files; leave it out.": ("quantization",),
    "Drafts are never padded; leave it out.": ("disable_padded_drafter_batch",),
}

ADVICE: dict[str, str] = {key: advice for advice, keys in _ADVICE.items() for key in keys}
"""Key of vLLM -> what to do here."""
