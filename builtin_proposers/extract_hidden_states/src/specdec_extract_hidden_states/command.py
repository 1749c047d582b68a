"""What ``specdec extract`` does."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from specdec import LLM, SamplingParams
from specdec.cli.prompts import read_file
from specdec.config import from_kwargs
from specdec.errors import InvalidRequestError
from specdec.progress import GenerationProgress
from specdec_extract_hidden_states.extract import RECORD_ID
from specdec_extract_hidden_states.shards import MANIFEST, read_manifest

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from specdec.cli.prompts import Prompt
    from specdec.config import EngineConfig


def extract(arguments: argparse.Namespace) -> int:
    """Run the model over the prompts that are not written yet; the exit code is 1 when some are missing at the end."""
    prompts = _distinct(read_file(Path(arguments.prompts)))
    if arguments.chat:
        prompts = [prompt.as_chat() for prompt in prompts]
    folder = Path(arguments.output)
    with LLM.from_config(engine_config(arguments)) as llm:
        known = written(folder)
        left = [prompt for prompt in prompts if prompt.id not in known]
        if len(left) < len(prompts):
            print(f"{len(prompts) - len(left)} of {len(prompts)} prompts are written already", file=sys.stderr)
        with GenerationProgress(len(left), show=sys.stderr.isatty()) as bar:
            for begin in range(0, len(left), arguments.batch_size):
                _run(llm, left[begin : begin + arguments.batch_size], arguments, bar)
        faults = llm.stats().num_proposer_faults
    known = written(folder)
    missing = [prompt.id for prompt in left if prompt.id not in known]
    print(f"{len(left) - len(missing)} prompts written to {folder}")
    if missing:
        print(f"{len(missing)} are missing, the first is {missing[0]!r}; {faults} faults, see the log", file=sys.stderr)
    return 1 if missing else 0


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    """Without prefix caching: what is in the cache would not be computed."""
    method = {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        "output_path": arguments.output,
        "layers": list(arguments.layers),
        "final_hidden_states": not arguments.no_final,
        "hidden_states_dtype": arguments.hidden_dtype,
        "shard_size": arguments.shard_size,
    }
    return from_kwargs(
        arguments.model,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len,
        enable_prefix_caching=False,
        speculative_config=method,
        stat_loggers=(),
    )


def written(folder: Path) -> set[str]:
    """Ids of the requests in a directory's manifest."""
    if not (folder / MANIFEST).exists():
        return set()
    return {record["id"] for record in read_manifest(folder)[1]}


def _run(llm: LLM, prompts: Sequence[Prompt], arguments: argparse.Namespace, bar: GenerationProgress) -> None:
    params = [
        SamplingParams(
            temperature=arguments.temperature, max_tokens=arguments.max_tokens, extra_args={RECORD_ID: prompt.id}
        )
        for prompt in prompts
    ]
    outputs = llm.generate([prompt.for_engine(llm) for prompt in prompts], params, use_tqdm=False)
    for output in outputs:
        bar.advance(len(output.prompt_token_ids) + len(output.outputs[0].token_ids))


def _distinct(prompts: list[Prompt]) -> list[Prompt]:
    twice = next((name for name, count in Counter(prompt.id for prompt in prompts).items() if count > 1), None)
    if twice is not None:
        raise InvalidRequestError(
            f"two prompts have the id {twice!r}; give each its own, or none for its line's number."
        )
    return prompts
