"""`LLM`: generate for a list of prompts and wait for the result."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from specdec.errors import InvalidRequestError
from specdec.progress import GenerationProgress
from specdec.sampling.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from specdec.config import EngineConfig
    from specdec.drafting.base import Proposer
    from specdec.engine.group import RequestGroup
    from specdec.metrics.stats import EngineStats
    from specdec.outputs import RequestOutput
    from specdec.speculation import RequestSpeculation

    Speculation = RequestSpeculation | Mapping[str, Any] | bool | str | None


class LLM:
    """A model ready to generate, in this process.

    ``LLM("demo:smollm2", speculative_config={"method": "ngram", "num_speculative_tokens": 4})``

    Args:
        model: a directory, a model id, a GGUF file, or ``demo:<name>``.
        speculative_config: the keys of the ``speculative`` section; None decodes without speculation.
        proposer: an object to draft with, in place of an installed method.
        settings: any other field of `specdec.config.EngineConfig`.

    Raises:
        SpecdecError: a setting, a name or a checkpoint is wrong; the message says what to do.
    """

    def __init__(
        self,
        model: str,
        *,
        speculative_config: Mapping[str, Any] | None = None,
        proposer: Proposer | None = None,
        **settings: Any,
    ) -> None:
        from specdec.config.load import from_kwargs_with_origins
        from specdec.config.structure import naming_origins
        from specdec.engine.frontend import speculative_settings

        speculative = speculative_settings(speculative_config, proposer)
        config, origins = from_kwargs_with_origins(model, **speculative, **settings)
        with naming_origins(origins):
            self._start(config, proposer)

    @classmethod
    def from_config(cls, config: EngineConfig, proposer: Proposer | None = None) -> LLM:
        """An engine for a configuration that is already validated."""
        llm = cls.__new__(cls)
        llm._start(config, proposer)
        return llm

    def _start(self, config: EngineConfig, proposer: Proposer | None) -> None:
        from specdec.engine.frontend import Frontend

        self._engine = Frontend(config, proposer)

    @property
    def config(self) -> EngineConfig:
        """The configuration the engine was started with."""
        return self._engine.config

    @property
    def max_model_len(self) -> int:
        """The longest sequence, prompt and output together."""
        return self._engine.context.max_model_len

    @property
    def dtype(self) -> str:
        """Type of weights and activations, for example 'bfloat16'."""
        return self._engine.context.dtype

    @property
    def device(self) -> str:
        """Where the model runs: 'cpu', 'cuda', …"""
        return self._engine.context.device

    def get_default_sampling_params(self) -> SamplingParams:
        """What is done where a request says nothing: vLLM's defaults, with what the model's authors set of sampling."""
        return self._engine.default_sampling_params

    def get_tokenizer(self) -> Any:
        """The model's tokenizer, or None when it has none."""
        return self._engine.tokenizer

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
        speculation: Speculation | Sequence[Speculation] = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or a list of prompts; outputs come in the order of the prompts.

        Args:
            prompts: a string, a list of token ids, ``{"prompt": …}``, ``{"prompt_token_ids": …}``, or a list of these.
            sampling_params: one for all prompts or one for each; None takes `get_default_sampling_params`.
            use_tqdm: show a progress bar.
            priority: one number per prompt, smaller first; needs ``scheduling_policy="priority"``.
            speculation: a `specdec.RequestSpeculation`, a dict of its fields, or False or "off" for plain decoding; one
                for all prompts or one for each. None leaves it to the engine.

        Raises:
            InvalidRequestError: a prompt or parameter is wrong; nothing has been generated.
        """
        many = _as_list(prompts)
        params = _per_prompt("sampling_params", sampling_params or self.get_default_sampling_params(), len(many))
        ranks = list(priority) if isinstance(priority, Iterable) else priority or 0
        priorities = _per_prompt("priority", ranks, len(many))
        choices = _per_prompt("speculation", speculation, len(many))
        groups = [
            self._engine.prepare(prompt, one, None, rank, choice)
            for prompt, one, rank, choice in zip(many, params, priorities, choices, strict=True)
        ]
        return self._run(groups, use_tqdm)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        speculation: Speculation | Sequence[Speculation] = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or a list of conversations through the model's chat template.

        Raises:
            InvalidRequestError: the model has no chat template, or the messages do not fit it.
        """
        from specdec.target.tokenizer import apply_chat_template

        conversations: Any = messages
        if not isinstance(messages, (list, tuple)):
            raise InvalidRequestError(f"chat: messages must be a list of dicts, not {type(messages).__name__}")
        if messages and isinstance(messages[0], dict):
            conversations = [messages]
        prompts = [
            {"prompt_token_ids": apply_chat_template(self._engine.tokenizer, conversation, model=self.config.model)}
            for conversation in conversations
        ]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm, speculation=speculation)

    def stats(self) -> EngineStats:
        """Totals since the engine started."""
        return self._engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._engine.core.reset_prefix_cache()

    def close(self) -> None:
        """Release the model and the KV cache; harmless when called again."""
        self._engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self, groups: list[RequestGroup], use_tqdm: bool) -> list[RequestOutput]:
        pending = deque(groups)
        try:
            with GenerationProgress(len(groups), show=use_tqdm) as progress:
                while pending or self._engine.core.has_work:
                    while pending and self._engine.has_room(len(pending[0].requests)):
                        self._engine.submit(pending.popleft())
                    for group in self._engine.step():
                        if group.is_finished:
                            progress.advance(sum(request.num_output_tokens for request in group.requests))
        except BaseException:
            for group in groups:
                self._engine.abort(group.request_id)
            raise
        return [group.output() for group in groups]


def _as_list(prompts: Any) -> list[Any]:
    """One prompt or many, as a list of prompts."""
    if isinstance(prompts, (str, dict)):
        return [prompts]
    if not isinstance(prompts, (list, tuple)):
        raise InvalidRequestError(f"prompts must be a prompt or a list of prompts, not {type(prompts).__name__}")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def _per_prompt(name: str, value: Any, count: int) -> list[Any]:
    """One value for each prompt."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise InvalidRequestError(f"{name} has {len(value)} entries for {count} prompts; give one, or one for each")
    return list(value)
