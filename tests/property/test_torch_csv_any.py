"""torch's CSV over all schedules: what is written is read back the same, torch's own loader and passes take it,
its simulator completes, and no text makes the reader do anything but read or say where it is wrong."""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torchs

import penstock as ps
from penstock.formats import from_torch_csv, to_torch_csv
from penstock.formats.torch_csv import BOOKKEEPING, WAITS
from penstock.passes import add_communication, remove_communication
from penstock.schedule import Op, declare_shown_order
from penstock.schedule.op import COMMUNICATION
from strategies import library_schedules
from tiers import examples

pytestmark = pytest.mark.property

COMMS: Any = "compute_comms_waits" if hasattr(torchs, "WAIT_SEND_F") else "compute_comms"
"""What this torch means by "compute_comms"."""
STEPS = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def random_schedules(draw: st.DrawFn) -> ps.Schedule:
    """A valid schedule of any placement whose ranks run whatever is ready, in an order of the draw's; microbatches go
    forward in ascending order and back in any one, which is declared."""
    num_ranks = draw(st.integers(1, 4))
    num_stages = draw(st.integers(num_ranks, 6))
    hosts = draw(st.permutations(range(num_ranks)))
    hosts += draw(st.lists(st.integers(0, num_ranks - 1), min_size=num_stages - num_ranks, max_size=num_stages))
    hosts = draw(st.permutations(hosts[:num_stages]))
    num = draw(st.integers(1, 5))
    split = {(s, m): draw(st.booleans()) for s in range(num_stages) for m in range(num)}
    rows: list[list[Op]] = [[] for _ in range(num_ranks)]
    left = {Op("F", s, m) for s in range(num_stages) for m in range(num)}
    left |= {Op(kind, s, m) for (s, m), halves in split.items() for kind in ("IW" if halves else "B")}
    done: set[tuple[str, int, int]] = set()
    order = draw(st.permutations(range(num)))

    def comes_next(kinds: str, s: int, m: int) -> bool:
        before = order[: order.index(m)]
        return all(any((kind, s, other) in done for kind in kinds) for other in before)

    def is_ready(op: Op) -> bool:
        kind, s, m = op
        if kind == "F":  # in microbatch order, which torch asks of the last stage
            return (s == 0 or ("F", s - 1, m) in done) and (m == 0 or ("F", s, m - 1) in done)
        if not all(comes_next(kinds, s, m) for kinds in ("BI", "BW") if kind in kinds):
            return False
        if kind == "W":
            return ("I", s, m) in done
        return ("F", s, m) in done and (s + 1 == num_stages or ("back", s + 1, m) in done)

    while left:
        op = draw(st.sampled_from(sorted(op for op in left if is_ready(op))))
        left.remove(op)
        done |= {op, ("back", *op[1:])} if op.kind in "BI" else {op}
        rows[hosts[op.stage]].append(op)
    return declare_shown_order(ps.Schedule.of("any", ps.Placement((tuple(hosts),)), rows, num))


def exportable(schedule: ps.Schedule) -> bool:
    """Whether torch has all that the schedule needs."""
    try:
        to_torch_csv(schedule)
    except ps.ScheduleError as error:
        if error.rule != "torch":
            raise
        return False
    return True


schedules = (library_schedules() | random_schedules()).filter(exportable)


class Loaded(torchs._PipelineScheduleRuntime):
    """torch's runtime as far as loading a schedule goes: no stages, no processes."""

    def __init__(self, schedule: ps.Schedule) -> None:
        stage = SimpleNamespace(num_stages=schedule.num_stages, group_size=schedule.num_ranks, group_rank=0)
        super().__init__([stage], schedule.num_microbatches)

    def read(self, text: str, form: Any, folder: Path) -> dict[int, list[Any]]:
        path = folder / "schedule.csv"
        path.write_text(text)
        self._load_csv(str(path), format=form)
        return self.pipeline_order_with_comms


def without_bookkeeping(order: dict[int, list[Any]]) -> dict[int, list[Any]]:
    """torch's simulator knows no UNSHARD, RESHARD and REDUCE_GRAD, which torch's own passes put in, no waits, and of
    pairs only their two halves.
    """
    beside = {*BOOKKEEPING, *WAITS}
    return {
        rank: [half for a in row if a.computation_type.value not in beside for half in a.sub_actions or (a,)]
        for rank, row in order.items()
    }


def simulated(order: dict[int, list[Any]], schedule: ps.Schedule) -> None:
    """Raises ValueError where torch's simulator finds no way on."""
    with contextlib.redirect_stdout(io.StringIO()):
        torchs._simulate_comms_compute(order, lambda s: schedule.rank_of(s, 0), schedule.num_stages)


