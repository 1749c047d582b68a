"""Connections on which no request comes."""

from __future__ import annotations

import logging
import socket

import pytest

from .test_disconnects import request_bytes
from .test_hostile import HEAD, connect

GET = b"GET /version HTTP/1.1\r\nHost: x\r\n\r\n"


def read_to_end(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(65536):
        received += part
    return received


def read_until(connection: socket.socket, end: bytes) -> bytes:
    received = b""
    while end not in received:
        part = connection.recv(65536)
        assert part, f"closed after {received!r}"
        received += part
    return received


@pytest.fixture(scope="module")
def hasty(model, serving):
    with serving(model, {"header_timeout": 0.2}) as server:
        yield server


@pytest.mark.parametrize(("sent", "told"), [(b"", False), (b"P", True), (HEAD, True), (b"\r\n", True)])
def test_a_connection_without_a_request_is_closed(hasty, caplog, sent, told):
    with caplog.at_level(logging.WARNING), connect(hasty.url) as connection:
        connection.sendall(sent)
        assert read_to_end(connection) == b""
    assert ("did not send its headers within 0.2 s (server.header_timeout)" in caplog.text) == told


def test_the_headers_of_a_later_request_have_the_same_time(hasty, caplog):
    with connect(hasty.url) as connection:
        connection.sendall(GET)
        read_until(connection, b"}")
        connection.sendall(HEAD)
        assert read_to_end(connection) == b""
    assert "(server.header_timeout)" in caplog.text


def test_bodies_and_answers_may_take_longer(hasty, caplog):
    request = request_bytes("/v1/completions", {"prompt": "x", "max_tokens": 400, "ignore_eos": True, "n": 4})
    third = len(request) // 3
    with connect(hasty.url) as connection, hasty.client() as other:
        for _ in range(2):
            for start in range(0, len(request), third):
                connection.sendall(request[start : start + third])
                other.get("/version")
            assert read_until(connection, b'"usage"').startswith(b"HTTP/1.1 200")
    assert "header_timeout" not in caplog.text


def test_headers_may_come_in_pieces(running):
    with connect(running.url) as connection, running.client() as other:
        connection.sendall(GET[:10])
        other.get("/version")
        connection.sendall(GET[10:])
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
