"""Pictures that must not change unless --update-golden says so; look at them before you say so."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock as ps
from penstock.draw import to_svg, to_terminal
from penstock.formats.perfetto import to_perfetto

pytestmark = pytest.mark.golden
Golden = Callable[[str, str], None]
COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
SLOW = ps.Links({(0, 1): 20.0})
IMAGES = sorted((Path(__file__).parents[2] / "docs" / "images").glob("*.py"))


def zb(dispatch: str) -> ps.Timeline:
    return ps.simulate(ps.build("zb", 4, 12, warmup=[7, 5, 3, 1]), COSTS, links=SLOW, dispatch=dispatch)


def test_svg_of_a_schedule(golden: Golden) -> None:
    golden("draw_zb_v.svg", to_svg(ps.build("zb-v", 4, 4)))


def test_svg_of_two_timelines(golden: Golden) -> None:
    golden("draw_slow_link.svg", to_svg([zb("frozen"), zb("dynamic")], titles=["frozen", "dynamic"]))


def test_svg_of_posted_messages(golden: Golden) -> None:
    placed = [
        ps.simulate(ps.build("1f1b", 2, 4), links=ps.Links({(0, 1): 3.0}), channels=each) for each in ("gloo", "nccl")
    ]
    golden("draw_messages.svg", to_svg(placed, width=700))


def test_terminal(golden: Golden) -> None:
    schedule = ps.build("zb-v", 4, 4)
    blocked = ps.simulate(ps.build("1f1b", 4, 6), COSTS, links=SLOW, transport=ps.Blocking(1))
    pictures = [
        to_terminal(schedule, color=False, width=130),
        to_terminal(schedule, color=False, width=60),
        to_terminal(zb("frozen"), color=False, width=110),
        to_terminal(zb("dynamic"), color=False, width=60),
        to_terminal(blocked, color=False, width=110),
        to_terminal(ps.simulate(schedule), color=False, width=130),
    ]
    golden("draw_terminal.txt", "\n\n".join(pictures) + "\n")


def test_terminal_in_colour(golden: Golden) -> None:
    pictures = [
        to_terminal(ps.build("interleaved-1f1b", 2, 4), color=True, width=100),
        to_terminal(zb("frozen"), color=True, width=110),
    ]
    golden("draw_terminal.ansi", "\n\n".join(pictures) + "\n")


def test_trace(golden: Golden) -> None:
    t = ps.simulate(ps.build("1f1b", 2, 2), ps.Costs.uniform(2, f=10, i=10, w=10), links=ps.Links({(0, 1): 5.0}))
    value = json.loads(to_perfetto(t))
    lines = ",\n".join(json.dumps(event) for event in value["traceEvents"])
    golden("draw_trace.json", f"[\n{lines}\n]\n")


@pytest.mark.slow
@pytest.mark.parametrize("script", IMAGES, ids=lambda script: script.stem)
def test_the_pictures_of_the_pages_are_what_their_commands_make(script: Path) -> None:
    made = runpy.run_path(str(script))["pictures"]()
    assert made
    for name, text in made.items():
        there = script.with_name(f"{name}.svg").read_text(encoding="utf-8")
        assert there == text, f"run: python docs/images/{script.name}"