@STEPS
@given(schedules)
def test_compute_only_there_and_back(schedule: ps.Schedule) -> None:
    read = declare_shown_order(from_torch_csv(to_torch_csv(schedule), name=schedule.name))
    assert read == replace(schedule, max_in_flight=None)


@STEPS
@given(schedules)
def test_compute_comms_there_and_back(schedule: ps.Schedule) -> None:
    placed = add_communication(schedule)
    for form in ("compute_comms", "compute_comms_waits"):
        read = declare_shown_order(from_torch_csv(to_torch_csv(placed, form), name=schedule.name))
        assert read == replace(placed, max_in_flight=None)


@STEPS
@given(schedules)
def test_messages_are_proved_even_where_sends_wait(schedule: ps.Schedule) -> None:
    placed = add_communication(schedule)
    ps.check(placed, channels="nccl")
    assert remove_communication(placed) == schedule
    crossing = sum(
        schedule.rank_of(s, m) != schedule.rank_of(s + 1, m)
        for s in range(schedule.num_stages - 1)
        for m in range(schedule.num_microbatches)
    )
    there = [op for row in placed.order for op in row if op.kind in COMMUNICATION]
    assert len(there) == len(set(there)) == 4 * crossing


@STEPS
@given(schedule=schedules)
def test_torch_loads_compute_only(schedule: ps.Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    loaded = Loaded(schedule)
    order = loaded.read(to_torch_csv(schedule), "compute_only", tmp_path_factory.getbasetemp())
    assert loaded.stage_index_to_group_rank == dict(enumerate(schedule.placement.pipelines[0]))
    simulated(without_bookkeeping(order), schedule)


@STEPS
@example(schedule=ps.build("dualpipe-v", 1, 2, overlap=True))  # torch's simulator knows no pairs
@given(schedule=schedules)
def test_torch_loads_compute_comms_and_means_the_same(
    schedule: ps.Schedule, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the same bookkeeping as torch's own passes put in, though it may stand elsewhere."""
    folder = tmp_path_factory.getbasetemp()
    ours = Loaded(schedule).read(to_torch_csv(schedule, COMMS), "compute_comms", folder)
    simulated(without_bookkeeping(ours), schedule)
    torch_own = Loaded(schedule).read(to_torch_csv(schedule), "compute_only", folder)
    for rank, row in ours.items():
        sums = [str(a) for a in row if a.computation_type.value == "REDUCE_GRAD"]
        assert sorted(sums) == sorted(str(a) for a in torch_own[rank] if a.computation_type.value == "REDUCE_GRAD")
        sent = {str(a) for a in row if a.computation_type.value in COMMUNICATION}
        assert sent == {str(a) for a in torch_own[rank] if a.computation_type.value in COMMUNICATION}


@STEPS
@given(schedule=schedules)
def test_what_torch_writes_is_read(schedule: ps.Schedule, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What torch makes of our file, written by torch, is a schedule that is proved here, sends waiting or not."""
    folder = tmp_path_factory.getbasetemp()
    loaded = Loaded(schedule)
    loaded.read(to_torch_csv(schedule), "compute_only", folder)
    path = folder / "dumped.csv"
    loaded._dump_csv(str(path))
    read = ps.load(path, declare_order=True)
    ps.check(read, channels="nccl")
    assert remove_communication(read).order == schedule.order
    loaded._dump_csv(str(path), format="compute_only")
    assert ps.load(path).order == schedule.order


TORCHS_OWN = {
    "ScheduleInterleaved1F1B": "interleaved-1f1b",
    "ScheduleLoopedBFS": None,
    "ScheduleInterleavedZeroBubble": None,
    "ScheduleZBVZeroBubble": "zb-v",
    "ScheduleDualPipeV": "dualpipe-v",
}


@pytest.mark.parametrize(
    ("name", "num_ranks", "num"),
    [
        (name, num_ranks, num)
        for name in TORCHS_OWN
        for num_ranks, num in [(2, 4), (4, 8), (4, 4), (4, 16)]
        if name != "ScheduleDualPipeV" or num >= 2 * num_ranks
    ],
)
def test_torchs_own_schedules_are_read(name: str, num_ranks: int, num: int, tmp_path: Path) -> None:
    """In both forms; ZB-V with fewer than 2p - 1 microbatches has holes where torch dropped its padding."""
    in_v = name in ("ScheduleZBVZeroBubble", "ScheduleDualPipeV")
    last = 2 * num_ranks - 1
    stages = [
        SimpleNamespace(
            stage_index=index,
            num_stages=2 * num_ranks,
            group_size=num_ranks,
            group_rank=0,
            is_last=index == last,
            submod=None,
        )
        for index in ((0, last) if in_v else (0, num_ranks))
    ]
    made = getattr(torchs, name)(stages, num, loss_fn=lambda output, target: output)
    read = {}
    for form in ("compute_only", "compute_comms"):
        made._dump_csv(str(tmp_path / "torchs.csv"), format=form)
        text = (tmp_path / "torchs.csv").read_text()
        plain = from_torch_csv(text)
        read[form] = declare_shown_order(plain)
        ps.check(read[form])
        # torch's looped BFS runs each stage's backwards in reverse; all others run in ascending order.
        assert (read[form] != plain) == (name == "ScheduleLoopedBFS")
        assert ("OVERLAP" in text) == bool(plain.pairs) == (name == "ScheduleDualPipeV")
        assert from_torch_csv(to_torch_csv(read[form], form)) == plain if name != "ScheduleLoopedBFS" else True
    assert remove_communication(read["compute_comms"]) == read["compute_only"]
    ps.check(read["compute_comms"], channels="nccl")
    if (ours := TORCHS_OWN[name]) is not None:
        own = ps.build(ours, num_ranks, num, **{"overlap": True} if in_v and ours == "dualpipe-v" else {})
        assert read["compute_only"].placement == own.placement
        if ours == "dualpipe-v":  # the very same: each op in its place, and torch's pairs
            assert read["compute_only"] == own.renamed("torch")


CELLS = st.sampled_from(
    [f"{stage}{kind}{m}" for stage in (0, 1) for kind in "FBIW" for m in (0, 1)]
    + ["0SEND_F0", "1RECV_F0", "0UNSHARD", "1REDUCE_GRAD", "0WAIT_SEND_F0", "1WAIT_REDUCE_GRAD"]
    + ["(0F0;0B0)OVERLAP_F_B", "0BW0", "99F0", "0F999999999"]
    + ["", " ", '"', "0F", "F0", "0F\u0663", "-1F0", "0F0 0F1", "\x00", "\u2028", "0f0"]
) | st.text(max_size=6)
TEXTS = st.text(max_size=60) | st.lists(st.lists(CELLS, max_size=6), max_size=4).map(
    lambda rows: "\n".join(",".join(row) for row in rows)
)


@settings(max_examples=examples(400), deadline=None)
@given(TEXTS)
def test_any_text_is_read_or_refused_with_its_spot(text: str) -> None:
    refused: ps.ScheduleError | None = None
    try:
        read = from_torch_csv(text)
    except ps.ScheduleError as error:
        refused = error
    if refused is None:
        assert all(row for row in read.order)
        assert len({op for row in read.order for op in row}) == read.num_ops
        assert sum(cell.strip(" \t") != "" for cell in re.split(r",|\r\n|\r|\n", text)) >= read.num_ops
        return
    assert refused.rule == "csv"
    assert refused.line is not None
    assert refused.column is not None
    assert str(refused).startswith(f"line {refused.line}, column {refused.column} (character ")


@settings(max_examples=examples(150), deadline=None)
@given(schedules, st.data())
def test_one_wrong_cell_is_found_at_its_place(schedule: ps.Schedule, data: st.DataObject) -> None:
    rows = [line.split(",") for line in to_torch_csv(schedule).splitlines()]
    line = data.draw(st.integers(0, len(rows) - 1))
    column = data.draw(st.integers(0, len(rows[line]) - 1))
    rows[line][column] = data.draw(st.sampled_from(["x", "0Q0", "F0", "0BW0", "0F0x", "00", "1.5F0", "0F-1", "0F"]))
    with pytest.raises(ps.ScheduleError) as caught:
        from_torch_csv("\n".join(",".join(row) for row in rows))
    assert (caught.value.line, caught.value.column) == (line + 1, column + 1)
    assert repr(rows[line][column]) in str(caught.value)


@pytest.mark.slow
@settings(max_examples=examples(150), deadline=None)
@given(schedules, st.data())
def test_a_file_cut_off_is_refused_unless_what_is_left_is_whole(schedule: ps.Schedule, data: st.DataObject) -> None:
    """Rows of several ranks need one another, so only a cut between ranks or microbatches can go unseen."""
    text = to_torch_csv(schedule)
    left = text[: data.draw(st.integers(0, len(text) - 1))]
    try:
        read = from_torch_csv(left)
    except ps.ScheduleError:
        return
    ps.check(declare_shown_order(read))  # a file does not say which order it declares
    for was, row in zip(schedule.order, read.order, strict=False):
        assert was[: len(row)] == row
