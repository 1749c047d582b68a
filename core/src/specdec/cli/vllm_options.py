"""Options of vLLM's command line that do not exist here, and what to do instead. The table serves error messages."""

from __future__ import annotations

_PARALLEL = "One process drives one replica on one device; run several behind a load balancer for more throughput."
_OLD_SPECULATION = 'Write it into the table: --speculative-config \'{"method": …, "model": …}\'.'
_COMPILATION = "Layers are fused at load without a compiler or captured graphs; --no-fuse leaves them as they are."
_TOOLS = "Calls that are JSON are found in answers without it."
_PREFILL = "Prompts are cut into chunks by themselves; --max-num-batched-tokens bounds the tokens of one step."
_MEMORY = "Say how much instead: --kv-cache-memory 8GiB (1GiB when not set)."
_LORA = "Adapters are not supported; merge them into a checkpoint first."
_QUANTIZATION = "Checkpoints that are quantised load as .gguf files."
_MULTIMODAL = "Only text goes in and out; of a multimodal model the language part is loaded."
_HUB = "Put the files of the revision that you want into a directory, and pass that as the model."

_ADVICE: dict[str, tuple[str, ...]] = {
    _PARALLEL: (
        *("--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp"),
        *("--enable-expert-parallel", "--distributed-executor-backend", "--max-parallel-loading-workers"),
        *("--decode-context-parallel-size", "--nnodes", "--node-rank", "--api-server-count"),
    ),
    _MEMORY: (
        *("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--swap-space", "--cpu-offload-gb"),
        "--num-gpu-blocks-override",
    ),
    _COMPILATION: ("--enforce-eager", "--compilation-config", "-O", "--max-seq-len-to-capture", "--cuda-graph-sizes"),
    _PREFILL: (
        *("--enable-chunked-prefill", "--no-enable-chunked-prefill", "--max-num-partial-prefills"),
        *("--max-long-partial-prefills", "--long-prefill-token-threshold", "--max-num-scheduled-tokens"),
    ),
    _OLD_SPECULATION: (
        *("--speculative-model", "--num-speculative-tokens", "--speculative-draft-tensor-parallel-size"),
        *("--speculative-max-model-len", "--speculative-model-quantization", "--speculative-disable-mqa-scorer"),
    ),
    'Use num_speculative_tokens_per_batch_size of the table speculative, for example {"16": 0}.': (
        "--speculative-disable-by-batch-size",
    ),
    "Choose a verifier: --verifier match, rejection or typical; `specdec plugins` lists those that are installed.": (
        *("--spec-decoding-acceptance-method", "--typical-acceptance-sampler-posterior-threshold"),
        "--typical-acceptance-sampler-posterior-alpha",
    ),
    _TOOLS: ("--enable-auto-tool-choice", "--tool-call-parser", "--tool-parser-plugin"),
    _LORA: ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank"),
    _QUANTIZATION: ("--quantization", "-q", "--load-format", "--kv-cache-dtype"),
    _MULTIMODAL: ("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path"),
    _HUB: ("--revision", "--tokenizer-revision", "--code-revision", "--download-dir"),
    "Use --grammar-backend and --grammar-options.": ("--guided-decoding-backend", "--structured-outputs-config"),
    'Use --stat-loggers ""; without loggers nothing is written.': ("--disable-log-stats",),
    "Requests are not written to the log.": ("--disable-log-requests", "--enable-log-requests", "--max-log-len"),
    "The tokenizer is chosen with the model, or with --tokenizer.": ("--tokenizer-mode", "--skip-tokenizer-init"),
    "The configuration of the checkpoint decides; edit its config.json.": ("--hf-overrides", "--rope-scaling"),
    "Set max_tokens and temperature in requests, or --max-tokens where a command makes text.": (
        *("--generation-config", "--override-generation-config"),
    ),
    "Use --num-threads, and taskset to bind them to cores.": ("--cpu-omp-threads-bind", "--omp-threads"),
}

ADVICE: dict[str, str] = {option: advice for advice, options in _ADVICE.items() for option in options}
"""Option of vLLM -> what to do here."""
