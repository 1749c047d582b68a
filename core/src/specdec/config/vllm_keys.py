"""Keys of vLLM's configuration that do not exist here, and what to do instead. It serves error messages."""

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
"""Key of vLLM's speculative configuration -> what to do here."""

_ENGINE_ADVICE: dict[str, tuple[str, ...]] = {
    "One process drives one replica on one device; leave it out.": (
        *("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "distributed_executor_backend"),
        *("enable_expert_parallel", "disable_custom_all_reduce"),
    ),
    "Say how much instead, with kv_cache_memory (1GiB when not set).": (
        *("gpu_memory_utilization", "kv_cache_memory_bytes", "swap_space", "cpu_offload_gb", "num_gpu_blocks_override"),
    ),
    "Nothing is compiled into graphs; leave it out.": (
        *("enforce_eager", "compilation_config", "cudagraph_capture_sizes", "max_seq_len_to_capture"),
    ),
    "Prompts are cut into chunks by themselves; max_num_batched_tokens bounds the tokens of one step.": (
        "enable_chunked_prefill",
    ),
    "Write it into the table speculative (speculative_config in Python).": (
        *("speculative_model", "num_speculative_tokens", "num_lookahead_slots"),
    ),
    "Adapters are not supported; merge them into a checkpoint first.": (
        *("enable_lora", "max_loras", "max_lora_rank", "lora_modules"),
    ),
    "Checkpoints that are quantised load as .gguf files; leave it out.": (
        *("quantization", "load_format", "kv_cache_dtype"),
    ),
    "Only text goes in and out; leave it out.": (
        "limit_mm_per_prompt",
        "mm_processor_kwargs",
        "disable_mm_preprocessor_cache",
    ),
    "Put the files of the revision that you want into a directory, and give that as model.": (
        *("revision", "tokenizer_revision", "code_revision", "download_dir"),
    ),
    "The configuration of the checkpoint decides; edit its config.json.": (
        "hf_overrides",
        "rope_scaling",
        "rope_theta",
    ),
    "Set stat_loggers; empty for none.": ("disable_log_stats",),
    "The tokenizer is chosen with the model, or with tokenizer.": ("tokenizer_mode", "skip_tokenizer_init"),
    "Set grammar_backend and grammar_options.": ("structured_outputs_config", "guided_decoding_backend"),
    "Set what it should say in requests, or in the checkpoint's generation_config.json.": (
        "override_generation_config",
    ),
    "Models generate text, nothing else; leave it out.": ("task", "runner", "convert"),
}

ENGINE_ADVICE: dict[str, str] = {key: advice for advice, keys in _ENGINE_ADVICE.items() for key in keys}
"""Argument of vLLM's engine -> what to do here."""
