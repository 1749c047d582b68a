"""Faults of the operating system, in words and without its numbers."""

import socket
from pathlib import Path

import pytest

from specdec.errors import ConfigError
from specdec_server.app import read_template
from specdec_server.config import ServerConfig
from specdec_server.serve import listen
from specdec_server.top import UnreachableError, read


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_port_in_use() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"^cannot listen on 127.0.0.1:{port}: address already in use\. Choose"):
            listen(ServerConfig(host="127.0.0.1", port=port))


def test_no_server_to_watch() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(UnreachableError, match=rf"^no metrics at {url}/metrics: connection refused\. Is the server"):
        read(url)


def test_a_template_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot be read: no such file or directory$"):
        read_template(str(tmp_path / "none.jinja"))
