"""The code blocks of the documentation work: configurations load, and Python and console blocks run.

What a block may be and how it is marked: `tests.docs.blocks`. Pages whose blocks load a model are slow.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

from specdec.config import load
from specdec.config.load import COMMAND_TABLES, load_table
from specdec.config.schema import SpeculativeConfig
from specdec.config.structure import structure
from specdec.errors import ConfigError
from specdec.registry import Registry
from specdec.registry.catalogue import GROUPS, KINDS
from tests.docs.blocks import PAGES, READMES, ROOT, Block, blocks, commands, shows

ALL = [block for page in [*PAGES, *READMES] for block in blocks(page)]
RUN = [page for page in PAGES if any(block.language in ("python", "console") for block in blocks(page))]
LANGUAGES = {"python", "console", "toml", "json", "bash", "text"}
SERVER = "<!-- server: "
ADDRESS = "http://localhost:8000"
SECONDS = 900


def _of(*languages: str) -> list[Any]:
    return [pytest.param(block, id=block.id) for block in ALL if block.language in languages]


# --- configurations -----------------------------------------------------------------------------


@pytest.mark.parametrize("block", _of("toml"))
def test_a_toml_block_is_a_configuration_or_part_of_a_package(block: Block, tmp_path: Path) -> None:
    values = tomllib.loads(block.text)
    if "project" in values:
        groups = values["project"].get("entry-points", {})
        assert set(groups) <= set(GROUPS)
    elif "checkpoint" in values:
        assert all(marker.keys() >= {"method", "config"} for marker in values["checkpoint"])
    elif "head" in values:
        assert all(table.keys() == {"target", "method", "folder"} for table in values["head"])
    elif "needs" in values:
        assert all(table.keys() == {"plugin", "any_path", "otherwise"} for table in values["needs"])
    else:
        (tmp_path / "specdec.toml").write_text(block.text)
        check_configuration(tmp_path / "specdec.toml", values)


def check_configuration(path: Path, values: dict[str, Any]) -> None:
    """Load a file as an engine would, with the options of its plugins and the tables of commands."""
    overrides = {} if "model" in values else {"model": "m"}
    config, _ = load(path, overrides, environ={})
    registry = Registry()
    if config.speculative is not None:
        check_speculative(registry, config.speculative)
    registry.plugin_config("verifier", config.verifier, config.verifier_options)
    for name, options in config.logits_processor_options.items():
        registry.plugin_config("logits_processor", name, options)
    for table, command in COMMAND_TABLES.items():
        load_table(table, registry.create("command", command, "config_class"), path, environ={})


def check_speculative(registry: Registry, speculative: SpeculativeConfig) -> None:
    """The options of a method, and of the members of a composite one."""
    if speculative.method is None:
        return
    section = {"model": speculative.model, **speculative.options}
    registry.plugin_config("proposer", speculative.method, {k: v for k, v in section.items() if v is not None})
    for member in speculative.options.get("proposers", ()):
        options = {key: value for key, value in member.items() if key not in ("method", "num_speculative_tokens")}
        registry.plugin_config("proposer", member["method"], options)


@pytest.mark.parametrize("block", _of("json"))
def test_a_json_block_is_a_speculative_configuration(block: Block) -> None:
    check_speculative(Registry(), structure(SpeculativeConfig, json.loads(block.text), "speculative"))


def test_a_wrong_configuration_is_noticed(tmp_path: Path) -> None:
    for text in ('[speculative]\nmethod = "ngram"\nprompt_lookup = 4', "[server]\nprot = 1", "block_sise = 3"):
        (tmp_path / "specdec.toml").write_text(text)
        with pytest.raises(ConfigError, match="unknown setting"):
            check_configuration(tmp_path / "specdec.toml", {})
    with pytest.raises(ConfigError, match="unknown setting"):
        check_speculative(Registry(), structure(SpeculativeConfig, {"method": "ngram", "max": 4}, "speculative"))


# --- Python and console -------------------------------------------------------------------------


@pytest.mark.parametrize("block", [pytest.param(block, id=block.id) for block in ALL])
def test_a_block_has_a_language_that_is_tested(block: Block) -> None:
    assert block.language in LANGUAGES
    if block.language == "python":
        compile(block.text, block.id, "exec")


def _pages() -> list[Any]:
    marks = (pytest.mark.slow, pytest.mark.model, pytest.mark.timeout(SECONDS))
    return [
        pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks if _is_heavy(page) else ())
        for page in RUN
        if any(_runs(block) for block in blocks(page))
    ]


def _runs(block: Block) -> bool:
    return block.language in ("python", "console") and not block.info and block.reason is None


def _is_heavy(page: Path) -> bool:
    return any(block.is_heavy and _runs(block) for block in blocks(page))


@pytest.mark.parametrize("page", _pages())
def test_the_blocks_of_a_page_run(page: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    environ = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(install(page, tmp_path)),
    }
    with served(page, environ, tmp_path) as address:
        for block in blocks(page):
            if _runs(block):
                run_block(block, folder, environ, address)


def run_block(block: Block, folder: Path, environ: dict[str, str], address: str) -> None:
    """Run one block; fails with its place and output."""
    if block.language == "python":
        run(block, [sys.executable, "-c", block.text.replace(ADDRESS, address)], [], folder, environ)
        return
    for command, output in commands(block):
        run(block, ["bash", "-c", command.replace(ADDRESS, address)], output, folder, environ)


def run(block: Block, command: list[str], expected: list[str], folder: Path, environ: dict[str, str]) -> None:
    """Run a command and compare what it printed with what the page shows."""
    done = subprocess.run(
        command, cwd=folder, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    assert done.returncode == 0, f"{block.id}\n{command[-1]}\n{done.stdout}"
    assert shows(expected, done.stdout), f"{block.id}\n{command[-1]}\nexpected:\n{expected}\ngot:\n{done.stdout}"


def install(page: Path, tmp_path: Path) -> Path:
    """A folder with the distribution that the page's ``file=`` blocks make up; empty when it has none."""
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for block in blocks(page):
        if path := re.fullmatch(r"file=(\S+)", block.info):
            (source / path[1]).parent.mkdir(parents=True, exist_ok=True)
            (source / path[1]).write_text(block.text)
    if source.exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", target]
        subprocess.run([*pip, source], check=True)
        if (source / "tests").exists():
            shutil.copytree(source / "tests", target / "tests")
    return target


