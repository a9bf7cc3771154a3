"""The pages that the site makes by itself: the reference, what excludes what, and the figures of the papers."""

from __future__ import annotations

import ast
import re
import sys
from html import escape
from pathlib import Path
from typing import Any

import typer
from typer.main import get_command

import penstock as ps
from penstock.cli.run import application
from penstock.runtime.compatibility import REFUSALS
from penstock.train.exclusions import table as exclusions
from penstock.train.settings import Settings

PACKAGE = Path(ps.__file__).parent
ROOT = Path(__file__).parents[2]

MODULES: dict[str, tuple[str, str]] = {
    "schedule": ("Schedules", "../schedule.md"),
    "cost": ("Costs and links", "../cost.md"),
    "simulation": ("Simulation", "../simulation.md"),
    "program": ("Programs", "../program.md"),
    "passes": ("Passes", "../schedule.md#passes"),
    "library": ("Library", "../library.md"),
    "planning": ("Planning", "../planning.md"),
    "formats": ("Files", "../formats.md"),
    "draw": ("Pictures", "../formats.md#pictures"),
    "analyze": ("Analysis of traces", "../analyze.md"),
    "control": ("Control", "../control.md"),
    "runtime": ("Runtime", "../runtime.md"),
    "models": ("Models", "../models.md"),
    "data": ("Data", "../data.md"),
    "lab": ("Lab", "../lab.md"),
}
"""Submodules with a page in the reference: its title, and the guide that explains it."""

PLACEMENTS = "placements"
"""The one public name that is a module itself."""


def public_names(module: str) -> list[str]:
    """What `__all__` of a submodule lists. It is read and not imported, since the runtime would import torch."""
    for node in ast.parse((PACKAGE / module / "__init__.py").read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [str(each.value) for each in getattr(node.value, "elts", []) if isinstance(each, ast.Constant)]
    return []


def home(name: str) -> str:
    """The submodule whose page documents a name of the top level."""
    return next(module for module in MODULES if name in public_names(module))


def interface() -> dict[str, str]:
    """The pages of the reference of the interface, by their places in the site."""
    pages = {f"reference/{module}.md": _module_page(module) for module in MODULES}
    lines = [
        "# The interface",
        "",
        "What planning, proving, drawing and running need lies at the top level, `import penstock as ps`. All else "
        "lies in the submodules in the navigation, such as `ps.passes` or `ps.control`. Times are milliseconds. "
        "Memory is in bytes, or in activations where a model is abstract.",
        "",
        "| name | see |",
        "|---|---|",
    ]
    for name in ps.__all__:
        module = home(name)
        lines.append(f"| [`ps.{name}`][penstock.{module}.{name}] | {MODULES[module][0]} |")
    return {"reference/index.md": "\n".join(lines) + "\n", **pages}


def _module_page(module: str) -> str:
    title, guide = MODULES[module]
    lines = [f"# {title}", "", f"`ps.{module}` is explained in [its guide]({guide}).", ""]
    for name in sorted(public_names(module), key=str.lower):
        shown = f"ps.{name}" if name in ps.__all__ else f"ps.{module}.{name}"
        lines += [f"::: penstock.{module}.{name}", "    options:", f'      heading: "{shown}"']
        if name == PLACEMENTS:
            lines += ["      members: true", "      show_root_members_full_path: false"]
        lines.append("")
    return "\n".join(lines)


def commands() -> str:
    """The page of the command line, from what `--help` is made from."""
    root: Any = get_command(application())
    lines = [
        "# The command line",
        "",
        "Every verb takes `--json`, which prints one JSON object and nothing else to stdout. The exit code is 0 when "
        "the work is done, 1 when the schedule or the run is invalid, and 2 when the command was misused.",
        "",
    ]
    for name, command in root.commands.items():
        lines += _command(command, f"penstock {name}", 2)
    return "\n".join(lines)


def _command(command: Any, path: str, level: int) -> list[str]:
    context = typer.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    lines = [f"{'#' * level} {path}", "", *_description(command.help or ""), "", "```text", usage, "```", ""]
    records = [record for each in command.get_params(context) if (record := each.get_help_record(context))]
    if records:
        lines += ["| option | what it does |", "|---|---|"]
        lines += [f"| {_code(names)} | {_cell(said)} |" for names, said in records]
        lines.append("")
    for name, below in getattr(command, "commands", {}).items():
        lines += _command(below, f"{path} {name}", level + 1)
    return lines


def _description(text: str) -> list[str]:
    """Paragraphs as they are; what is indented is shown as it is typed."""
    return [_escaped(line) if not line.startswith("    ") else line for line in text.replace("\b", "").splitlines()]


LONG = 40
"""From this number of letters on, a list of choices may go on in the next line."""


def _code(text: str) -> str:
    """As HTML, for in a table Markdown would show the backslash before a bar within backquotes."""
    text = re.sub(r" <list\[\w+\]>$", "", " ".join(text.split()))  # the dots of `FILE...` say so already
    bar = "&#124;<wbr>" if len(text) > LONG else "&#124;"
    return f"<code>{escape(text).replace('|', bar)}</code>"


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _escaped(text: str) -> str:
    for mark in "\\*_<>[]":
        text = text.replace(mark, "\\" + mark)
    return text


OF_SCHEDULES = (
    ("a rank that hosts a stage in two pipelines", "copies are there so that other ranks run them"),
    ("stages that feed one another and work on numbers of microbatches that do not match", "samples would not match"),
    ("updates as ops beside REDUCE ops", "each update sums over the replicas itself"),
    ("a parameter of a shared stage and of one on other ranks", "the ranks of the former have a part of it each"),
    ("links with a bound (depth) that the order outgrows", "every rank would wait to send"),
)
"""What is refused of single schedules and models, and why."""


def compatibility() -> str:
    """The page of the features of a pipeline that exclude one another, from the runtime's own table."""
    rows = [f"| {row.one} | {row.other} | {row.why} | {row.instead} |" for row in REFUSALS]
    schedules = [f"| {refused} | {why} |" for refused, why in OF_SCHEDULES]
    return "\n".join([
        "# What excludes what",
        "",
        "A pipeline that has both features of a row is refused where it is made, with the reason given here.",
        "",
        "| feature | other feature | why | instead |",
        "|---|---|---|---|",
        *rows,
        "",
        "Some schedules and models are refused by themselves:",
        "",
        "| refused | why |",
        "|---|---|",
        *schedules,
        "",
        "## Options of penstock train",
        "",
        "| options | why |",
        "|---|---|",
        *(f"| {options} | {_escaped(why)} |" for options, why in exclusions(Settings)),
        "",
    ])  # fmt: skip


def papers() -> dict[str, str]:
    """The pages on the papers' figures, which are made out of committed results."""
    sys.path.insert(0, str(ROOT))  # experiments/ is no part of the package
    from experiments.claims.pages import pages

    return {f"papers/{name}": text for name, text in pages().items()}


def generated() -> dict[str, str]:
    """All pages in Markdown that are made here, by their places in the site."""
    return {**interface(), "reference/commands.md": commands(), "compatibility.md": compatibility(), **papers()}


NAMES = frozenset(
    {"gallery.md", "playground.html", "reference/index.md", "reference/commands.md"}
    | {f"reference/{module}.md" for module in MODULES}
    | {"compatibility.md", *(f"papers/{name}.md" for name in ("pipemorph", "flexpipe", "amdp", "audit"))}
)
"""What a link may lead to that is only there when the site is built."""
