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
        *("--decode-context-parallel-size", "-dcp", "--prefill-context-parallel-size", "-pcp", "-ep", "--enable-eplb"),
        *("--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port", "--headless"),
        *("--api-server-count", "-asc", "--data-parallel-size-local", "-dpl", "--data-parallel-rank", "-dpn"),
        *("--data-parallel-start-rank", "-dpr", "--data-parallel-address", "-dpa", "--data-parallel-rpc-port", "-dpp"),
        *("--data-parallel-backend", "-dpb", "--data-parallel-hybrid-lb", "--data-parallel-external-lb"),
        *("--disable-custom-all-reduce", "--worker-cls", "--worker-extension-cls", "--kv-transfer-config"),
        "--disable-frontend-multiprocessing",
    ),
    _MEMORY: (
        *("--gpu-memory-utilization", "--device-memory-utilization", "--kv-cache-memory-bytes", "--swap-space"),
        *("--cpu-offload-gb", "--num-gpu-blocks-override", "--kv-offloading-size"),
    ),
    _COMPILATION: (
        *("--enforce-eager", "--compilation-config", "-cc", "-O", "--optimization-level", "--performance-mode"),
        *("--max-seq-len-to-capture", "--cuda-graph-sizes", "--cudagraph-capture-sizes"),
        "--max-cudagraph-capture-size",
    ),
    _PREFILL: (
        *("--enable-chunked-prefill", "--no-enable-chunked-prefill", "--max-num-partial-prefills"),
        *("--max-long-partial-prefills", "--long-prefill-token-threshold", "--max-num-scheduled-tokens"),
    ),
    _OLD_SPECULATION: (
        *("--speculative-model", "--num-speculative-tokens", "--speculative-draft-tensor-parallel-size"),
        *("--speculative-max-model-len", "--speculative-model-quantization", "--speculative-disable-mqa-scorer"),
        *("-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    ),
    'Use num_speculative_tokens_per_batch_size of the table speculative, for example {"16": 0}.': (
        "--speculative-disable-by-batch-size",
    ),
    "Choose a verifier: --verifier match, rejection or typical; `specdec plugins` lists those that are installed.": (
        *("--spec-decoding-acceptance-method", "--typical-acceptance-sampler-posterior-threshold"),
        "--typical-acceptance-sampler-posterior-alpha",
    ),
    _TOOLS: ("--enable-auto-tool-choice", "--tool-call-parser", "--tool-parser-plugin"),
    "A request with tool_choice none shows no tools to the model.": ("--exclude-tools-when-tool-choice-none",),
    _LORA: ("--enable-lora", "--lora-modules", "--max-loras", "--max-lora-rank", "--max-cpu-loras", "--lora-dtype"),
    _QUANTIZATION: ("--quantization", "-q", "--load-format", "--kv-cache-dtype"),
    _MULTIMODAL: (
        *("--limit-mm-per-prompt", "--mm-processor-kwargs", "--allowed-local-media-path", "--allowed-media-domains"),
        *("--media-io-kwargs", "--interleave-mm-strings", "--disable-mm-preprocessor-cache"),
        *("--mm-processor-cache-gb", "--language-model-only"),
    ),
    _HUB: ("--revision", "--tokenizer-revision", "--code-revision", "--download-dir", "--hf-token"),
    "Models are loaded by transformers, from their config.json.": (
        *("--model-impl", "--config-format", "--hf-config-path"),
    ),
    "Models that make text are loaded, and nothing else.": ("--runner", "--convert", "--task", "--pooler-config"),
    "Use --grammar-backend and --grammar-options.": ("--guided-decoding-backend", "--structured-outputs-config"),
    "Use --attention-backend.": ("--attention-config", "-ac"),
    'Use --stat-loggers ""; without loggers nothing is written.': ("--disable-log-stats",),
    "Requests are not written to the log.": (
        *("--disable-log-requests", "--enable-log-requests", "--max-log-len", "--uvicorn-log-level"),
        *("--disable-uvicorn-access-log", "--disable-access-log-for-endpoints", "--enable-log-outputs"),
    ),
    "Use --max-waiting-requests.": ("--max-num-queued-reqs",),
    "The next step is planned when one has ended.": ("--async-scheduling", "--num-scheduler-steps"),
    "Tokens are sent after every step.": ("--stream-interval",),
    "Thoughts stay in the answer's text, between the model's own marks.": (
        *("--reasoning-parser", "--enable-reasoning", "--reasoning-config"),
    ),
    "Send chat_template_kwargs in requests.": ("--default-chat-template-kwargs",),
    "Templates get content as text.": ("--chat-template-content-format",),
    "A template is the server's matter: --chat-template.": ("--trust-request-chat-template",),
    "Answers are the assistant's.": ("--response-role",),
    "Send return_tokens_as_token_ids in requests.": ("--return-tokens-as-token-ids",),
    "Answers always say how many tokens of the prompt were cached.": ("--enable-prompt-tokens-details",),
    "Send stream_options with include_usage in requests.": ("--enable-force-include-usage",),
    "Send return_spec_stats in requests.": ("--enable-per-request-metrics", "--per-request-spec-decode-metrics"),
    "The id of an answer is the X-Request-Id of its request, with a prefix.": ("--enable-request-id-headers",),
    "Let the proxy in front take the prefix off; nothing here says its own address.": ("--root-path",),
    "Let a proxy in front do it; --ssl-certfile and --ssl-keyfile are all there is of HTTPS.": (
        *("--ssl-ca-certs", "--ssl-cert-reqs", "--ssl-ciphers", "--enable-ssl-refresh", "--middleware"),
    ),
    "Use --host and --port.": ("--uds", "--grpc", "--grpc-port"),
    "Only --allowed-origins restricts browsers: all headers are taken, and there are no cookies.": (
        *("--allow-credentials", "--allowed-methods", "--allowed-headers"),
    ),
    "There are none to switch off.": ("--disable-fastapi-docs",),
    "It is among the metrics: num_requests_running and num_requests_waiting.": ("--enable-server-load-tracking",),
    "Use the stat logger opentelemetry: --stat-loggers logging,opentelemetry.": (
        *("--otlp-traces-endpoint", "--collect-detailed-traces"),
    ),
    "The tokenizer is chosen with the model, or with --tokenizer.": ("--tokenizer-mode", "--skip-tokenizer-init"),
    "The configuration of the checkpoint decides; edit its config.json.": ("--hf-overrides", "--rope-scaling"),
    "Set what it should say in requests, or in the checkpoint's generation_config.json.": (
        "--override-generation-config",
    ),
    "Use --num-threads, and taskset to bind them to cores.": ("--cpu-omp-threads-bind", "--omp-threads"),
}

ADVICE: dict[str, str] = {option: advice for advice, options in _ADVICE.items() for option in options}
"""Option of vLLM -> what to do here."""