@contextmanager
def served(page: Path, environ: dict[str, str], tmp_path: Path) -> Iterator[str]:
    """The address of a server, where a page says that it needs one; the command is the page's own."""
    text = page.read_text(encoding="utf-8")
    if SERVER not in text:
        yield ADDRESS
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    serve = next(command for block in blocks(page) if block.reason for command, _ in commands(block))
    with (tmp_path / "server.log").open("w") as log:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {serve} --port {port}"], cwd=tmp_path, env=environ, stdout=log, stderr=log
        )
        try:
            wait_for(f"http://127.0.0.1:{port}/ready", process, tmp_path / "server.log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    end = monotonic() + 300
    while monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            sleep(0.5)
    raise AssertionError(f"no server at {url}: {log.read_text()}")


def test_the_packages_own_tests_pass(tmp_path: Path) -> None:
    """Of the packages that pages make; docs/how-to/write-a-plugin.md has tests of its own."""
    page = ROOT / "docs/how-to/package-a-head.md"
    target = install(page, tmp_path)
    environ = {**os.environ, "PYTHONPATH": str(target)}
    command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, str(target / "tests")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout
    assert " passed" in done.stdout


# --- the kit itself -----------------------------------------------------------------------------


def test_shown_output_is_compared() -> None:
    assert shows(["error: …'x'…", "…", "end"], "error: no 'x' here\nmore\nstill more\nend\n")
    assert not shows(["one", "two"], "two\none\n")
    assert shows([], "anything")


def test_a_failing_block_is_noticed(tmp_path: Path) -> None:
    for language, text in (("python", "assert 1 == 2"), ("console", "$ false"), ("console", "$ echo a\nb")):
        block = Block(ROOT / "docs/x.md", 1, language, "", text + "\n", None)
        with pytest.raises(AssertionError):
            run_block(block, tmp_path, dict(os.environ), ADDRESS)


def test_every_method_that_is_installed_is_on_the_page_about_methods() -> None:
    text = (ROOT / "docs/how-to/choose-a-method.md").read_text(encoding="utf-8")
    names = {e.name for e in Registry().entries() if e.kind == "proposer" and e.distribution.startswith("specdec-")}
    assert {name for name in names if f"`{name}`" not in text} == set()
    verifiers = (ROOT / "docs/how-to/choose-a-verifier.md").read_text(encoding="utf-8")
    names = {e.name for e in Registry().entries() if e.kind == "verifier" and e.distribution.startswith("specdec-")}
    assert {name for name in names if f"`{name}`" not in verifiers} == set()
    assert "proposer" in KINDS
