"""`penstock emulate`, ranks as threads: what it prints, keeps and refuses. No time is asserted."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from in_step import keep_in_step
from penstock.cli import main
from penstock.cli.emulate import with_message_cap
from penstock.train import start
from penstock.train.emulated import EmulatedJob, EmulatedRun, lost_pace
from penstock.train.folder import RunFolder
from penstock.train.report import Report, read_adaptation

pytestmark = pytest.mark.unit

Run = Callable[..., dict[str, Any]]
QUICK = "zb-h1 --in-process --ranks 2 --microbatches 3 --costs quick.json"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    costs = {"f": 2, "i": 2, "w": 2, "message_bytes": 5000}
    (tmp_path / "quick.json").write_text(json.dumps(costs))
    return tmp_path


@pytest.fixture
def run(place: Path, capfd: Any) -> Run:
    """Runs into place/run; returns the one JSON object it prints."""

    def call(options: str, given: str = QUICK) -> dict[str, Any]:
        assert main(f"emulate {given} --out run {options} --json".split()) == 0
        out, err = capfd.readouterr()
        assert err == ""
        value: dict[str, Any] = json.loads(out)
        return value

    return call


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_what_a_run_leaves(run: Run, place: Path) -> None:
    report = run("--steps 4 --link 0:1=latency:5ms")
    names = {path.name for path in (place / "run").iterdir()}
    assert {"settings.json", "schedule.txt", "schedule.svg", "metrics.jsonl", "report.json"} <= names
    assert {"timeline.html", "timeline.json", "control.jsonl", "iterations.jsonl"} <= names
    assert not names & {"checkpoints", "sample.txt"}
    rows = lines(place / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    schedule = ps.build("zb-h1", 2, 3)
    costs = ps.Costs.uniform(2, 2, 2, 2)
    expected = ps.simulate(schedule, costs, links=ps.Links({(0, 1): 5.0})).makespan
    for row in rows:
        assert row["simulated_ms"] == pytest.approx(expected)
        assert row["ms"] >= max(ps.simulate(schedule, costs).busy)
        assert 0 <= row["bubble"] < 1
        assert row["number"] == 0
    assert ps.load(place / "run" / "schedule.txt") == schedule
    assert json.loads((place / "run" / "report.json").read_text()) == report
    assert (report["steps"], report["interrupted"], report["adapted"]) == (4, False, False)
    assert report["simulated"] == pytest.approx(expected)
    assert report["median_error"] >= 0
    assert report["steered"]["decisions"] == []
    assert report["peaks"] == list(ps.simulate(schedule, costs).peak_activations)
    assert report["notices"][: report["said_before"]] in (
        ["link 0:1=latency:5.0ms was injected"], ["link 0:1=latency:5ms was injected"],
    )  # fmt: skip
    saved = json.loads((place / "run" / "settings.json").read_text())
    told = {"ranks": 2, "microbatches": 3, "steps": 4, "device": "emulated", "costs": "quick.json"}
    assert saved == {**saved, **told, "schedule": "zb-h1", "link": "0:1=latency:5ms", "dispatch": "frozen"}


def test_every_iteration_is_told(place: Path, capfd: Any) -> None:
    assert main(f"emulate {QUICK} --dispatch auto --steps 3 --out run".split()) == 0
    out, err = capfd.readouterr()
    told = [line for line in err.splitlines() if line.startswith("iteration")]
    assert [line.split()[1] for line in told] == ["1/3", "2/3", "3/3"]
    assert all("simulated" in line and line.endswith("plan 0") for line in told)
    assert "3 iterations of zb-h1, hinted, on 2 ranks" in out  # as fast as frozen, which "auto" tries after it
    assert "nothing is learned, so there is no loss" in out


def test_the_end_names_updates_and_the_simulated_speed(place: Path, capfd: Any) -> None:
    line = "amdp --in-process --ranks 2 --microbatches 8 --option window=4 --costs quick.json --steps 1 --out run"
    assert main(["emulate", *line.split()]) == 0
    shown = capfd.readouterr().out
    report = json.loads((place / "run" / "report.json").read_text())
    assert "updates    one every 4 microbatches, at most 1 update between F and B (proved)" in shown
    assert f"{8e3 / report['simulated']:.1f} simulated" in shown


def test_messages_are_cut_and_it_is_said(run: Run) -> None:
    report = run("--steps 1 --set message_cap=1KB --link 0:1=bandwidth:1MB/s")
    assert any("messages of more than 1KB" in notice for notice in report["notices"])
    whole, plan = ps.cost.costs_preset("gpt2-7b", 4), ps.build("zb", 4, 12)
    kept, is_cut = with_message_cap(whole, plan, "1GB")
    assert (tuple(kept.message_bytes), is_cut) == (tuple(whole.message_bytes), False)
    assert with_message_cap(whole, plan, "1MB")[1]
    costs = ps.Costs([2, 2], [2, 2], [2, 2], message_bytes=[1000, 1000])
    links = ps.Links.parse("0:1=bandwidth:1MB/s")
    assert report["simulated"] == pytest.approx(ps.simulate(ps.build("zb-h1", 2, 3), costs, links=links).makespan)


def test_a_preset_is_emulated(place: Path, capfd: Any) -> None:
    line = "zb --in-process --ranks 4 --microbatches 4 --costs gpt2-7b --stretch 0.1 --steps 1 --set message_cap=1KB"
    assert main(f"emulate {line} --out run --json".split()) == 0
    report = json.loads(capfd.readouterr().out)
    simulated = ps.simulate(ps.build("zb", 4, 4), ps.cost.costs_preset("gpt2-7b", 4))
    assert report["simulated"] == pytest.approx(simulated.makespan)
    assert (report["costs"], report["stretch"]) == ("gpt2-7b", 0.1)


def test_a_folder_with_a_run_is_left_alone(run: Run, place: Path, capfd: Any) -> None:
    run("--steps 1")
    assert main(["train", "--resume", "run"]) == 2
    assert "emulated devices learned nothing to go on from" in capfd.readouterr().err
    assert main(["train", "--device", "emulated", "--out", "other"]) == 2
    assert "penstock emulate" in capfd.readouterr().err
    assert main(f"emulate {QUICK} --out run".split()) == 2
    assert "holds a run; give another --out" in capfd.readouterr().err


@pytest.mark.slow
def test_a_slow_link_is_found_and_answered(run: Run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link turns late, the plan changes on all ranks, and the end says what was slow and what was decided."""
    keep_in_step(monkeypatch)
    report = run(
        "--steps 32 --adapt --transport direct --dispatch auto --link 2:3=latency:steps:0ms/0ms,300ms/60ms",
        "zb --in-process --ranks 4 --microbatches 8 --costs quick.json",
    )
    steered = report["steered"]
    assert steered["decisions"], (
        "a link that is thirty ops late is answered within 32 iterations, on a busy machine too"
    )
    first = steered["decisions"][0]
    assert first["ms_then"] < first["ms_now"]
    assert steered["spells"][0]["link"] == "2:3"
    rows = lines(place / "run" / "metrics.jsonl")
    numbers = [row["number"] for row in rows]
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 1
    slow = steered["links"]
    assert max(slow, key=lambda link: slow[link]) in ("2>3", "3>2")
    assert "link 2–3 was " in steered["headline"].lower()
    found = read_adaptation(place / "run")
    assert found is not None
    assert json.loads(json.dumps(found)) == steered


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "window"), [("amdp", 4), ("vnag", 1)])
def test_an_asynchronous_schedule_is_emulated_as_it_is(run: Run, place: Path, schedule: str, window: int) -> None:
    given = f"{schedule} --in-process --ranks 2 --microbatches 8 --option window={window} --costs quick.json"
    report = run("--steps 2", given)
    built = ps.load(place / "run" / "schedule.txt")
    assert (report["num_microbatches"], built.num_microbatches, report["steps"]) == (8, 8, 2)
    assert (report["window"], report["dispatch"]) == (window, "frozen")
    assert report["mismatch"] == max(ps.schedule.count_mismatch(built).values()) == 1


