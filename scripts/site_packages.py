"""A hook of mkdocs: the packages' READMEs become pages, and links to files of the workspace lead to what the site has.

Pages link as files lie in the workspace, so that they also work where the sources are read. In the site a link to a
package's README leads to its page, one to the workspace's README to the start page, and one to any other file outside
docs/ becomes the file's name. Blocks of code that name their file (``file=…``) get it as their title.
"""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
FOLDER = "packages"
_FOLDERS = ("core", "builtin_proposers", "builtin_heads", "plugins")
_LONG = 42
"""Characters of code that may break in a table."""
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def _packages() -> dict[Path, str]:
    """README of each package -> its page, relative to docs/."""
    projects = [p for folder in _FOLDERS for p in sorted(ROOT.glob(f"{folder}/**/pyproject.toml"))]
    named = {p: tomllib.loads(p.read_text(encoding="utf-8"))["project"]["name"] for p in projects}
    return {p.parent / "README.md": f"{FOLDER}/{name}.md" for p, name in named.items()}


PACKAGES = _packages()
_SOURCES = {page: readme for readme, page in PACKAGES.items()}


def on_config(config: Any) -> Any:
    """Put the packages at the end of the navigation."""
    config.nav = [*config.nav, {"Packages": sorted(PACKAGES.values())}]
    return config


def on_files(files: Files, config: Any) -> Files:
    """Add a page for each package."""
    for readme, page in PACKAGES.items():
        files.append(File.generated(config, page, content=readme.read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Let links lead to pages of the site."""
    del config, files
    uri = page.file.src_uri
    return titled(rewritten(markdown, _SOURCES.get(uri, DOCS / uri), uri))


def titled(markdown: str) -> str:
    """The text with fences as the site reads them: the file that a block is, or is short for, becomes its title."""
    return re.sub(r"^(```\w+) (?:file|short)=(\S+)$", r'\1 title="\2"', markdown, flags=re.MULTILINE)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:
    """Mark long code, which may break inside a table; short code, such as an option, stays in one line."""
    del page, config, files
    return re.sub(rf"<code>([^<]{{{_LONG},}})</code>", r'<code class="long">\1</code>', html)


def rewritten(markdown: str, source: Path, uri: str) -> str:
    """The text with links as the site needs them.

    Args:
        markdown: the text of a page.
        source: the file it comes from.
        uri: the page's place in the site.
    """

    def link(match: re.Match[str]) -> str:
        text, target, anchor = match[1], (source.parent / match[2]).resolve(), match[3] or ""
        page = _page_of(target)
        if page is None:
            return text if "`" in text else f"{text} (`{os.path.relpath(target, ROOT)}`)"
        return f"[{text}]({os.path.relpath(page, Path(uri).parent)}{anchor})"

    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else _LINK.sub(link, part) for part in parts)


def _page_of(target: Path) -> str | None:
    """The page that shows a file; None when there is none."""
    if target in PACKAGES:
        return PACKAGES[target]
    if target == ROOT / "README.md":
        return "index.md"
    return target.relative_to(DOCS).as_posix() if target.is_relative_to(DOCS) else None
