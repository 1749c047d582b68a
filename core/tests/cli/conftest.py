"""An engine that needs no model: it answers with the words of the prompt, half of them as accepted drafts."""

import asyncio
import os
from typing import ClassVar

import pytest

from specdec.errors import InvalidRequestError
from specdec.metrics import EngineStats
from specdec.outputs import CompletionOutput, RequestOutput
from specdec.sampling.params import SamplingParams
from specdec.types import SpecStats


def words_of(prompt):
    if isinstance(prompt, dict):
        return [f"t{token}" for token in prompt["prompt_token_ids"]]
    return prompt.split()


class FakeTokenizer:
    """Token i is the text "ti "."""

    chat_template = "yes"


def make_output(prompt, params, number, count=None):
    words = words_of(prompt)
    token_ids = [len(word) for word in words][:count]
    text = " ".join(words[:count])
    choice = CompletionOutput(
        index=0,
        text=text,
        token_ids=token_ids,
        finish_reason="length",
        token_origins=[i % 3 - 1 for i in range(len(token_ids))],
    )
    return RequestOutput(
        request_id=str(number),
        prompt=prompt if isinstance(prompt, str) else None,
        prompt_token_ids=[1, 2],
        outputs=[choice],
        finished=count is None,
        spec_stats=SpecStats(
            num_drafts=1, num_draft_tokens=2, num_accepted_tokens=1, num_accepted_tokens_per_pos=(1, 0)
        ),
    )


class FakeLLM:
    made: ClassVar[list] = []

    def __init__(self, config):
        self.config = config
        self.dtype, self.device = "bfloat16", "cpu"
        self.calls = []
        self.speculation = []
        self.closed = False
        self.steps = 0
        self.drifts = False
        type(self).made.append(self)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.closed = True

    def close(self):
        self.closed = True

    def get_tokenizer(self):
        return FakeTokenizer()

    def get_default_sampling_params(self):
        return SamplingParams()

    def generate(self, prompts, params, use_tqdm=True, speculation=None):
        self.calls.append((prompts, params, use_tqdm))
        self.speculation.append(speculation)
        if any(not words_of(prompt) for prompt in prompts):
            raise InvalidRequestError("the prompt is empty")
        self.steps += len(prompts)
        outputs = [make_output(prompt, params, number) for number, prompt in enumerate(prompts)]
        if self.config.speculative is not None and self.drifts:
            outputs[0].outputs[0].token_ids.append(99)
        return outputs

    async def chat(self, messages, params):
        if messages[-1]["content"] == "too long":
            raise InvalidRequestError("the prompt is longer than max_model_len")
        self.calls.append((list(messages), params))
        words = messages[-1]["content"]
        for count in range(1, len(words.split()) + 1):
            yield make_output(words, params, 0, count)
            await asyncio.sleep(0)

    def stats(self):
        drafts = self.steps if self.config.speculative is not None else 0
        return EngineStats(
            num_steps=self.steps,
            num_generated_tokens=3 * self.steps,
            num_drafts=drafts,
            num_draft_tokens=2 * drafts,
            num_accepted_tokens=drafts,
            num_accepted_tokens_per_pos=(drafts, 0) if drafts else (),
            num_draft_tokens_per_pos=(drafts, drafts) if drafts else (),
            target_seconds=0.01 * self.steps,
        )


@pytest.fixture
def fake_engine(monkeypatch):
    """Commands open fakes; the list of those that were opened."""
    FakeLLM.made = []
    for name in ("open_llm", "open_async_llm"):
        monkeypatch.setattr(f"specdec.cli.engines.{name}", FakeLLM)
    monkeypatch.setattr("specdec.cli.engines.check", lambda config: None)
    monkeypatch.setattr("specdec.cli.bench.check_plugins", lambda config, sources: None)
    monkeypatch.setattr("specdec.cli.prompts.chat_token_ids", lambda engine, messages: [len(messages), 7])
    return FakeLLM.made


@pytest.fixture(autouse=True)
def _clean(tmp_path, monkeypatch):
    """No configuration file nearby, a terminal of known width, no settings in the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in list(os.environ):
        if name.startswith("SPECDEC_"):
            monkeypatch.delenv(name)


@pytest.fixture
def cli(capsys):
    """Run a command line; exit code, standard output, standard error."""
    from specdec.cli.main import main

    def run(*argv):
        code = main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return code, out, err

    return run
