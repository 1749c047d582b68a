"""The parts that answers are made of: log-probabilities, token counts, statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specdec.sampling.token_text import token_bytes

if TYPE_CHECKING:
    from specdec.outputs import CompletionOutput, RequestOutput
    from specdec.sampling.logprobs import Logprob
    from specdec.sampling.token_text import TokenBytes

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's API uses the same number."""


def usage(outputs: Sequence[RequestOutput], num_output_tokens: int) -> dict[str, Any]:
    """Token counts of a request, all its prompts together."""
    num_prompt = sum(len(output.prompt_token_ids) for output in outputs)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(output.num_cached_tokens for output in outputs)},
    }


def spec_stats(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """How the drafts of a request fared, its prompts together."""
    from specdec.metrics import SpecCounter

    counter = SpecCounter()
    for output in outputs:
        counter.add_stats(output.spec_stats)
    total = counter.snapshot()
    return {
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_draft_tokens,
        "num_accepted_tokens": total.num_accepted_tokens,
        "num_draft_tokens_per_pos": list(total.num_draft_tokens_per_pos),
        "num_accepted_tokens_per_pos": list(total.num_accepted_tokens_per_pos),
        "num_grammar_forced_tokens": total.num_grammar_forced_tokens,
        "num_grammar_accepted_tokens": total.num_grammar_accepted_tokens,
        "acceptance_rate": total.acceptance_rate,
        "mean_acceptance_length": total.mean_acceptance_length,
        "lossless": all(output.lossless for output in outputs),
    }


def _finite(value: float) -> float:
    return max(value, LOWEST)


def token_name(token_id: int, entry: Logprob, *, by_id: bool = False) -> str:
    """A token as text; by its number when that is asked for and for a model without a tokenizer."""
    return f"token_id:{token_id}" if by_id or entry.decoded_token is None else entry.decoded_token


def chat_logprobs(choice: CompletionOutput, top: int, tokenizer: Any, *, by_id: bool) -> dict[str, Any] | None:
    """``choices[].logprobs`` of the chat API for the tokens of ``choice``; None when none were asked for.

    Args:
        choice: what was made.
        top: alternatives to show.
        tokenizer: the model's, or None.
        by_id: whether tokens are named by their numbers.
    """
    if choice.logprobs is None:
        return None
    table = None if tokenizer is None else token_bytes(tokenizer)
    content = []
    for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True):
        best = sorted(entries.items(), key=lambda item: item[1].rank)[:top]
        alternatives = [_chat_entry(other, entry, table, by_id=by_id) for other, entry in best]
        chosen = _chat_entry(token_id, entries[token_id], table, by_id=by_id)
        content.append({**chosen, "top_logprobs": alternatives})
    return {"content": content, "refusal": None}


def _chat_entry(token_id: int, entry: Logprob, table: TokenBytes | None, *, by_id: bool) -> dict[str, Any]:
    name = token_name(token_id, entry, by_id=by_id)
    raw = (entry.decoded_token or name).encode("utf-8", "replace") if table is None else table.of(token_id)
    return {"token": name, "logprob": _finite(entry.logprob), "bytes": list(raw)}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[dict[int, Logprob] | None],
    top: int,
    offset: int,
    *,
    by_id: bool,
) -> dict[str, Any]:
    """``choices[].logprobs`` of the completions API.

    Args:
        token_ids: the tokens.
        logprobs: for each, the entries; None for the first token of a prompt.
        top: alternatives to show.
        offset: where the first token's text begins in the whole text.
        by_id: whether tokens are named by their numbers.
    """
    result: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entries in zip(token_ids, logprobs, strict=True):
        text = "" if entries is None else token_name(token_id, entries[token_id])
        result["tokens"].append(f"token_id:{token_id}" if by_id else text)
        result["text_offset"].append(offset)
        offset += len(text)
        if entries is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(_finite(entries[token_id].logprob))
        best = sorted(entries.items(), key=lambda item: item[1].rank)[:top]
        chosen = (token_id, entries[token_id])
        shown = [*best, *([] if any(other == token_id for other, _ in best) else [chosen])]
        result["top_logprobs"].append(
            {token_name(other, entry, by_id=by_id): _finite(entry.logprob) for other, entry in shown}
        )
    return result


def bytes_of(token_ids: Sequence[int], tokenizer: Any, *, skip_special: bool) -> list[list[int]]:
    """The bytes that each token adds to the text; none for all tokens without a tokenizer.

    Args:
        token_ids: the tokens.
        tokenizer: the model's, or None.
        skip_special: whether special tokens are left out of the text, and have no bytes then.
    """
    if tokenizer is None:
        return [[] for _ in token_ids]
    table = token_bytes(tokenizer)
    if table is None:
        texts = [tokenizer.decode([token_id], skip_special_tokens=skip_special) for token_id in token_ids]
        return [list(text.encode("utf-8", "replace")) for text in texts]
    return [[] if skip_special and table.is_special(token_id) else list(table.of(token_id)) for token_id in token_ids]


def prompt_logprobs(output: RequestOutput) -> list[dict[str, Any] | None]:
    """vLLM's ``prompt_logprobs``: for each prompt token a table by token id; None for the first."""
    return [
        None
        if entries is None
        else {
            str(token_id): {
                "logprob": _finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in entries.items()
        }
        for entries in output.prompt_logprobs or []
    ]
