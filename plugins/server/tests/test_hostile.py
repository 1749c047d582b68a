"""Clients that are slow on purpose, or send what costs much: they harm nobody else."""

from __future__ import annotations

import gzip
import json
import socket

JSON = {"content-type": "application/json"}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(url: str) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])))
    connection.settimeout(20)
    return connection


def test_a_body_that_drips_in_is_given_up_as_one_that_does_not_come(model, serving):
    """The limit is on the whole body: no part of it takes longer than the limit here."""
    body = json.dumps({"prompt": "x" * 200, "max_tokens": 1}).encode()
    with serving(model, {"request_timeout": 1}) as server, connect(server.url) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % len(body))
        connection.settimeout(0.1)
        answer = b""
        for index in range(len(body)):
            connection.sendall(body[index : index + 1])
            try:
                answer = connection.recv(4096)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"(server.request_timeout)" in answer
        connection.settimeout(20)
        assert connection.recv(4096) == b""  # and holds no connection


def test_a_compressed_body_is_a_415(client):
    body = gzip.compress(b'{"prompt": "x"}')
    response = client.post("/v1/completions", content=body, headers={**JSON, "content-encoding": "gzip"})
    assert response.status_code == 415
    assert "'gzip' is not understood; send it uncompressed" in response.json()["error"]["message"]
    plain = client.post("/tokenize", content=b'{"prompt": "x"}', headers={**JSON, "content-encoding": "identity"})
    assert plain.status_code == 200
