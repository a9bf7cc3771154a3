"""`penstock report`: one page that tells which link was slow when, what was decided, and what that saved.

penstock report runs/tiny-1f1b-4          penstock report runs/tiny-1f1b-4 --out page.html --json
"""

from __future__ import annotations

import gzip
import json as json_format
import zlib
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import INVALID, Misuse
from penstock.cli.options import Json, page_option
from penstock.cli.output import print_json
from penstock.formats.files import write_whole
from penstock.report import RunStory, to_page
from penstock.report.words import headline, more

LOG, ITERATIONS, TIMELINES, SETTINGS = "control.jsonl", "iterations.jsonl", "timelines.jsonl", "settings.json"
LOGS = (LOG, f"{LOG}.gz")
TOLD = ("model", "device", "costs", "transport", "store", "link", "links")
"""Settings of a run that its report names, where they are there."""


class ReportError(Exception):
    """The logs of a run do not make sense; the message says which and why."""

    exit_code = INVALID
    rule = "log"


@app.command(short_help="Write a page on a run: slow links, decisions, and what they saved.")
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or the control.jsonl in it.")],
    out: Annotated[
        str | None,
        page_option("Where the result goes: the page, .html. [report.html in the run's folder]", "the report"),
    ] = None,
    json: Json = False,
) -> None:
    """Show a run that adapted on one HTML page: its iteration times, links, decisions and savings."""
    folder = _folder(Path(run))
    story = _story(folder, Path(run))
    target = None if json and out is None else Path(out) if out is not None else folder / "report.html"
    if target is not None:
        write_whole(target, to_page(story))
    if json:
        print_json({**story.to_json(), "headline": headline(story), "out": None if target is None else str(target)})
        return
    print("\n".join([headline(story), *more(story), f"wrote {target}"]))


def _folder(run: Path) -> Path:
    """The folder that holds the logs: the one given, the one of the file given, or the only one below that does."""
    if run.name in LOGS and run.is_file():
        return run.parent
    if not run.is_dir():
        what = "this is a file" if run.exists() else "there is no such folder"
        raise Misuse(f"{run}: {what}; give the folder of a run")
    if any((run / name).is_file() for name in LOGS):
        return run
    below = sorted({path.parent for name in LOGS for path in run.glob(f"*/{name}")})
    if len(below) > 1:
        raise Misuse(f"{run} holds {len(below)} runs: give one, like {below[0]}")
    if not below:
        raise Misuse(
            f"{run} has no {LOG}: its links were not watched; train with --adapt, or run with "
            "ps.AdaptOptions(folder=...)"
        )
    return below[0]


def _story(folder: Path, run: Path) -> RunStory:
    # Imported here, as only this verb needs all of control.
    from penstock.control import ControlError
    from penstock.report.from_logs import read_story

    name = (run.parent if run.name in LOGS else run).resolve().name
    try:
        return read_story(
            _lines(folder / LOG),
            name=name,
            iterations=_lines(folder / ITERATIONS),
            timelines=_lines(folder / TIMELINES),
            facts=_facts(folder, run),
        )
    except ControlError as error:
        raise ReportError(f"{folder}: {error}") from None


def _lines(path: Path) -> list[str]:
    """A file's lines, or those of the same with `.gz` behind its name, as `gzip` leaves it; none where there is
    neither."""
    packed = path.with_name(f"{path.name}.gz")
    if not path.exists() and packed.exists():
        path = packed
    elif not path.exists():
        return []
    try:
        if path is packed:
            return gzip.decompress(path.read_bytes()).decode().splitlines()
        return path.read_text(encoding="utf-8").splitlines()
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ReportError(f"{path}: gzip can't read it: {error}") from None
    except UnicodeDecodeError:
        raise ReportError(f"{path}: not text") from None


def _facts(folder: Path, run: Path) -> list[tuple[str, str]]:
    """What the run's settings say of it; nothing where there are none that can be read."""
    for path in (folder / SETTINGS, run / SETTINGS, folder.parent / SETTINGS):
        try:
            value: Any = json_format.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(value, dict):
            return [(name, _said(value[name])) for name in TOLD if value.get(name)]
    return []


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
