"""Profiles of torch, Megatron, TorchTitan, DeepSpeed and Penstock, and tables, are read into the same run."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.analyze import analyze_trace
from penstock.analyze.page import headline
from penstock.draw import save_picture
from penstock.formats.traces import RunTrace, TraceError, read_trace
from penstock.simulation import Timeline

pytestmark = pytest.mark.unit


def timeline(seed: int = 0, name: str = "1f1b", ranks: int = 3, num: int = 5) -> Timeline:
    costs = ps.Costs(f=[4.0 + seed, 5, 6], i=[4, 4, 4], w=[3, 3, 3], uneven=[1, 1.5, 0.7, 1.2, 0.8])
    return ps.simulate(ps.build(name, ranks, num), costs, links=ps.Links(default=0.5))


def profile(folder: Path, runs: list[Timeline], name_of: Any, *, gpu: bool = False, steps: bool = True) -> Path:
    """One file per rank, as torch's profiler writes them, with each run as a step."""
    for rank in range(runs[0].num_ranks):
        events: list[dict[str, Any]] = []
        for number, run in enumerate(runs):
            origin = 1000.0 * number
            if steps:
                events.append(
                    {"ph": "X", "name": f"ProfilerStep#{number + 3}", "cat": "user_annotation", "pid": 7, "tid": 1,
                     "ts": origin * 1e3, "dur": 999e3}
                )  # fmt: skip
            for op in run.rows[rank]:
                event = {"ph": "X", "name": name_of(op.op), "cat": "user_annotation", "pid": 7, "tid": 1}
                events.append({**event, "ts": (origin + op.start) * 1e3, "dur": (op.end - op.start) * 1e3})
                events.append({**event, "name": "aten::mm", "ts": (origin + op.start) * 1e3, "dur": 10.0})
                if gpu:  # the GPU runs it later, and for longer than the CPU takes to launch it
                    events[-2]["dur"] = 50.0
                    real = {**event, "cat": "gpu_user_annotation", "pid": 0, "tid": 20}
                    events.append({**real, "ts": (origin + op.start) * 1e3, "dur": (op.end - op.start) * 1e3})
        value = {"distributedInfo": {"rank": rank, "world_size": runs[0].num_ranks}, "traceEvents": events}
        folder.mkdir(exist_ok=True)
        with gzip.open(folder / f"rank{rank}.json.gz", "wt") as file:
            json.dump(value, file)
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Changes what each file of a profile holds."""
    for path in folder.iterdir():
        value = json.loads(gzip.decompress(path.read_bytes()))
        change(value)
        path.write_bytes(gzip.compress(json.dumps(value).encode()))
    return folder


def agrees(trace: RunTrace, runs: list[Timeline]) -> None:
    """The trace is replayed to the makespans of the runs."""
    found = analyze_trace(trace)
    assert found.run.replayed == pytest.approx([run.makespan for run in runs], rel=1e-4)
    assert found.run.measured == pytest.approx([run.makespan for run in runs], rel=1e-6)
    assert found.fit is not None
    assert found.fit.name == runs[0].schedule.name
    assert found.fit.links.delay(0, 1) == pytest.approx(0.5, rel=1e-3)


def test_torchtitans_names_are_read(tmp_path: Path) -> None:
    runs = [timeline(), timeline(1)]
    folder = profile(tmp_path / "run", runs, lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    trace = read_trace(folder)
    assert trace.steps.tolist() == [3, 4]
    assert "read by the preset torch" in trace.notes
    agrees(trace, runs)


def test_torchs_names_without_a_stage_are_of_the_files_rank(tmp_path: Path) -> None:
    words = {"F": "Forward", "B": "Backward"}
    runs = [timeline()]
    agrees(read_trace(profile(tmp_path / "run", runs, lambda op: f"{words[op.kind]} {op.microbatch}")), runs)


def test_zero_bubble_halves_are_read(tmp_path: Path) -> None:
    runs = [timeline(name="zb-h1")]
    folder = profile(tmp_path / "run", runs, lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}", steps=False)
    agrees(read_trace(folder), runs)


def test_megatrons_functions_have_their_microbatches_counted(tmp_path: Path) -> None:
    words = {"F": "forward_step", "B": "backward_step"}
    runs = [timeline(), timeline(2)]
    folder = profile(
        tmp_path / "run", runs, lambda op: f"megatron/core/pipeline_parallel/schedules.py(312): {words[op.kind]}"
    )
    agrees(read_trace(folder), runs)
    without = profile(tmp_path / "other", runs, lambda op: words[op.kind], steps=False)
    agrees(read_trace(without, num_microbatches=5), runs)


def test_megatrons_functions_of_several_chunks_are_refused(tmp_path: Path) -> None:
    """Two chunks a rank were read as one with twice as many microbatches."""
    words = {"F": "forward_step", "B": "backward_step"}
    folder = profile(tmp_path / "run", [timeline()], lambda op: f"schedules.py(312): {words[op.kind]}")
    caller = {"ph": "X", "name": "schedules.py(9): forward_backward_pipelining_with_interleaving", "pid": 7, "tid": 1}
    edited(folder, lambda value: value["traceEvents"].append({**caller, "ts": 0.0, "dur": 999e3}))
    with pytest.raises(TraceError, match=r"several chunks of the model, and .*PP:\{stage\}F\{m\}.* --pattern"):
        read_trace(folder)


@pytest.mark.parametrize("annotations", [[], ["Optimizer.step#Adam.step"]])
def test_functions_whose_kernels_ran_on_a_gpu_are_refused(tmp_path: Path, annotations: list[str]) -> None:
    """The CPU only queues what they do: its times were taken for those of the ops."""
    words = {"F": "stage.py(7): forward_one_chunk", "B": "stage.py(9): backward_one_chunk"}
    runs = [timeline()]
    folder = profile(tmp_path / "run", runs, lambda op: words[op.kind])
    where = {"ph": "X", "pid": 0, "tid": 7, "ts": 1.0, "dur": 1.0}
    message = {**where, "cat": "kernel", "name": "ncclDevKernel_SendRecv"}
    agrees(read_trace(edited(folder, lambda value: value["traceEvents"].append(message))), runs)
    device = [{**where, "cat": "kernel", "name": "gemm"}]
    device += [{**where, "cat": "gpu_user_annotation", "name": each} for each in annotations]
    edited(folder, lambda value: value["traceEvents"].extend(device))
    with pytest.raises(TraceError, match=r"kernels ran on a GPU, but names like .* have times of the CPU alone"):
        read_trace(folder)


def test_deepspeeds_functions_are_read(tmp_path: Path) -> None:
    words = {"F": "_exec_forward_pass", "B": "_exec_backward_pass"}
    runs = [timeline()]
    folder = profile(tmp_path / "run", runs, lambda op: f"deepspeed/runtime/pipe/engine.py(686): {words[op.kind]}")
    agrees(read_trace(folder), runs)


def test_a_users_own_pattern_is_read(tmp_path: Path) -> None:
    runs = [timeline()]
    folder = profile(tmp_path / "run", runs, lambda op: f"chunk{op.stage}.{op.kind.lower()}wd.mb={op.microbatch}")
    with pytest.raises(TraceError, match="--pattern"):
        read_trace(folder)
    trace = read_trace(folder, patterns=[r"chunk(?P<stage>\d+)\.(?P<op>fwd|bwd)\.mb=(?P<microbatch>\d+)"])
    agrees(trace, runs)
    both = [rf"{op}=chunk(?P<stage>\d+)\.{word}\.mb=(?P<microbatch>\d+)" for op, word in (("F", "fwd"), ("B", "bwd"))]
    agrees(read_trace(folder, patterns=both), runs)
    with pytest.raises(TraceError, match="--framework torch and --pattern both say what names mean"):
        read_trace(folder, patterns=both, preset="torch")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"(?P<microbatch>\d+)", "does not say which op it is"),
        (r"(?P<op>F)(?P<color>\d+)", "has a group 'color'"),
        (r"(?P<op>F", "is no regular expression"),
        (r"nothing(?P<op>F)", "no name of"),
    ],
)
def test_patterns_that_make_no_sense_are_refused(tmp_path: Path, pattern: str, said: str) -> None:
    folder = profile(tmp_path / "run", [timeline()], lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    with pytest.raises(TraceError, match=said):
        read_trace(folder, patterns=[pattern])


def test_the_gpus_annotations_count_where_both_are_there(tmp_path: Path) -> None:
    runs = [timeline(), timeline(1)]
    folder = profile(tmp_path / "run", runs, lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}", gpu=True)
    agrees(read_trace(folder), runs)


def test_replicas_are_found_by_the_stages_their_processes_have(tmp_path: Path) -> None:
    runs = [timeline()]
    folder = profile(tmp_path / "run", runs, lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    for rank in (2, 1, 0):  # as a mesh lays them out: both replicas of a rank side by side
        value = json.loads(gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes()))
        for replica in (0, 1):
            value["distributedInfo"] = {"rank": 2 * rank + replica, "world_size": 6}
            (folder / f"worker{2 * rank + replica}.json").write_text(json.dumps(value))
        (folder / f"rank{rank}.json.gz").unlink()
    trace = read_trace(folder)
    assert (trace.num_replicas, trace.num_ranks) == (2, 3)
    agrees(trace, runs)


@pytest.mark.parametrize("is_side_by_side", [True, False])
@pytest.mark.parametrize("groups", ["none", "undefined", "of both"])
def test_regression_pipelines_on_consecutive_processes_were_taken_for_replicas(
    tmp_path: Path, is_side_by_side: bool, groups: str
) -> None:
    """Two pipelines of three processes, whose names say neither stages nor ranks, read with --ranks 3."""
    words, run = {"F": "Forward", "B": "Backward"}, timeline()
    folder = profile(tmp_path / "run", [run], lambda op: f"{words[op.kind]} {op.microbatch}")
    inside = [[0, 2, 4], [1, 3, 5]] if is_side_by_side else [[0, 1, 2], [3, 4, 5]]
    others = [[each[0] for each in inside], [0, 5, 1], [2, 3, 4]]  # as of tensor-parallel groups
    listed = {"none": [], "undefined": inside, "of both": [*inside, *others]}[groups]
    for rank in range(3):
        value = json.loads(gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes()))
        (folder / f"rank{rank}.json.gz").unlink()
        for pipeline in inside:
            its = [each for each in [list(range(6)), *listed] if pipeline[rank] in each]
            described = [{"pg_desc": "undefined", "ranks": each} for each in its]
            value["distributedInfo"] = {"rank": pipeline[rank], "world_size": 6, "pg_config": described}
            (folder / f"worker{pipeline[rank]}.json").write_text(json.dumps(value))
    trace = read_trace(folder, num_ranks=3)
    assert (trace.num_replicas, trace.num_ranks) == (2, 3)
    agrees(trace, [run])
    is_guessed = not is_side_by_side and groups != "undefined"
    assert any("consecutive processes are taken as a pipeline" in note for note in trace.notes) == is_guessed


def test_regression_replicas_without_names_or_groups_were_one_pipeline_without_a_word(tmp_path: Path) -> None:
    words = {"F": "forward_step", "B": "backward_step"}
    run = ps.simulate(ps.build("1f1b", 4, 8), ps.Costs.uniform(4, f=10, i=10, w=10))
    folder = profile(tmp_path / "run", [run], lambda op: words[op.kind])
    said = "4 processes are taken as one pipeline; --ranks where they are replicas"
    assert said in read_trace(folder).notes
    assert said not in read_trace(folder, num_ranks=4).notes
    for rank in (3, 2, 1, 0):  # two replicas side by side
        value = json.loads(gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes()))
        (folder / f"rank{rank}.json.gz").unlink()
        for worker in (2 * rank, 2 * rank + 1):
            value["distributedInfo"] = {"rank": worker, "world_size": 8}
            (folder / f"worker{worker}.json").write_text(json.dumps(value))
    notes = analyze_trace(read_trace(folder)).notes
    assert said.replace("4", "8") in notes
    assert any("the order that ran is no valid schedule" in note and "\n" not in note for note in notes)
    named = profile(tmp_path / "named", [run], lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    assert said not in read_trace(named).notes


@pytest.mark.parametrize("is_inside", [True, False])
def test_ranks_keep_their_order_whatever_stages_they_have(tmp_path: Path, is_inside: bool) -> None:
    """Stages on ranks 2 1 0, in two replicas: ranks were numbered by their stages, and links mirrored."""
    folder = profile(tmp_path / "run", [timeline()], lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    for stage in range(3):
        value = json.loads(gzip.decompress((folder / f"rank{stage}.json.gz").read_bytes()))
        (folder / f"rank{stage}.json.gz").unlink()
        for replica in range(2):
            worker = 2 * (2 - stage) + replica if is_inside else 3 * replica + 2 - stage
            value["distributedInfo"] = {"rank": worker, "world_size": 6}
            (folder / f"worker{worker}.json").write_text(json.dumps(value))
    trace = read_trace(folder)
    places = set(zip(trace.stage.tolist(), trace.rank.tolist(), trace.replica.tolist()))
    assert places == {(stage, 2 - stage, replica) for stage in range(3) for replica in range(2)}


def test_files_of_two_jobs_are_told_apart(tmp_path: Path) -> None:
    folder = profile(tmp_path / "run", [timeline()], lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    (folder / "again-rank0.json.gz").write_bytes((folder / "rank0.json.gz").read_bytes())
    with pytest.raises(TraceError, match=r"again-rank0.json.gz and rank0.json.gz are both of rank 0.*two jobs"):
        read_trace(folder)
    (folder / "again-rank0.json.gz").unlink()
    value = json.loads(gzip.decompress((folder / "rank2.json.gz").read_bytes()))
    value["distributedInfo"]["world_size"] = 8
    (folder / "rank2.json.gz").write_bytes(gzip.compress(json.dumps(value).encode()))
    with pytest.raises(TraceError, match="there were 3, 8 processes"):
        read_trace(folder)


def test_a_missing_file_of_a_rank_is_named(tmp_path: Path) -> None:
    folder = profile(tmp_path / "run", [timeline()], lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    (folder / "rank1.json.gz").unlink()
    with pytest.raises(TraceError, match="no ops of stage 1, but of stage 2: is the file of one rank missing"):
        analyze_trace(read_trace(folder))


def test_a_file_without_names_of_ops_is_not_taken_for_an_idle_rank(tmp_path: Path) -> None:
    """One process was recorded without names of ops: the others were analysed as a pipeline of their own."""
    folder = profile(tmp_path / "run", [timeline()], lambda op: f"{'FB'.index(op.kind)} {op.microbatch}")
    for rank in range(3):
        value = json.loads(gzip.decompress((folder / f"rank{rank}.json.gz").read_bytes()))
        value["distributedInfo"]["pg_config"] = [{"ranks": [0, 1, 2]}]
        for event in value["traceEvents"]:
            word, _, number = event["name"].partition(" ")
            if word in ("0", "1") and rank < 2:
                event["name"] = f"{('Forward', 'Backward')[int(word)]} {number}"
        (folder / f"rank{rank}.json.gz").write_bytes(gzip.compress(json.dumps(value).encode()))
    with pytest.raises(TraceError, match="no file with forwards or backwards of 2"):
        read_trace(folder)


def test_the_first_sentence_and_the_step_times_say_the_same(tmp_path: Path) -> None:
    """The sentence left late starts out: a step of 47 ms took "1.04 times as long" as 31 ms."""
    folder = profile(tmp_path / "run", [timeline(), timeline(1)], lambda op: f"PP:{op.stage}{op.kind}{op.microbatch}")
    found = analyze_trace(read_trace(folder))
    assert f"takes {found.metrics.measured / found.metrics.ideal:.2f} times as long" in headline(found)


def test_penstocks_own_trace_is_read(tmp_path: Path) -> None:
    runs = [timeline()]
    save_picture(runs[0], tmp_path / "timeline.json")
    agrees(read_trace(tmp_path / "timeline.json"), runs)


def test_pipelines_in_both_directions_are_one_replica(tmp_path: Path) -> None:
    run = ps.simulate(ps.build("chimera", 4, 8), links=ps.Links(default=0.25))
    save_picture(run, tmp_path / "timeline.json")
    trace = read_trace(tmp_path / "timeline.json")
    assert (trace.num_replicas, trace.num_ranks) == (1, 4)
    found = analyze_trace(trace)
    assert found.run.replayed[0] == pytest.approx(run.makespan, rel=1e-4)
    assert any("stage 0 runs on ranks 0, 3, with some of its microbatches on each" in note for note in found.notes)


@pytest.mark.parametrize(
    "name", ["gpipe", "interleaved-1f1b", "zb-h1", "zb-v", "zb", "hanayo", "dualpipe-v", "bitpipe"]
)
def test_any_schedule_of_a_chain_is_replayed(tmp_path: Path, name: str) -> None:
    run = ps.simulate(ps.build(name, 4, 8), links=ps.Links({(0, 1): 3.0}, default=0.25))
    save_picture(run, tmp_path / "timeline.json")
    found = analyze_trace(read_trace(tmp_path / "timeline.json"))
    assert found.run.replayed[0] == pytest.approx(run.makespan, rel=1e-4)


@pytest.mark.parametrize(("ranks", "num"), [(2, 3), (4, 8), (5, 6)])
def test_stages_that_ranks_share_are_replayed_together(tmp_path: Path, ranks: int, num: int) -> None:
    uneven = [1 + 0.4 * (m % 3) for m in range(num)]
    times = [3.0, *(5.0 + stage % 2 for stage in range(ranks)), 4.0]
    costs = ps.Costs(times, times, times, uneven=uneven)
    run = ps.simulate(ps.build("mllm", ranks, num), costs, links=ps.Links({(0, 1): 3.0}, default=0.25))
    save_picture(run, tmp_path / "timeline.json")
    found = analyze_trace(read_trace(tmp_path / "timeline.json"))
    assert found.run.replayed[0] == pytest.approx(run.makespan, rel=1e-4)
    assert found.replay_error < 1e-4
    assert found.fit is not None
    assert found.fit.name == "mllm"
    again = ps.simulate(found.fit.schedule, found.fit.costs(0, 0), links=found.fit.links)
    assert again.makespan == pytest.approx(run.makespan, rel=1e-3)


def test_stages_that_branch_are_refused(tmp_path: Path) -> None:
    save_picture(ps.simulate(ps.build("distmm", 4, 8)), tmp_path / "timeline.json")
    with pytest.raises(TraceError, match="do they branch"):
        analyze_trace(read_trace(tmp_path / "timeline.json"))


def test_penstocks_run_folder_is_read(tmp_path: Path) -> None:
    runs = [timeline(), timeline(1)]
    lines = []
    for n, run in enumerate(runs):
        ops = [[t.rank, *t.op[:3], t.start, t.end] for t in run.ops]
        lines.append(json.dumps({"iteration": 8 * n, "number": 0, "why": "early", "ops": ops}))
    (tmp_path / "timelines.jsonl").write_text("\n".join([*lines, '{"iteration": 16, "num']))
    trace = read_trace(tmp_path)
    assert trace.steps.tolist() == [0, 8]
    agrees(trace, runs)


def test_of_a_run_that_changed_its_plan_the_steps_of_one_plan_are_read(tmp_path: Path) -> None:
    """As `penstock train --adapt`, whose figures were means over the plans before and after a change."""
    first, then = timeline(), ps.simulate(ps.build("zb-h1", 4, 8))
    ran = [(0, 0, first), (7, 0, first), (9, 1, then), (30, 1, then), (32, 2, first)]
    lines = []
    for iteration, number, run in ran:
        ops = [[t.rank, *t.op[:3], t.start, t.end] for t in run.ops]
        lines.append(json.dumps({"iteration": iteration, "number": number, "why": "", "ops": ops}))
    (tmp_path / "timelines.jsonl").write_text("\n".join([*lines, lines[0]]))
    assert read_trace(tmp_path).steps.tolist() == [9, 30], "of as many recorded steps those of the later plan"
    ended = {0: 8, 1: 23, 2: 60}
    each = [
        json.dumps({"iteration": 0, "number": number, "ms": 1.0}) for number in ended for _ in range(ended[number])
    ]
    (tmp_path / "iterations.jsonl").write_text("\n".join(each))
    found = read_trace(tmp_path)
    assert found.steps.tolist() == [32]
    (note,) = found.notes
    assert "shown is plan 2, which 60 iterations ran, by its steps 32" in note
    assert "--only-steps chooses steps of another: 0,7 (plan 0), 9,30 (plan 1)" in note
    assert read_trace(tmp_path, steps=[9, 30]).notes == ()
    agrees(read_trace(tmp_path, steps=[0, 7]), [first, first])
    (mixed,) = read_trace(tmp_path, steps=[7, 9]).notes
    assert mixed.startswith("these steps ran 2 plans, and figures are means over them")
    with pytest.raises(TraceError, match="has no step 8; it has 0, 7, 9"):
        read_trace(tmp_path, steps=[8])


def test_a_table_with_columns_of_other_names_is_read(tmp_path: Path) -> None:
    runs = [timeline(), timeline(1)]
    with (tmp_path / "ops.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["phase", "stage", "mb", "it", "begin", "took", "colour"])
        for number, run in enumerate(runs):
            for t in run.ops:
                word = {"F": "forward", "B": "backward"}[t.op.kind]
                writer.writerow(
                    [word, t.op.stage, t.op.microbatch, number, t.start * 1e3, (t.end - t.start) * 1e3, ""]
                )
    columns = {"op": "phase", "microbatch": "mb", "step": "it", "start": "begin", "duration": "took"}
    agrees(read_trace(tmp_path / "ops.csv", columns=columns, unit="us"), runs)
    with pytest.raises(TraceError, match=r"has no column op, microbatch, start, end \(or duration\); it has phase"):
        read_trace(tmp_path / "ops.csv")
    with pytest.raises(TraceError, match="has no column 'nowhere' for op"):
        read_trace(tmp_path / "ops.csv", columns={"op": "nowhere"})
    with pytest.raises(TraceError, match="unit 'h'"):
        read_trace(tmp_path / "ops.csv", columns=columns, unit="h")


def test_deepseeks_names_are_read_by_a_pattern(tmp_path: Path) -> None:
    """Its published profile annotates each layer of a pair of chunks so, and says neither stage nor microbatch."""
    layer = ("combine(B)", "attn(F)", "mlp(B)", "dispatch(F)", "mlp(W)", "mlp(F)", "attn(B)", "attn(W)", "combine(F)")
    alike = {"ph": "X", "cat": "user_annotation", "pid": 7, "tid": 1, "dur": 9.0}
    events = [{**alike, "name": "ProfilerStep#1", "ts": 0.0, "dur": 400.0}]
    events += [{**alike, "name": "aten::empty", "cat": "cpu_op", "ts": 1.0}] * 50
    events += [
        {**alike, "name": name, "ts": 10.0 * k + 90.0 * number} for number in range(4) for k, name in enumerate(layer)
    ]
    files = tmp_path / "train.json"
    files.write_text(json.dumps({"traceEvents": events}), encoding="utf-8")
    with pytest.raises(TraceError, match=r"there are 'combine\(B\)', 'attn\(F\)', 'mlp\(B\)'"):
        read_trace(files)
    trace = read_trace(files, patterns=[r"attn\((?P<op>F|B|W)\)"])
    assert len(trace) == 12
    assert sorted(trace.microbatch.tolist()) == sorted([0, 1, 2, 3] * 3)
    assert {kind.kind for kind in trace.kinds} == {"F", "B", "W"}
