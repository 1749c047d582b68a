"""The proposer that proposes nothing and writes down what the target computes."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field

from specdec.config import parse_size
from specdec.drafting import Proposer
from specdec.errors import InvalidRequestError
from specdec.types import Draft, Needs, ProposerCapabilities
from specdec_extract_hidden_states.shards import ShardWriter

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    from torch import Tensor

    from specdec.sampling.params import SamplingParams
    from specdec.types import ComputedStep, EngineContext, ProposalInput, RequestInfo
    from specdec_extract_hidden_states.config import ExtractConfig

logger = logging.getLogger(__name__)

RECORD_ID = "hidden_states_id"
"""Key of `SamplingParams.extra_args`: the id under which a request is written, instead of its request id."""


@define(eq=False)
class _Running:
    """The states of a running request so far, from position 0 on without a gap."""

    record_id: str
    num_prompt_tokens: int
    is_known: bool
    """Whether it is in the manifest already."""
    parts: dict[str, list[Tensor]]
    num_positions: int = 0
    has_gap: bool = field(default=False)
    """Whether cached blocks held positions that this engine step did not compute."""


class HiddenStatesExtractor(Proposer):
    """Collects the hidden states of requests, and writes completed ones (`specdec_extract_hidden_states.shards`).

    Every token of prompt and output has its states once, however it was computed: in chunks, or again after a
    preemption. Only the last token has none, because the target has not read it. A request whose prompt was partly in
    the prefix cache cannot be written, as those states were not computed; the log says so.
    """

    def __init__(self, config: ExtractConfig, engine: EngineContext) -> None:
        info = engine.target_info
        self.needs = Needs(every_step=True, hidden_states=config.final_hidden_states, aux_layers=config.layers)
        self.capabilities = ProposerCapabilities(keeps_finished_requests=True)
        self.request_options = (RECORD_ID,)
        self._config = config
        self._dtype = getattr(torch, config.hidden_states_dtype)
        self._names = [f"layer_{layer}" for layer in config.layers] + ["final"] * config.final_hidden_states
        self._header = {
            "model": Path(info.model).name,
            "model_type": info.model_type,
            "hidden_size": info.hidden_size,
            "layers": list(config.layers),
            "final": config.final_hidden_states,
            "dtype": config.hidden_states_dtype,
        }
        self._writer: ShardWriter | None = None
        self._running: dict[str, _Running] = {}
        self._num_left_out = 0

    @property
    def writer(self) -> ShardWriter:
        """Opened by `load`."""
        if self._writer is None:
            self._writer = ShardWriter(
                Path(self._config.output_path).expanduser(), self._header, parse_size(self._config.shard_size)
            )
        return self._writer

    def load(self, target: Any) -> None:
        """Open the directory, so that what is wrong with it is said before anything is computed."""
        del target
        _ = self.writer

    def check_request(self, sampling: SamplingParams) -> None:
        """See `Proposer.check_request`."""
        record_id = sampling.extra_args.get(RECORD_ID)
        if record_id is not None and not (isinstance(record_id, str) and record_id):
            raise InvalidRequestError(f"extra_args[{RECORD_ID!r}] is {record_id!r}; it must be a non-empty string.")

    def start(self, request: RequestInfo) -> None:
        """See `Proposer.start`."""
        record_id = request.sampling.extra_args.get(RECORD_ID, request.request_id)
        self._running[request.request_id] = _Running(
            record_id,
            len(request.prompt_token_ids),
            record_id in self.writer,
            {name: [] for name in self._names},
        )

    def propose(self, batch: ProposalInput) -> Draft:
        """Keep what the step computed; propose nothing."""
        if batch.computed is not None and len(batch.computed.kept):
            self._collect(batch.computed)
        return Draft(
            token_ids=torch.empty(0, dtype=torch.int64),
            num_draft_tokens=torch.zeros(len(batch.request_ids), dtype=torch.int32),
        )

    def complete(self, request_id: str, token_ids: np.ndarray) -> None:
        """Hand a whole request to the writer."""
        running = self._running.get(request_id)
        if running is None or running.is_known or running.record_id in self.writer:
            return
        if running.num_positions != len(token_ids) - 1:
            self._leave_out(running)
            return
        tensors = {name: torch.cat(parts) for name, parts in running.parts.items()}
        tensors["token_ids"] = torch.tensor(token_ids, dtype=torch.int64)
        facts = {"num_tokens": len(token_ids), "num_prompt_tokens": running.num_prompt_tokens}
        self.writer.add(running.record_id, tensors, facts)

    def finish(self, request_id: str) -> None:
        """See `Proposer.finish`."""
        self._running.pop(request_id, None)

    def close(self) -> None:
        """Write what waits."""
        if self._writer is not None:
            self._writer.flush()

    def memory(self) -> Mapping[str, int]:
        """Bytes of running requests' states, and of completed ones that wait to be written."""
        parts = [part for running in self._running.values() for found in running.parts.values() for part in found]
        return {"running": sum(part.nbytes for part in parts), "waiting": self._writer.nbytes if self._writer else 0}

    def stats(self) -> Mapping[str, Any]:
        """Requests in the manifest, and requests that could not be written."""
        return {"written_requests": self.writer.num_written, "left_out_requests": self._num_left_out}

    def _collect(self, computed: ComputedStep) -> None:
        kept = torch.from_numpy(computed.kept)
        sources = [*(computed.target.aux_hidden_states or ())]
        if self._config.final_hidden_states and computed.target.hidden_states is not None:
            sources.append(computed.target.hidden_states)
        # The one copy to the host: the rows of all requests that are part of their texts.
        states = [source[kept.to(source.device)].to(self._dtype).cpu() for source in sources]
        for r, request_id in enumerate(computed.request_ids):
            running = self._running.get(request_id)
            if running is not None and not running.is_known:
                begin, end = computed.kept_start[r : r + 2].tolist()
                self._append(running, [state[begin:end] for state in states], int(computed.first_position[r]))

    def _append(self, running: _Running, states: list[Tensor], first: int) -> None:
        """Add the positions from ``first`` on that are not there yet; those computed again are equal."""
        seen = running.num_positions - first
        if seen < 0:
            running.has_gap = True
        if running.has_gap or seen >= len(states[0]):
            return
        for name, state in zip(self._names, states, strict=True):
            running.parts[name].append(state[seen:].clone())
        running.num_positions += len(states[0]) - seen

    def _leave_out(self, running: _Running) -> None:
        self._num_left_out += 1
        if self._num_left_out == 1:
            cause = (
                "the prefix cache held a part of its prompt, so that part was not computed; "
                "set enable_prefix_caching to false"
                if running.has_gap
                else "not all of its tokens were seen"
            )
            logger.warning("the hidden states of request %s are not written: %s", running.record_id, cause)
