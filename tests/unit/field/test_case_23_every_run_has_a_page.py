"""`penstock report` makes a page for every run: loss, rate, speed, bubbles, memory, a timeline, notices."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.formats import to_perfetto
from penstock.formats.perfetto import from_perfetto
from report_cases import CROPPED, Page

pytestmark = pytest.mark.xdist_group("browser")

SMALL = "--ranks 2 --microbatches 4 --batch 4 --depth 2 --width 16 --heads 2 --context 8 --in-process --threads 1"
RUNS = {
    "plain": f"--schedule zb-h1 --steps 6 {SMALL} --evaluate-every 2",
    "amdp": f"--schedule amdp --window 4 --steps 4 --drain-every 4 {SMALL}",
    "emulated": "zb --ranks 2 --microbatches 4 --costs gpt2-7b --steps 4 --in-process --set message_cap=10KB",
    "mesh": f"--schedule 1f1b --dp 2 --steps 2 {SMALL.replace('microbatches 4', 'microbatches 2')}",
    "adapts": f"--schedule 1f1b --steps 12 {SMALL} --adapt",
    "adapts briefly": f"--schedule 1f1b --steps 2 {SMALL} --adapt",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of runs: some that ended, one that went on, and one that was killed in its fourth step."""
    folder = tmp_path_factory.mktemp("runs")
    text = folder / "text.txt"
    text.write_text("".join(f"{number} and {number * 7 % 10} are digits.\n" for number in range(2000)))
    for name, options in RUNS.items():
        line = f"emulate {options}" if name == "emulated" else f"train {options} --data {text}"
        assert main([*f"{line} --json --out".split(), str(folder / name)]) == 0
    shutil.copytree(folder / "plain", folder / "killed")
    (folder / "killed" / "report.json").unlink()
    lines = (folder / "plain" / "metrics.jsonl").read_text().splitlines()
    (folder / "killed" / "metrics.jsonl").write_text("\n".join([*lines[:3], lines[3][:20]]))
    shutil.copytree(folder / "plain", folder / "resumed")
    assert main(["train", "--resume", str(folder / "resumed"), "--steps", "8", "--json"]) == 0
    for name in (*RUNS, "killed", "resumed"):
        assert main(["report", str(folder / name)]) == 0
    return folder


def report_of(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Page, dict[str, Any]]:
    """The page of a run, and what the verb prints of it as JSON."""
    capsys.readouterr()
    assert main(["report", str(folder), "--json"]) == 0
    return Page((folder / "report.html").read_text(encoding="utf-8")), json.loads(capsys.readouterr().out)


@pytest.mark.slow
def test_a_page_has_all_of_a_run(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, value = report_of(runs / "plain", capsys)
    metrics = [json.loads(line) for line in (runs / "plain" / "metrics.jsonl").read_text().splitlines()]
    run = value["run"]
    assert run["steps"] == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "lr", "tokens_per_second", "bubble"):
        assert run["columns"][name] == pytest.approx([line[name] for line in metrics], rel=1e-5)
    assert [loss is None for loss in run["columns"]["validation_loss"]] == [True, False] * 3
    assert run["ended"]["peak_memory"]
    titles = page.texts["h2"]
    assert titles[:6] == ["Loss", "Learning rate", "Speed", "Bubbles", "Memory of processes", "One step"]
    assert "Notices" in titles
    assert value["headline"] == page.texts["h1"][0]
    assert f"{metrics[-1]['loss']:.3f} in 6 steps of zb-h1" in value["headline"]
    value.pop("headline")
    value.pop("out")
    assert page.data == value
    drawn = sum(attrs.get("class", "").startswith("k") for tag, attrs in page.tags if tag == "rect")
    assert drawn >= 2 * 2 * ps.build("zb-h1", 2, 4).num_ops  # measured and simulated, for a screen and a phone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "titles", "said"),
    [
        ("amdp", ["Loss", "Speed", "Bubbles", "One pass"], "in 4 steps of amdp"),
        ("mesh", ["Loss", "Speed", "Bubbles", "Memory of processes", "One step"], "in 2 steps of 1f1b"),
        ("emulated", ["Bubbles", "One iteration", "Iteration time", "Decisions", "Memory"], "No link was late"),
        ("adapts", ["Loss", "One step", "Iteration time", "Decisions"], "in 12 iterations"),
        ("adapts briefly", ["Loss", "One step"], "in 2 steps of 1f1b"),
        ("resumed", ["Loss", "Memory of processes", "One step"], "in 8 steps of zb-h1"),
        ("killed", ["Loss", "Learning rate", "Speed", "Bubbles"], "in 3 steps, 6 were asked for"),
    ],
)
def test_runs_of_every_kind_have_a_page(
    runs: Path, name: str, titles: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page, value = report_of(runs / name, capsys)
    assert set(titles) <= set(page.texts["h2"])
    assert said in value["headline"].replace("\u2060", "")
    bars = [attrs for tag, attrs in page.tags if tag == "rect" and attrs.get("class", "").startswith("k")]
    assert bool(bars) == (name != "killed"), "one of the last steps is drawn once a run has ended"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (400, "dark")])
