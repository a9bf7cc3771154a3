"""The SVG is well-formed, stands alone, and shows every op where it ran."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import product

import pytest

import penstock as ps
from penstock.draw import to_svg
from penstock.draw.panel import Panel
from penstock.draw.style import ink, percent, rgb, shade, short, ticks
from penstock.simulation import Timeline

pytestmark = pytest.mark.unit
SVG = "{http://www.w3.org/2000/svg}"


def bars(root: ET.Element) -> list[ET.Element]:
    return [e for e in root.iter(f"{SVG}rect") if e.find(f"{SVG}title") is not None]


@pytest.mark.parametrize("name", list(ps.library.SCHEDULES))
def test_every_op_of_every_library_schedule_is_a_bar_with_a_tooltip(name: str) -> None:
    schedule = ps.build(name, 4, 8)
    root = ET.fromstring(to_svg(schedule))
    titles = [bar.findtext(f"{SVG}title", "").split(":")[0] for bar in bars(root)]
    assert sorted(titles) == sorted(str(op) for row in schedule.order for op in row)


def test_the_key_leaves_room_for_the_name_of_an_own_op_in_capitals() -> None:
    own = ps.NewOp("COMPRESS", stage=0, after={("B", 0): 4}, time=1.0)
    program = ps.Program(ps.placements.one_to_one(2), 4, ops=[own])
    found = re.search(r'x="([\d.]+)"[^>]*>COMPRESS<.*?<rect class="lane" x="([\d.]+)"', to_svg(program.build()), re.S)
    assert found is not None
    start, following = map(float, found.groups())
    assert following - start > 9.0 * len("COMPRESS"), "a capital of the 12 px font takes up to 9 px"


def test_a_measured_timeline_starts_at_its_first_op() -> None:
    t = ps.simulate(ps.build("1f1b", 2, 3), ps.Costs.uniform(2, f=10, i=10, w=10))
    later = tuple(replace(op, start=op.start + 5000, end=op.end + 5000) for op in t.ops)
    moved = replace(t, ops=later, messages=(), source="measured")
    assert to_svg(moved).replace("measured", "simulated") == to_svg(t)


def test_blocked_time_and_waits_are_told() -> None:
    t = ps.simulate(
        ps.build("1f1b", 4, 12),
        ps.Costs.uniform(4, f=10, i=10, w=10),
        links=ps.Links({(1, 2): 40.0}),
        transport=ps.Blocking(2),
    )
    text = to_svg(t)
    assert 'class="blocked"' in text
    assert "then blocked" in text
    assert "link full" in text
    assert re.search(r"waited [\d.]+ ms for 1F0", text)


def test_it_stands_alone_and_never_changes() -> None:
    schedule = ps.build("zb-v", 4, 8)
    text = to_svg(schedule)
    assert text == to_svg(schedule)
    assert "href" not in text
    assert "<script" not in text
    assert text.count("http") == 1  # the namespace
    assert to_svg(schedule, comment="a -- b").startswith("<!-- a - - b -->\n<svg")
    ET.fromstring(to_svg(schedule, comment="a -- b -"))


def test_nothing_to_draw() -> None:
    with pytest.raises(ps.ScheduleError, match="nothing to draw"):
        to_svg([])
    with pytest.raises(ps.ScheduleError, match="2 titles for 1 timelines"):
        to_svg(ps.build("gpipe", 2, 2), titles=["a", "b"])
    empty = ps.build("gpipe", 2, 2)
    empty = replace(empty, order=((), ()))
    ET.fromstring(to_svg(Timeline(empty, (), (), (0.0, 0.0))))


def test_text_reads_on_every_shade() -> None:
    def luminance(color: str) -> float:
        linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb(color)]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    for kind, chunk in product("FRBIWUX", range(4)):
        back = shade(kind, chunk, 4)
        dark, light = sorted((luminance(back), luminance(ink(back))))
        assert (light + 0.05) / (dark + 0.05) >= 4.0


def test_numbers_are_short() -> None:
    assert [short(v) for v in (0, 0.1234, 1.5, 33.456, 440, 123.45, 2140.4, -3)] == [
        "0", "0.123", "1.5", "33.46", "440", "123.5", "2140", "-3",
    ]  # fmt: skip
    assert [percent(v) for v in (0, 1, 0.2727)] == ["0%", "100%", "27.3%"]
    assert ticks(450, 14) == [0, 50, 100, 150, 200, 250, 300, 350, 400, 450]
    assert ticks(0, 10) == [0]


def test_a_shared_stage_has_its_own_shade_on_every_rank_that_runs_it() -> None:
    panel = Panel(ps.simulate(ps.build("mllm", 3, 2)), "mllm", "ms")
    assert [panel.chunk(rank, ps.Op("F", 4, 0)) for rank in range(3)] == [2, 2, 2]
    assert panel.chunk(1, ps.Op("F", 0, 0)) != panel.chunk(1, ps.Op("F", 2, 0))
