"""Charts: well-formed, drawn to scale, told in words, and clear about data that cannot be drawn."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable

import pytest

from penstock.cost import CostError
from penstock.draw.chart import (
    COLORS,
    STEPS,
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
)
from penstock.draw.style import rgb
from report_cases import story_of

pytestmark = pytest.mark.unit
SVG = "{http://www.w3.org/2000/svg}"

DELAYS = [0.0, 20.0, 40.0, 60.0]


def slowdown() -> Figure:
    return line_chart(
        [
            Line("frozen", DELAYS, [1.0, 1.2, 1.6, 2.1]),
            Line("re-planned", DELAYS, [1.0, 1.03, 1.08, 1.13], stroke="dashed"),
            Line("short <s>", DELAYS[:2], [1.0, 1.1]),
            Line("paper", [60.0], [1.13], stroke="none"),
        ],
        title="Slowdown & delay",
        x=Axis("delay, ms"),
        y=Axis("times", low=1.0),
        marks=[Mark(20.0, "first"), Mark(21.0, "too near")],
        levels=[Level(1.06, "simulated")],
    )


def bars() -> Figure:
    ours = Bars("ours", [1.4, 1.5, None], paper=[1.36, None, None])
    return bar_chart(["A", "B", "C <c>"], [Bars("zb", [1.0, 1.0, 1.0]), ours], title="Throughput", y=Axis("times zb"))


def shares() -> Figure:
    return stacked_chart(["direct", "delegate"], [Bars("busy", [0.6, 0.9]), Bars("idle", [0.4, None])])


def heat() -> Figure:
    return heat_map(["0 → 1", "1 → 0"], [[0.0, 0.0, 60.0], [None, 7.0, 7.0]], unit="ms", marks=[Mark(1, "1")])


def texts(figure: Figure) -> list[str]:
    return ["".join(each.itertext()) for each in ET.fromstring(str(figure)).iter(f"{SVG}text")]


def paths(figure: Figure, color: str) -> list[list[tuple[float, float]]]:
    """The corners of the paths of a colour."""
    found = [e for e in ET.fromstring(str(figure)).iter(f"{SVG}path") if f"var(--pc-{color})" in e.get("style", "")]
    numbers = [list(map(float, re.findall(r"-?[0-9.]+", e.get("d", "")))) for e in found]
    return [list(zip(each[::2], each[1::2], strict=True)) for each in numbers]


@pytest.mark.parametrize("draw", [slowdown, bars, shares, heat], ids=lambda draw: draw.__name__)
def test_every_chart_is_well_formed_stands_alone_and_is_the_same_each_time(draw: Callable[[], Figure]) -> None:
    figure = draw()
    text = str(figure)
    assert text == str(draw())
    root = ET.fromstring(text)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert "prefers-color-scheme:dark" in text
    assert not re.search(r"\bsrc|@import|<script|url\([^#]|href=.[^#]", text)
    assert "<style" not in figure.inline()
    ET.fromstring(figure.inline())
    for element in root.iter(f"{SVG}text"):
        assert 0 <= float(element.get("x", "")) <= figure.width
        assert 0 <= float(element.get("y", "")) <= figure.height


@pytest.mark.parametrize("draw", [slowdown, bars, shares, heat], ids=lambda draw: draw.__name__)
def test_every_colour_suits_both_grounds(draw: Callable[[], Figure]) -> None:
    """A colour that is no variable would be the same on a dark ground."""
    body = draw().body
    assert set(re.findall(r"var\(--pc-(\w+)\)", body)) <= set(COLORS)
    assert set(re.findall(r"#[0-9a-f]{6}\b(?!\))", body)) <= {"#16202d"}  # text on amber


def test_lines_lie_to_scale() -> None:
    (points,) = [path for path in paths(slowdown(), "blue") if len(path) == 4]
    assert points[2][0] - points[1][0] == pytest.approx(points[1][0] - points[0][0], abs=0.02)
    rise = [points[0][1] - y for _, y in points]
    assert rise[3] / rise[1] == pytest.approx(1.1 / 0.2, abs=0.02)
    figure = slowdown()
    left, right, _, bottom = figure.plot
    assert points[0] == pytest.approx((left, bottom), abs=0.02)
    assert points[-1][0] == pytest.approx(right, abs=0.02)


@pytest.mark.parametrize(("count", "marked"), [(1, ["0"]), (3, ["0", "1", "2"])])
def test_an_axis_of_whole_numbers_marks_no_fractions(count: int, marked: list[str]) -> None:
    columns = heat_map(["rank 0"], [[1.0] * count], x=Axis("replica", is_whole=True), first=-0.5, unit="times")
    assert [text for text in texts(columns) if re.fullmatch(r"-?[0-9.]+", text)] == marked


def test_series_levels_and_marks_are_named() -> None:
    said = texts(slowdown())
    assert {"frozen", "re-planned", "short <s>", "paper", "simulated", "Slowdown & delay", "first"} <= set(said)
    assert "too near" not in said


def test_a_bar_is_as_high_as_its_value_and_says_it() -> None:
    said = texts(bars())
    assert [said.count(each) for each in ("1.4", "–", "C <c>", "paper")] == [1] * 4
    high = [max(y for _, y in path) - min(y for _, y in path) for path in paths(bars(), "brick")][:2]
    assert high[1] / high[0] == pytest.approx(1.5 / 1.4, abs=0.001)
    (zb, *_) = [max(y for _, y in path) - min(y for _, y in path) for path in paths(bars(), "blue")]
    assert high[1] / zb == pytest.approx(1.5, abs=0.001)


def test_the_parts_of_a_row_add_up() -> None:
    blue, brick = paths(shares(), "blue"), paths(shares(), "brick")
    assert max(x for x, _ in blue[0]) == pytest.approx(min(x for x, _ in brick[0]), abs=0.02)
    wide = [max(x for x, _ in path) - min(x for x, _ in path) for path in (blue[0], blue[1], brick[0])]
    assert wide[1] / wide[0] == pytest.approx(1.5, abs=0.01)
    assert wide[2] / wide[0] == pytest.approx(4 / 6, abs=0.01)


def test_names_of_many_bars_overlapped_on_a_phone() -> None:
    many = bar_chart([f"rank {rank}" for rank in range(24)], [Bars("held", [1.0] * 24)], width=360)
    assert 4 < texts(many).count("rank") < 24


def test_missing_cells_are_left_out() -> None:
    cells = [path for step in range(8) for path in paths(heat(), f"h{step}") if max(x for x, _ in path) > 50]
    assert sum(map(len, cells)) == 5 * 4


def test_steps_are_round_and_rise_to_the_largest_value() -> None:
    assert steps_for([0.0, 60.0]) == (0.5, 1, 2, 5, 10, 20, 50)
    assert steps_for([0.003]) == (2e-05, 5e-05, 0.0001, 0.0002, 0.0005, 0.001, 0.002)
    assert len(steps_for([])) == len(STEPS[0]) - 1
    for steps, sign in ((STEPS[0], -1), (STEPS[1], 1)):
        luminance = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b in map(rgb, steps)]
        assert luminance == sorted(luminance, reverse=sign < 0)


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
    bar_chart(["a"], [Bars("none", [None])])
    assert "五" in texts(line_chart([Line("五", [0.0], [1.0]), Line("$a_1$", [0.0], [2.0])]))


def test_text_is_no_formula() -> None:
    assert "$x^2$ <b>" in texts(line_chart([Line("$x^2$ <b>", [0.0, 1.0], [1.0, 2.0])]))


def test_files_hold_the_chart_and_how_it_was_made(tmp_path) -> None:
    figure = line_chart([Line("a", [0.0, 1.0], [1.0, 2.0])], comment="made by: python x.py --fast")
    save_chart(figure, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text(encoding="utf-8")
    assert text == str(figure)
    assert text.startswith("<!-- made by: python x.py - -fast -->\n<svg ")
    ET.fromstring(text)


def test_without_matplotlib_a_chart_is_refused_and_a_page_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.report import to_page

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CostError, match=r"pip install matplotlib"):
        slowdown()
    text = to_page(story_of())
    assert text.count("pip install matplotlib") == 3
    assert "of it saved, measured" in text
