"""I10 and class M: a stream says what the finished request says; aborts leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specdec import AsyncLLM, SamplingParams
from specdec.errors import CapacityError, EngineDeadError, InvalidRequestError
from tests.invariants.kit import PROMPTS, Baseline, Runs, oracle

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "kv_cache_memory": "4MiB",
    "stat_loggers": (),
}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


@contextlib.asynccontextmanager
async def engine(model: str, **settings: Any) -> AsyncIterator[AsyncLLM]:
    async with AsyncLLM(model, **(SETTINGS | settings)) as llm:
        yield llm
        for _ in range(100):
            stats = llm.stats()
            if stats.free_blocks == stats.total_blocks:
                break
            await asyncio.sleep(0.02)
        assert stats.free_blocks == stats.total_blocks, "blocks leaked (I8)"


def test_pieces_join_to_the_whole(model: str, baseline: Baseline, runs: Runs) -> None:
    params = SamplingParams(temperature=0, max_tokens=24, logprobs=3)

    async def stream(llm: AsyncLLM, prompt: list[int]) -> tuple[str, list[int], Any]:
        text, ids, last = "", [], None
        async for output in llm.generate(prompt, params):
            choice = output.outputs[0]
            text += choice.delta_text
            ids += choice.delta_token_ids
            assert choice.text == text
            assert choice.token_ids == ids
            last = output
        return text, ids, last

    async def main() -> None:
        async with engine(model, proposer=oracle(runs), speculative_config={"num_speculative_tokens": 4}) as llm:
            found = await asyncio.gather(*(stream(llm, prompt) for prompt in PROMPTS))
        for (text, ids, last), plain in zip(found, baseline(PROMPTS, params), strict=True):
            choice = plain.outputs[0]
            assert (text, ids) == (choice.text, choice.token_ids)
            assert last.finished
            assert last.outputs[0].finish_reason == choice.finish_reason
            for streamed, expected in zip(last.outputs[0].logprobs, choice.logprobs or [], strict=True):
                assert streamed.keys() == expected.keys()
                for token in streamed:
                    assert streamed[token].logprob == pytest.approx(expected[token].logprob, abs=1e-4)

    asyncio.run(main())


def test_leaving_a_stream_aborts_the_request(model: str) -> None:
    async def main() -> None:
        async with engine(model, speculative_config=NGRAM) as llm:
            for prompt in PROMPTS:
                stream = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=None))
                async for _ in stream:
                    break
                await stream.aclose()

    asyncio.run(main())


def test_cancelling_tasks_at_random_moments(model: str) -> None:
    async def main() -> None:
        async with engine(model, speculative_config=NGRAM, kv_cache_memory="1MiB", max_model_len=128) as llm:

            async def read(i: int) -> None:
                async for _ in llm.generate(PROMPTS[i % 8], SamplingParams(seed=i, max_tokens=30)):
                    pass

            tasks = [asyncio.create_task(read(i)) for i in range(40)]
            for i, task in enumerate(tasks):
                await asyncio.sleep(0.001 * (i % 7))
                if i % 3:
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)

    asyncio.run(main())


def test_abort_by_id(model: str) -> None:
    async def main() -> None:
        async with engine(model) as llm:
            reasons = []
            async for output in llm.generate(PROMPTS[0], SamplingParams(max_tokens=200, seed=1), request_id="mine"):
                await llm.abort("mine")
                reasons.append(output.outputs[0].finish_reason)
            assert reasons[-1] == "abort"

    asyncio.run(main())


def test_bad_requests_fail_alone(model: str) -> None:
    async def main() -> None:
        async with engine(model, max_waiting_requests=2, max_num_seqs=1) as llm:

            async def read(prompt: Any, **kwargs: Any) -> int:
                count = 0
                async for output in llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20), **kwargs):
                    count = len(output.outputs[0].token_ids)
                return count

            with pytest.raises(InvalidRequestError, match="empty"):
                await read([])
            results = await asyncio.gather(*(read(PROMPTS[i % 8]) for i in range(12)), return_exceptions=True)
            assert {type(r) for r in results} == {int, CapacityError}
            same = await asyncio.gather(
                read(PROMPTS[0], request_id="a"), read(PROMPTS[1], request_id="a"), return_exceptions=True
            )
            assert {type(r) for r in same} == {int, InvalidRequestError}

    asyncio.run(main())


def test_an_id_can_be_used_again_with_other_parameters(model: str, baseline: Baseline) -> None:
    """Whatever is kept for a request by its id must go with it."""
    each = [
        SamplingParams(temperature=0, max_tokens=12),
        SamplingParams(temperature=1.5, seed=3, max_tokens=12),
        SamplingParams(temperature=0, max_tokens=12, logit_bias={9: 100.0}),
        SamplingParams(temperature=0, max_tokens=12, frequency_penalty=2),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=2),
    ]
    plain = [baseline([PROMPTS[0]], params)[0].outputs[0].token_ids for params in each]

    async def main() -> None:
        async with engine(model) as llm:
            for params, expected in zip(each, plain, strict=True):
                outputs = [output async for output in llm.generate(PROMPTS[0], params, request_id="mine")]
                assert outputs[-1].outputs[0].token_ids == expected

    asyncio.run(main())


@pytest.mark.parametrize("first", ["mine", "mine#1"])
def test_ids_of_choices_are_taken_too(model: str, first: str) -> None:
    async def main() -> None:
        async with engine(model) as llm:

            async def read(name: str) -> int:
                params = SamplingParams(n=1 if "#" in name else 2, max_tokens=30, seed=1, ignore_eos=True)
                outputs = [output async for output in llm.generate(PROMPTS[0], params, request_id=name)]
                return sum(len(choice.token_ids) for choice in outputs[-1].outputs)

            second = "mine#1" if first == "mine" else "mine"
            results = await asyncio.gather(read(first), read(second), return_exceptions=True)
            assert results[0] == (60 if first == "mine" else 30)
            assert isinstance(results[1], InvalidRequestError)
            assert "'mine#1' is in use" in str(results[1])

    asyncio.run(main())


def test_a_closed_engine_ends_its_streams(model: str) -> None:
    async def main() -> None:
        llm = AsyncLLM(model, **SETTINGS)

        async def read() -> None:
            async for _ in llm.generate(PROMPTS[0], SamplingParams(temperature=0, max_tokens=None)):
                pass

        task = asyncio.create_task(read())
        await asyncio.sleep(0.05)
        await asyncio.to_thread(llm.close)
        with contextlib.suppress(EngineDeadError):
            await asyncio.wait_for(task, 5)
        with pytest.raises(EngineDeadError, match="closed"):
            await asyncio.wait_for(read(), 5)

    asyncio.run(main())


@pytest.mark.parametrize("fault", [RuntimeError, SystemExit, KeyboardInterrupt])
def test_an_internal_fault_ends_streams_with_its_cause(model: str, fault: type[BaseException]) -> None:
    """Whatever ends the engine's thread, nobody waits for it in vain."""

    async def main() -> None:
        llm = AsyncLLM(model, **SETTINGS)

        def fail(*_: object) -> None:
            raise fault("on purpose")

        llm._engine.core._target.forward = fail  # type: ignore[method-assign,assignment]

        async def read() -> None:
            async for _ in llm.generate(PROMPTS[0]):
                pass

        for _ in range(2):
            with pytest.raises(EngineDeadError, match="on purpose"):
                await asyncio.wait_for(read(), 5)
        llm.close()

    asyncio.run(main())