@pytest.mark.parametrize(("given", "units"), [("4", 4.0), ("8GB", None), ("1GiB", None)])
def test_host_memory_is_activations_or_bytes(
    given: str, units: float | None, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[EmulatedJob] = []
    monkeypatch.setattr(start, "run_job", lambda job: jobs.append(job) or 0)
    line = f"zb --ranks 4 --microbatches 4 --costs gpt2-7b --adapt --set host_memory={given} --out run"
    assert main(["emulate", *line.split()]) == 0
    largest = max(ps.cost.costs_preset("gpt2-7b", 4).activation)
    assert jobs[0].host_memory == (units * largest if units else {"8GB": 8e9, "1GiB": 2**30}[given])


BAD: dict[str, tuple[str, list[str]]] = {
    "unknown preset": ("--costs gpt2-8b", ["costs 'gpt2-8b'", "neither a file nor a preset", "did you mean gpt2-7b"]),
    "preset with a wrong option": ("--costs gpt2-7b:gpus=4", ["no option 'gpus'"]),
    "costs that are no costs": ("--costs bad.json", ["bad.json", "not JSON"]),
    "too many stages": ("--costs gpt2-7b --ranks 99 --microbatches 200", ["99 stages: it has 24 layers"]),
    "unknown link": ("--link 0:9=latency:3ms", ["link 0:9: ranks go from 0 to 1"]),
    "negative delay": ("--link 0:1=latency:-3ms", ["'-3ms'", "at least 0"]),
    "a trace with gaps": ("--link 0:1=latency:trace:gaps.txt", ["gaps.txt, line 2", "is a gap"]),
    "a missing trace": ("--link 0:1=latency:trace:nowhere.txt", ["nowhere.txt", "No such file"]),
    "stretch": ("--stretch 0", ["stretch is 0", "above 0"]),
    "cap": ("--set message_cap=lots", ["--set message_cap lots", "2GiB"]),
    "steps": ("--steps 0", ["steps is 0", "at least 1"]),
    "transport": ("--transport smoke", ["no transport 'smoke'", "host, gloo, direct or delegate"]),
    "nccl": ("--transport nccl", ["no transport 'nccl'"]),
    "delegates between threads": ("--transport delegate", ["--transport delegate is between processes"]),
    "gloo between threads": ("--transport gloo", ["--transport gloo is between processes", "--in-process"]),
    "store without adapting": ("--set store=redis://localhost:6379", ["add --adapt"]),
    "host memory without adapting": ("--set host_memory=4", ["add --adapt"]),
    "no store": ("--adapt --set store=localhost", ["write redis://HOST:PORT"]),
    "host memory in words": ("--adapt --set host_memory=much", ["host_memory 'much'", "activations, like 4"]),
    "host memory in bytes": ("--adapt --set host_memory=8GB", ["how many bytes an activation has", "like 4"]),
    "dispatch": ("--dispatch eager", ["eager"]),
    "a schedule without a size": ("--ranks 0", ["0"]),
    "a file in the way": ("--out quick.json", ["quick.json", "--out"]),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD.keys())
def test_a_mistake_is_told(options: str, words: list[str], place: Path, capfd: Any) -> None:
    (place / "bad.json").write_text("{")
    (place / "gaps.txt").write_text("0 10\n100 -\n")
    before = sorted(place.rglob("*"))
    assert main(f"emulate {QUICK} --out run {options}".split()) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith("penstock: ")
    assert len(err.splitlines()) <= 2, err
    assert all(word in err for word in words), err
    assert sorted(place.rglob("*")) == before


def test_a_redis_that_refuses(place: Path, capfd: Any) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, and nobody listens: it refuses
        address = f"redis://127.0.0.1:{taken.getsockname()[1]}"
        assert main(f"emulate {QUICK} --out run --adapt --set store={address}".split()) == 2
    err = capfd.readouterr().err
    assert "--set store" in err
    assert address.removeprefix("redis://") in err
    assert not (place / "run").exists()


def test_a_run_in_which_the_machine_lost_the_pace_says_so() -> None:
    assert lost_pace(104.0, 100.0) == []
    (notice,) = lost_pace(560.0, 85.0)
    assert notice.startswith(
        "an iteration took 560 ms where 85 ms were simulated: this machine did not keep the pace"
    )


@pytest.mark.parametrize("adapts", [False, True])
def test_an_emulated_run_that_delegates_nothing_was_given_delegates(
    adapts: bool, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes then sent by gloo, where a run that trains has shared memory."""
    jobs: list[EmulatedJob] = []
    monkeypatch.setattr(start, "run_job", lambda job: jobs.append(job) or 0)
    assert main(f"emulate {QUICK} --out run {'--adapt' if adapts else ''}".split()) == 0
    with EmulatedRun(jobs[0])._pipeline() as pipe:
        assert pipe._choice.has_delegates == adapts


def test_assumed_costs_are_named_and_what_to_give_is_a_note(run: Run) -> None:
    report = run("--steps 1", "zb-h1 --in-process --ranks 2 --microbatches 3")
    assert report["costs"] == "F = I = W = 1 ms per stage, 1 ms for each rank's share of the model"
    assert report["notices"][0] == "costs were assumed; give --f, --i, --w or --costs"


def test_it_does_not_offer_to_resume_a_run_that_learned(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "run" / "checkpoints").mkdir(parents=True)
    assert main(f"emulate {QUICK} --out run".split()) == 2
    assert capsys.readouterr().err == "penstock: run holds a run; give another --out\n"


def test_a_reader_that_has_left_is_no_failure_of_the_rank_that_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with `penstock train | head`: the first rank prints the report, behind the command line's back."""
    reads, writes = os.pipe()
    os.close(reads)
    values = {"schedule": "1f1b", "dispatch": "frozen", "num_ranks": 2, "steps": 1, "interrupted": False}
    more = {"seconds": 1.0, "notices": [], "said_before": 0, "steered": None, "details": {}, "pace": "", "rows": []}
    report = Report(folder=RunFolder(tmp_path), **values, **more)
    with os.fdopen(writes, "w") as nobody:
        monkeypatch.setattr(sys, "stdout", nobody)
        report.show(as_json=False)
        print("more", flush=True)
