"""Whatever comes in: no answer is a 5xx, and the server goes on."""

from __future__ import annotations

import random
import socket
from contextlib import closing
from typing import Any

import pytest


def generated(client: Any, num_examples: int) -> list[tuple[Any, int]]:
    """Send examples made from the server's own OpenAPI document, valid and not; what got a 5xx."""
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import strategies as st

    schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
    operations = [found.ok() for found in schema.get_all_operations()]
    assert len(operations) > 8
    failures: list[tuple[Any, int]] = []
    modes = (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE)
    cases = [operation.as_strategy(generation_mode=mode) for operation in operations for mode in modes]

    @settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=st.one_of(cases))
    def send(case: Any) -> None:
        if isinstance(case.body, dict):  # keep what is valid short
            case.body["max_tokens" if "responses" not in case.path else "max_output_tokens"] = 2
        response = case.call(base_url=str(client.base_url))
        if response.status_code >= 500:
            failures.append((case.as_curl_command(), response.status_code))

    send()
    return failures


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_bodies_made_from_the_openapi_document_get_no_5xx(running, client):
    assert generated(client, 300) == []
    assert client.post("/v1/completions", json={"prompt": "the", "max_tokens": 2}).status_code == 200


def test_bytes_that_are_no_http_leave_the_server_well(running, client):
    rng = random.Random(0)
    port = int(running.url.rpartition(":")[2])
    starts = [
        b"",
        b"POST /v1/completions HTTP/1.1\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"\x16\x03",
    ]
    for _ in range(30):
        with closing(socket.create_connection(("127.0.0.1", port))) as connection:
            connection.settimeout(0.2)
            connection.sendall(rng.choice(starts) + rng.randbytes(rng.randrange(1, 200)))
            try:
                answer = connection.recv(4096)
            except (TimeoutError, ConnectionError):
                answer = b""
            assert not answer.startswith(b"HTTP/1.1 5")
    assert client.get("/health").status_code == 200
