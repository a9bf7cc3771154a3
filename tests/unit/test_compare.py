"""`penstock compare`: the same for all, then side by side."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.cli import main
from penstock.train import checks
from penstock.train.compare.contenders import contenders
from penstock.train.compare.result import Comparison, ComparisonRow, SimulatedResult, TrainingResult, simulated
from penstock.train.compare.run import headline
from penstock.train.settings import Settings
from report_cases import Page
from train_runs import losses

pytestmark = pytest.mark.unit

SMALL = "--preset nano --depth 6 --width 16 --heads 2 --context 16 --batch 8 --microbatches 4 --threads 1"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text, and costs that are not of a preset."""
    folder = tmp_path_factory.mktemp("compare")
    draw = random.Random(1)
    (folder / "text.txt").write_text(" ".join(draw.choice(["rank", "stage", "op", "window"]) for _ in range(2000)))
    (folder / "costs.json").write_text('{"f": 1, "i": 1, "w": 1}')
    (folder / "stages.json").write_text('{"f": [1, 1, 1, 1], "i": 1, "w": 1}')
    ps.build("zb-h1", 4, 6).save(folder / "mine.json")
    ps.build("zb-h1", 4, 6).save(folder / "1f1b.json")
    ps.build("amdp", 4, 16, window=8).save(folder / "pass.json")
    return folder


@pytest.fixture
def compare(place: Path, capfd: Any) -> Callable[..., tuple[int, str, str]]:
    """Compares in this process; returns exit code, stdout and stderr."""

    def call(line: str) -> tuple[int, str, str]:
        threads = torch.get_num_threads()
        try:
            code = main(["compare", *line.format(place=place).split()])
        finally:
            torch.set_num_threads(threads)
        out, err = capfd.readouterr()
        return code, out, err

    return call


@pytest.mark.slow
def test_side_by_side(compare: Any, tmp_path: Path) -> None:
    """The numbers are those of a run of each, of the simulator, and of the order."""
    out = tmp_path / "out"
    names = "1f1b amdp pipedream-2bw"
    line = f"{names} {SMALL} --data {{place}}/text.txt --costs {{place}}/costs.json --steps 4 --out {out} --json"
    code, printed, err = compare(f"{line} --max-mismatch 1")
    assert (code, err) == (0, "")
    assert printed.count("\n") == 1
    found = json.loads(printed)
    assert (found["steps"], found["ranks"], found["microbatches"], found["batch"]) == (4, 4, 4, 8)
    rows = {row["name"]: row for row in found["schedules"]}
    assert list(rows) == names.split()
    for name, row in rows.items():
        report = json.loads((out / name / "report.json").read_text())
        assert row["trained"]["loss"] == report["loss"]
        assert row["trained"]["losses"] == losses(out / name)
        assert row["trained"]["train_loss"] == losses(out / name)[-1]  # a tenth of four steps is the last
        assert row["trained"]["state"] == max(sum(rank.values()) for rank in report["state"])
        assert row["trained"]["num_updates"] == 4
        assert row["trained"]["mismatch"] == row["simulated"]["mismatch"] == (0 if name == "1f1b" else 1)
        schedule = ps.load(out / name / "schedule.txt")
        t = ps.simulate(schedule, ps.Costs.uniform(4))
        assert row["simulated"]["microbatches_per_second"] == schedule.num_microbatches / t.makespan * 1e3
        assert row["simulated"]["busy"] == pytest.approx(1 - t.bubble_ratio)
        assert row["simulated"]["milliseconds"] == t.makespan / row["drain_every"]
        assert row["simulated"]["memory"] is None  # these costs say nothing of weights
    assert rows["1f1b"]["relative"] == {"speedup": 1.0, "loss": 1.0, "train_loss": 1.0}
    assert rows["amdp"]["relative"]["speedup"] > 1
    assert rows["pipedream-2bw"]["simulated"]["versions"] == 2
    page = Page((out / "compare.html").read_text())
    assert [row[0] for row in page.tables["Side by side"]] == ["schedule", *names.split()]
    assert page.data == {name: value for name, value in found.items() if name != "files"}
    labels = [attrs.get("aria-label") or "" for tag, attrs in page.tags if tag == "svg"]
    # Throughput, memory, one step, four steps and the loss twice, on a screen and on a phone.
    assert len(labels) == 2 * 6
    assert all(sum(name in label for label in labels) >= 6 for name in rows)
    loaded = re.findall(r"https?:[^\s\"']*", (out / "compare.html").read_text())
    assert set(loaded) <= {"http://www.w3.org/2000/svg"}
    assert all(Path(path).exists() for path in found["files"].values())
    assert set(found["files"]) == {"json", "page", "loss-by-update", "loss-by-time"}
    assert compare(line)[0] == 2  # what is there is not written over


