"""Prompts from arguments, files, standard input and the bundled sets."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from attrs import frozen

from specdec.cli.engines import chat_token_ids
from specdec.config.problems import closest
from specdec.errors import InvalidRequestError
from specdec.wording import reason_of

FORMS = '{"prompt": "…"}, {"prompt_token_ids": […]}, {"turns": ["…"]}, {"messages": […]} or a string'


@frozen(kw_only=True)
class Prompt:
    """One prompt: text, token ids, or a conversation for the chat template."""

    id: str
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    task: str = ""
    """What kind of work it is, when the file says so."""

    def as_chat(self, system: str | None = None) -> Prompt:
        """Text becomes a user message; a system message is put first when given."""
        if self.token_ids is not None:
            raise InvalidRequestError(f"prompt {self.id} has token ids, so --chat cannot apply the chat template to it")
        messages = self.messages or ({"role": "user", "content": self.text},)
        first = ({"role": "system", "content": system},) if system else ()
        return Prompt(id=self.id, messages=(*first, *messages), task=self.task)

    def as_text(self) -> Prompt:
        """A conversation becomes the text of its first message, without the chat template."""
        if self.messages is None:
            return self
        return Prompt(id=self.id, text=str(self.messages[0]["content"]), task=self.task)

    def for_engine(self, engine: Any) -> str | dict[str, list[int]]:
        """What `specdec.LLM.generate` takes."""
        if self.messages is not None:
            return {"prompt_token_ids": chat_token_ids(engine, self.messages)}
        if self.token_ids is not None:
            return {"prompt_token_ids": list(self.token_ids)}
        return str(self.text)


def from_arguments(texts: Sequence[str], file: str | None) -> list[Prompt]:
    """The prompts of a command line: its arguments, then its file; standard input when there are neither.

    Raises:
        InvalidRequestError: there is no prompt, or the file cannot be read.
    """
    prompts = [Prompt(id=str(number), text=text) for number, text in enumerate(texts, start=1) if text != "-"]
    if "-" in texts or not (texts or file):
        prompts.append(_from_stdin())
    if file is not None:
        prompts += read_file(Path(file))
    return prompts


def _from_stdin() -> Prompt:
    if sys.stdin is None or sys.stdin.isatty():
        raise InvalidRequestError("no prompt: give one as an argument, with --prompts, or on standard input.")
    text = sys.stdin.read()
    return Prompt(id="stdin", text=text.removesuffix("\n"))


def read_file(path: Path) -> list[Prompt]:
    """A .jsonl file holds one prompt a line, in one of the `FORMS`; any other file is one prompt.

    Raises:
        InvalidRequestError: the file cannot be read, or a line is not a prompt; the line is named.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"prompt file {path} cannot be read: {reason_of(error)}") from error
    if path.suffix != ".jsonl":
        return [Prompt(id=path.name, text=text.removesuffix("\n"))]
    prompts = list(_lines(text, str(path)))
    if not prompts:
        raise InvalidRequestError(f"prompt file {path} holds no prompts.")
    return prompts


def bundled_sets() -> list[str]:
    """Names of the prompt sets that come with specdec."""
    folder = resources.files("specdec.cli") / "prompt_sets"
    return sorted(item.name.removesuffix(".jsonl") for item in folder.iterdir() if item.name.endswith(".jsonl"))


def read_set(name: str) -> list[Prompt]:
    """A .jsonl file by path, or a bundled set by name.

    Raises:
        InvalidRequestError: neither exists; the bundled sets are listed.
    """
    if Path(name).is_file():
        return read_file(Path(name))
    sets = bundled_sets()
    if name in sets:
        text = (resources.files("specdec.cli") / "prompt_sets" / f"{name}.jsonl").read_text(encoding="utf-8")
        return list(_lines(text, name))
    near = closest(name, sets)
    hint = f" Did you mean {near!r}?" if near else ""
    raise InvalidRequestError(f"--prompts {name}: no such file, and no bundled set.{hint} Bundled: {', '.join(sets)}.")


def _lines(text: str, source: str) -> Iterator[Prompt]:
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            where = f"{source}:{number}"
            try:
                yield _parse(json.loads(line), where)
            except ValueError as error:
                raise InvalidRequestError(f"{where} is not JSON: {error}") from error


def _parse(item: Any, where: str) -> Prompt:
    if isinstance(item, str):
        return Prompt(id=where, text=item)
    if isinstance(item, dict):
        named: dict[str, Any] = {"id": str(item.get("id", where)), "task": str(item.get("task", ""))}
        if isinstance(item.get("prompt"), str):
            return Prompt(**named, text=item["prompt"])
        if _is_list(item.get("prompt_token_ids"), int):
            return Prompt(**named, token_ids=tuple(item["prompt_token_ids"]))
        if _is_list(item.get("messages"), dict):
            return Prompt(**named, messages=tuple(item["messages"]))
        if _is_list(item.get("turns"), str):
            return Prompt(**named, messages=({"role": "user", "content": item["turns"][0]},))
    raise InvalidRequestError(f"{where}: a prompt is {FORMS}.")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)
