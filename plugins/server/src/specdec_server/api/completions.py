"""``POST /v1/completions``."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from attrs import define, field

from specdec_server.api import formats
from specdec_server.api.sampling import prompt_cut, sampling_params
from specdec_server.api.service import Ask, answer_id, engine_id, gather, merge
from specdec_server.api.streaming import respond
from specdec_server.http.bodies import apart
from specdec_server.http.errors import AsciiJSONResponse, invalid
from specdec_server.http.streams import Events, while_connected

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

    from specdec.outputs import CompletionOutput, RequestOutput
    from specdec.sampling.params import SamplingParams
    from specdec_server.api.requests import CompletionRequest
    from specdec_server.api.service import Service


async def create_completion(service: Service, request: Request, body: CompletionRequest) -> Response:
    """Complete one prompt or several."""
    service.check_open()
    answer = Answer(service, body, service.check_model(body.model), answer_id("cmpl", request, body))
    prompts = split_prompts(body.prompt)
    params = await apart(request, lambda: answer.params)
    if len(prompts) * params.n > service.config.max_choices:
        raise invalid(
            f"{len(prompts)} prompts with n={params.n} make more than {service.config.max_choices} choices "
            "(server.max_choices)",
            "n",
        )
    special, cut = body.add_special_tokens is not False, prompt_cut(body, params)
    prompt_ids = [
        service.fit(await service.tokenise(prompt, add_special_tokens=special), cut, "prompt") for prompt in prompts
    ]
    for token_ids in prompt_ids:
        service.check_room(len(token_ids), body.max_tokens, "max_tokens")
    asks = [
        Ask(
            token_ids=token_ids,
            params=params,
            request_id=engine_id(answer.id),
            kind="delta" if body.stream else "final",
            priority=body.priority or 0,
            speculation=body.speculation,
        )
        for token_ids in prompt_ids
    ]
    sent = prompts if cut is None else prompt_ids
    answer.prompt_texts = [await answer.prompt_text(prompt) for prompt in sent] if body.echo else []
    if body.stream:
        outputs = merge([service.outputs(ask) for ask in asks])
        return await respond(service, request, outputs, answer.chunks)
    finished = await while_connected(request, gather([service.final(ask) for ask in asks]))
    return AsciiJSONResponse(answer.whole(finished), headers=service.headers)


def split_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    """One prompt or a batch, as a list of prompts.

    Raises:
        APIError: there is none.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty; send a text, token ids, or a list of them", "prompt")
    if isinstance(prompt[0], int):
        return [prompt]
    return list(prompt)


