"""What the registry knows by name alone: the kinds of plugins, and which distribution brings a known name.

The tables serve error messages. Nothing is imported or selected because a name stands here, and a name that is missing
here works just as well once its distribution is installed.
"""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Kind:
    """One kind of plugin."""

    name: str
    group: str
    """Entry-point group."""
    hook: str
    """The hook a plugin of this kind must implement."""
    label: str
    use: str
    """How a user asks for one, as the end of a sentence that begins with the plural."""
    setting: str = ""
    """Dotted path of the setting that names one; empty when none does."""
    returns: str
    """``module:class`` of what the hook returns; empty when anything goes."""
    options: str
    """Where the options of a selected plugin stand in the configuration, ``{name}`` for its name; empty when there is
    no such place."""

    def section(self, name: str) -> str:
        """The dotted path of the options of one plugin; empty when there is no place for them."""
        return self.options.format(name=name)


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind(
            name="proposer",
            group="specdec.proposers",
            hook="propose",
            label="proposer",
            use="are selected by speculative.method",
            setting="speculative.method",
            returns="specdec.drafting.base:Proposer",
            options="speculative",
        ),
        Kind(
            name="head",
            group="specdec.heads",
            hook="draft_head",
            label="head",
            use="are used through a proposer (speculative.method), which picks the head that fits the target",
            returns="specdec.drafting.base:DraftHead",
            options="",
        ),
        Kind(
            name="verifier",
            group="specdec.verifiers",
            hook="verify",
            label="verifier",
            use="are selected by verifier",
            setting="verifier",
            returns="specdec.verify.base:Verifier",
            options="verifier_options",
        ),
        Kind(
            name="attention_backend",
            group="specdec.attention_backends",
            hook="attention_backend",
            label="attention backend",
            use="are selected by attention_backend",
            setting="attention_backend",
            returns="specdec.attention.interface:AttentionBackend",
            options="",
        ),
        Kind(
            name="sampling_backend",
            group="specdec.sampling_backends",
            hook="sampling_backend",
            label="sampling backend",
            use="are selected by sampling_backend",
            setting="sampling_backend",
            returns="specdec.sampling.backend:SamplingBackend",
            options="",
        ),
        Kind(
            name="grammar",
            group="specdec.grammars",
            hook="grammar",
            label="grammar backend",
            use="are selected by grammar_backend",
            setting="grammar_backend",
            returns="specdec.grammar.interface:GrammarBackend",
            options="grammar_options",
        ),
        Kind(
            name="logits_processor",
            group="specdec.logits_processors",
            hook="logits_processor",
            label="logits processor",
            use="are listed in logits_processors",
            setting="logits_processors",
            returns="specdec.sampling.processor:LogitsProcessor",
            options="logits_processor_options.{name}",
        ),
        Kind(
            name="stat_logger",
            group="specdec.stat_loggers",
            hook="stat_logger",
            label="stat logger",
            use="are listed in stat_loggers",
            setting="stat_loggers",
            returns="specdec.metrics.loggers:StatLogger",
            options="",
        ),
        Kind(
            name="command",
            group="specdec.commands",
            hook="add_command",
            label="command",
            use="are typed after 'specdec' on the command line",
            returns="",
            options="",
        ),
    )
}

GROUPS: dict[str, Kind] = {kind.group: kind for kind in KINDS.values()}

_EAGLE_LLAMA = ("llama", "mixtral", "qwen2", "qwen3")
_EAGLE3_LLAMA = (*_EAGLE_LLAMA, "gpt_oss", "llama4_text", "minimax_m2", "mistral", "qwen3_moe")

DISTRIBUTIONS: dict[str, dict[str, str]] = {
    "proposer": {
        "composite": "specdec-composite",
        "draft_model": "specdec-draft-model",
        "eagle": "specdec-eagle",
        "eagle3": "specdec-eagle",
        "extract_hidden_states": "specdec-extract-hidden-states",
        "medusa": "specdec-medusa",
        "mlp_speculator": "specdec-mlp-speculator",
        "ngram": "specdec-ngram",
        "ngram_gpu": "specdec-ngram",
        "suffix": "specdec-suffix",
        "token_recycling": "specdec-token-recycling",
    },
    "head": {
        **{f"eagle.{target}": "specdec-eagle-llama" for target in _EAGLE_LLAMA},
        **{f"eagle3.{target}": "specdec-eagle-llama" for target in _EAGLE3_LLAMA},
        "eagle.deepseek_v3": "specdec-eagle-deepseek",
        "eagle.deepseek_v2": "specdec-eagle-deepseek",
        "eagle3.deepseek_v2": "specdec-eagle-deepseek",
        "eagle3.deepseek_v3": "specdec-eagle-deepseek",
        "eagle.llama4_text": "specdec-eagle-llama4",
        "eagle.minicpm": "specdec-eagle-minicpm",
        "eagle.mistral": "specdec-eagle-mistral",
        "eagle.mistral4": "specdec-eagle-mistral-large-3",
        "eagle.mistral_large_3": "specdec-eagle-mistral-large-3",
        "eagle.ministral3": "specdec-eagle-mistral",
    },
    "verifier": {
        "block": "specdec-verify-block",
        "match": "specdec-core",
        "rejection": "specdec-core",
        "synthetic": "specdec-verify-synthetic",
        "typical": "specdec-verify-typical",
    },
    "attention_backend": {
        "cpu": "specdec-attention-cpu",
        "sdpa": "specdec-core",
        "triton": "specdec-attention-triton",
    },
    "sampling_backend": {
        "cpu": "specdec-core",
        "torch": "specdec-core",
        "triton": "specdec-kernels-triton",
    },
    "grammar": {"xgrammar": "specdec-grammar-xgrammar"},
    "logits_processor": {"thinking_budget": "specdec-thinking-budget"},
    "stat_logger": {
        "logging": "specdec-core",
        "opentelemetry": "specdec-opentelemetry",
        "prometheus": "specdec-server",
    },
    "command": {
        "bench.serve": "specdec-server",
        "demo": "specdec-demo",
        "extract": "specdec-extract-hidden-states",
        "serve": "specdec-server",
        "top": "specdec-server",
        "train": "specdec-train",
    },
}
"""Kind -> name -> the distribution to install for it."""

CHECKPOINTS: tuple[tuple[dict[str, object], str], ...] = (
    ({"model_type": "medusa"}, "medusa"),
    ({"medusa_num_heads": "*"}, "medusa"),
    ({"model_type": "mlp_speculator"}, "mlp_speculator"),
    ({"architectures": "*Eagle3*"}, "eagle3"),
    ({"model_type": "eagle"}, "eagle"),
    ({"speculators_model_type": ["eagle3", "peagle"]}, "eagle3"),
)
"""Patterns of a checkpoint's ``config.json``, as in `specdec.registry.markers` -> the proposer to suggest."""
