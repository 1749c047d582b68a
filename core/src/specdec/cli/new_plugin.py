"""``specdec new-plugin``: writes a distribution that works, to be changed into the author's own."""

from __future__ import annotations

import argparse
import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from attrs import frozen
from packaging.version import Version

from specdec.cli.commands import COMMANDS
from specdec.cli.parser import Subparsers, UsageError, add_command
from specdec.registry.catalogue import DISTRIBUTIONS, KINDS
from specdec.version import __version__
from specdec.wording import reason_of

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

PREFIX = "specdec-"
TEMPLATES = "plugin_templates"
COMMON = "common"
"""The folder of what all kinds share; each of the others is a kind."""

LONGEST_NAME = 40
_NAME = re.compile(r"[a-z][a-z0-9]*([-_][a-z0-9]+)*")
_AUTHOR = re.compile(r"(?P<name>[^<>]*[^<>\s])\s*(<(?P<email>[^<>\s]+@[^<>\s]+)>)?")

EXAMPLES = """\
  specdec new-plugin proposer echo-words
      make the distribution specdec-echo-words in a folder of that name
  specdec new-plugin head falcon-h1 --target falcon_h1 --path heads --author "Ada Lovelace <ada@example.org>"
      make a head for targets of another architecture, below the folder heads"""


def add_parser(commands: Subparsers[Any]) -> None:
    """Add the subcommand."""
    parser = add_command(
        commands,
        "new-plugin",
        summary=COMMANDS["new-plugin"].summary,
        description="Write a distribution with a small working plugin, its README, licence and tests. It installs, "
        "passes its contract\ntests and does something; change it into your own.",
        examples=EXAMPLES,
    )
    parser.add_argument("kind", choices=kinds(), help=f"one of {', '.join(kinds())}", metavar="KIND")
    parser.add_argument("name", metavar="NAME", help="what users will type; the distribution is called specdec-NAME")
    parser.add_argument("--path", metavar="DIR", default=".", help="folder to make it in (default: the current one)")
    parser.add_argument("--author", metavar="AUTHOR", help="'Name' or 'Name <address>', for its metadata")
    parser.add_argument("--target", metavar="MODEL_TYPE", help="for a head: model_type of its targets (default: NAME)")
    parser.set_defaults(run=run)


def kinds() -> list[str]:
    """The kinds there are templates for, as they are typed."""
    return sorted(folder.name for folder in _templates().iterdir() if folder.joinpath("template.toml").is_file())


def run(arguments: argparse.Namespace) -> int:
    """Write the distribution, and say how to go on."""
    plan = plan_of(arguments.kind, arguments.name, target=arguments.target, author=arguments.author)
    folder = Path(arguments.path).expanduser() / plan.distribution
    write(plan, folder)
    print(next_steps(plan, folder))
    return 0


# --- what is made -------------------------------------------------------------------------------


@frozen(kw_only=True)
class Plan:
    """A distribution to be written."""

    distribution: str
    package: str
    entry: str
    """Name of the entry point."""
    check_options: str
    """What ``specdec plugins check`` needs besides the name."""
    substitutes: dict[str, str]
    kind: str
    modules: tuple[str, ...]
    """Files of the package besides ``plugin.py``."""


def plan_of(kind: str, name: str, *, target: str | None = None, author: str | None = None) -> Plan:
    """Check the names and fill in what the templates ask for.

    Args:
        kind: one of `kinds`.
        name: what the user typed.
        target: for a head, the ``model_type`` of its targets; the name when absent.
        author: ``Name`` or ``Name <address>``.

    Raises:
        UsageError: a name that cannot be used, with one that could.
    """
    _check_name(name)
    template = tomllib.loads(_templates().joinpath(kind, "template.toml").read_text(encoding="utf-8"))
    if target is not None and "$target" not in template["entry"]:
        raise UsageError(f"--target is {target!r}, but only a head is made for one architecture; leave it out.")
    words = re.split("[-_]", name)
    plain = "_".join(words)
    release = Version(__version__)
    values = {
        "name": plain,
        "target": _model_type(target or plain),
        "distribution": PREFIX + "-".join(words),
        "package": f"{PREFIX[:-1]}_{plain}",
        "title": "".join(word.capitalize() for word in words),
        "group": KINDS[template["kind"]].group,
        "label": KINDS[template["kind"]].label,
        "core_lower": f"{release.major}.{release.minor}",
        "core_upper": f"{release.major}.{release.minor + 1}",
        "authors": _authors(author),
    }
    values["entry_name"] = Template(template["entry"]).substitute(values)
    for key in ("summary", "use", "check_options"):
        values[key] = Template(template.get(key, "")).substitute(values).lstrip("\n")
    core = f"specdec-core>={values['core_lower']},<{values['core_upper']}"
    requirements = sorted([*template["dependencies"], core])
    values["dependencies"] = "\n".join(f'    "{requirement}",' for requirement in requirements)
    package = values["package"]
    values["files"] = "\n".join(f"| `src/{package}/{file}` | {what} |" for file, what in template["files"].items())
    _check_free(template["kind"], values["entry_name"], values["distribution"])
    return Plan(
        distribution=values["distribution"],
        package=package,
        entry=values["entry_name"],
        check_options=values["check_options"],
        substitutes=values,
        kind=kind,
        modules=tuple(template["files"]),
    )


