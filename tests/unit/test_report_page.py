"""The page says the same as the JSON, loads nothing, lets no name break out, and keeps its form."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

import pytest

import penstock as ps
from penstock.report import RunStory, to_page
from penstock.report.from_logs import read_story
from penstock.report.run_story import (
    AlarmCounts,
    Fault,
    RunMemory,
    TitledTimeline,
)
from penstock.report.words import headline, seconds
from report_cases import Page, decided, iteration, log_of, story_of, told

pytestmark = pytest.mark.unit


def small() -> RunStory:
    """Twelve iterations: three calm, three late, then a decision; another is given up, and a link breaks."""
    rows = [iteration(n, 100.0 + n, 0, None, 0.0, 0.1) for n in range(3)]
    rows += [iteration(n, 210.0 + n, 0, None, 60.0, 0.1) for n in range(3, 6)]
    rows += [iteration(n, 110.0 + n, 1, 215.0, 60.0, 0.1) for n in range(6, 12)]
    decisions = [decided(1, 4, 6), decided(2, 9, None, "re-plan", "given up")]
    return replace(
        told(rows, decisions),
        name="small",
        facts=(("schedule", "zb"), ("ranks", "2")),
        memory=RunMemory((4.0, 3.0), (4.0, 4.0), "activations", "measured"),
        alarms=AlarmCounts(3, 2, 1),
        faults=(Fault(8, "link 0–1 went down"),),
        counters=(("messages sent again", 3.0),),
        shown=(TitledTimeline("before", ps.simulate(ps.build("1f1b", 2, 2))),),
    )


def test_the_page_loads_nothing() -> None:
    text = to_page(story_of())
    assert "https:" not in text
    assert set(re.findall(r"http:[^\s\"']*", text)) <= {"http://www.w3.org/2000/svg"}
    page = Page(text)
    for tag, attrs in page.tags:
        assert not {"src", "href", "srcset", "action"} & set(attrs), tag
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    for word in ("@import", "url(", "fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval("):
        assert word not in text


def test_the_page_says_what_the_json_says() -> None:
    story = story_of()
    page, value = Page(to_page(story)), story.to_json()
    assert page.data == value
    assert [text.replace("\u2060", "") for text in page.texts["h1"]] == [headline(story)]
    assert f"{seconds(value['saved_ms'])} of {seconds(value['lost_ms'])} lost" in headline(story)
    large = dict(zip(page.texts["span"], page.texts["b"], strict=False))
    assert large["iterations with a late link"] == f"{value['num_late']} of {value['num_iterations']}"
    assert large["lost, had nothing been changed"] == seconds(value["lost_ms"])
    assert large["of it saved, measured"] == seconds(value["saved_ms"])
    rows = page.tables["Iterations"][1:]
    assert [int(row[0]) for row in rows] == value["iterations"]["number"]
    assert [float(row[2]) for row in rows] == pytest.approx(value["iterations"]["ms"], rel=1e-3)
    assert [float(row[4]) for row in rows] == pytest.approx(value["iterations"]["kept"], rel=1e-3)
    decisions = page.tables["Decisions"][1:]
    assert [(int(row[0]), row[1], row[3]) for row in decisions] == [
        (each["number"], each["action"], each["reason"]) for each in value["decisions"]
    ]
    assert [row[5:7] for row in decisions] == [
        [f"after {each['made']}", str(each["first"])] for each in value["decisions"]
    ]
    (late,) = page.tables["Late links"][1:]
    assert late[2] == str(value["spells"][0]["num_late"])


def test_names_do_not_break_out_of_the_page() -> None:
    evil = '</script><img src=x onerror="alert(1)"><!-- {{data}} {{js}} &'
    page = Page(to_page(read_story(log_of(), name=evil, facts=[(evil, evil)])))
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert page.data["name"] == evil


def test_pictures_are_told_in_words_and_every_style_is_there() -> None:
    text = to_page(story_of())
    page = Page(text)
    svgs = [attrs for tag, attrs in page.tags if tag == "svg"]
    assert len(svgs) == 2 * 4
    assert all(attrs.get("role") == "img" and attrs.get("aria-label") for attrs in svgs)
    used = {
        name
        for _, attrs in page.tags
        for name in (attrs.get("class") or "").split()
        if name.startswith(("r-", "pc-"))
    }
    unstyled = {name for name in used if f".{name}" not in text}
    assert unstyled <= {"pc-small", "pc-text"}
    assert "{{" not in text


@pytest.mark.parametrize(
    "link", ["0:1=0", "0:1=10", "1:2=latency:normal:30ms,10ms@50ms..100ms#3", "0:1=latency:60ms 2:3=bandwidth:1GB/s"]
)
def test_other_runs_make_pages_too(link: str) -> None:
    story = story_of(link, 6_000)
    assert Page(to_page(story)).data == story.to_json()


def test_the_page_stays_as_it_was(golden: Callable[[str, str], None]) -> None:
    golden("report.html", to_page(small()))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs node to read the script")
def test_the_script_parses(tmp_path: Path) -> None:
    script = tmp_path / "report.js"
    script.write_text(files("penstock.report").joinpath("report.js").read_text(encoding="utf-8"), encoding="utf-8")
    done = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