@define(eq=False)
class Answer:
    """Makes the answers to one completion request."""

    service: Service
    body: CompletionRequest
    model: str
    id: str
    created: int = field(factory=lambda: int(time.time()))
    prompt_texts: list[str] = field(factory=list)
    _lengths: dict[int, int] = field(factory=dict)
    """Characters of each choice that were sent."""

    @property
    def _only_prompt(self) -> bool:
        """``echo`` with ``max_tokens`` 0 asks for the prompt and its log-probabilities alone."""
        return bool(self.body.echo) and self.body.max_tokens == 0

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of every prompt."""
        body = self.body
        if body.suffix:
            raise invalid("suffix is not supported: the models served here complete to the right", "suffix")
        if body.best_of not in (None, 1, body.n):
            raise invalid("best_of is not supported; send n", "best_of")
        if body.echo and body.stream and body.logprobs is not None:
            raise invalid("echo with logprobs cannot be streamed", "echo")
        max_tokens = 16 if body.max_tokens is None else body.max_tokens
        if body.echo and body.logprobs is not None and body.prompt_logprobs is None:
            body = body.model_copy(update={"prompt_logprobs": body.logprobs})
        return sampling_params(
            body,
            max_tokens=1 if self._only_prompt else max_tokens,
            logprobs=body.logprobs,
            defaults=self.service.llm.get_default_sampling_params(),
            limits=self.service.config,
            wanted=body.response_format,
        )

    async def prompt_text(self, prompt: str | list[int]) -> str:
        """The prompt as text, for ``echo``."""
        if isinstance(prompt, str):
            return prompt
        tokenizer = self.service.llm.get_tokenizer()
        if tokenizer is None:
            raise invalid("echo needs a tokenizer, and this model has none", "echo")
        return str(tokenizer.decode(prompt))

    def whole(self, outputs: list[RequestOutput]) -> dict[str, Any]:
        """The answer of a request that is not streamed."""
        choices = [
            self._whole_choice(number, output, choice)
            for number, output in enumerate(outputs)
            for choice in output.outputs
        ]
        num_tokens = 0 if self._only_prompt else sum(len(c.token_ids) for o in outputs for c in o.outputs)
        answer = {**self._frame(), "choices": choices, "usage": formats.usage(outputs, num_tokens)}
        if self.body.return_spec_stats:
            answer["spec_stats"] = formats.spec_stats(outputs)
        return answer

    def _whole_choice(self, number: int, output: RequestOutput, choice: CompletionOutput) -> dict[str, Any]:
        body = self.body
        text = "" if self._only_prompt else choice.text
        prompt_text = self.prompt_texts[number] if body.echo else ""
        result = {
            "index": number * len(output.outputs) + choice.index,
            "text": prompt_text + text,
            "logprobs": None if body.logprobs is None else self._whole_logprobs(output, choice, prompt_text),
            "finish_reason": "length" if self._only_prompt else choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.prompt_logprobs is not None:
            result["prompt_logprobs"] = formats.prompt_logprobs(output)
        return {**result, **self._extras(choice), **self._prompt(output)}

    def _whole_logprobs(self, output: RequestOutput, choice: CompletionOutput, prompt_text: str) -> dict[str, Any]:
        top = self.body.logprobs or 0
        token_ids = [] if self._only_prompt else choice.token_ids
        entries: list[Any] = [] if self._only_prompt else list(choice.logprobs or [])
        by_id = bool(self.body.return_tokens_as_token_ids)
        if not self.body.echo:
            return formats.completion_logprobs(token_ids, entries, top, 0, by_id=by_id)
        all_ids = [*output.prompt_token_ids, *token_ids]
        all_entries = [*(output.prompt_logprobs or []), *entries]
        result = formats.completion_logprobs(all_ids, all_entries, top, 0, by_id=by_id)
        tokenizer = self.service.llm.get_tokenizer()
        if tokenizer is not None and all_ids:
            first = str(tokenizer.decode(all_ids[:1]))
            if not by_id:
                result["tokens"][0] = first
            result["text_offset"][1:] = [offset + len(first) for offset in result["text_offset"][1:]]
        return result

    def _prompt(self, output: RequestOutput) -> dict[str, Any]:
        return {"prompt_token_ids": output.prompt_token_ids} if self.body.return_token_ids else {}

    def _extras(self, choice: CompletionOutput) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self.body.return_token_ids:
            extras["token_ids"] = choice.token_ids
        if self.body.return_token_origins:
            extras["token_origins"] = choice.token_origins
        if self.body.return_token_bytes:
            skip_special = self.body.skip_special_tokens is not False
            tokenizer = self.service.llm.get_tokenizer()
            extras["token_bytes"] = formats.bytes_of(choice.token_ids, tokenizer, skip_special=skip_special)
        return extras

    async def chunks(self, outputs: AsyncGenerator[tuple[int, RequestOutput]]) -> AsyncGenerator[bytes]:
        """The parts of a streamed answer."""
        latest: dict[int, RequestOutput] = {}
        counts: dict[int, int] = {}
        ended: set[int] = set()
        options = self.body.stream_options
        event = Events(self._frame())
        async with aclosing(outputs) as stream:
            async for number, output in stream:
                latest[number] = output
                for choice in output.outputs:
                    index = number * len(output.outputs) + choice.index
                    if index in ended:
                        continue
                    counts[index] = counts.get(index, 0) + len(choice.token_ids)
                    chunk = self._chunk(number, index, output, choice, first=index not in self._lengths)
                    if chunk is not None:
                        if options and options.continuous_usage_stats:
                            chunk["usage"] = formats.usage(list(latest.values()), sum(counts.values()))
                        yield event(chunk)
                    if choice.finish_reason is not None:
                        ended.add(index)
        if options and options.include_usage:
            total = formats.usage(list(latest.values()), sum(counts.values()))
            yield event({"choices": [], "usage": total, **self._stats(latest)})
        elif self.body.return_spec_stats:
            yield event({"choices": [], **self._stats(latest)})

    def _stats(self, latest: dict[int, RequestOutput]) -> dict[str, Any]:
        return {"spec_stats": formats.spec_stats(list(latest.values()))} if self.body.return_spec_stats else {}

    def _chunk(
        self, number: int, index: int, output: RequestOutput, choice: CompletionOutput, *, first: bool
    ) -> dict[str, Any] | None:
        body = self.body
        text = "" if self._only_prompt else choice.text
        if first and body.echo:
            text = self.prompt_texts[number] + text
        sent = self._lengths.get(index, 0)
        self._lengths[index] = sent + len(text)
        extras = self._extras(choice)
        if not (text or choice.finish_reason or choice.logprobs or extras):
            return None
        logprobs = None
        if body.logprobs is not None and choice.logprobs is not None:
            by_id = bool(body.return_tokens_as_token_ids)
            logprobs = formats.completion_logprobs(choice.token_ids, choice.logprobs, body.logprobs, sent, by_id=by_id)
        one = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            **extras,
        }
        if first:
            one |= self._prompt(output)
            if body.prompt_logprobs is not None:
                one["prompt_logprobs"] = formats.prompt_logprobs(output)
        return {"choices": [one]}

    def _frame(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.service.fingerprint,
        }
