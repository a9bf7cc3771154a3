"""Puts the playground's page together: the translated engine, the scripts beside this file, our pictures' colours."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path

from penstock.draw import palette
from penstock.engine import (
    decider,
    event_loop,
    list_by_rules,
    list_by_values,
    memory_safety,
    min_tree,
    rule_tables,
    tolerance,
)
from penstock.planning import forward_backward, longest_paths
from penstock.play.to_javascript import bundle
from penstock.schedule import ScheduleError

ENGINE = (
    tolerance, memory_safety, min_tree, decider, event_loop, list_by_rules, list_by_values, longest_paths,
    forward_backward,
)  # fmt: skip
SCRIPTS = ("schedule.js", "run.js", "library.js", "plan.js")
_SLOT = re.compile(r"\{\{(\w+)\}\}")


def scripts() -> str:
    """All that computes, without the page: runs in any JavaScript engine."""
    return "\n".join(['"use strict";', bundle(ENGINE, (rule_tables,)), *map(_own, SCRIPTS)])


def page() -> str:
    """The page, which loads nothing: style and scripts are inside, and a policy forbids it every request."""
    colours = {
        "kinds": palette.KINDS,
        "lightest": palette.LIGHTEST,
        "light": palette.LIGHT_INK,
        "dark": palette.DARK_INK,
    }
    shown = [f"const palette = {json.dumps(colours)};", _own("view.js"), _own("app.js")]
    slots = {"css": _own("page.css"), "engine": scripts(), "scripts": "\n".join(shown)}
    return _SLOT.sub(lambda slot: slots[slot[1]], _own("page.html"))


def _own(name: str) -> str:
    return files("penstock.play").joinpath(name).read_text("utf-8")


def save(path: str | Path) -> None:
    """Writes the page to a file, which any browser opens.

    Raises:
        ScheduleError (rule "file"): it can't be written; the message says why.
    """
    try:
        Path(path).write_text(page(), encoding="utf-8")
    except OSError as error:
        raise ScheduleError(f"{path}: {error.strerror}; name a file in a folder that is there", rule="file") from None
