"""PipeMorph's figures that need a GPU: their logic on a CPU, the profiler's traces, and the tables of results."""

from __future__ import annotations

import importlib
import json
import os
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from experiments.claims import pages
from experiments.claims.claim import ROOT, Item
from experiments.common.results import find, load
from experiments.pipemorph import RESULTS, figure9, figure10, figure21_gpu, gpu, spans
from experiments.pipemorph.spans import DeviceSpan, device_spans, drawn, inside, merged, overlap, tracks
from tiers import others_nightly

FIGURES = ("figure9", "figure10", "figure21_gpu")
FOLDER = Path(__file__).parents[2] / "experiments" / "pipemorph"


@pytest.mark.parametrize("name", FIGURES)
def test_each_says_its_command_its_protocol_and_is_in_the_readme(name: str) -> None:
    about = importlib.import_module(f"experiments.pipemorph.{name}").__doc__ or ""
    assert f"python -m experiments.pipemorph.{name}" in about
    assert "Protocol, written before the run" in about
    assert f"{name}.py" in (FOLDER / "README.md").read_text(encoding="utf-8")


def run(monkeypatch: pytest.MonkeyPatch, module: Any, *given: str) -> None:
    monkeypatch.setattr(sys, "argv", [str(FOLDER / f"{module.__name__.rpartition('.')[2]}.py"), *given])
    module.main()


