"""Profiles of torch's own schedules, recorded with ops of known lengths: their ops, their waits, and what they lack.

`experiments/torch_profiles.py` recorded them in `tests/golden/torch_profiles`; `facts.json` there has the true
lengths.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.analyze import analyze_trace
from penstock.cli import main
from penstock.formats.traces import RunTrace, TraceError, read_trace

pytestmark = pytest.mark.unit
PROFILES = Path(__file__).parents[2] / "golden" / "torch_profiles"
FACTS = json.loads((PROFILES / "facts.json").read_text(encoding="utf-8"))
NAMED = sorted(FACTS.keys() - {"1f1b"})
NEAR = 0.05
"""The share by which an op may differ from its true length."""
CALLS = 1.0
"""Ms that torch's own calls around an op take, of ops that do nothing."""


def contents(name: str) -> dict[str, dict[str, Any]]:
    """The recorded traces by file name."""
    paths = sorted((PROFILES / name).glob("*.json.gz"))
    return {path.name: json.loads(gzip.decompress(path.read_bytes())) for path in paths}


def written(folder: Path, traces: dict[str, dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    for name, trace in traces.items():
        (folder / name).write_bytes(gzip.compress(json.dumps(trace).encode()))
    return folder


def true_length(name: str, kind: str, stage: int) -> float:
    facts = FACTS[name]
    num_stages = len(facts["ms"]["F"])
    if stage == 0 and kind in ("I", "W"):  # torch leaves all of the first stage's backward to W
        return float(facts["ms"]["B"][0]) if kind == "W" else 0.0
    loss = facts["loss"] if kind == "F" and stage == num_stages - 1 else 0.0
    return float(facts["ms"][kind][stage] + loss)


def wrong_lengths(trace: RunTrace, name: str) -> list[str]:
    found = []
    for at in range(len(trace)):
        kind, stage = trace.kinds[trace.kind[at]].kind, int(trace.stage[at])
        if kind:
            took, true = trace.end[at] - trace.start[at], true_length(name, kind, stage)
            if abs(took - true) > max(NEAR * true, CALLS):
                found.append(f"{stage}{kind}{trace.microbatch[at]}: {took:.2f} for {true:.2f} ms")
    return found


def num_ops(name: str) -> int:
    facts = FACTS[name]
    halves = facts["schedule"] in ("ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")
    pipelines = facts["steps"] * facts["replicas"] * len(facts["ms"]["F"])
    return int(pipelines * facts["microbatches"] * (3 if halves else 2))


@pytest.mark.parametrize("name", NAMED)
def test_ops_have_their_true_lengths_and_the_step_is_simulated_from_them(name: str) -> None:
    facts = FACTS[name]
    trace = read_trace(PROFILES / name)
    assert (trace.num_replicas, trace.num_ranks) == (facts["replicas"], facts["ranks"])
    assert trace.num_stages == len(facts["ms"]["F"])
    compute = trace.has(lambda kind: bool(kind.kind))
    if facts["schedule"] != "ScheduleDualPipeV":  # which splits only some backwards
        assert compute.sum() == num_ops(name)
    assert wrong_lengths(trace, name) == []

    found = analyze_trace(trace)
    assert found.replay_error < NEAR
    assert found.fit is not None
    for step, measured in enumerate(found.run.measured.tolist()):
        longest = max(
            ps.simulate(found.fit.schedule, found.fit.costs(step, replica), links=found.fit.links).makespan
            for replica in range(facts["replicas"])
        )
        assert longest == pytest.approx(measured, rel=NEAR)


@pytest.mark.parametrize("name", ["gpipe", "interleaved", "zbv"])
def test_waits_inside_ranges_are_waits(name: str) -> None:
    """The ranks' idle time is what is left of the step, though torch's ranges cover nearly all of it."""
    trace = read_trace(PROFILES / name)
    facts = FACTS[name]
    compute = trace.has(lambda kind: bool(kind.kind))
    busy = float((trace.end - trace.start)[compute].sum()) / facts["steps"]
    stages = range(len(facts["ms"]["F"]))
    letters = ("F", "I", "W") if name == "zbv" else ("F", "B")
    true = facts["microbatches"] * sum(true_length(name, kind, stage) for stage in stages for kind in letters)
    assert busy == pytest.approx(true, rel=NEAR)
    covered = sum(
        event["dur"] / 1e3
        for content in contents(name).values()
        for event in content["traceEvents"]
        if event.get("cat") == "user_annotation" and event["name"].startswith(("Forward", "Backward", "PP:"))
    )
    assert covered / facts["steps"] > 1.15 * true


@pytest.mark.parametrize("name", ["gpipe", "gpipe-loss", "looped-bfs", "interleaved", "interleaved-zb", "zbv"])
def test_without_records_of_receives_an_op_begins_when_its_message_was_sent(name: str, tmp_path: Path) -> None:
    traces = contents(name)
    for trace in traces.values():
        trace["traceEvents"] = [event for event in trace["traceEvents"] if "gloo:" not in event.get("name", "")]
    found = analyze_trace(read_trace(written(tmp_path / "run", traces)))
    table = found.run.table
    assert any("their ranges hold the wait" in note for note in found.notes)
    letters, last = table.letters, table.trace.num_stages - 1
    for op in range(table.num_ops):
        kind, stage = str(letters[op]), int(table.stage[op])
        if kind and not (name == "gpipe-loss" and (kind, stage) == ("F", last)):  # the loss lies outside of the range
            true = true_length(name, kind, stage)
            assert found.run.own[:, op] == pytest.approx(true, rel=NEAR, abs=2 * CALLS)


def test_the_schedules_are_known_by_their_names() -> None:
    names = {name: analyze_trace(read_trace(PROFILES / name)).fit for name in ("gpipe", "interleaved", "zbv")}
    assert {name: fit and fit.name for name, fit in names.items()} == {
        "gpipe": "gpipe", "interleaved": "interleaved-1f1b", "zbv": "zb-v",
    }  # fmt: skip


def test_the_command_reads_one_file_for_each_rank(capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(PROFILES / "gpipe" / f"rank{rank}.json.gz") for rank in range(3)]
    assert not main(["analyze", *files, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["num_ranks"], found["num_microbatches"], found["num_steps"]) == (3, 4, 2)
    assert found["causes"][0]["kind"] == "stage"
    assert found["causes"][0]["names"] == {"stage": 2}
    ms = FACTS["gpipe"]["ms"]
    assert found["op_ms"] == {kind: pytest.approx(ms[kind], rel=NEAR) for kind in "FB"}
    busy = 4 * sum(ms["F"] + ms["B"]) / 3
    assert found["bubble_ratio"] == pytest.approx(1 - busy / found["step_ms"]["measured"], abs=0.02)


def test_a_folder_may_hold_other_json_beside_the_traces(tmp_path: Path) -> None:
    folder = written(tmp_path / "run", contents("gpipe"))
    (folder / "config.json").write_text('{"ranks": 3}')
    assert wrong_lengths(read_trace(folder), "gpipe") == []


@pytest.mark.parametrize("name", ["gpipe", "zbv", "1f1b-stacks"])
def test_clocks_of_machines_that_differ_change_no_op(name: str, tmp_path: Path) -> None:
    traces = contents(name)
    for rank, trace in enumerate(traces.values()):
        trace["baseTimeNanoseconds"] += (0, 250, -90)[rank] * 1_000_000
    trace = read_trace(written(tmp_path / "run", traces))
    assert wrong_lengths(trace, name) == []
    found, right = analyze_trace(trace), analyze_trace(read_trace(PROFILES / name))
    assert found.run.measured == pytest.approx(right.run.measured, rel=0.01)


def test_files_that_do_not_say_their_rank_have_it_in_their_names(tmp_path: Path) -> None:
    traces = {f"trace{rank}.json": trace for rank, trace in enumerate(contents("gpipe").values())}
    for trace in traces.values():
        del trace["distributedInfo"]
    assert wrong_lengths(read_trace(written(tmp_path / "run", traces)), "gpipe") == []


def test_a_pipelines_missing_file_is_named(tmp_path: Path) -> None:
    traces = contents("gpipe")
    del traces["rank2.json.gz"]
    with pytest.raises(
        TraceError, match=r"pipeline of processes 0, 1, 2 has no file with forwards or backwards of 2"
    ):
        read_trace(written(tmp_path / "run", traces))


def test_one_of_two_pipelines_is_read_and_the_others_absence_said(tmp_path: Path) -> None:
    traces = {name: trace for name, trace in contents("gpipe-replicas").items() if name[4] in "13"}
    trace = read_trace(written(tmp_path / "run", traces))
    assert (trace.num_replicas, trace.num_ranks) == (1, 2)
    assert wrong_lengths(trace, "gpipe-replicas") == []
    assert any("2 of the job's 4 processes have no file here" in note for note in trace.notes)


def test_a_schedule_that_names_no_op_is_refused_with_the_line_to_add() -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(PROFILES / "1f1b")
    said = str(caught.value)
    assert "torch's Schedule1F1B gives its ops no names" in said
    assert "torch.profiler.profile(..., with_stack=True)" in said
    assert 'with torch.profiler.record_function(f"Forward {m}"):' in said
    assert 'with torch.profiler.record_function(f"Backward {m}"):' in said


def test_forwards_that_are_named_alone_lack_backwards(tmp_path: Path) -> None:
    traces = contents("1f1b-ranges")
    for trace in traces.values():
        trace["traceEvents"] = [each for each in trace["traceEvents"] if not each["name"].startswith("Backward")]
    with pytest.raises(TraceError, match="no names of backwards"):
        read_trace(written(tmp_path / "run", traces))


@pytest.mark.parametrize(
    ("forward", "backward"),
    [
        ("F{m}", "B{m}"),
        ("fwd {m}", "bwd {m}"),
        ("forward_mb{m}", "backward_mb{m}"),
        ("Stage {s} forward microbatch {m}", "Stage {s} backward microbatch {m}"),
        ("fwd[{m}] stage={s}", "bwd[{m}] stage={s}"),
        ("{s}F{m}", "{s}B{m}"),
        ("stage{s}_mb{m}_fwd", "stage{s}_mb{m}_bwd"),
        ("FW {m}", "BW {m}"),
        ("forward: {m} (warm)", None),
    ],
)
def test_ranges_of_ones_own_are_read(forward: str, backward: str | None, tmp_path: Path) -> None:
    traces = contents("1f1b-ranges")
    for rank, trace in enumerate(traces.values()):
        for event in trace["traceEvents"]:
            word, _, microbatch = event["name"].partition(" ")
            form = {"Forward": forward, "Backward": backward or "B {m}"}.get(word)
            if form:
                event["name"] = form.format(s=rank, m=microbatch)
    folder = written(tmp_path / "run", traces)
    if backward is None:
        with pytest.raises(TraceError, match="no names of forwards that"):
            read_trace(folder)
        return
    assert wrong_lengths(read_trace(folder), "1f1b-ranges") == []


def test_a_backward_with_its_halves_inside_is_its_halves(tmp_path: Path) -> None:
    traces = contents("gpipe")
    for trace in traces.values():
        inner: list[dict[str, Any]] = []
        for event in trace["traceEvents"]:
            if event["name"].startswith("autograd::engine::evaluate_function: _Slow"):
                event |= {"cat": "user_annotation", "name": "IW"[len(inner) % 2]}
                inner.append(event)
        for number, event in enumerate(sorted(inner, key=lambda each: float(each["ts"]))):
            event["name"] = f"{'IW'[number % 2]}{number // 2 % 4}"
    trace = read_trace(written(tmp_path / "run", traces), preset="ranges")
    letters = [trace.kinds[kind].kind for kind in trace.kind]
    assert {letter: letters.count(letter) for letter in "FBIW"} == {"F": 24, "B": 0, "I": 24, "W": 24}
    for at, letter in enumerate(letters):
        if letter in ("I", "W"):
            true = FACTS["gpipe"]["ms"][letter][trace.stage[at]]
            assert trace.end[at] - trace.start[at] == pytest.approx(true, rel=NEAR)


def test_steps_are_told_apart_where_neither_marks_nor_names_say_them(tmp_path: Path) -> None:
    traces = contents("1f1b-stacks")
    for trace in traces.values():
        trace["traceEvents"] = [each for each in trace["traceEvents"] if "ProfilerStep" not in each["name"]]
    trace = read_trace(written(tmp_path / "run", traces))
    assert (trace.steps.tolist(), sorted(set(trace.microbatch.tolist()))) == ([0, 1], [-1, 0, 1, 2, 3, 4])
    assert wrong_lengths(trace, "1f1b-stacks") == []


def test_a_range_inside_another_of_its_op_counts_once(tmp_path: Path) -> None:
    traces = contents("interleaved")
    for trace in traces.values():
        events = trace["traceEvents"]
        for event in [each for each in events if each["name"].startswith("PP:") and each["name"][4] in "FB"]:
            word = "Forward" if event["name"][4] == "F" else "Backward"
            inside = {"ts": event["ts"] + 5.0, "dur": event["dur"] - 10.0, "name": f"{word} {event['name'][5:]}"}
            events.append(event | inside)
    assert wrong_lengths(read_trace(written(tmp_path / "run", traces)), "interleaved") == []


def by_hand(folder: Path, *ranks: list[tuple[str, str, float, float]]) -> RunTrace:
    """A trace of events by rank: category, name, start and end in ms."""
    traces = {}
    for rank, rows in enumerate(ranks):
        events = [
            {"ph": "X", "cat": kind, "name": name, "ts": start * 1e3, "dur": (end - start) * 1e3, "pid": 1, "tid": 1}
            for kind, name, start, end in rows
        ]
        traces[f"rank{rank}.json"] = {"traceEvents": events}
    return read_trace(written(folder, traces))


def times(trace: RunTrace) -> dict[str, tuple[float, float]]:
    return {
        f"{trace.stage[at]}{trace.kinds[trace.kind[at]].kind}{trace.microbatch[at]}": (
            round(float(trace.start[at]), 3), round(float(trace.end[at]), 3),
        )
        for at in range(len(trace))
    }  # fmt: skip


def test_an_op_ends_when_it_sends_though_a_busy_machine_ends_its_range_late(tmp_path: Path) -> None:
    """There the other rank has the message before this one's call of send is over."""
    note, call = "user_annotation", "cpu_op"
    first = [
        (note, "Forward 0", 0.0, 30.0), (call, "aten::mm", 0.5, 9.5), (call, "c10d::send", 10.0, 29.0),
        (note, "gloo:send", 28.0, 70.0), (note, "Backward 0", 70.0, 110.0), (note, "gloo:recv", 71.0, 80.0),
    ]  # fmt: skip
    last = [
        (note, "Forward 0", 0.0, 25.0), (note, "gloo:recv", 1.0, 12.0), (note, "Backward 0", 30.0, 90.0),
        (call, "aten::mm", 31.0, 50.0), (call, "c10d::send", 60.0, 88.0), (note, "gloo:send", 87.0, 89.0),
    ]  # fmt: skip
    assert times(by_hand(tmp_path / "run", first, last)) == {
        "0F0": (0.0, 10.0), "0B0": (80.0, 110.0), "1F0": (12.0, 30.0), "1B0": (30.0, 60.0),
    }  # fmt: skip


def test_a_slow_first_message_makes_later_ones_no_slower_than_they_were(tmp_path: Path) -> None:
    """A message that nobody waited for was there when its op began, whatever its link takes in the median."""
    note = "user_annotation"
    first: list[tuple[str, str, float, float]] = []
    last: list[tuple[str, str, float, float]] = []
    for begin, slow in ((0.0, 300.0), (500.0, 0.2)):
        there = begin + 10 + slow
        first += [(note, "F0", begin, begin + 10), (note, "F1", begin + 10, begin + 20)]
        last += [(note, "F0", there, there + 10), (note, "F1", there + 10, there + 20)]
        last += [(note, "B0", there + 20, there + 40), (note, "B1", there + 40, there + 60)]
        first += [(note, "B0", there + 40.2, there + 60.2), (note, "B1", there + 60.2, there + 80.2)]
    found = analyze_trace(by_hand(tmp_path / "run", first, last))
    assert found.run.measured == pytest.approx([390.2, 90.4], abs=0.1)
    assert found.run.replayed == pytest.approx(found.run.measured, abs=0.1)


def test_a_late_send_is_no_loss(tmp_path: Path) -> None:
    note, call = "user_annotation", "cpu_op"
    rows = [
        (note, "PP:0F0", 0.0, 10.0), (note, "PP:0SEND_F0", 10.1, 20.0), (call, "c10d::send", 10.2, 19.9),
        (note, "gloo:send", 19.8, 60.0), (note, "PP:0B0", 30.0, 50.0), (note, "gloo:recv", 19.9, 40.0),
    ]  # fmt: skip
    assert times(by_hand(tmp_path / "run", rows)) == {"0F0": (0.0, 10.0), "0B0": (40.0, 50.0)}


def test_pairs_that_nothing_recorded_divides_are_told(tmp_path: Path) -> None:
    """On a GPU their forward was taken for a third of them without a word."""
    pair, gpu, note = "PP:(0F1;0B0)OVERLAP_F_B", "gpu_user_annotation", "user_annotation"
    rows = [(gpu, "PP:0F0", 0.0, 10.0), (gpu, pair, 10.0, 40.0), (gpu, "PP:0B1", 40.0, 60.0)]
    on_gpu = by_hand(tmp_path / "gpu", rows)
    assert times(on_gpu)["0B0"] == (20.0, 40.0)
    assert any("where they divide: 1; the forward is" in each for each in on_gpu.notes)
    began = ("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 18.0, 19.0)
    rows = [(note, "PP:0F0", 0.0, 10.0), (note, pair, 10.0, 40.0), began, (note, "PP:0B1", 40.0, 60.0)]
    on_cpu = by_hand(tmp_path / "cpu", rows)
    assert times(on_cpu)["0B0"] == (18.0, 40.0)
    assert not any("where they divide" in each for each in on_cpu.notes)


def test_the_streams_of_messages_on_a_gpu_hold_no_ops(tmp_path: Path) -> None:
    """torch writes a range's annotation for each stream of a GPU on which its kernels ran, also NCCL's."""
    traces = contents("gpipe")
    for trace in traces.values():
        device: list[dict[str, Any]] = []
        events = trace["traceEvents"]
        received = [each for each in events if each["name"] == "gloo:recv"]
        for event in [each for each in events if each["name"].startswith(("Forward", "Backward"))]:
            until = event["ts"] + event["dur"]
            waits = [each["ts"] + each["dur"] for each in received if event["ts"] < each["ts"] < until]
            begin = max([event["ts"], *waits])
            on_gpu = {"ph": "X", "cat": "gpu_user_annotation", "pid": 0, "name": event["name"]}
            device.append({**on_gpu, "tid": 7, "ts": begin, "dur": until - begin})
            device.append({**on_gpu, "tid": 22, "ts": event["ts"], "dur": event["dur"]})
        for tid, kernel in ((7, "gemm"), (22, "ncclDevKernel_SendRecv")):
            device.append({"ph": "X", "cat": "kernel", "name": kernel, "pid": 0, "tid": tid, "ts": 1e9, "dur": 1.0})
        trace["traceEvents"] = events + device
    trace = read_trace(written(tmp_path / "run", traces))
    assert wrong_lengths(trace, "gpipe") == []
    assert any("GPU" in note for note in trace.notes)


def test_the_hint_for_a_profile_of_a_pipeline_s_run_leads_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gave hints for torch.distributed.pipelining alone, and with_stack=True led to the same ones again."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with ps.Pipeline(model, ps.build("1f1b", 2, 2), loss_fn=nn.MSELoss()) as pipe:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], with_stack=True) as profile:
            pipe.step(torch.randn(4, 4), torch.randn(4, 4))
        profile.export_chrome_trace(str(tmp_path / "profile.json"))
        pipe.timeline().save(tmp_path / "run.json")
    assert main(["analyze", str(tmp_path / "profile.json")]) == 1
    assert 'A run of ps.Pipeline has a trace of its own: pipe.timeline().save("run.json").' in capsys.readouterr().err
    assert main(["analyze", str(tmp_path / "run.json"), "--json"]) == 0