def test_streams_of_only_what_is_new_and_only_the_end_say_the_same(model: str, runs: Runs) -> None:
    params = SamplingParams(temperature=1, seed=4, n=2, max_tokens=24, logprobs=2)

    async def deltas(llm: AsyncLLM, prompt: list[int], pause: float) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = [{"text": "", "ids": [], "logprobs": [], "origins": []} for _ in range(2)]
        async for output in llm.generate(prompt, params, output_kind="delta"):
            for part, choice in zip(found, output.outputs, strict=True):
                assert len(choice.token_ids) == len(choice.logprobs or ()) == len(choice.token_origins)
                part["text"] += choice.text
                part["ids"] += choice.token_ids
                part["logprobs"] += choice.logprobs or []
                part["origins"] += choice.token_origins
            await asyncio.sleep(pause)  # a slow reader gets several steps at once
        return found

    async def main() -> None:
        async with engine(model, proposer=oracle(runs), speculative_config={"num_speculative_tokens": 4}) as llm:
            for prompt in PROMPTS[:2]:
                outputs = [output async for output in llm.generate(prompt, params, output_kind="final")]
                assert len(outputs) == 1
                assert outputs[0].finished
                for pause in (0, 0.02):
                    for part, choice in zip(await deltas(llm, prompt, pause), outputs[0].outputs, strict=True):
                        assert (part["text"], part["ids"]) == (choice.text, choice.token_ids)
                        assert len(part["origins"]) == len(choice.token_origins)
                        assert [set(entries) for entries in part["logprobs"]] == [set(e) for e in choice.logprobs or ()]

    asyncio.run(main())


def test_stat_loggers_are_told_of_every_request_that_ends(model: str) -> None:
    from specdec.metrics import EngineStats, RequestStats, StatLogger, StepStats

    class Recorder(StatLogger):
        def __init__(self) -> None:
            self.ended: list[RequestStats] = []
            self.first: list[float] = []
            self.gaps: list[float] = []

        def record(self, step: StepStats) -> None:
            self.first += step.first_token_seconds
            self.gaps += step.inter_token_seconds

        def record_request(self, request: RequestStats) -> None:
            self.ended.append(request)

    recorder = Recorder()

    async def main() -> EngineStats:
        async with engine(model) as llm:
            llm._engine.core._loggers = (recorder,)
            params = SamplingParams(temperature=1, max_tokens=6, n=2, ignore_eos=True)
            async for _ in llm.generate(PROMPTS[0], params):
                pass
            async with contextlib.aclosing(llm.generate(PROMPTS[1], SamplingParams(max_tokens=200))) as outputs:
                await anext(outputs)
            while llm.stats().num_running:
                await asyncio.sleep(0.01)
            return llm.stats()

    stats = asyncio.run(main())
    assert [ended.finish_reason for ended in recorder.ended] == ["length", "length", "abort"]
    assert [ended.num_output_tokens for ended in recorder.ended[:2]] == [6, 6]
    assert sum(ended.num_output_tokens for ended in recorder.ended) == stats.num_generated_tokens
    assert len(recorder.first) == 3
    assert len(recorder.gaps) >= 10
    for ended in recorder.ended:
        assert 0 <= (ended.queued_seconds or 0) <= (ended.first_token_seconds or 0) <= ended.total_seconds
