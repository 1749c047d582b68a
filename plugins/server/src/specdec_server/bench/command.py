"""``specdec bench serve``: from options to numbers."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from specdec.cli.bench import check_writable
from specdec.cli.console import harmless, make_console
from specdec.cli.parser import UsageError
from specdec.cli.prompts import Prompt, read_set
from specdec.config.text import parse_object
from specdec_server.bench.client import Result
from specdec_server.bench.load import Load, first_model, run_load
from specdec_server.bench.report import summary, tables

KEY_VARIABLE = "SPECDEC_API_KEY"
"""Holds the key to send when no option does."""
_PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


def run(arguments: argparse.Namespace) -> int:
    """Measure and report, after Ctrl-C what there is by then.

    Returns:
        1 when a request failed, 130 after Ctrl-C.
    """
    check_writable(arguments.output_json)
    prompts = read_set(arguments.prompts)
    extra = _extra_body(arguments.extra_body)
    results, duration, model = asyncio.run(_measure(arguments, prompts, extra))
    numbers = summary(results, duration, arguments.percentiles)
    _report(arguments, model, numbers, results)
    if len(results) < arguments.num_prompts:
        print(f"stopped after {len(results)} of {arguments.num_prompts} requests", file=sys.stderr)
        return 130
    return 1 if numbers["failed"] else 0


def _address(text: str) -> str:
    """The server's address without what OpenAI's clients have at its end."""
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"--base-url {text!r}: must begin with http:// or https://, such as http://127.0.0.1:8000.")
    return text.rstrip("/").removesuffix("/v1")


def _extra_body(text: str | None) -> dict[str, Any]:
    try:
        return {} if text is None else dict(parse_object(text))
    except ValueError as error:
        raise UsageError(f"--extra-body {text!r}: must be {error}.") from error


async def _measure(
    arguments: argparse.Namespace, prompts: Sequence[Prompt], extra: dict[str, Any]
) -> tuple[list[Result], float, str]:
    base_url = _address(arguments.base_url)
    key = arguments.api_key or os.environ.get(KEY_VARIABLE)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    model = arguments.model or await first_model(base_url, headers)
    load = Load(
        url=base_url + _PATHS[arguments.endpoint],
        headers=headers,
        request_rate=arguments.request_rate,
        burstiness=arguments.burstiness,
        max_concurrency=arguments.max_concurrency,
        timeout=arguments.timeout,
        seed=arguments.seed,
    )
    common = {
        "model": model,
        "max_tokens": arguments.max_tokens,
        "temperature": arguments.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"ignore_eos": True} if arguments.ignore_eos else {}),
        **extra,
    }
    bodies = [
        {**common, **body_of(prompt, arguments.endpoint)} for prompt in islice(cycle(prompts), arguments.num_prompts)
    ]
    if arguments.num_warmups:
        warmups = list(islice(cycle(bodies), arguments.num_warmups))
        if len((await run_load(load, warmups, lambda _: None))[0]) < arguments.num_warmups:
            raise KeyboardInterrupt  # nothing is measured yet
    with _Progress(len(bodies)) as progress:
        results, duration = await run_load(load, bodies, progress.advance)
    return results, duration, model


def body_of(prompt: Prompt, endpoint: str) -> dict[str, Any]:
    """The part of a request that is the prompt.

    Raises:
        InvalidRequestError: token ids cannot be a conversation.
    """
    if endpoint == "chat":
        return {"messages": list((prompt if prompt.messages else prompt.as_chat()).messages or ())}
    plain = prompt.as_text()
    return {"prompt": list(plain.token_ids) if plain.token_ids is not None else plain.text}


def _report(arguments: argparse.Namespace, model: str, numbers: dict[str, Any], results: Sequence[Result]) -> None:
    names = ("base_url", "endpoint", "prompts", "num_prompts", "burstiness", "max_concurrency", "max_tokens")
    settings = {name: getattr(arguments, name) for name in (*names, "temperature", "seed", "ignore_eos", "extra_body")}
    rate = arguments.request_rate
    settings |= {"model": model, "request_rate": "inf" if math.isinf(rate) else rate}
    content = {"settings": settings, **numbers}
    if arguments.save_detailed:
        content["requests"] = [_detail(result) for result in results]
    text = json.dumps(content, indent=2)
    if arguments.output_json == "-":
        print(text)
        return
    if arguments.output_json:
        Path(arguments.output_json).write_text(text + "\n", encoding="utf-8")
    console = make_console()
    for table in tables(numbers, arguments.percentiles):
        console.print(table)
    for error in numbers["errors"]:
        console.print(f"failed: {harmless(error)}", markup=False)


def _detail(result: Result) -> dict[str, Any]:
    return {
        "ttft": result.ttft,
        "itl": result.gaps,
        "e2el": result.e2e,
        "input_tokens": result.num_prompt_tokens,
        "output_tokens": result.num_output_tokens,
        "text": result.text,
        "error": result.error,
    }


class _Progress:
    """A bar on a terminal's stderr."""

    def __init__(self, total: int) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._task = self._bar.add_task("requests", total=total)

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.stop()

    def advance(self, _: Result) -> None:
        """A request is over."""
        self._bar.update(self._task, advance=1)
