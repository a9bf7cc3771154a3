"""torch's CSV: what is read and written, and that each thing wrong in a file is named with its line and column."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.formats import from_torch_csv, to_torch_csv
from penstock.passes import add_communication, remove_communication, separate_pairs
from penstock.schedule import Needs, Op, Registered, StageGraph, declare_shown_order

pytestmark = pytest.mark.unit

COMPUTE = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1\n"

COMMS = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""


def refusal(text: str) -> ps.ScheduleError:
    with pytest.raises(ps.ScheduleError) as caught:
        from_torch_csv(text)
    assert caught.value.rule == "csv"
    return caught.value


def test_a_table_is_read_and_bookkeeping_is_left_out() -> None:
    read = from_torch_csv(COMPUTE, name="mine")
    assert read == ps.parse("""
        schedule mine: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 F1 B0 B1
        rank 1 | F0 B0 F1 B1
    """)
    placed = from_torch_csv(COMMS)
    ps.check(placed)
    assert " ".join(map(str, placed.order[0])) == "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"
    assert remove_communication(placed) == from_torch_csv(COMPUTE)
    for spelled in (COMPUTE.replace("\n", "\r\n"), COMPUTE.rstrip("\n"), COMPUTE.replace(",", " ,\t")):
        assert from_torch_csv(spelled) == from_torch_csv(COMPUTE)


BAD: dict[str, tuple[str, tuple[int, int], str]] = {
    "nothing": ("", (1, 1), "the file holds no rank"),
    "junk after an action": ("0F0junk,0B0\n", (1, 1), "'0F0junk' is no action"),
    "no such action": ("0F0,0B0,0Q0\n", (1, 3), "'0Q0': there is no action Q; there are F, B, I, W, SEND_F"),
    "a letter too many": ("0F0,\n1F0,1BW0\n", (2, 2), "'1BW0': BW was the full backward, and B its input half"),
    "an op of ours": ("0F0,0R0,0B0\n", (1, 2), "'0R0': R is an op of Penstock's, not of torch's"),
    "no stage number": ("F0,0B0\n", (1, 1), "'F0' is no action; write [stage][action][microbatch]"),
    "no microbatch": ("0F0,,0B\n", (1, 3), "'0B' names no microbatch; write one after B, like 0B0"),
    "a microbatch on a whole stage": ("0UNSHARD0,0F0,0B0\n", (1, 1), "'0UNSHARD0': UNSHARD is for a whole stage"),
    "other digits": ("0F0,0B\u0663\n", (1, 2), "is no action"),
    "a quoted cell": ('0F0,"0B0"\n', (1, 2), "'\"0B0\"' is no action"),
    "a byte order mark": ("\ufeff0F0,0B0\n", (1, 1), "is no action"),
    "an op twice": ("0F0,0B0,0F0\n", (1, 3), "0F0 occurs twice, first at line 1, column 1"),
    "a stage on two ranks": ("0F0,0B0\n1F0,1B0,0F1\n", (2, 3), "0F1 puts stage 0 on rank 1, but it is on rank 0 too"),
    "a stage nowhere": ("0F0,0B0\n2F0,2B0\n", (2, 1), "'2F0': stage 1 has no op anywhere"),
    "a gap in the microbatches": ("0F0,0B0,0F2,0B2\n", (1, 3), "0F1 is missing here or before"),
    "a row cut off": ("0F0,0F1,0B0,0B1\n,1F0,1B0,1F1\n", (2, 4), "1B1 is missing after this cell"),
    "a half backward": ("0F0,0I0\n", (1, 2), "0W0 is missing after this cell"),
    "a rank without ops": ("0F0,0B0\n,,\n1F0,1B0\n", (2, 1), "rank 1 has no op"),
    "a blank line at the end": ("0F0,0B0\n\n", (2, 1), "rank 1 has no op; a line is a rank, and each runs at least "),
    "letters of an older torch": ("0F0,0B0,0W0\n", (1, 3), "if this file is as old, replace every B by I"),
    "a sum before the end": ("0F0,0I0,0REDUCE_GRAD,0W0\n", (1, 4), "0W0 comes after the REDUCE_GRAD of its stage"),
    "two sums": ("0F0,0B0,0REDUCE_GRAD,0REDUCE_GRAD\n", (1, 4), "0REDUCE_GRAD occurs twice, first at line 1"),
    "a wait before its send": ("0F0,0WAIT_SEND_F0\n", (1, 2), "no 0SEND_F0 comes before it on its rank"),
    "two waits for a send": (
        "0F0,0SEND_F0,0WAIT_SEND_F0,0WAIT_SEND_F0\n",
        (1, 4),
        "0WAIT_SEND_F0 occurs twice, first at line 1, column 3",
    ),
    "a wait for no sum": ("0F0,0B0,0WAIT_REDUCE_GRAD\n", (1, 3), "no 0REDUCE_GRAD comes before it"),
    "bookkeeping of another rank": ("0F0,0B0,1UNSHARD\n1F0,1B0\n", (1, 3), "stage 1 has no op here"),
}


def test_what_is_wrong_is_named_with_line_and_column() -> None:
    for text, (line, column), message in BAD.values():
        error = refusal(text)
        assert (error.line, error.column) == (line, column)
        assert str(error).startswith(f"line {line}, column {column} (character ")
        assert message in str(error)
    assert len(str(refusal("0F0," + "x" * 10**6))) < 200


def test_what_is_no_pair_is_refused() -> None:
    for cell, says in {
        "(0SEND_F1;0B0)OVERLAP_F_B": "and this is of SEND_F, B",
        "(0B0;0F1)OVERLAP_F_B": "a forward (F) and then a full backward (B), and this is of B, F",
        "(0F1)OVERLAP_F_B": "and this is of F;",
        "(0F1;0UNSHARD)OVERLAP_F_B": "and this is of F, UNSHARD",
        "(0F1;0B0)OVERLAP_B_F": "there is no OVERLAP_B_F",
        "(0F0;0B0)OVERLAP_F_B": "0F0 occurs twice",
    }.items():
        error = refusal(f"0F0,{cell},0B1\n1F0,1F1,1B1\n")
        assert says in str(error)
        assert (error.line, error.column) == (1, 2)


def test_an_overlapped_pair_is_read_as_one_op_and_written_back() -> None:
    text = "0F0,0F1,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n"
    assert to_torch_csv(from_torch_csv(text)) == text
    assert separate_pairs(from_torch_csv(text)) == from_torch_csv("0F0,0F1,0F2,0B0,0B1,0B2\n")


def one_rank(*ops: str) -> ps.Schedule:
    body = " ".join(ops)
    return ps.parse(f"schedule x: 1 rank, 1 stage, 2 microbatches\npipeline 0: stages on ranks 0\nrank 0 | {body}")


def two_pipelines() -> ps.Schedule:
    return ps.parse("""
        schedule x: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1, microbatches 0
        pipeline 1: stages on ranks 1 0, microbatches 1
        rank 0 | 0F0 1F1 1B1 0B0
        rank 1 | 0F1 1F0 1B0 0B1
    """)


def shared() -> ps.Schedule:
    placement = ps.Placement(((0, 0),), shared=((1, (0, 1)),))
    rows = [[Op("F", 0, 0), Op("F", 1, 0), Op("B", 1, 0), Op("B", 0, 0)], [Op("F", 1, 0), Op("B", 1, 0)]]
    return ps.Schedule.of("x", placement, rows, 1)


def with_graph(graph: StageGraph) -> ps.Schedule:
    return replace(ps.build("gpipe", 2, 2), stage_graph=graph)


LACKS: dict[str, tuple[Callable[[], ps.Schedule], str]] = {
    "pipelines": (two_pipelines, "torch's pipelining lacks several pipelines (2 here)"),
    "shared": (shared, "torch's pipelining lacks stages that several ranks share (stage 1 is on ranks 0, 1)"),
    "branches": (lambda: with_graph(StageGraph(2, ())), "torch's pipelining lacks a graph of stages"),
    "registered": (
        lambda: with_graph(StageGraph(2, ((0, 1),), (), (Registered("GATHER", 1, 2),))),
        "torch's pipelining lacks op kinds of the user's own (GATHER here)",
    ),
    "needs": (
        lambda: with_graph(StageGraph(2, ((0, 1),), (), (), (Needs(("F", 0), ("B", 1)),))),
        "torch's pipelining lacks a graph of stages",
    ),
    "recomputation": (
        lambda: one_rank("F0", "R0", "B0", "F1", "B1"),
        "rank 0, step 1, 0R0: torch's pipelining lacks recomputation as an op of the schedule (R)",
    ),
    "an idle rank": (
        lambda: replace(one_rank("F0", "B0", "F1", "B1"), order=(one_rank("F0", "B0", "F1", "B1").order[0], ())),
        "torch's pipelining lacks ranks with nothing to do (rank 1 has no op)",
    ),
    "losses out of order": (
        lambda: declare_shown_order(one_rank("F1", "B1", "F0", "B0")),
        "rank 0, step 0, 0F1: torch's pipelining lacks forwards of the last stage out of microbatch order",
    ),
}


def test_what_torch_lacks_is_named() -> None:
    for make, message in LACKS.values():
        with pytest.raises(ps.ScheduleError) as caught:
            to_torch_csv(make())
        assert caught.value.rule == "torch"
        assert str(caught.value).startswith(message)
    with pytest.raises(ps.ScheduleError, match="rule: coverage"):
        to_torch_csv(one_rank("F0", "B0", "F1"))


def test_messages_that_could_wait_for_one_another_are_not_written() -> None:
    """Both ranks send before they receive: fine on gloo, but not where both messages share a stream."""
    schedule = ps.parse("""
        schedule x: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 SEND_F0 F1 SEND_F1 RECV_B0 B0 RECV_B1 B1
        rank 1 | RECV_F0 F0 B0 SEND_B0 RECV_F1 F1 B1 SEND_B1
    """)
    ps.check(schedule)
    with pytest.raises(ps.ScheduleError, match="messages wait for one another on nccl") as caught:
        to_torch_csv(schedule)
    assert (caught.value.rank, caught.value.step, str(caught.value.op)) == (1, 3, "1SEND_B0")
    assert "1SEND_B0 from rank 1 to rank 0 waits behind 0SEND_F1, which rank 0 posts earlier" in str(caught.value)
    assert "0SEND_F1 from rank 0 to rank 1 waits behind 1SEND_B0, which rank 1 posts earlier" in str(caught.value)
    with pytest.raises(ps.ScheduleError, match="on nccl-pair"):
        to_torch_csv(schedule, channels="nccl-pair")
    for channel in ("gloo", "nccl-edge", "buffered"):
        assert to_torch_csv(schedule, channels=channel)
    assert to_torch_csv(add_communication(schedule)) == COMMS


def test_files_are_written_for_a_channel(tmp_path: Path) -> None:
    schedule, path = ps.build("zb", 4, 8), tmp_path / "plan.csv"
    ps.save(schedule, path, dialect="torch:compute_comms", channels="gloo")
    placed = ps.load(path)
    ps.check(placed, channels="gloo")
    assert placed.order == add_communication(schedule, channels="gloo").order
    with pytest.raises(ps.ScheduleError, match="wait for one another on nccl"):
        ps.save(placed, path, dialect="torch:compute_comms")


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zb-v"])
def test_files_are_fixed(name: str, golden: Any) -> None:
    schedule = ps.build(name, 2, 4)
    golden(f"torch_csv/{name}.csv", to_torch_csv(schedule))
    golden(f"torch_csv/{name}.comms.csv", to_torch_csv(add_communication(schedule)))
    golden(f"torch_csv/{name}.waits.csv", to_torch_csv(schedule, "compute_comms_waits"))


def test_files_by_ending_and_dialect(tmp_path: Path) -> None:
    schedule = ps.build("zb-v", 2, 4)
    path = tmp_path / "my plan.csv"
    ps.save(schedule, path)
    assert ps.load(path) == ps.load(path, dialect="torch") == schedule.renamed("my-plan")
    ps.save(schedule, path, dialect="torch:compute_comms")
    assert ps.load(path) == add_communication(schedule).renamed("my-plan")
    ps.save(schedule, path, dialect="torch:compute_comms_waits")
    assert "WAIT_SEND_F" in path.read_text()
    assert ps.load(path) == add_communication(schedule).renamed("my-plan")
    assert ps.load(path, dialect="torch:compute_only") == schedule.renamed("my-plan")
    ps.save(ps.load(path), path, dialect="torch:compute_only")
    assert ps.load(path) == schedule.renamed("my-plan")
    assert ps.load(path, dialect="torch:compute_comms") == add_communication(schedule).renamed("my-plan")


def test_a_dialect_is_one_of_csv(tmp_path: Path) -> None:
    schedule = ps.build("1f1b", 2, 4)
    with pytest.raises(
        ps.ScheduleError, match="no dialect 'jax'; there are torch, torch:compute_only, torch:compute"
    ):
        ps.save(schedule, tmp_path / "s.csv", dialect="jax")
    with pytest.raises(ps.ScheduleError, match=r"s\.json: dialect 'torch' is for \.csv files"):
        ps.save(schedule, tmp_path / "s.json", dialect="torch")
    assert list(tmp_path.iterdir()) == []


def test_the_files_name_comes_first_and_the_spot_stays(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("0F0,0B0\n1F0,1X0\n")
    with pytest.raises(ps.ScheduleError) as caught:
        ps.load(path)
    assert str(caught.value).startswith(f"{path}: line 2, column 2 (character 5): '1X0'")
    assert (caught.value.line, caught.value.column, caught.value.rank) == (2, 2, 1)


@pytest.mark.slow
def test_written_as_a_csv_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schedule = ps.build("zb", 2, 4, max_in_flight=4)
    native, csv, back = (str(tmp_path / name) for name in ("zb.json", "zb.csv", "back.json"))
    ps.save(schedule, native)
    assert main(["show", native, "--out", csv]) == 0
    assert capsys.readouterr().out == (
        f"wrote {csv}\nleft out: at most 4 activations in flight, for which a CSV has no place\n"
    )
    assert main(["show", csv, "--out", back]) == 0
    assert ps.load(back) == replace(schedule, max_in_flight=None)
    assert main(["show", native, "--out", csv, "--dialect", "torch:compute_comms", "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["left_out"] == ["max_in_flight"]
    assert "0SEND_F0" in Path(csv).read_text()


@pytest.mark.parametrize(
    ("channels", "carry"), [("nccl", ["nccl"]), ("gloo", ["gloo"]), ("nccl-edge", ["nccl-edge"])]
)
def test_show_writes_a_plan_for_another_channel_as_plan_does(
    channels: str, carry: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    costs = ps.Costs.uniform(4, f=10, i=10, w=10)
    plan = ps.plan(costs, 4, 8, channels=channels, time_limit=0.5)
    for ending in ("json", "csv"):
        plan.save(tmp_path / f"plan.{ending}")
    line = ["show", str(tmp_path / "plan.json"), "--out", str(tmp_path / "shown.csv")]
    assert main(line) == 0
    said = capsys.readouterr().out
    assert (tmp_path / "shown.csv").read_text() == (tmp_path / "plan.csv").read_text()
    assert main([*line, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["channels"]
    assert set(carry) <= set(found)
    assert ("its messages are placed for" in said) == ("nccl" not in found)
