"""What is no whole trace of one job is refused: the message says what is missing and what would help."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.analyze import RunAnalysis, analyze_trace
from penstock.cli import main
from penstock.formats.traces import TraceError, read_trace
from trace_samples import Row, study_sample

pytestmark = pytest.mark.unit
SMALL = {"num_steps": 3, "num_replicas": 2, "num_ranks": 2, "num_microbatches": 3}


def analyzed(tmp_path: Path, change: Callable[[list[Row]], object], *, drop_incomplete: bool = False) -> RunAnalysis:
    sample = study_sample(**SMALL)  # type: ignore[arg-type]
    changed = change(sample.rows)
    if isinstance(changed, list):
        sample.rows = changed
    return analyze_trace(read_trace(sample.write(tmp_path / "run.parquet")), drop_incomplete=drop_incomplete)


def refused(tmp_path: Path, change: Callable[[list[Row]], object]) -> str:
    with pytest.raises(TraceError) as caught:
        analyzed(tmp_path, change)
    return str(caught.value)


def is_op(row: Row, step: int, op: str, stage: int, microbatch: int, replica: int = 0) -> bool:
    return (row["step"], row["optype"], row["stage"], row["mb_id"], row["dp_rank"]) == (
        step, op, stage, microbatch, replica,
    )  # fmt: skip


def each(**changed: object) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [{**row, **changed} for row in rows]


def only(keep: Callable[[Row], bool]) -> Callable[[list[Row]], list[Row]]:
    return lambda rows: [row for row in rows if keep(row)]


def ends_before(rows: list[Row]) -> None:
    next(row for row in rows if is_op(row, 12, "backward-compute", 1, 0))["duration"] = -0.004


def set_back(rows: list[Row]) -> None:
    for row in rows:
        if row["step"] == 11 and row["stage"] == 0 and row["dp_rank"] == 1 and row["start_ts"] > 1100.07:
            row["start_ts"] -= 0.03


def cut_off(rows: list[Row]) -> None:
    rows[5]["duration"] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (each(mb_id=-1), "not say which microbatch 72 of 72 ops are of (backward-compute, forward-compute)"),
        (each(mb_id=-1), "record_function"),
        (only(lambda row: "compute" not in row["optype"]), "no forwards or backwards; its ops are backward-recv"),
        (only(lambda row: row["optype"] != "backward-compute"), "has no backwards"),
        (
            only(lambda row: (row["optype"], row["stage"], row["mb_id"]) != ("backward-compute", 0, 1)),
            "replica 0 has no backward of stage 0 for microbatch 1 in any step",
        ),
        (
            only(lambda row: row["stage"] != 0),
            "has no ops of stage 0, but of stage 1: is the file of one rank missing?",
        ),
        (
            only(lambda row: not (row["optype"] == "forward-recv" and row["seq_id"] > 0)),
            "replica 0, rank 1 has 1 of forward-recv, and 3 ops that need one; are ops missing?",
        ),
        (
            ends_before,
            "backwards: step 12, backward-compute of microbatch 0, stage 1 (replica 0, rank 1) ends 4 ms before",
        ),
        (ends_before, "CLOCK_MONOTONIC"),
        (set_back, "the clock goes backwards, or ops overlap: step 11"),
        (
            lambda rows: [*rows, *({**row, "start_ts": row["start_ts"] + 5000} for row in rows)],
            "occurs twice, 5e+06 ms apart (72 such ops): are there two jobs",
        ),
        (
            lambda rows: [{**row, "job_id": name} for name in ("first", "second") for row in rows],
            "holds 2 jobs by its column job_id (first, second)",
        ),
        (cut_off, "1 ops have no start or no end"),
        (each(duration=0.0), "no forward or backward takes any time"),
        (each(start_ts="x"), "start_ts is 'x': give a number"),
        (each(step=float("inf")), "column step holds inf: give whole numbers"),
    ],
)
def test_what_is_no_whole_trace_of_one_job_is_refused(
    tmp_path: Path, change: Callable[[list[Row]], object], message: str
) -> None:
    assert message in refused(tmp_path, change)


def test_an_op_missing_in_one_step_is_named_and_the_step_can_be_left_out(tmp_path: Path) -> None:
    def without_one(rows: list[Row]) -> list[Row]:
        return [row for row in rows if not is_op(row, 11, "forward-compute", 1, 2)]

    said = refused(tmp_path, without_one)
    assert "ops are missing in 1 of 3 steps (11)" in said
    assert "forward-compute of microbatch 2, stage 1 (replica 0, rank 1)" in said
    assert "--drop-incomplete" in said
    found = analyzed(tmp_path, without_one, drop_incomplete=True)
    assert found.run.table.steps.tolist() == [10, 12]
    assert "1 steps in which ops are missing were left out: 11" in found.notes


def test_a_table_of_another_form_names_the_columns_it_lacks(tmp_path: Path) -> None:
    said = refused(tmp_path, lambda rows: [{k: v for k, v in row.items() if k != "mb_id"} for row in rows])
    assert "has no column 'mb_id' for microbatch" in said
    assert "--column" in said
    (tmp_path / "no.parquet").write_text("not at all", encoding="utf-8")
    with pytest.raises(TraceError, match=r"no\.parquet is no parquet file"):
        read_trace(tmp_path / "no.parquet")
    with pytest.raises(TraceError, match="there is no such file"):
        read_trace(tmp_path / "nowhere.csv")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = study_sample(**SMALL).write(tmp_path / "run.parquet")  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(TraceError, match=r"pip install '\.\[traces\]'; or convert it to CSV"):
        read_trace(path)


def test_steps_and_layers_that_are_not_there_are_refused(tmp_path: Path) -> None:
    path = study_sample(**SMALL).write(tmp_path / "run.parquet")  # type: ignore[arg-type]
    with pytest.raises(TraceError, match="has no step 7; it has 10, 11, 12"):
        read_trace(path, steps=[7, 10])
    with pytest.raises(TraceError, match="give how many each of the 2 stages has"):
        analyze_trace(read_trace(path), layers=[1, 2, 3])


# What nobody meant to write: each was a traceback once.

TABLE = "op,stage,microbatch,rank,step,start,end\n"
ROWS = ("F,0,0,0,0,0,1\n", "B,0,0,0,0,1,2\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TABLE + ROWS[0] + "B,0,1e30,0,0,1,2\n", "column microbatch holds 1e+30: give whole numbers"),
        (TABLE + ROWS[0] + "B,0,inf,0,0,1,2\n", "column microbatch holds inf: give whole numbers"),
        (TABLE + ROWS[0] + "B,0,0.5,0,0,1,2\n", "column microbatch holds numbers that are not whole"),
        (TABLE + "".join(ROWS).replace("F,0,0", "F,0,4000000000"), "an op of microbatch 4000000000: numbers of a"),
        (TABLE.replace("start", "end") + "".join(ROWS), "has 2 columns named 'end'"),
        (TABLE + f'"{"x" * 200_000}",0,0,0,0,0,1\n', "is a quote left open"),
        (TABLE + "F,0,0,0,0,0,nan\n" + ROWS[1], "1 ops have no start or no end"),
        ("", "is empty; its first line names the columns"),
        (TABLE, "has no ops; a pipeline's forwards and backwards"),
    ],
)
def test_tables_with_numbers_that_mean_nothing_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.csv").write_text(text, encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        analyze_trace(read_trace(tmp_path / "run.csv"))
    assert message in str(caught.value)


def profile(*events: object, **more: object) -> str:
    return json.dumps({"traceEvents": events, **more})


F0 = {"ph": "X", "name": "PP:0F0", "ts": 1, "dur": 2, "pid": 0, "tid": 0}
B0 = {**F0, "name": "PP:0B0", "ts": 5}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("run.json", "[" * 100_000, "lie too deep in one another"),
        ("run.json", "", "is no JSON"),
        ("run.json", profile({**F0, "pid": []}, {**B0, "tid": {}}), "there are no events at all"),
        ("run.json", profile(F0, B0, distributedInfo={"rank": "abc"}), "the rank in distributedInfo is 'abc'"),
        ("run.json", profile(F0, B0, distributedInfo={"world_size": "x"}), "world_size in distributedInfo is 'x'"),
        ("run.json", profile(F0, B0, baseTimeNanoseconds="x"), "baseTimeNanoseconds is 'x': give a number"),
        ("run.json", profile({**F0, "name": "PP:0F" + "9" * 25}, B0), "numbers count from 0"),
        ("run.json", profile({"ph": "M", "name": "process_name", "args": "x"}), "there are no events at all"),
        ("run.jsonl", '{"iteration": 1e400, "number": 0, "ops": []}', "is no record of an iteration"),
    ],
)
def test_profiles_with_values_of_another_kind_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(TraceError) as caught:
        analyze_trace(read_trace(tmp_path / name))
    assert message in str(caught.value)


def test_records_that_are_no_text_are_refused(tmp_path: Path) -> None:
    for name in ("run.jsonl", "run.csv"):
        (tmp_path / name).write_bytes(bytes(range(128, 256)))
        with pytest.raises(TraceError, match="is no text"):
            read_trace(tmp_path / name)


def test_what_is_said_of_names_in_profiles_is_refused_for_a_table(tmp_path: Path) -> None:
    (tmp_path / "run.csv").write_text(TABLE + "".join(ROWS), encoding="utf-8")
    for options in ({"patterns": ["F=x"]}, {"preset": "megatron"}, {"num_ranks": 1}, {"num_microbatches": 1}):
        with pytest.raises(TraceError, match="says what names in profiles mean, and this is no profile"):
            read_trace(tmp_path / "run.csv", **options)  # type: ignore[arg-type]


def test_what_is_said_of_tables_is_refused_for_others(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(profile(F0, B0), encoding="utf-8")
    (tmp_path / "run.jsonl").write_text('{"iteration": 0, "number": 0, "ops": []}', encoding="utf-8")
    for name in ("run.json", "run.jsonl"):
        for option, value in (("unit", "us"), ("columns", {"op": "phase"})):
            with pytest.raises(TraceError, match=rf"--{option.removesuffix('s')} says how a table is read"):
                read_trace(tmp_path / name, **{option: value})  # type: ignore[arg-type]


def test_a_unit_that_is_given_counts_for_the_columns_of_the_study_too(tmp_path: Path) -> None:
    path = study_sample(**SMALL).write(tmp_path / "run.parquet")  # type: ignore[arg-type]
    seconds, given = read_trace(path), read_trace(path, unit="us")
    assert given.end == pytest.approx(seconds.end / 1e6)


def test_ranges_of_steps_that_fall_or_never_end_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.csv").write_text(TABLE + "".join(ROWS), encoding="utf-8")
    for steps in ("1-0", "0-99999999999"):
        assert main(["analyze", str(tmp_path / "run.csv"), "--only-steps", steps]) == 2
        assert "give ranges that rise, of at most 1,000,000 numbers" in capsys.readouterr().err


def test_a_folder_of_tables_beside_other_json_says_which_to_give(tmp_path: Path) -> None:
    for name in ("trace.csv", "summary.json"):
        (tmp_path / name).write_text(TABLE + "".join(ROWS), encoding="utf-8")
    with pytest.raises(TraceError, match=r"holds 1 tables and 1 JSON files: give one, like .*trace\.csv"):
        read_trace(tmp_path)