def test_nothing_is_cut_off(runs: Path, browser: Any, width: int, scheme: str) -> None:
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, errors = context.new_page(), []
    page.on("pageerror", lambda error: errors.append(str(error)))
    for name in ("plain", "amdp", "emulated", "killed"):
        page.goto((runs / name / "report.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (name, page.evaluate(CROPPED), errors) == (name, [], [])
    context.close()


def test_a_loss_that_is_never_finite_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": NaN}\n{"step": 1, "loss": Infinity}\n')
    assert main(["report", str(tmp_path)]) == 0
    page, value = report_of(tmp_path, capsys)
    assert value["headline"] == "No loss was finite in 2 steps."
    assert "Loss" not in page.texts["h2"]


@pytest.mark.parametrize(
    ("files", "code", "message"),
    [
        ({"settings.json": "{}"}, 2, "has no metrics.jsonl"),
        ({"metrics.jsonl": ""}, 1, "no step has ended"),
        ({"metrics.jsonl": "x\n{}\n"}, 1, "line 1 of metrics.jsonl is not JSON"),
        (
            {"metrics.jsonl": '{"step": 0, "loss": 1}', "report.json": '{"steps": 1}', "timeline.json": "{}"},
            1,
            "no trace of Penstock's",
        ),
    ],
)
def test_what_cannot_be_reported_is_said(
    tmp_path: Path, files: dict[str, str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ps.save(ps.build("1f1b", 2, 2), tmp_path / "schedule.txt")
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert main(["report", str(tmp_path)]) == code
    assert message in capsys.readouterr().err


def test_a_trace_is_read_as_the_timelines_that_it_shows() -> None:
    schedule = ps.build("amdp", 4, 8, window=4)
    given = [ps.simulate(schedule, ps.Costs.uniform(4, f=3.25, b=7)), ps.simulate(schedule)]
    read = from_perfetto(to_perfetto(given), schedule)
    assert [each.bubble_ratio for each in read] == pytest.approx([each.bubble_ratio for each in given])
    for one, other in zip(read, given, strict=True):
        assert sorted((t.rank, t.op, t.start, t.end) for t in one.ops) == sorted(
            (t.rank, t.op, t.start, t.end) for t in other.ops
        )
    assert from_perfetto(to_perfetto(given), ps.build("1f1b", 4, 4)) == []


def test_a_trace_with_the_reductions_of_replicas_is_read_with_the_schedule_of_one() -> None:
    plain = ps.build("1f1b", 2, 4)
    ran = ps.simulate(ps.passes.add_reductions(plain, asynchronous=False), ps.Costs.uniform(2, f=2))
    [read] = from_perfetto(to_perfetto(ran), plain)
    assert len(read.ops) == len(ran.ops) == plain.num_ops + 2
    assert "REDUCE" in ps.draw.to_svg(read)
