"""The report: what the logs tell is right, the page says the same as the JSON, loads nothing, keeps its form."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.control import (
    Configuration,
    ControlError,
    Controller,
    IterationEnded,
    Job,
    LinkDown,
    Switched,
    Transfers,
    rehearse,
    run_once,
)
from penstock.control.configuration import peaks
from penstock.control.story import read_story
from penstock.cost import LinkConditions
from penstock.draw.report import RunStory, to_page
from penstock.draw.report.story import (
    Alarms,
    Decided,
    Fault,
    Iteration,
    Memory,
    Ran,
    Shares,
    Shown,
    runs_of,
    spells_of,
)
from penstock.draw.report.words import headline, more, seconds

pytestmark = pytest.mark.unit

COSTS = ps.Costs.uniform(4, f=10, i=10, w=10)
LATE = "2:3=latency:steps:0ms/0ms,1600ms/60ms,6s/0ms"


def job(**more: Any) -> Job:
    zb = ps.build("zb", 4, 8)
    return Job(COSTS, Configuration(zb, "frozen", (), tuple(peaks(zb, COSTS))), **more)


@lru_cache(maxsize=8)
def log_of(link: str = LATE, until: float = 12_000) -> tuple[str, ...]:
    lines: list[str] = []
    rehearse(Controller(job(), log=lines.append), LinkConditions.parse(link), until=until)
    return tuple(lines)


@lru_cache(maxsize=8)
def story_of(link: str = LATE, until: float = 12_000) -> RunStory:
    return read_story(log_of(link, until), name="late & last")


class Page(HTMLParser):
    """Tags, the text of each element, and the rows of tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.stack: list[str] = []
        self.texts: dict[str, list[str]] = {}
        self.tables: dict[str, list[list[str]]] = {}
        self.table: list[list[str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.stack.append(tag)
        self.texts.setdefault(tag, []).append("")
        if tag == "table":
            self.table = self.tables.setdefault(dict(attrs).get("aria-label") or "", [])
        if tag == "tr":
            self.table.append([])
        if tag in ("td", "th"):
            self.table[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        while self.stack and self.stack.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self.stack:
            self.texts[self.stack[-1]][-1] += data
        if self.stack and self.stack[-1] in ("td", "th"):
            self.table[-1][-1] += data

    @property
    def data(self) -> Any:
        return json.loads(next(text for text in self.texts["script"] if text.startswith("{")))


# What the logs tell.


def test_the_story_has_every_iteration_as_it_was_rehearsed() -> None:
    lines: list[str] = []
    run = rehearse(Controller(job(), log=lines.append), LinkConditions.parse(LATE), until=12_000)
    story = read_story(lines, name="run")
    assert [(each.number, each.decision) for each in story.iterations] == [
        (each.number, each.decision) for each in run.iterations
    ]
    assert [each.ms for each in story.iterations] == pytest.approx([each.ms for each in run.iterations], rel=1e-3)
    assert [each.number for each in story.decisions] == [each.number for each in run.decisions]
    assert [each.made for each in story.decisions] == [each.iteration for each in run.decisions]
    assert len(run.decisions) >= 1


def test_late_links_are_found_with_their_time_and_delay() -> None:
    (spell,) = story_of().spells
    late = [each.number for each in story_of().iterations if max(each.delays) >= 1]  # type: ignore[type-var]
    assert (spell.link, spell.first, spell.last, spell.num_late) == ((2, 3), late[0], late[-1], len(late))
    assert spell.ms == pytest.approx(60, rel=0.01)
    assert story_of().late == set(late)


def test_saved_is_what_the_first_configuration_would_have_taken_less_what_was_taken() -> None:
    story = story_of()
    late = run_once(job(), job().start, LinkConditions.parse("2:3=latency:60ms")).makespan
    healthy = run_once(job(), job().start, LinkConditions()).makespan
    assert story.undisturbed == healthy
    switched = [each for each in story.iterations if each.decision and each.number in story.late]
    steady = [each for each in switched if each.number < story.spells[0].last]
    assert [each.kept for each in steady] == pytest.approx([late] * len(steady), rel=1e-6)
    assert story.saved == pytest.approx(sum(each.kept - each.ms for each in story.iterations if each.decision))  # type: ignore[operator]
    cost = sum(each.ms for each in story.iterations) - healthy * len(story.iterations)
    assert story.lost == pytest.approx(story.saved + cost, rel=0.02)
    assert story.decisions[0].saved == pytest.approx(story.saved, rel=0.05)


def test_what_ran_is_simulated_as_it_was() -> None:
    assert story_of().error == pytest.approx(0, abs=0.005)
    for each in story_of().ran:
        assert each.simulated == pytest.approx(each.measured, rel=0.01)
        assert each.shares is not None
        shares = each.shares
        assert shares.busy + shares.dependency + shares.head_of_line + shares.warm_up_and_drain == pytest.approx(1)
    assert story_of().ran[0].shares.busy < story_of().ran[1].shares.busy  # type: ignore[union-attr]


def test_some_iterations_may_stand_for_all() -> None:
    few = read_story(log_of(), name="few", most=6)
    assert sum(each.simulated is not None for each in few.iterations) < len(few.iterations)
    assert few.saved == pytest.approx(story_of().saved, rel=0.25)
    assert few.total == story_of().total


def test_memory_stays_within_its_caps() -> None:
    memory = story_of().memory
    assert memory is not None
    assert all(peak <= cap for peak, cap in zip(memory.peaks, memory.caps, strict=True))
    assert memory.caps == job().start.caps


def test_alarms_are_counted_as_the_controller_counted_them() -> None:
    link = "1:2=latency:steps:0ms/0ms,3s/40ms,3300ms/0ms,6s/60ms,12s/0ms"
    lines: list[str] = []
    controller = Controller(job(may_replan=False), log=lines.append)
    rehearse(controller, LinkConditions.parse(link), until=20_000)
    story = read_story(lines, name="noise")
    counts = controller.counts
    assert counts.suspected > counts.verified > 0
    assert counts.false > 0
    assert story.alarms == Alarms(counts.suspected, counts.verified, counts.false)


def test_a_log_cut_off_anywhere_is_read_as_far_as_it_goes() -> None:
    lines = log_of()
    text = "\n".join(lines)
    cut = text[: len(text) * 2 // 3].splitlines()
    story = read_story(cut, name="cut")
    assert 0 < len(story.iterations) < len(story_of().iterations)
    assert to_page(story)


def test_records_add_the_iterations_before_the_log_and_measured_timelines() -> None:
    lines = log_of()
    story = story_of()
    first = story.decisions[0].first
    assert first is not None
    early = json.dumps({"iteration": -1, "ms": 500.0, "number": 0, "links": {"0:1": 0.5, "2:3": 0.1}})
    op = [0, "F", 0, 0, 0.0, 10.0]
    timelines = [
        json.dumps({"iteration": first - 1, "number": 0, "why": "before 1", "ops": [op]}),
        json.dumps({"iteration": first + 2, "number": 1, "why": "after 1", "ops": [op, [1, "F", 1, 0, 10.0, 20.0]]}),
    ]
    told = read_story(lines, name="run", iterations=[early], timelines=timelines)
    assert told.iterations[0].number == -1
    assert told.iterations[0].ms == 500
    assert [each.timeline.source for each in told.shown] == ["measured", "measured"]
    assert [len(each.timeline.ops) for each in told.shown] == [1, 2]


def test_a_dead_link_is_a_fault_and_keeping_is_not_counted() -> None:
    lines: list[str] = []
    controller = Controller(job(), log=lines.append)
    for number in range(6):
        controller.feed(Transfers.of((0, 1), [(1.0, 10.0 * at, 10.0 * at + 0.1) for at in range(8)]))
        controller.feed(IterationEnded(number, 390.0))
        if number == 2:
            (decision,) = controller.feed(LinkDown((0, 1)))
            controller.feed(Switched(decision.number))
    story = read_story(lines, name="dead")
    assert [(each.iteration, each.what) for each in story.faults] == [(3, "link 0:1 went down")]
    assert [each.kept for each in story.iterations[3:]] == [None] * 3
    assert story.saved is None
    assert "link 0:1 went down" in to_page(story)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "empty log"),
        (["{}"], "no controller's log"),
        (["nonsense", "{}"], "line 1 of the log is not JSON"),
        (log_of()[:1], "no iteration that ended"),
        ([log_of()[0], '{"event": {"switched": {"number": 7}}}'], "decision 7, which it does not have"),
        ([log_of()[0], '{"decision": {"number": 1}}'], "a decision that this version did not write"),
        ([log_of()[0], "[1]"], "no JSON object"),
    ],
)
def test_a_log_that_makes_no_sense_is_an_error(lines: list[str], message: str) -> None:
    with pytest.raises(ControlError, match=message):
        read_story(lines, name="run")


def test_a_record_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ControlError, match=r"iterations\.jsonl: a line that does not fit the log"):
        read_story(log_of(), name="run", iterations=['{"iteration": 3, "ms": 1.0, "number": 99, "links": {}}'])


