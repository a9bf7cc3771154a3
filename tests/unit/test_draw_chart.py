"""Charts: well-formed, drawn to scale, told in words, and clear about data that cannot be drawn."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from itertools import pairwise

import pytest

from penstock.cost import CostError
from penstock.draw.chart import (
    Axis,
    Bars,
    Figure,
    Level,
    Line,
    Mark,
    bar_chart,
    heat_map,
    line_chart,
    save_chart,
    stacked_chart,
    steps_for,
    thinned,
)
from penstock.draw.figure import HUES, STEPS
from penstock.draw.palette import rgb
from penstock.draw.scale import spread_out

pytestmark = pytest.mark.unit
SVG = "{http://www.w3.org/2000/svg}"

DELAYS = [0.0, 20.0, 40.0, 60.0]


def slowdown() -> Figure:
    return line_chart(
        [
            Line("frozen", DELAYS, [1.0, 1.2, 1.6, 2.1]),
            Line("re-planned", DELAYS, [1.0, 1.03, 1.08, 1.13], stroke="dashed"),
            Line("short", DELAYS[:2], [1.0, 1.1]),
            Line("paper", [60.0], [1.13], stroke="none", titles=["Figure 15 <last>"]),
        ],
        title="Slowdown & delay",
        x=Axis("delay, ms"),
        y=Axis("times", low=1.0),
        marks=[Mark(20.0, "1", "first decision")],
        levels=[Level(1.06, "simulated")],
    )


def bars() -> Figure:
    ours = Bars("ours", [1.4, 1.5, None], paper=[1.36, None, None])
    return bar_chart(["A", "B", "C <c>"], [Bars("zb", [1.0, 1.0, 1.0]), ours], title="Throughput", y=Axis("times zb"))


def shares() -> Figure:
    return stacked_chart(["direct", "delegate"], [Bars("busy", [0.6, 0.9]), Bars("idle", [0.4, None])])


def heat() -> Figure:
    return heat_map(["0 → 1", "1 → 0"], [[0.0, 0.0, 60.0], [None, 7.0, 7.0]], unit="ms", marks=[Mark(1, "1")])


@pytest.mark.parametrize("draw", [slowdown, bars, shares, heat], ids=lambda draw: draw.__name__)
def test_every_chart_is_well_formed_stands_alone_and_is_the_same_each_time(draw: Callable[[], Figure]) -> None:
    text = str(draw())
    assert text == str(draw())
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"\b(?:href|src|url\(|@import|<script)", text)
    assert "<style" not in draw().inline()
    ET.fromstring(draw().inline())


@pytest.mark.parametrize("draw", [slowdown, bars, shares, heat], ids=lambda draw: draw.__name__)
def test_every_class_has_a_style_and_all_lies_within(draw: Callable[[], Figure]) -> None:
    figure = draw()
    root = ET.fromstring(str(figure))
    style = root.findtext(f"{SVG}style", "")
    used = {name for element in root.iter() for name in (element.get("class") or "").split()}
    assert {name for name in used if f".{name}" not in style} <= {"pc", "pc-small", "pc-text"}
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x", "")) <= figure.width
        assert 0 <= float(element.get("y", "")) <= figure.height


def test_lines_lie_to_scale() -> None:
    root = ET.fromstring(str(slowdown()))
    frozen = next(e for e in root.iter(f"{SVG}path") if e.get("class") == "pc-line pc-l-blue")
    points = [tuple(map(float, point.split())) for point in frozen.get("d", "")[1:].split("L")]
    assert points[2][0] - points[1][0] == pytest.approx(points[1][0] - points[0][0], abs=0.02)
    rise = [points[0][1] - y for _, y in points]
    assert rise[3] / rise[1] == pytest.approx(1.1 / 0.2, abs=0.02)


def test_lines_are_named_where_they_end_and_the_rest_in_a_legend() -> None:
    texts = list(ET.fromstring(str(slowdown())).iter(f"{SVG}text"))
    at = {"".join(e.itertext()): float(e.get("x", "")) for e in texts}
    assert at["frozen"] == at["re-planned"] == at["simulated"] > 500
    assert at["paper"] < 300
    assert at["short"] < 300
    assert at["Slowdown & delay"] < 50


def test_a_bar_is_as_high_as_its_value_and_says_it() -> None:
    found = {}
    for rect in ET.fromstring(str(bars())).iter(f"{SVG}rect"):
        if title := rect.findtext(f"{SVG}title"):
            found[title] = float(rect.get("height", ""))
    assert set(found) == {"A, zb: 1", "B, zb: 1", "C <c>, zb: 1", "A, ours: 1.4", "B, ours: 1.5"}
    assert found["B, ours: 1.5"] / found["A, zb: 1"] == pytest.approx(1.5, abs=0.001)
    assert "A, ours, paper: 1.36" in str(bars())


def test_the_parts_of_a_row_add_up() -> None:
    rects = [e for e in ET.fromstring(str(shares())).iter(f"{SVG}rect") if e.findtext(f"{SVG}title")]
    assert [e.findtext(f"{SVG}title") for e in rects] == [
        "direct, busy: 0.6",
        "direct, idle: 0.4",
        "delegate, busy: 0.9",
    ]
    ends = [float(e.get("x", "")) + float(e.get("width", "")) for e in rects]
    assert float(rects[1].get("x", "")) == pytest.approx(ends[0] + 1, abs=0.02)


def test_names_of_many_bars_overlapped_on_a_phone() -> None:
    many = bar_chart([f"rank {rank}" for rank in range(24)], [Bars("held", [1.0] * 24)], width=360)
    places = [float(e.get("x", "")) for e in ET.fromstring(str(many)).iter(f"{SVG}text") if e.text == "rank"]
    assert all(right - left > 24 for left, right in pairwise(places))


def test_cells_of_one_step_are_one_piece_and_missing_ones_are_none() -> None:
    root = ET.fromstring(str(heat()))
    cells = {e.get("class"): e.get("d", "") for e in root.iter(f"{SVG}path") if "pc-h" in (e.get("class") or "")}
    assert sum(path.count("z") for path in cells.values()) == 3


def test_steps_are_round_and_rise_to_the_largest_value() -> None:
    assert steps_for([0.0, 60.0]) == (0.5, 1, 2, 5, 10, 20, 50)
    assert steps_for([0.003]) == (2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002)
    assert len(steps_for([])) == len(STEPS[0]) - 1
    for steps, sign in ((STEPS[0], -1), (STEPS[1], 1)):
        luminance = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b in map(rgb, steps)]
        assert luminance == sorted(luminance, reverse=sign < 0)


def test_long_series_keep_their_extremes_and_lose_the_rest() -> None:
    points = [(place / 100, float((place * 7919) % 1000)) for place in range(20_000)]
    kept = thinned(points)
    assert len(kept) <= 4 * 401
    assert max(y for _, y in kept) == max(y for _, y in points)
    assert min(y for _, y in kept) == min(y for _, y in points)
    assert kept[0] == points[0]
    assert kept[-1] == points[-1]


def test_names_are_pushed_apart_and_stay_between_the_ends() -> None:
    assert spread_out([10.0, 11.0, 50.0], 15, 0, 100) == [3.0, 18.0, 50.0]
    assert spread_out([0.0, 0.0, 0.0], 10, 0, 100) == [0.0, 10.0, 20.0]
    assert spread_out([99.0, 100.0], 10, 0, 100) == [90.0, 100.0]


@pytest.mark.parametrize("dark", [False, True])
def test_text_in_a_hue_reads_on_its_ground(dark: bool) -> None:
    ground = _luminance("#0f151d" if dark else "#ffffff")
    for colors in HUES.values():
        low, high = sorted((ground, _luminance(colors[2 + dark])))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_data_that_cannot_be_drawn_is_an_error() -> None:
    refused = {
        "a chart of nothing": lambda: line_chart([]),
        "'a' has 1 and 0 values": lambda: line_chart([Line("a", [1.0], [])]),
        "no finite value": lambda: line_chart([Line("a", [1.0], [None])]),
        "2 values for 1 groups": lambda: bar_chart(["A"], [Bars("a", [1.0, 2.0])]),
        "0 groups and 0 series": lambda: bar_chart([], []),
        "below 0 in a row": lambda: stacked_chart(["A"], [Bars("a", [-1.0])]),
        "1 names and rows of": lambda: heat_map(["a"], [[1.0], [2.0]]),
        "1 steps: give 7": lambda: heat_map(["a"], [[1.0]], steps=[1.0]),
    }
    for message, draw in refused.items():
        with pytest.raises(CostError, match=message):
            draw()


def test_odd_data_is_drawn() -> None:
    line_chart([Line("one point", [1.0], [5.0]), Line("", [0.0, 1.0], [3.0, 3.0])], levels=[Level(-1.0, "below 0")])
    line_chart([Line("broken", [0.0, 1.0, 2.0], [1.0, None, float("inf")])], x=Axis(low=0, high=10))
    bar_chart(["a"], [Bars("all the same", [0.0])])
    heat_map(["a"], [[None]])


def test_files_hold_the_chart_and_how_it_was_made(tmp_path) -> None:
    figure = line_chart([Line("a", [0.0, 1.0], [1.0, 2.0])], comment="made by: python x.py --fast")
    save_chart(figure, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == str(figure)
    assert text.startswith("<!-- made by: python x.py - -fast -->\n<svg ")
    ET.fromstring(text)


def _luminance(color: str) -> float:
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