def _check_name(name: str) -> None:
    if name.startswith(PREFIX):
        raise UsageError(f"NAME is {name!r}; leave out {PREFIX!r}, which is put before it: {name.removeprefix(PREFIX)}")
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        proposal = "-".join(re.findall("[a-z0-9]+", name.lower()))[:LONGEST_NAME].strip("-")
        hint = f" For example: {proposal}" if _NAME.fullmatch(proposal) else ""
        raise UsageError(
            f"NAME is {name!r}; it must be lower-case words of letters and digits, joined by '-' or '_', that begin "
            f"with a letter, and at most {LONGEST_NAME} characters.{hint}"
        )


def _model_type(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_-]+", text):
        raise UsageError(f"--target is {text!r}; it must be a model_type, as config.json of the target has it.")
    return text


def _authors(author: str | None) -> str:
    """The line of ``pyproject.toml``."""
    if author is None:
        return ""
    parts = _AUTHOR.fullmatch(author.strip())
    if parts is None:
        raise UsageError(f"--author is {author!r}; it must be 'Name' or 'Name <address@host>'.")
    fields = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in parts.groupdict().items() if value]
    return f"authors = [{{ {', '.join(fields)} }}]\n"


def _check_free(kind: str, entry: str, distribution: str) -> None:
    """Refuse names that specdec's own packages or installed ones have."""
    from specdec.registry import Registry

    known = {other for names in DISTRIBUTIONS.values() for other in names.values()}
    if distribution in known:
        raise UsageError(f"NAME: {distribution} is a package of specdec itself; choose another name.")
    taken = [found for found in Registry().entries() if found.kind == kind and found.name == entry]
    taken = [found for found in taken if found.distribution != distribution]
    if taken:
        label = KINDS[kind].label
        raise UsageError(f"NAME: the {label} {entry!r} is installed already, by {taken[0].distribution}.")


# --- writing ------------------------------------------------------------------------------------


def write(plan: Plan, folder: Path) -> None:
    """Write all files.

    Raises:
        UsageError: the folder exists, or cannot be made.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UsageError(f"{folder} exists; nothing was written. Choose another NAME or --path.") from None
    except OSError as error:
        raise UsageError(f"{folder} cannot be made: {reason_of(error)}") from error
    common, own = _templates().joinpath(COMMON), _templates().joinpath(plan.kind)
    source, tests = folder / "src" / plan.package, folder / "tests"
    source.mkdir(parents=True)
    tests.mkdir()
    (folder / "LICENSE").write_text(common.joinpath("LICENSE").read_text(encoding="utf-8"), encoding="utf-8")
    (source / "py.typed").touch()
    made = {
        folder / "pyproject.toml": common.joinpath("pyproject.toml.in"),
        folder / "README.md": common.joinpath("README.md.in"),
        source / "__init__.py": common.joinpath("init.py.in"),
        tests / "test_contract.py": own.joinpath("test_contract.py.in"),
        tests / f"test_{plan.substitutes['name']}.py": own.joinpath("test_name.py.in"),
    }
    made |= {source / module: own.joinpath(f"{module}.in") for module in ("plugin.py", *plan.modules)}
    for path, template in made.items():
        text = Template(template.read_text(encoding="utf-8")).substitute(plan.substitutes)
        path.write_text(text, encoding="utf-8")


def next_steps(plan: Plan, folder: Path) -> str:
    """What the author does now."""
    method = folder / "src" / plan.package / plan.modules[-1 if plan.modules[-1] != "random_checkpoint.py" else 0]
    checkpoint = f"  python -m {plan.package}.random_checkpoint CHECKPOINT\n" if plan.check_options else ""
    return (
        f"{folder} holds the distribution {plan.distribution}. Next:\n"
        f"  cd {folder}\n"
        "  pip install -e '.[test]'\n"
        "  pytest\n"
        f"{checkpoint}"
        f"  specdec plugins check {plan.entry}{plan.check_options}\n"
        f"Then change {method}; README.md says what the other files are."
    )


def _templates() -> Traversable:
    return files("specdec.cli").joinpath(TEMPLATES)