# The words.


def iteration(number: int, ms: float, decision: int = 0, kept: float | None = None, *delays: float) -> Iteration:
    return Iteration(number, ms, decision, ms, ms if decision == 0 else kept, delays)


def told(iterations: list[Iteration], decisions: list[Decided] | None = None) -> RunStory:
    links = ((0, 1), (1, 0), (1, 2), (2, 1))[: len(iterations[0].delays)]
    return RunStory(
        "run", (), links, tuple(iterations), tuple(decisions or ()), spells_of(iterations, links, 1.0), (), None,
        Alarms(0, 0, 0), 1.0, 100.0, "given",
    )  # fmt: skip


def decided(number: int, made: int, first: int | None, action: str = "delegate", outcome: str = "ran") -> Decided:
    return Decided(
        number,
        action,
        "why",
        "zb, dynamic, delegated 0–1",
        made - 1,
        made,
        first,
        outcome,
        2.0,
        1.0,
        0,
        None,
        None,
        5,
    )


def test_one_late_link_is_told_in_one_sentence() -> None:
    calm = [iteration(n, 100, 0, None, 0.0, 0.1) for n in range(3)]
    slow = [iteration(n, 1100, 0, None, 60.0, 0.1) for n in range(3, 6)]
    after = [iteration(n, 150, 1, 1100, 60.0, 0.1) for n in range(6, 10)]
    story = told([*calm, *slow, *after], [decided(1, 4, 6)])
    assert story.lost == pytest.approx(7 * 1000)
    assert story.saved == pytest.approx(4 * 950)
    assert headline(story) == (
        "Link 0–1 was 60 ms late for 7 iterations; it was delegated after 3; 3.8 s of 7.0 s lost time was saved."
    )


