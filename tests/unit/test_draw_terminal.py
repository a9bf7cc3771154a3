"""Terminal pictures stay within the width, and say the same with and without colour."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

import penstock as ps
from penstock.draw import to_terminal
from penstock.draw.panel import panels
from penstock.simulation import Timeline

pytestmark = pytest.mark.unit
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def rows(text: str) -> list[str]:
    return [line for line in ESCAPE.sub("", text).splitlines() if line.startswith("rank")]


@pytest.mark.parametrize("name", list(ps.library.SCHEDULES))
@pytest.mark.parametrize("width", [40, 80, 200])
@pytest.mark.parametrize("color", [True, False])
def test_rows_stay_within_the_width(name: str, width: int, color: bool) -> None:
    schedule = ps.build(name, 4, 12)
    for drawn in (schedule, ps.simulate(schedule)):
        text = to_terminal(drawn, color=color, width=width)
        assert len(rows(text)) == 4
        assert max(map(len, rows(text))) <= width
        assert ("\x1b" in text) == color


def test_what_is_too_long_is_cropped_or_scaled_with_a_note() -> None:
    s = ps.build("1f1b", 4, 100)
    assert "(steps 0 to 17 of 206; SVG and HTML show them all)" in to_terminal(s, color=False, width=80)
    assert "of 206" not in to_terminal(s, color=True)
    text = to_terminal(ps.simulate(s), color=False, width=80)
    assert "800 of 800 ops are shorter" in text
    assert "makespan 309 ms" in text


def test_a_kind_that_has_no_room_is_cut_and_moves_nothing() -> None:
    # Whole names pushed the rest of their row to the right, out of the axis below it.
    offload = ps.NewOp("STASH", 0, {("F", 0): 1}, holds=-1, time=1.0, asynchronous=True)
    fetch = ps.NewOp("FETCH", 0, {("STASH", 0): 1, ("F", 1): 1}, {("B", 0): 1}, holds=1, time=1.0)
    program = ps.Program(ps.placements.one_to_one(2), 16, ps.Rules(max_in_flight=2), ops=[offload, fetch])
    t = ps.simulate(program.build(), program.all_costs)
    text = to_terminal(t, color=False, width=80)
    beside = [line for line in text.splitlines() if line.startswith("beside")]
    assert len(beside) == 1
    assert {line.index("|", 8) for line in [*rows(text), *beside]} == {74}
    assert set(beside[0][8:74]) == {"s", "."}
    assert "f" in rows(text)[0]
    assert "(small letters begin the name of a kind that has no room)" in text
    assert "small letters" not in to_terminal(t, color=False, width=1000)
    assert "small letters" not in to_terminal(t, color=True, width=80)


def test_equal_ops_get_equal_bars() -> None:
    t = ps.simulate(ps.build("zb", 4, 12, warmup=[7, 5, 3, 1]), ps.Costs.uniform(4, f=10, i=10, w=10))
    text = to_terminal(t, color=False, width=140)
    bars = re.findall(r"[FIW]\d?\d?-*", "".join(row.split("|")[1] for row in rows(text)))
    assert len(bars) == len(t.ops)
    assert {len(bar) for bar in bars} == {3}


def test_every_microbatch_is_readable_in_colour() -> None:
    text = to_terminal(ps.build("1f1b", 2, 12), color=True)
    assert sorted(map(int, rows(text)[0].split("|")[1].replace("▏", " ").split())) == sorted([*range(12)] * 2)


def test_measured_with_an_offset_and_nothing_at_all() -> None:
    t = ps.simulate(ps.build("1f1b", 2, 3))
    moved = replace(
        t, ops=tuple(replace(o, start=o.start + 7, end=o.end + 7) for o in t.ops), messages=(), source="measured"
    )
    assert rows(to_terminal(moved, False, 90)) == rows(to_terminal(t, False, 90))
    assert "measured" in to_terminal(moved, False, 90)
    empty = Timeline(replace(t.schedule, order=((), ())), (), (), (0.0, 0.0))
    assert len(rows(to_terminal(empty, True, 90))) == 2
    assert len(rows(to_terminal(empty.schedule, True, 90))) == 2


def test_both_ops_of_a_pair_are_drawn() -> None:
    schedule = ps.build("dualpipe-v", 2, 4, overlap=True)
    assert "0F3+3B1" in to_terminal(schedule, color=False)
    painted = re.sub("\x1b\\[[0-9;]*m", "", to_terminal(schedule))
    row = painted.splitlines()[1]
    assert sum(map(str.isdigit, row.partition("|")[2])) == len(schedule.order[0])  # every op has its number
    timeline = ps.simulate(schedule, ps.Costs.uniform(4, f=10, i=10, w=10))
    (panel,) = panels(timeline)
    bars = {timed.op: (timed.start, timed.end) for timed in panel.rows[0]}
    for forward, backward in schedule.pairs:
        if forward in bars:
            assert bars[forward][1] == bars[backward][0]
            assert bars[forward][1] - bars[forward][0] == pytest.approx(bars[backward][1] - bars[backward][0])
            assert bars[forward][1] > bars[forward][0]
    assert "shorter" not in to_terminal(timeline, color=False, width=120)