@pytest.mark.slow
def test_figures_6_and_9_run_over_gloo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With gloo for NCCL, where a send that is waited for holds the next op up until its receive comes."""
    run(monkeypatch, figure9, "--device", "cpu", "--rounds", "1", "--out", str(tmp_path))
    rows = load(tmp_path, "figure9-cpu")
    assert {row["way"] for row in rows} == {"nobody else", *figure9.WAYS}
    assert max(find(rows, way="in order", late_ms=30.0)["pause_ms"]) >= 30.0
    assert find(rows, way="delegates", late_ms=30.0)["makespan_ms"] > 0
    assert "receive stands" in capsys.readouterr().out
    assert (tmp_path / "figure9-cpu.svg").exists()


@pytest.mark.slow
def test_figure_9_says_why_nccl_did_not_run_and_runs_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = figure9.Protocol9("cpu", num_ops=2, op_ms=0.5, message_bytes=4096, rounds=3, budget=0.0)
    first = [True]

    def failing(*args: Any, limit: float) -> Any:
        if first.pop() if first else False:
            raise gpu.PairFailed("process 0: ncclInvalidUsage: Duplicate GPU detected")
        return gpu.run_pair(*args, limit=limit)

    monkeypatch.setattr(figure9, "run_pair", failing)
    rows, facts = figure9.measure(protocol)
    assert facts["device"] == "cpu"
    assert facts["turns"] == 1  # there is no time for more
    assert {row["way"] for row in rows} == {"nccl", "nobody else", "alone", "delegates"}
    said = list(figure9.lines(rows))
    assert (
        said[0]
        == "NCCL did not run between two ranks on one GPU: process 0: ncclInvalidUsage: Duplicate GPU detected"
    )
    assert sum("NCCL did not run" in line for line in said) == 1


@pytest.mark.slow
def test_figures_10_to_12_run_without_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, figure10, "--device", "cpu", "--rounds", "1", "--out", str(tmp_path))
    rows = load(tmp_path, "figure10-cpu")
    assert [row["part"] for row in rows].count("way") == 2
    assert all(ms > 0 for row in figure10.of_part(rows, "way") for ms in row["whole_ms"])
    assert len(figure10.of_part(rows, "beside")) == len(figure10.of_part(rows, "timeline")) == 2
    assert "recorded nothing of a GPU" in capsys.readouterr().out


@pytest.mark.nightly
def test_figure_21_trains_to_the_same_losses_by_both_transports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--device", "cpu", "--ranks", "2", "--steps", "1", "--out", str(tmp_path)]
    run(monkeypatch, figure21_gpu, *given)
    rows = load(tmp_path, "figure21_cpu-2ranks")
    alone, host, delegate = (find(rows, transport=name) for name in (figure21_gpu.ALONE, *figure21_gpu.TRANSPORTS))
    assert host["losses"] == delegate["losses"]
    assert host["losses"][:3] == alone["losses"]
    assert all(each["crossing_ms"] for each in delegate["by_rank"])
    assert "the same at the first step" in capsys.readouterr().out


def failing_rank(peer: gpu.Peer, how: str) -> int:
    if peer.rank == 0 and how == "raises":
        raise ValueError("no such thing")
    if peer.rank == 0 and how == "ends":
        os._exit(3)
    peer.values.recv()
    return peer.rank


FAILURES = [("raises", "process 0.*no such thing"), ("ends", "ended before"), ("stays", "still running after 4 s")]


@pytest.mark.slow
@pytest.mark.parametrize(("how", "said"), others_nightly(FAILURES, FAILURES[:1]))
def test_a_process_that_fails_is_an_error_that_says_so(how: str, said: str) -> None:
    with pytest.raises(gpu.PairFailed, match=r"(?s)" + said):
        gpu.run_pair(failing_rank, how, limit=4.0 if how == "stays" else 60.0)


TRACE: dict[str, Any] = {
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 900.0, "dur": 40.0},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaMemcpyAsync", "ts": 910.0, "dur": 4.0},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1000.0, "dur": 100.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1105.0, "dur": 95.0, "args": {"stream": 7}},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 1300.0, "dur": 100.0, "args": {"stream": 7}},
        {
            "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1150.0, "dur": 100.0,
            "args": {"stream": 20, "bytes": 1048576},
        },
        {
            "ph": "X", "cat": "gpu_memcpy", "name": "Memcpy HtoD (Pageable -> Device)", "ts": 1320.0, "dur": 50.0,
            "args": {"stream": 24, "bytes": 1048576},
        },
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 990.0, "dur": 1.0},
        {"ph": "X", "cat": "gpu_memset", "name": "Memset (Device)", "ts": 980.0, "dur": 1.0},
        {"ph": "f", "cat": "ac2g", "name": "ac2g", "ts": 1000.0},
        {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    ]
}  # fmt: skip
"""As torch.profiler exports it, in microseconds."""


def test_a_trace_s_device_spans_are_kernels_and_copies_by_their_direction() -> None:
    found = device_spans(TRACE)
    assert [(span.track, span.num_bytes, span.pinned) for span in found] == [
        ("other", 0, False),
        ("other", 0, False),
        ("compute", 0, False),
        ("compute", 0, False),
        ("out", 1048576, True),
        ("compute", 0, False),
        ("in", 1048576, False),
    ]
    assert found[2] == DeviceSpan("compute", "gemm", 7, 1.0, 1.1)
    assert [span.ms for span in spans.copies(found, "out", 1 << 20)] == [pytest.approx(0.1)]
    assert spans.copies(found, "in", (1 << 20) + 1) == []


def test_the_share_of_copies_beside_kernels() -> None:
    found = device_spans(TRACE)
    assert merged(found, "compute") == [(1.0, pytest.approx(1.2)), (1.3, pytest.approx(1.4))]
    # Of 0.1 ms out 0.05 lie beside the second kernel, and all of 0.05 ms in beside the third.
    assert inside(found) == pytest.approx((0.05 + 0.05) / 0.15)
    assert inside([span for span in found if span.track == "compute"]) is None
    assert overlap([(0.0, 2.0), (3.0, 4.0)], [(1.0, 3.5)]) == pytest.approx(1.5)


def test_a_timeline_as_text() -> None:
    found = tracks(device_spans(TRACE))
    assert found["out"] == [(pytest.approx(0.17), pytest.approx(0.27))]
    said = list(drawn({"compute": [[0.0, 5.0], [7.5, 10.0]], "out": [[5.0, 5.2]], "in": []}, width=10))
    assert said == [
        "10.0 ms, 1.00 ms a column",
        "compute #####..###",
        "out     .....-....",
        "in      ..........",
    ]
    assert list(drawn({"compute": []}, width=3)) == ["0.0 ms, 1.00 ms a column", "compute ..."]


def test_nothing_is_recorded_without_a_gpu() -> None:
    with spans.profiled(torch.device("cpu")) as found:
        torch.ones(4).sum()
    assert found.spans == []


def test_gemms_by_what_the_link_did() -> None:
    """The first message is received at once, the second late, and the third lay there before it was asked for."""
    waits, moves = figure9.states([0.010, 0.020, 0.060], [(0.010, 0.014), (0.050, 0.054), (0.070, 0.063)])
    assert moves == [(0.010, 0.014), (0.050, 0.054), (0.060, 0.063)]
    assert waits == [(0.010, 0.010), (0.020, 0.050), (0.063, 0.070)]
    times = [(at / 1e3, 1.0) for at in range(0, 80)]
    found = figure9.by_state([*times[:30], (0.030, 9.0), *times[31:]], waits, moves)
    assert {state: each["count"] for state, each in found.items()} == {
        "free": 32,
        "waits": 37,
        "moves": 11,
        "all": 80,
    }
    assert found["waits"]["most"] == 9.0
    assert figure9.by_state(times, *figure9.states([0.01], None))["waits"] == {"count": 0}


def test_turns_rotate_and_leave_nccl_out_where_it_is_refused() -> None:
    protocol = figure9.Protocol9(rounds=3)
    plan = figure9._plan(protocol, "")
    by_turn = [[each[1:] for each in plan if each[0] == turn] for turn in range(-1, 3)]
    assert all(sorted(turn) == sorted(by_turn[0]) and len(turn) == 8 for turn in by_turn)
    assert by_turn[0] == by_turn[1]
    assert all(after == [*before[1:], before[0]] for before, after in pairwise(by_turn[1:]))
    assert {way for _, way, _ in figure9._plan(protocol, "no")} == {"alone", "delegates"}


def cells(said: str) -> list[str]:
    """The lines of a table, a single space between their cells."""
    return [" ".join(line.split()) for line in said.splitlines()]


def of_figure9(way: str, late_ms: float, gemm: float, high: float, pause: float) -> dict[str, Any]:
    spread = {"count": 10, "median": gemm, "p90": high, "most": high}
    states = {"free": spread, "waits": {"count": 0}, "moves": spread, "all": spread}
    row = {"way": way, "late_ms": late_ms, "turn": 0, "gemm_ms": states, "pause_ms": [0.1, pause], "call_ms": 0.2}
    return row | {"makespan_ms": 120.0 + pause}


def test_tables_of_figures_6_and_9() -> None:
    rows = [
        of_figure9("alone", 0.0, 0.11, 0.12, 0.0),
        of_figure9("in order", 30.0, 0.11, 0.12, 31.0),
        of_figure9("beside", 30.0, 0.22, 2.0, 0.1),
    ]
    said = "\n".join(figure9.lines(rows))
    assert "in order 30 31.00 151.00 0.20" in cells(said)
    assert "a GEMM alone takes 110 us" in said
    assert "beside 30 2.00 (18.18) 2.00 (18.18) 2.00 (18.18)" in cells(said)
    assert "<svg" in str(figure9.chart(rows))


def test_tables_of_figures_10_to_12() -> None:
    way = {"part": "way", "mb": 10, "whole_ms": [9.0], "crossing_ms": [8.0], "out_ms": [0.5], "in_ms": [0.25]}
    rows: list[dict[str, Any]] = [way]
    for memory, ms in (("pinned", 0.2), ("pageable", 1.0)):
        rows.append({"part": "copies", "mb": 10, "memory": memory, "out_ms": [ms], "in_ms": [ms]})
    for mb, gemm in ((0, 0.1), (10, 0.102)):
        spread = {"count": 9, "median": gemm, "p90": gemm, "most": gemm}
        rows.append({"part": "beside", "mb": mb, "gemm_ms": spread, "pause_ms": [0.5], "makespan_ms": 1200 * gemm})
        timeline = {"compute": [[0, 10]], "out": [[2, 3]], "in": []}
        rows.append(
            {"part": "timeline", "mb": mb, "tracks": timeline, "inside": 1.0 if mb else None, "num_copies": 1}
        )
    said = "\n".join(figure10.lines(rows))
    assert "10 MB 0.50 7.50 0.25 9.00 20.97 41.94" in cells(said)
    assert "10 MB 52.43 52.43 10.49 10.49" in cells(said)
    assert "10 MB 1.020 1.020 0.50 1.020" in cells(said)
    assert said.count("lies beside kernels") == 1
    assert "<svg" in str(figure10.chart(rows))


def test_messages_of_64_mb_go_every_fourth_op() -> None:
    assert [figure10.every(mb) for mb in (0, 1, 10, 16, 64)] == [1, 1, 1, 1, 4]


def test_tables_of_figure_21() -> None:
    rows = []
    for name, ms, last in (("one process", 96.0, 2.0), ("host", 100.0, 2.0), ("delegate", 102.0, 2.002)):
        mine = {"out_ms": [1.0, 1.0], "in_ms": [3.0], "crossing_ms": [6.0, 6.0], "inside": 0.95}
        rows.append(
            {
                "ranks": 2, "transport": name, "num_microbatches": 6, "message_bytes": 8 << 20,
                "steps_ms": [ms - 1, ms, ms + 1], "losses": [(3.0).hex(), last.hex()], "profiled_ms": 200.0,
                "by_rank": [{}, mine],
            }
        )  # fmt: skip
    del rows[0]["by_rank"], rows[0]["profiled_ms"]
    said = "\n".join(figure21_gpu.lines(rows))
    assert "delegates over host: +2.0%, over one process: +6.2% (target" in said
    assert "the same at the first step, apart by 1.0e-03 of them" in said
    assert "delegate 102.0 101.0 to 103.0 1.0% 5.0% 1.5% 95.0%" in cells(said)
    assert "<svg" in str(figure21_gpu.chart(rows))


def test_spread_of_times() -> None:
    assert gpu.spread([]) == {"count": 0}
    assert gpu.spread(list(map(float, range(1, 11)))) == {"count": 10, "median": 5.5, "p90": 9.0, "most": 10.0}


def test_a_message_that_is_not_the_one_sent_is_found() -> None:
    good = [torch.full((8,), figure9.content(3, op), dtype=torch.uint8) for op in range(2)]
    figure9.check(3, good)
    good[1][5] = 0
    with pytest.raises(RuntimeError, match="message 1 of turn 3 came with other bytes"):
        figure9.check(3, good)


def test_an_item_without_its_results_says_why_and_with_them_shows_them() -> None:
    (paper,) = (each for each in pages.PAPERS if each.key == "pipemorph")
    absent = Item("Figure 0", "nothing", "pipemorph.figure5", ("pipemorph/figure0-gpu",), reason="not run")
    assert list(pages._item(paper, absent)) == ["not run"]
    there = Item("Figure 5", "ZB", "pipemorph.figure5", ("pipemorph/figure5-simulate",), reason="not run")
    assert "`python -m experiments.pipemorph.figure5`" in list(pages._item(paper, there))


def test_a_row_of_the_audit_becomes_what_it_says_once_its_results_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"paper": "PM", "item": "Fig0", "was": "", "state": "not run", "evidence": [], "why": "no GPU"}
    then = {"state": "on one GPU", "evidence": ["experiments/pipemorph/results/figure5-simulate.json"], "why": ""}
    never = {**then, "evidence": ["experiments/pipemorph/results/figure0-gpu.json"]}
    path = tmp_path / "audit.json"
    path.write_text(json.dumps([{**row, "once": then}, {**row, "once": never}, row]), encoding="utf-8")
    monkeypatch.setattr(pages, "AUDIT", path)
    assert [each["state"] for each in pages.audited()] == ["on one GPU", "not run", "not run"]


def test_the_page_of_what_has_run_has_the_figures_of_the_results() -> None:
    page = " ".join((ROOT / "docs" / "measured.md").read_text(encoding="utf-8").split())
    rows = load(RESULTS, "figure9-gpu")
    late = [
        median(max(row["pause_ms"]) for row in rows if (row["way"], row["late_ms"]) == (way, 30.0))
        for way in ("in order", "delegates")
    ]
    assert f"by {late[0]:.0f} ms over NCCL in order, and by {late[1]:.1f} ms by delegates" in page
    ratios = []
    for ranks in (2, 4):
        steps = {row["transport"]: median(row["steps_ms"]) for row in load(RESULTS, f"figure21_gpu-{ranks}ranks")}
        ratios.append(steps["delegate"] / steps["host"])
    assert f"take {ratios[0]:.2f} and {ratios[1]:.2f} times as long by delegates as over shared memory" in page