@pytest.mark.parametrize(
    ("story", "said"),
    [
        (told([iteration(n, 100, 0, None, 0.2) for n in range(5)]), "No link was late in 5 iterations."),
        (
            told([iteration(n, 100.1, 0, None, 10.0) for n in range(5)]),
            "Link 0–1 was 10 ms late for all 5 iterations; what runs was never changed; "
            "that cost next to nothing (0 ms).",
        ),
        (
            told([iteration(n, 200, 0, None, 30.0, 30.0, 40.0, 1.0) for n in range(5)]),
            "Links 0–1 and 1–2 were 30 to 40 ms late, some of them in 5 of 5 iterations; "
            "what runs was never changed; 500 ms were lost, none of it saved.",
        ),
        (
            told(
                [iteration(n, 200, 0, None, 30.0 if n in (1, 9) else 0.0) for n in range(12)],
                [decided(1, 5, None, outcome="given up")],
            ),
            "Link 0–1 was 30 ms late 2 times, for 2 iterations in all; what runs was never changed; "
            "200 ms were lost, none of it saved.",
        ),
    ],
)
def test_other_runs_are_told_in_one_sentence_too(story: RunStory, said: str) -> None:
    assert headline(story) == said
    assert len(more(story)) == 3


def test_iterations_near_each_other_are_one_spell() -> None:
    assert runs_of([1, 2, 4, 9, 10], 3) == [[1, 2, 4], [9, 10]]
    assert runs_of([], 3) == []


@pytest.mark.parametrize(("ms", "said"), [(840, "840 ms"), (28_250, "28.2 s"), (128_000, "128 s"), (6e5, "10.0 min")])
def test_long_times_read_easily(ms: float, said: str) -> None:
    assert seconds(ms) == said


def test_shares_add_up_where_a_sender_stands_still() -> None:
    links = ps.Links({(1, 2): 40.0})
    shares = Shares.of(ps.simulate(ps.build("1f1b", 4, 12), COSTS, links=links, transport=ps.Blocking(2)))
    assert shares.head_of_line > 0
    assert shares.busy + shares.dependency + shares.head_of_line + shares.warm_up_and_drain == pytest.approx(1)


# The page.


