"""Every command line and option that the documentation names exists, and every link and anchor leads somewhere."""

from __future__ import annotations

import argparse
import importlib.util
import re
import shlex
import sys
from functools import cache
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from specdec.cli.main import build_parser, join_words, typed_command
from specdec.cli.parser import UsageError
from specdec.errors import SpecdecError
from tests.docs.blocks import GENERATED, PAGES, READMES, ROOT, shell_lines

TEXTS = [*PAGES, *READMES, ROOT / "CONTRIBUTING.md"]
COMMANDS = [(page, line, command) for page in TEXTS if page not in GENERATED for line, command in shell_lines(page)]
_PLACEHOLDER = re.compile(r"\.\.\.|…")


def _id(value: object) -> str | None:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else None


@pytest.mark.parametrize(("page", "line", "command"), COMMANDS, ids=_id)
def test_a_command_line_is_accepted(
    page: Path, line: int, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "person.json").write_text("{}")  # options that take a file read it
    words = shlex.split(command)[1:]
    typed = typed_command(words)
    if typed is None or not re.fullmatch(r"[a-z][a-z_.-]*", typed):
        return  # `specdec COMMAND --help`
    words, typed = join_words(words, typed)
    parser = build_parser(typed)
    if _PLACEHOLDER.search(command) or len(words) == 1 or "--help" in words or "PATH=VALUE" in words:
        known = _options(parser)
        assert [word for word in words if word.startswith("--") and word.partition("=")[0] not in known] == []
        return
    try:
        parser.parse_args(words)
    except SpecdecError as error:
        if "must be given" not in str(error):
            pytest.fail(f"{page}:{line}: {error}")


@cache
def _all_options() -> frozenset[str]:
    return frozenset(_options(build_parser(None)))


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a parser and of the commands in it."""
    found: set[str] = set()
    for action in parser._actions:
        found |= set(action.option_strings)
        if isinstance(action, argparse._SubParsersAction):
            for nested in action.choices.values():
                found |= _options(nested)
    return found


OTHERS = {"--check", "--no-deps", "--no-build-isolation", "--module", "--speculative.max-repeats"}
"""Options of other programs and scripts, and one that a page says does not exist."""


@pytest.mark.parametrize("page", TEXTS, ids=_id)
def test_options_in_the_text_exist(page: Path) -> None:
    """Options in inline code, outside the first column of a table about another program."""
    lines = page.read_text(encoding="utf-8").splitlines()
    foreign = page.name == "move-from-vllm.md"
    wrong = []
    for line in lines:
        text = line.split("|", 2)[2] if foreign and line.startswith("|") and line.count("|") > 2 else line
        for code in re.findall(r"`(--[^`]+)`", text):
            option = re.match(r"--[A-Za-z0-9._-]+", code)
            if option and option[0] not in _all_options() | OTHERS:
                wrong.append(option[0])
    assert wrong == []


def test_an_option_that_does_not_exist_is_noticed() -> None:
    assert "--no-such-option" not in _all_options()
    with pytest.raises(UsageError):
        build_parser("bench").parse_args(["bench", "--no-such-option"])


@cache
def anchors(page: Path) -> frozenset[str]:
    """The anchors of a page's headings, as the site and code hosts make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#{1,6} (.+?)\s*$", text, re.M)
    return frozenset(slugify(re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading), "-") for heading in headings)


@pytest.mark.parametrize("page", TEXTS, ids=_id)
def test_anchors_exist(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    wrong = []
    for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", text):
        linked = (page.parent / target).resolve() if target else page
        if linked.suffix == ".md" and anchor not in anchors(linked):
            wrong.append(f"{target}#{anchor}")
    assert wrong == []


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = set(re.findall(r"- (?:\w+: )?(\S+\.md)$", text, re.M))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES}


@pytest.mark.parametrize("script", sorted(ROOT.glob("scripts/gen_*_docs.py")), ids=lambda path: path.stem)
def test_a_generated_page_is_what_the_code_says(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.setattr(sys, "argv", [str(script), "--check"])
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    name = {"gen_cli_docs": "command-line", "gen_config_docs": "configuration", "gen_hook_docs": "hooks"}
    name |= {"gen_metric_docs": "metrics", "gen_api_docs": "python"}
    page = ROOT / "docs/reference" / f"{name[script.stem]}.md"
    assert page.read_text(encoding="utf-8") == module.page()


def test_links_are_rewritten_for_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    site = pytest.importorskip("site_packages", reason="needs mkdocs")
    page = ROOT / "docs/how-to/x.md"
    text = "[s](../../plugins/server/README.md#errors) [c](../../CONTRIBUTING.md) [g](../reference/glossary.md)"
    assert site.rewritten(text, page, "how-to/x.md") == (
        "[s](../packages/specdec-server.md#errors) c (`CONTRIBUTING.md`) [g](../reference/glossary.md)"
    )
    readme = ROOT / "builtin_heads/eagle_llama/README.md"
    text = "[specdec](../../README.md) [e](../../builtin_proposers/eagle/README.md)\n```\n[x](../../README.md)\n```"
    assert site.rewritten(text, readme, "packages/specdec-eagle-llama.md") == (
        "[specdec](../index.md) [e](specdec-eagle.md)\n```\n[x](../../README.md)\n```"
    )


def test_blocks_of_code_are_blocks_on_the_site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence with words that the site does not know is no fence: its code becomes running text."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    site = pytest.importorskip("site_packages", reason="needs mkdocs")
    known = re.compile(r"```(\w+( title=\"[^\"]+\")?)?")
    for page in [*ROOT.glob("docs/**/*.md"), *site.PACKAGES]:
        fences = re.findall(r"^```.*$", site.titled(page.read_text(encoding="utf-8")), re.MULTILINE)
        assert [fence for fence in fences if not known.fullmatch(fence)] == [], page


def test_long_code_may_break_in_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    site = pytest.importorskip("site_packages", reason="needs mkdocs")
    html = f"<code>--block-size</code> <code>{'x' * 50}</code>"
    assert site.on_page_content(html, None, None, None) == html.replace("<code>x", '<code class="long">x')
