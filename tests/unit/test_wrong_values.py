"""Values of the wrong kind given to the top level's functions: an error of ours that says what was needed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.draw import save_picture

pytestmark = pytest.mark.unit

SCHEDULE = ps.build("1f1b", 2, 2)
TIMELINE = ps.simulate(SCHEDULE)
COSTS = ps.Costs.uniform(2)
NEEDED = "a ps.Schedule is needed here, got "


@pytest.mark.parametrize("ending", [".json", ".txt", ".csv"])
@pytest.mark.parametrize(
    ("value", "said"),
    [
        (TIMELINE, f"{NEEDED}Timeline: give its .schedule"),
        (ps.plan(COSTS, 2, 2, time_limit=0.05), f"{NEEDED}Plan: give its .schedule"),
        (ps.Program(ps.placements.one_to_one(2), 2), f"{NEEDED}Program: give what its .build() returns"),
        (COSTS, f"{NEEDED}Costs: ps.build("),
        (None, f"{NEEDED}NoneType: ps.build("),
        ("1f1b", f"{NEEDED}str: ps.build("),
        ([SCHEDULE], f"{NEEDED}list: ps.build("),
    ],
    ids=lambda value: type(value).__name__,
)
def test_save_says_what_it_writes(value: Any, said: str, ending: str, tmp_path: Path) -> None:
    with pytest.raises(ps.ScheduleError, match=re.escape(said)):
        ps.save(value, tmp_path / f"made{ending}")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("made.png", "schedules are written as .json, .txt or .csv, not '.png'"),
        ("made", "schedules are written as .json, .txt or .csv, not ''"),
        ("nowhere/made.json", "No such file or directory"),
        ("folder.json", "Is a directory"),
        (f"{'a' * 300}.json", "File name too long"),
        ("zero\0.json", "a path holds no zero byte"),
        (None, "a file is named by text or a Path, got NoneType"),
        (5, "a file is named by text or a Path, got int"),
        (b"made.json", "a file is named by text or a Path, got bytes"),
    ],
)
def test_paths_that_nothing_can_be_written_to(
    path: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(ps.ScheduleError, match=re.escape(said)):
        ps.save(SCHEDULE, path)
    if not isinstance(path, str) or path.endswith("json"):
        with pytest.raises(ps.ScheduleError, match=re.escape(said)):
            save_picture(SCHEDULE, path)
    if not isinstance(path, str) or "a path" in said:
        with pytest.raises(ps.ScheduleError, match=re.escape(said)):
            ps.load(path)
    assert [each.name for each in tmp_path.iterdir()] == ["folder.json"]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: ps.check("1f1b"), f"{NEEDED}str"),
        (lambda: ps.check(TIMELINE), f"{NEEDED}Timeline: give its .schedule"),
        (lambda: ps.simulate("1f1b"), f"{NEEDED}str"),
        (lambda: ps.simulate(SCHEDULE, 10), "costs are int: give ps.Costs"),
        (lambda: ps.simulate(SCHEDULE, links={(0, 1): 20.0}), "links are dict: give ps.Links"),
        (lambda: ps.plan(None, 2, 2), "costs are NoneType: give ps.Costs"),
        (lambda: ps.plan(COSTS, 2, 2, links={}), "links are dict: give ps.Links"),
        (lambda: ps.plan(COSTS, 2, 2, placement="v"), "no placement is named 'v': choose among"),
        (lambda: ps.parse(SCHEDULE), "a grid of text is needed here, got Schedule"),
        (lambda: ps.build(None, 2, 2), "a schedule is named by text, got NoneType"),
        (lambda: ps.load(SCHEDULE), "a file is named by text or a Path, got Schedule"),
        (lambda: ps.save(SCHEDULE, "made.csv", dialect=["torch"]), "no dialect ['torch']"),
        (lambda: ps.Costs.uniform("four"), "costs need at least one stage, a whole number, got 'four'"),
        (lambda: ps.Links([(0, 1)]), "links are list: give them by link"),
        (lambda: ps.Links.of({}), "links are dict: give ps.Links"),
        (lambda: save_picture(None, "made.svg"), "a schedule or a timeline can be drawn, or a list of them"),
        (lambda: save_picture(COSTS, "made.svg"), "a schedule or a timeline can be drawn, or a list of them"),
        (lambda: save_picture([None], "made.svg"), "a schedule or a timeline can be drawn, not NoneType"),
    ],
)
def test_the_error_is_ours(call: Callable[[], object], said: str) -> None:
    with pytest.raises((ps.ScheduleError, ps.CostError), match=re.escape(said)):
        call()