def small() -> RunStory:
    """Twelve iterations: three calm, three late, then a decision; another is given up, and a link breaks."""
    rows = [iteration(n, 100.0 + n, 0, None, 0.0, 0.1) for n in range(3)]
    rows += [iteration(n, 210.0 + n, 0, None, 60.0, 0.1) for n in range(3, 6)]
    rows += [iteration(n, 110.0 + n, 1, 215.0, 60.0, 0.1) for n in range(6, 12)]
    decisions = [decided(1, 4, 6), decided(2, 9, None, "re-plan", "given up")]
    shares = Shares(0.5, 0.3, 0.1, 0.1)
    return replace(
        told(rows, decisions),
        name="small",
        facts=(("schedule", "zb"), ("ranks", "2")),
        ran=(
            Ran(0, "zb, frozen", 6, 158.5, 158.0, 0.004, shares, 4),
            Ran(1, "zb, dynamic", 6, 118.5, 118, 0.02, None, 7),
        ),
        memory=Memory((4.0, 3.0), (4.0, 4.0), "activations", "measured"),
        alarms=Alarms(3, 2, 1),
        faults=(Fault(8, "link 0:1 went down"),),
        counters=(("messages sent again", 3.0),),
        shown=(Shown("before", ps.simulate(ps.build("1f1b", 2, 2))),),
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
    assert page.texts["h1"] == [headline(story)]
    assert f"{seconds(value['saved_ms'])} of {seconds(value['lost_ms'])} lost" in headline(story)
    large = dict(zip(page.texts["span"], page.texts["b"], strict=False))
    assert large["iterations with a late link"] == f"{value['num_late']} of {value['num_iterations']}"
    assert large["lost, had nothing been changed"] == seconds(value["lost_ms"])
    assert large["of it saved"] == seconds(value["saved_ms"])
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
    compared = page.tables["Simulated and measured iteration time"][1:]
    assert [int(row[2]) for row in compared] == [*(each["num_iterations"] for each in value["ran"]), len(rows)]
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
    assert len(svgs) == 5
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
    script.write_text(
        files("penstock.draw.report").joinpath("report.js").read_text(encoding="utf-8"), encoding="utf-8"
    )
    done = subprocess.run(["node", "--check", str(script)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


# The verb.


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / "control.jsonl").write_text("\n".join(log_of()) + "\n", encoding="utf-8")
    (folder / "settings.json").write_text('{"device": "emulated", "link": ["2:3=latency:60ms"]}', encoding="utf-8")
    return folder


def test_the_verb_writes_the_page_into_the_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("Link 2–3 was 60 ms late")
    assert printed[-1] == f"wrote {run / 'report.html'}"
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    assert page.data["name"] == "slow"
    assert page.data["facts"]["device"] == "emulated"


@pytest.mark.parametrize("given", ["", "control.jsonl"])
def test_json_alone_writes_nothing(run: Path, given: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run / given), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["headline"].startswith("Link 2–3 was 60 ms late")
    assert value["saved_ms"] > 0
    assert value["out"] is None
    assert sorted(each.name for each in run.iterdir()) == ["control.jsonl", "settings.json"]


def test_the_page_and_the_json_may_be_had_together(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = run / "page.html"
    assert main(["report", str(run.parent), "--out", str(target), "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value.pop("out") == str(target)
    value.pop("headline")
    assert Page(target.read_text(encoding="utf-8")).data == value


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["nowhere"], 2, "no such folder"),
        (["."], 2, "has no control.jsonl"),
        (["slow", "--out", "page.svg"], 2, "a name that ends with .html"),
        (["slow", "--out", "nowhere/page.html"], 2, "No such file"),
        (["broken"], 1, "line 1 of the log is not JSON"),
        (["binary"], 1, "not text"),
        (["both"], 2, "holds 2 runs"),
    ],
)
def test_what_cannot_be_reported_is_said(
    arguments: list[str],
    code: int,
    message: str,
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run.parent)
    for name, content in (("broken", b"x\n{}\n"), ("binary", b"\xff\xfe\n"), ("both/a", b"{}"), ("both/b", b"{}")):
        (run.parent / name).mkdir(parents=True)
        (run.parent / name / "control.jsonl").write_bytes(content)
    if arguments == ["."]:
        for path in (run / "control.jsonl", Path("broken/control.jsonl"), Path("binary/control.jsonl")):
            path.unlink()
    assert main(["report", *arguments]) == code
    assert message in capsys.readouterr().err
    assert main(["report", *arguments, "--json"]) == code
    assert message in json.loads(capsys.readouterr().out)["error"]["message"]
