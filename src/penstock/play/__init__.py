"""The playground: one page that builds, edits, proves, times and plans schedules in the browser, with no server.

    engine/*.py --to_javascript--> event loop, list schedulers, ...   the same source as here
    schedule.js library.js run.js plan.js torch.js                    schedules, their proof, planning, torch's CSV
    page.html page.css view.js app.js                                 what is seen
                    |
                  page() -> one file that loads nothing

`tests/unit/test_play.py` runs the scripts beside Python's own functions over a thousand schedules.
"""

from __future__ import annotations

from html import escape
from importlib.resources import files
from pathlib import Path

from penstock.draw import style
from penstock.draw.html import filled, script_json
from penstock.engine import (
    decider,
    event_loop,
    list_by_rules,
    list_by_values,
    memory_safety,
    min_tree,
    needs,
    rule_tables,
    tolerance,
)
from penstock.formats.files import path_of, write_whole
from penstock.planning import forward_backward, longest_paths, metropolis
from penstock.translate.to_javascript import bundle

__all__ = ["page", "save", "scripts"]

ENGINE = (
    tolerance, memory_safety, min_tree, needs, decider, event_loop, list_by_rules, list_by_values, longest_paths,
    metropolis, forward_backward,
)  # fmt: skip
SCRIPTS = ("schedule.js", "run.js", "torch.js", "library.js", "plan.js")


def scripts() -> str:
    """All that computes, without the page: runs in any JavaScript engine."""
    return "\n".join(['"use strict";', bundle(ENGINE, (rule_tables,)), *map(_own, SCRIPTS)])


def page(home: str | None = None) -> str:
    """The page, which loads nothing: style and scripts are inside, and a policy forbids it every request.

    Args:
        home: the address of the pages about Penstock, to which the page then links.
    """
    colours = {"kinds": style.KINDS, "lightest": style.LIGHTEST, "light": style.LIGHT_INK, "dark": style.DARK_INK}
    shown = [f"const palette = {script_json(colours)};", _own("view.js"), _own("app.js")]
    link = "" if home is None else f'<a class="home" href="{escape(home)}" target="_top">Penstock\'s pages</a>\n'
    slots = {"home": link, "css": _own("page.css"), "engine": scripts(), "scripts": "\n".join(shown)}
    return filled(_own("page.html"), slots)


def _own(name: str) -> str:
    return files("penstock.play").joinpath(name).read_text("utf-8")


def save(path: str | Path) -> None:
    """Writes the page to a file, whole or not at all; any browser opens it.

    Args:
        path: the file to write.

    Raises:
        ScheduleError: (rule "file") it can't be written; the message says why.
    """
    write_whole(path_of(path), page())
