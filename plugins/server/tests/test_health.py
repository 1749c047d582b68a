"""What an orchestrator is told: alive, able to take requests, or neither."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.testing import SlowProposer, WrongProposer, use_proposer
from specdec_server.api.status import health, ready
from specdec_server.config import ServerConfig


def service(*, running: bool = True, stalled: float = 0.0, draining: bool = False) -> Any:
    llm = SimpleNamespace(is_running=running, stalled_seconds=stalled)
    return SimpleNamespace(llm=llm, config=ServerConfig(stall_timeout=5.0), draining=draining)


@pytest.mark.parametrize(
    ("state", "healthy", "welcome", "code"),
    [
        ({}, 200, 200, None),
        ({"stalled": 5.0}, 200, 200, None),
        ({"stalled": 5.1}, 503, 503, "stalled"),
        ({"running": False}, 503, 503, "engine_dead"),
        ({"draining": True}, 200, 503, "stopping"),
    ],
)
def test_states(state: dict[str, Any], healthy: int, welcome: int, code: str | None) -> None:
    told = service(**state)
    assert (health(told).status_code, ready(told).status_code) == (healthy, welcome)
    if code is not None:
        assert json.loads(bytes(ready(told).body))["error"]["code"] == code


def test_an_engine_whose_steps_do_not_end_turns_bad_and_good_again(model: Any, serving: Any) -> None:
    """A step that hangs is seen from outside, while /health itself answers at once."""
    settings = use_proposer(SlowProposer(WrongProposer(3), 1.5), 2)
    with (
        serving(model, {"stall_timeout": 0.5}, proposer_time_budget=0, **settings) as running,
        running.client() as http,
    ):
        assert http.get("/health").status_code == 200
        body = {"model": "tiny", "prompt": "a", "max_tokens": 3, "ignore_eos": True}
        request = threading.Thread(target=lambda: http.post("/v1/completions", json=body))
        request.start()
        seen = set()
        while request.is_alive():
            seen.add(http.get("/health").status_code)
            request.join(0.05)
        assert seen == {200, 503}
        assert http.get("/health").status_code == 200
