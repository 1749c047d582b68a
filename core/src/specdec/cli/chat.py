"""``specdec chat``: a conversation in the terminal, streamed."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from specdec.cli import engines
from specdec.cli.commands import COMMANDS
from specdec.cli.parser import Subparsers, add_command
from specdec.cli.sampling import add_sampling_flags, read_sampling, with_defaults
from specdec.config.flags import add_config_flags, add_model_argument, read_config
from specdec.config.problems import closest
from specdec.errors import EngineDeadError, SpecdecError

if TYPE_CHECKING:
    from rich.console import Console

    from specdec.outputs import RequestOutput
    from specdec.sampling.detokenizer import IncrementalDetokenizer
    from specdec.sampling.params import SamplingParams

EXAMPLES = """\
  specdec chat demo:smollm2
      talk to the demonstration model
  specdec chat demo:smollm2 --speculative.method ngram --show-accepted
      and see which tokens were guessed
  echo "Name three colours." | specdec chat demo:smollm2 --temperature 0
      without a terminal: one message a line, the answers on standard output"""

HELP = """\
/reset           forget the conversation (the system message stays)
/stats           speed and acceptance since the start
/show-accepted   mark accepted draft tokens, or stop marking them
/help            this text
/exit            leave; end of file does too
Ctrl-C           stop the answer; at the prompt: leave"""

NOT_SHOWN = ("n", "logprobs", "prompt_logprobs", "detokenize")
"""Sampling parameters for what a conversation does not show: more than one answer, probabilities, token ids."""

WORDS = ("/reset", "/stats", "/show-accepted", "/help", "/exit", "/quit")


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "chat",
        summary=COMMANDS["chat"].summary,
        description=f"Talk to a model; answers appear while they are made. Commands during the talk:\n\n{HELP}",
        examples=EXAMPLES,
        usage="specdec chat [options] [MODEL]",
    )
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--show-accepted", action="store_true", help="mark accepted draft tokens from the start")
    add_config_flags(parser)
    add_sampling_flags(parser, skip=NOT_SHOWN)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Hold the conversation until the user leaves."""
    from specdec.cli.console import make_console

    config, _ = read_config(arguments)
    params = read_sampling(arguments, max_tokens=None)
    console = make_console()
    interactive = sys.stdin.isatty() and console.is_terminal
    if interactive:
        console.print(f"loading {config.model} …", style="dim")
    engine = engines.open_async_llm(config)
    try:
        params = with_defaults(arguments, params, engine.get_default_sampling_params())
        talk = Conversation(engine, params, console, arguments.system, marks=arguments.show_accepted)
        talk.hold(interactive)
    finally:
        engine.close()
    return 0


class Conversation:
    """The messages so far, and what the user can do with them."""

    def __init__(
        self, engine: Any, params: SamplingParams, console: Console, system: str | None, *, marks: bool
    ) -> None:
        self._engine = engine
        self._params = params
        self._console = console
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages: list[dict[str, str]] = list(self._first)
        self.marks = marks

    def hold(self, interactive: bool) -> None:
        """Read lines and answer them until the end of input or ``/exit``."""
        if interactive:
            self._console.print("Type a message, or /help.", style="dim")
            if self.marks:
                self._show_legend()
        with asyncio.Runner() as runner:
            while (line := self._read(interactive)) is not None:
                if line.startswith("/"):
                    if not self._command(line):
                        return
                elif line:
                    self._answer(runner, line)

    def _read(self, interactive: bool) -> str | None:
        """The next line without surrounding space; None at the end of input."""
        if not interactive:
            line = sys.stdin.readline()
            return line.strip() if line else None
        try:
            return input(">>> ").strip()
        except EOFError:
            self._console.print()
            return None

    def _command(self, line: str) -> bool:
        """Run a slash command; False to leave."""
        if line in ("/exit", "/quit"):
            return False
        if line == "/reset":
            self.messages = list(self._first)
            self._console.print("The conversation starts anew.", style="dim")
        elif line == "/stats":
            from specdec.cli.tables import stats_table

            self._console.print(stats_table(self._engine.stats()))
        elif line == "/show-accepted":
            self.marks = not self.marks
            self._show_legend() if self.marks else self._console.print("No marks.", style="dim")
        else:
            near = closest(line, WORDS)
            unknown = "" if line == "/help" else f"Unknown command {line}." + (f" Did you mean {near}?" if near else "")
            self._console.print(f"{unknown}\n{HELP}".strip(), style="dim", markup=False)
        return True

    def _show_legend(self) -> None:
        from specdec.cli.marking import legend

        self._console.print(legend())

    def _answer(self, runner: asyncio.Runner, line: str) -> None:
        """Answer one message. A question without an answer is forgotten; an answer that is stopped is kept."""
        self.messages.append({"role": "user", "content": line})
        reply = _Reply()
        try:
            runner.run(self._stream(reply))
        except KeyboardInterrupt:
            self._console.print(" (stopped)", style="dim")
        except EngineDeadError:
            raise
        except SpecdecError as error:
            self._console.print()
            print(f"error: {error}", file=sys.stderr)
        if reply.text:
            self.messages.append({"role": "assistant", "content": reply.text})
        else:
            self.messages.pop()

    async def _stream(self, reply: _Reply) -> None:
        from specdec.cli.marking import MarkedStream

        stream = None
        output: RequestOutput | None = None
        begin = time.perf_counter()
        async with aclosing(self._engine.chat(self.messages, self._params)) as outputs:
            async for output in outputs:
                if stream is None:
                    stream = MarkedStream(self._console, self._detokenizer(output.prompt_token_ids))
                stream.update(output.outputs[0])
                reply.text = output.outputs[0].text
        self._console.print()
        if output is not None:
            self._after(output, time.perf_counter() - begin)

    def _detokenizer(self, prompt_token_ids: list[int]) -> IncrementalDetokenizer | None:
        """For the marks; None when there are none."""
        tokenizer = self._engine.get_tokenizer()
        if not self.marks or tokenizer is None:
            return None
        from specdec.sampling.detokenizer import IncrementalDetokenizer

        return IncrementalDetokenizer(tokenizer, prompt_token_ids, self._params)

    def _after(self, output: RequestOutput, seconds: float) -> None:
        """The line below an answer: failures always, figures when accepted tokens are marked."""
        choice = output.outputs[0]
        if choice.finish_reason == "error":
            print(f"error: {choice.error}", file=sys.stderr)
        elif self.marks:
            stats = output.spec_stats
            length = f", acceptance length {stats.mean_acceptance_length:.2f}" if stats.num_drafts else ""
            rate = len(choice.token_ids) / max(seconds, 1e-9)
            self._console.print(f"({len(choice.token_ids)} tokens, {rate:.1f} tokens/s{length})", style="dim")


class _Reply:
    """What has been answered so far; outlives a cancelled stream."""

    text = ""