def test_for_people(compare: Any) -> None:
    code, out, err = compare("spectrain 1f1b --steps 0 --costs gpt2-14b --microbatches 8")
    assert (code, err) == (0, "")
    head, first, second, _, *told = out.splitlines()
    assert re.split("  +", head.strip())[:5] == ["schedule", "microbatches/s", "speed", "busy", "memory MiB"]
    assert re.split("  +", first)[0] == "spectrain"
    assert re.split("  +", first)[2] == "1.00x"
    assert re.split("  +", second)[5:7] == ["0", "1"]
    assert told[0] == "4 ranks run 8 microbatches per step, in batches of 16; nothing was trained"
    assert "asynchronous schedules drain every 8 steps, and the time that takes is counted" in told
    assert "note  microbatches that an update gathers: 1 in spectrain" in told


def test_files_beside_names(compare: Any) -> None:
    """Ranks and microbatches are the file's, and the file is what is simulated."""
    code, out, err = compare("zb-h1 {place}/mine.json gpipe --steps 0 --costs gpt2-7b --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["ranks"], found["microbatches"]) == (4, 6)
    rows = {row["name"]: row["simulated"] for row in found["schedules"]}
    assert list(rows) == ["zb-h1", "mine", "gpipe"]
    assert rows["mine"] == rows["zb-h1"] != rows["gpipe"]


def test_a_file_with_updates_is_a_pass(compare: Any) -> None:
    code, out, err = compare("1f1b {place}/pass.json --steps 0 --costs gpt2-7b --microbatches 8 --json")
    assert (code, err) == (0, "")
    first, own = json.loads(out)["schedules"]
    assert (first["drain_every"], own["drain_every"]) == (1, 2)
    assert own["simulated"]["mismatch"] == 1


def test_links_and_dispatch_are_those_of_the_simulation(compare: Any) -> None:
    names, costs = ("1f1b", "zb-v"), "--costs gpt2-7b"
    line = f"{' '.join(names)} --steps 0 {costs} --microbatches 8 --link 1:2=20 --default-delay 1 --dispatch hinted"
    code, out, err = compare(f"{line} --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["links"], found["dispatch"]) == (["1:2=latency:20ms"], "hinted")
    for row in found["schedules"]:
        schedule = ps.build(row["name"], 4, 8)
        of_stages = ps.cost.costs_preset("gpt2-7b", schedule.num_stages)
        links = ps.Links({(1, 2): 20.0}, default=1.0)
        t = ps.simulate(schedule, of_stages, links, dispatch="hinted")
        assert row["simulated"]["milliseconds"] >= t.makespan > ps.simulate(schedule, of_stages).makespan
        held = ps.footprint(schedule, of_stages, links, dispatch="hinted")
        assert row["simulated"]["memory"] == held.peak
    told = compare(line)[1]
    assert "links 1:2=latency:20ms, all others latency:1ms and hinted dispatch" in told


def test_what_takes_no_time_is_told(compare: Any, place: Path) -> None:
    ps.build("distmm", 4, 8).save(place / "towers.json")
    code, out, err = compare("{place}/towers.json --steps 0 --costs {place}/costs.json --microbatches 8")
    assert (code, err) == (0, "")
    assert "note  simulated in 0 ms, as the costs do not name them: GATHER of towers" in out
    assert "0 ms" not in compare("1f1b --steps 0 --costs {place}/costs.json")[1]


def test_who_fits(compare: Any) -> None:
    line = "1f1b gpipe zb-h1 zb-v --steps 0 --costs gpt2-7b --microbatches 12"
    code, out, err = compare(f"{line} --memory-limit 35GiB --json")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert found["memory_limit"] == 35 * 2**30
    fits = {row["name"]: row["fits"] for row in found["schedules"]}
    assert fits == {row["name"]: row["simulated"]["memory"] <= 35 * 2**30 for row in found["schedules"]}
    assert fits == {"1f1b": True, "gpipe": False, "zb-h1": True, "zb-v": False}
    assert "2 of 4 fit into 35,840.0 MiB, of which zb-h1 is the fastest" in compare(f"{line} --memory-limit 35GiB")[1]
    assert "none fits into 1,024.0 MiB" in compare(f"{line} --memory-limit 1GiB")[1]
    assert all(row["fits"] is None for row in json.loads(compare(f"{line} --json")[1])["schedules"])


@pytest.mark.slow
def test_costs_measured_here(compare: Any, tmp_path: Path) -> None:
    """Those of the model, with its updates and weights."""
    database = tmp_path / "known.sqlite"
    line = f"1f1b zb-v amdp {SMALL} --steps 0 --seconds 0.05 --database {database} --json"
    code, out, _ = compare(line)
    assert code == 0
    found = json.loads(out)
    for row in found["schedules"]:
        assert row["trained"] is None
        assert row["simulated"]["memory"] > row["simulated"]["activations"] > 0
        tokens = row["simulated"]["tokens_per_second"]
        assert tokens == pytest.approx(row["simulated"]["microbatches_per_second"] * 2 * 16)
    again = json.loads(compare(line)[1])
    assert again["schedules"] == found["schedules"]  # remembered


def test_headline_names_the_fastest_and_what_it_costs() -> None:
    def row(name: str, speed: float, loss: float | None) -> ComparisonRow:
        timeline = ps.simulate(ps.build("1f1b", 2, 2))
        learned = None if loss is None else TrainingResult(loss, loss, 2, 0, 8, [loss], [1], None)
        return ComparisonRow(name, 1, SimulatedResult(1.0, speed, 0.5, None, 2.0, 0, 1, timeline), learned)

    def of(*rows: ComparisonRow) -> str:
        return headline(Comparison(rows, "costs", 0, 4, 2, 2))

    assert of(row("a", 2.0, None)) == "a runs 2 microbatches/s."
    assert of(row("a", 2.0, None), row("b", 3.0, None)) == (
        "b is 1.50 times as fast as a: 3 microbatches/s against 2 microbatches/s."
    )
    assert of(row("a", 2.0, 4.0), row("b", 3.0, 4.1)) == (
        "b is 1.50 times as fast as a, and its validation loss is 2.5% higher."
    )
    assert of(row("a", 2.0, 4.0), row("b", 3.0, 4.0)).endswith("and its validation loss is the same.")
    assert of(row("a", 2.0, None), row("b", 1.0, None)) == "None is faster than a, which runs 2 microbatches/s."
    simulated = SimulatedResult(1.0, 1.0, 0.5, 3.0 * 2**20, 2.0, 0, 1, ps.simulate(ps.build("1f1b", 2, 2)))
    alone = Comparison([ComparisonRow("a", 1, simulated), ComparisonRow("b", 1, simulated)], "costs", 0, 4, 2, 2)
    assert headline(replace(alone, memory_limit=2.0**20)) == "None of them fits into 1.0 MiB."
    assert headline(replace(alone, memory_limit=4.0 * 2**20)).startswith("None that fits is faster than a")


def test_a_synchronous_step_ends_with_its_update() -> None:
    settings = Settings(schedule="1f1b", ranks=2, microbatches=4)
    plan = ps.build("1f1b", 2, 4)
    costs = ps.Costs.uniform(2).with_other({("U", 0): 3.0, ("U", 1): 5.0})
    found = simulated(settings, plan, costs)
    makespan = ps.simulate(plan, costs).makespan
    assert found.milliseconds == makespan + 5.0
    assert found.busy == pytest.approx((2 * 4 * 3 + 3 + 5) / (2 * (makespan + 5)))


def test_a_file_is_read_once_and_again_where_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: a comparison read it three times, and could be of three different schedules."""
    path = tmp_path / "mine.json"
    ps.save(ps.build("zb-h1", 4, 8), path)
    read: list[str] = []

    def load(source: str) -> ps.Schedule:
        read.append(source)
        return ps.load(source)

    monkeypatch.setattr(checks, "load_schedule", load)
    for _ in range(2):
        assert main(["compare", "1f1b", str(path), "--steps", "0", "--costs", "gpt2-7b", "--json"]) == 0
    assert read == [str(path)]
    ps.save(ps.build("zb-h2", 4, 12), path)
    assert contenders([str(path), "1f1b"], {})[1].microbatches == 12
    assert len(read) == 2


def test_options_of_schedules_could_not_be_given() -> None:
    """Each has those that it takes."""
    names, given = ["1f1b", "interleaved-1f1b", "zb"], {"num_stages": 16, "backward": "split", "warmup": [7, 5, 3, 1]}
    one, two, three = contenders(names, {"ranks": 4, "microbatches": 12, "schedule_options": given, "depth": 16})
    assert (one.stages, one.warmup, one.schedule_options) == (None, None, {})
    assert (two.stages, two.warmup, two.schedule_options) == (16, None, {"backward": "split"})
    assert (three.stages, list(three.warmup or ()), three.schedule_options) == (None, [7, 5, 3, 1], {})
    assert two.replica_schedule() == ps.build("interleaved-1f1b", 4, 12, num_stages=16, backward="split")
    assert three.replica_schedule() == ps.build("zb", 4, 12, warmup=[7, 5, 3, 1])


def test_all_train_as_many_steps() -> None:
    found = contenders(["1f1b", "amdp", "vnag"], {"steps": 5, "drain_every": 2, "window": 8, "microbatches": 8})
    assert [settings.steps for settings in found] == [6, 6, 6]
    assert [settings.drain_every for settings in found] == [None, 2, 2]
    assert [settings.optimizer for settings in found] == ["AdamW", "AdamW", "NAdam"]
    same = contenders(["1f1b", "pipedream"], {"optimizer": "SGD"})
    assert [settings.optimizer for settings in same] == ["SGD", "SGD"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("1f1b 1f1b", ["1f1b is named twice"]),
        ("1f1b zbv", ["no schedule named 'zbv'", "zb-v"]),
        ("1f1b mine.json", ["mine.json: No such file"]),
        ("1f1b {place}/mine.json", ["mine.json is for 4 ranks and 6 microbatches", "has 4 and 4"]),
        ("1f1b {place}/1f1b.json", ["1f1b is named twice"]),
        ("1f1b --costs {place}/costs.json --memory-limit 1GiB", ["do not say what weights take", "--memory-limit"]),
        ("1f1b --memory-limit 8", ["--memory-limit 8 has no unit", "35GiB"]),
        ("1f1b --memory-limit much", ["--memory-limit much", "2GiB"]),
        ("1f1b --link 0:9=3", ["link 0:9", "0 to 3"]),
        ("1f1b --dispatch best", ["best"]),
        ("1f1b zb-v --window 4", ["--window", "none is compared"]),
        ("1f1b zb-v --option backward=split", ["--option backward", "none of 1f1b, zb-v takes it", "hanayo"]),
        ("1f1b interleaved-1f1b --option backward=no", ["backward is 'no'; give 'whole' or 'split'"]),
        ("1f1b amdp --ranks 3", ["amdp", "got 3"]),
        ("1f1b xpipe --optimizer SGD", ["--optimizer SGD", "torch.optim.Adam"]),
        ("--costs {place}/costs.json zb-v 1f1b", ["costs.json has times per stage", "1f1b has 4 stages"]),
        ("--costs {place}/stages.json 1f1b zb-v", ["stages.json has times per stage", "zb-v has 8"]),
        ("--costs {place}/stages.json zb-v 1f1b", ["field 'f' has 4 entries; give one per stage, 8"]),
        ("--costs nowhere", ["nowhere", "neither a file nor a preset"]),
        ("--batch 3", ["batch of 3"]),
        ("--steps -1", ["--steps"]),
        ("--preset tny", ["no preset named 'tny'"]),
        ("--depth 2", ["8 stages", "4 layers"]),
        ("--data nowhere.txt", ["nowhere.txt"]),
    ],
)
def test_mistakes(compare: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: list[str]) -> None:
    """One or two lines, as text and as JSON; nothing is written."""
    monkeypatch.chdir(tmp_path)
    line = f"{SMALL} --data {{place}}/text.txt --costs gpt2-7b --out out {line}"
    code, out, err = compare(line)
    assert (code, out) == (2, "")
    told = err.removeprefix("penstock: ").splitlines()
    assert len(told) <= 2
    for word in words:
        assert word in "\n".join(told)
    code, out, err = compare(f"{line} --json")
    assert (code, err) == (2, "")
    assert json.loads(out)["error"]["message"].splitlines() == told
    assert list(tmp_path.iterdir()) == []
