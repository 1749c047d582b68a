"""``POST /tokenize`` and ``POST /detokenize``, shaped as vLLM's."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from specdec_server.api.messages import for_template
from specdec_server.api.tools import read_choice
from specdec_server.http.errors import invalid

if TYPE_CHECKING:
    from specdec_server.api.requests import DetokenizeRequest, TokenizeRequest
    from specdec_server.api.service import Service


async def tokenize(service: Service, body: TokenizeRequest) -> dict[str, Any]:
    """Token ids of a text or a conversation."""
    service.check_model(body.model)
    ids = await _ids(service, body)
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": service.llm.max_model_len, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = await asyncio.to_thread(_tokenizer(service).convert_ids_to_tokens, ids)
    return answer


async def _ids(service: Service, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise invalid("send either prompt or messages", "prompt")
    if body.messages is None:
        assert body.prompt is not None
        return await service.tokenise(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    tools = read_choice(body.tools, None).tools
    continued = bool(body.continue_final_message)
    return await service.tokenise_chat(
        await asyncio.to_thread(for_template, body.messages),
        tools=list(tools) or None,
        add_generation_prompt=not continued if body.add_generation_prompt is None else body.add_generation_prompt,
        continue_final_message=continued,
        add_special_tokens=bool(body.add_special_tokens),
        variables=body.chat_template_kwargs,
    )


async def detokenize(service: Service, body: DetokenizeRequest) -> dict[str, Any]:
    """The text of token ids."""
    service.check_model(body.model)
    tokenizer = _tokenizer(service)
    if len(body.tokens) > service.llm.max_model_len:
        raise invalid(
            f"tokens has {len(body.tokens)} ids; a sequence has at most {service.llm.max_model_len}", "tokens"
        )
    most = len(tokenizer) - 1

    def decode() -> str:
        wrong = next((token for token in body.tokens if not 0 <= token <= most), None)
        if wrong is not None:
            raise invalid(f"token id {wrong} is outside the vocabulary 0..{most}", "tokens")
        return str(tokenizer.decode(body.tokens, skip_special_tokens=bool(body.skip_special_tokens)))

    return {"prompt": await asyncio.to_thread(decode)}


def _tokenizer(service: Service) -> Any:
    tokenizer = service.llm.get_tokenizer()
    if tokenizer is None:
        raise invalid(f"the model {service.names[0]!r} has no tokenizer")
    return tokenizer
