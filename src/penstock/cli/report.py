"""`penstock report`: one page on a run: loss, rate, bubbles, memory, a timeline; slow links and what was decided.

penstock report runs/tiny-1f1b-4          penstock report runs/tiny-1f1b-4 --out page.html --json
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import INVALID, Misuse
from penstock.cli.options import Json, page_option
from penstock.cli.output import print_json
from penstock.formats import load
from penstock.formats.files import write_whole
from penstock.formats.perfetto import from_perfetto
from penstock.report import RunRecord, RunStory, to_page
from penstock.report.page import to_json
from penstock.report.words import sentences
from penstock.schedule import ScheduleError
from penstock.simulation import Timeline

LOG, ITERATIONS, TIMELINES, SETTINGS = "control.jsonl", "iterations.jsonl", "timelines.jsonl", "settings.json"
METRICS, ENDED, PLAN, TRACE, TEXT = "metrics.jsonl", "report.json", "schedule.txt", "timeline.json", "sample.txt"
LOGS = (LOG, METRICS)
TOLD = ("model", "device", "costs", "transport", "store", "link", "links")
"""Settings of a run that its report names, where they are there."""
OF_STEPS = ("schedule", "ranks", "dp", "tp", "microbatches", "batch", "dispatch", "optimizer", "precision")
"""The settings that the report of a run names too if its links were not watched."""


class ReportError(Exception):
    """The logs of a run do not make sense; the message says which and why."""

    exit_code = INVALID
    rule = "log"


@app.command(short_help="Write a page on a run: loss, bubbles, memory, timeline, slow links.")
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or the metrics.jsonl in it.")],
    out: Annotated[
        str | None,
        page_option("Where the result goes: the page, .html. [report.html in the run's folder]", "the report"),
    ] = None,
    json: Json = False,
) -> None:
    """Show a run on one HTML page: loss, learning rate, bubbles, memory, a timeline, links and decisions."""
    from penstock.control import ControlError  # here, as only this verb needs all of control

    folder = _folder(Path(run))
    try:
        story, record = _story(folder, Path(run)), _record(folder, Path(run))
    except ControlError as error:
        raise ReportError(f"{folder}: {error}") from None
    if story is None and record is None:
        raise ReportError(f"{folder}: no step has ended: there is nothing to report yet")
    target = None if json and out is None else Path(out) if out is not None else folder / "report.html"
    if target is not None:
        write_whole(target, to_page(story, record))
    said = sentences(story, record)
    if json:
        print_json({**to_json(story, record), "headline": said[0], "out": None if target is None else str(target)})
        return
    print("\n".join([*said, f"wrote {target}"]))


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
        raise Misuse(f"{run} has no {METRICS} and no {LOG}, as runs of penstock train have; give the folder of a run")
    return below[0]


def _name(run: Path) -> str:
    return (run.parent if run.name in LOGS else run).resolve().name


def _story(folder: Path, run: Path) -> RunStory | None:
    """What was measured of links and decided; None if links were not watched, or only in a few steps of a run."""
    from penstock.report.from_logs import read_story

    log = _lines(folder / LOG)
    if not log and (folder / METRICS).exists():
        return None
    first = (_object(folder / ENDED).get("steered") or {}).get("first", 1)  # a resumed run has later ones alone
    iterations, timelines, facts = _lines(folder / ITERATIONS), _lines(folder / TIMELINES), _facts(folder, TOLD)
    return read_story(log, name=_name(run), iterations=iterations, timelines=timelines, facts=facts, first=first)


def _record(folder: Path, run: Path) -> RunRecord | None:
    """The steps of a run and its end; None if no step of it is on record."""
    from penstock.report.run_story import read_record

    ended = _object(folder / ENDED)
    text = folder / TEXT
    return read_record(
        _lines(folder / METRICS),
        name=_name(run),
        facts=_facts(folder, OF_STEPS + TOLD),
        asked=_object(folder / SETTINGS).get("steps"),
        ended=ended,
        shown=_shown(folder) if ended else (),
        text=text.read_text(encoding="utf-8", errors="replace").strip() if ended and text.exists() else "",
    )


def _shown(folder: Path) -> list[tuple[str, Timeline]]:
    """One of the last steps, measured and simulated."""
    try:
        found = from_perfetto((folder / TRACE).read_bytes(), load(folder / PLAN))
    except FileNotFoundError:
        return []
    except (ValueError, ScheduleError) as error:
        raise ReportError(f"{folder / TRACE}: {error}") from None
    return [(timeline.schedule.name, timeline) for timeline in reversed(found)]


def _lines(path: Path) -> list[str]:
    """A file's lines; none where there is no such file."""
    try:
        return path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    except UnicodeDecodeError:
        raise ReportError(f"{path}: not text") from None


def _facts(folder: Path, names: Iterable[str]) -> list[tuple[str, str]]:
    """What the run's settings say of it; nothing where there are none that can be read."""
    value = _object(folder / SETTINGS)
    return [(name, _said(value[name])) for name in names if value.get(name)]


def _object(path: Path) -> dict[str, Any]:
    """A file's JSON object; empty where there is none that can be read."""
    try:
        value: Any = json_format.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _said(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
