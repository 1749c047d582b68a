"""Fields of OpenAI's API and vLLM's that do not exist here, and what to do instead. The table serves error messages."""

from __future__ import annotations

_STRUCTURED = 'Send structured_outputs, for example {"choice": ["a", "b"]}, {"regex": …} or {"json": schema}.'
_NOT_STORED = "Nothing is stored between requests: send the whole conversation in input, and wait for the answer."
_TEXT_ONLY = "Only text goes in and out."
_ONE_SERVER = "It belongs to a setup of several servers that work on one request."

_ADVICE: dict[str, tuple[str, ...]] = {
    _STRUCTURED: (
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_decoding_backend"),
        "guided_whitespace_pattern",
    ),
    _NOT_STORED: ("previous_response_id", "conversation", "background", "prompt"),
    _TEXT_ONLY: ("audio", "mm_processor_kwargs", "media_io_kwargs", "prompt_embeds"),
    _ONE_SERVER: ("kv_transfer_params", "ec_transfer_params"),
    "Send tools, and tool_choice.": ("functions", "function_call"),
    "Tools are functions of the client's own; nothing is searched or run here.": ("web_search_options",),
    "Set it for the server: --chat-template FILE. Values for it go into chat_template_kwargs.": ("chat_template",),
    "Values for the chat template go into chat_template_kwargs.": ("documents", "enable_thinking", "thinking"),
    "The prefix cache is shared by all clients; --no-enable-prefix-caching of the server switches it off.": (
        "cache_salt",
    ),
    "Send /tokenize the messages to see what the model gets.": ("return_prompt_text", "return_token_offsets"),
    "Load a logits processor for it, and send its extra_args.": ("thinking_token_budget", "repetition_detection"),
    "Tokens are sent after every step.": ("stream_interval",),
    "Say in the messages how long answers shall be.": ("verbosity",),
    "Send max_tokens, or max_completion_tokens for a conversation.": ("max_new_tokens",),
    "Send temperature 0.": ("do_sample",),
    "Every answer is drafted for by the server's method; see speculation.": ("prediction",),
    "Send n; there is no beam search.": ("num_beams", "beam_width"),
    "Send top_logprobs or logprobs for the most likely ones, or allowed_token_ids to choose among some.": (
        "logprob_token_ids",
    ),
}

ADVICE: dict[str, str] = {name: advice for advice, names in _ADVICE.items() for name in names}
"""Field -> what to do here."""
