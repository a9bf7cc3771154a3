"""Pairs of ops in two lanes of a device: nothing waits for too little, and a wait that is missing is found out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock as ps
from device_queues import Cell, LaneClocks, RaceDetector, TwoLanes
from offload_programs import offloaded
from penstock.cost import Costs
from penstock.dispatch import Dispatcher
from penstock.passes import overlap_pairs, separate_pairs
from penstock.runtime.execute import torch_backend
from penstock.runtime.execute.backend import OpTable
from penstock.runtime.execute.executors import run_local
from penstock.runtime.execute.launched_ops import MOST_LAUNCHED_OPS, LaunchedOps, lanes_of
from penstock.runtime.execute.timeline import measured_costs, measured_timeline
from penstock.runtime.execute.worker import Worker
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.stage.ops import StageRunner
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport import loopback
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.wiring import WiredOp, wire
from penstock.schedule import Op
from penstock.simulation.simulator import as_dispatch, frozen_peaks, memory_changes
from plain_loop import plain_step

PRIME = 1_000_003
SCHEDULES = {
    "dualpipe-v": ps.build("dualpipe-v", 4, 8, overlap=True),
    "dualpipe": ps.build("dualpipe", 4, 8, overlap=True),
    "interleaved": overlap_pairs(ps.build("interleaved-1f1b", 2, 8, num_stages=8)),
    "one stage a rank": overlap_pairs(ps.build("1f1b", 4, 8)),
}


class Sums:
    """Stages whose forwards and backwards compute with numbers in the memory of a device, so that it matters when
    each of them reads and writes. A forward replaces what the stage keeps, as a module may replace a buffer.

    Attributes:
        cells: gradients and what is kept, by (what, stage): there to the end.
    """

    def __init__(self, device: TwoLanes, num_stages: int) -> None:
        self._device = device
        self.cells = {(what, s): Cell(device) for s in range(num_stages) for what in ("gradient", "kept")}
        self._held: dict[tuple[int, int], Cell] = {}
        self._waiting: dict[tuple[int, int], Cell] = {}

    def state(self, op: Op) -> Sequence[Any]:
        return [self.cells["kept", op.stage]]

    def compute(self, made: Cell, read: Sequence[Cell], factors: Sequence[int], plus: int) -> None:
        """Has the device make a number from others; and does so at once, beside the device."""
        place, places = made.place, [cell.place for cell in read]
        made.value = (sum(f * cell.value for f, cell in zip(factors, read, strict=True)) + plus) % PRIME

        def work(memory: list[int]) -> None:
            memory[place] = (sum(f * memory[p] for f, p in zip(factors, places, strict=True)) + plus) % PRIME

        self._device.give(work)

    def handle(self, wired: WiredOp, inputs: Sequence[Payload]) -> list[Payload]:
        op, device = wired.op, self._device
        came: list[Cell] = [leaf for payload in inputs for leaf in payload.leaves]  # type: ignore[misc]
        key = op.stage, op.microbatch
        if op.kind == "F":
            inner, kept, made = Cell(device), Cell(device), Cell(device)
            old = self.cells["kept", op.stage]
            self.compute(inner, came, [3] * len(came), op.microbatch + 1)
            self.compute(made, [inner, old], [5, 7], op.stage)
            self.compute(kept, [old, inner], [11, 1], 0)
            self.cells["kept", op.stage], self._held[key] = kept, inner
        elif op.kind == "W":
            self._add(op.stage, self._held.pop(key), self._waiting.pop(key))
            return []
        else:
            inner, made = Cell(device), Cell(device)
            self.compute(inner, came, [13] * len(came), 1)
            self.compute(made, [inner, self._held[key], self.cells["kept", op.stage]], [3, 1, 17], 2)
            if op.kind == "I":
                self._waiting[key] = inner
            else:
                self._add(op.stage, self._held.pop(key), inner)
        return [Payload([made]) for _ in wired.output_edges]  # type: ignore[list-item]

    def _add(self, stage: int, held: Cell, gradient: Cell) -> None:
        total = self.cells["gradient", stage]
        self.compute(total, [total, held, gradient], [19, 1, 23], 0)

    def wrong(self) -> list[tuple[str, int]]:
        """Those that are not what comes of all ops one after the other."""
        self._device.run_all()
        return [key for key, cell in self.cells.items() if self._device.memory[cell.place] != cell.value]


class ForgetsInputs(LaunchedOps):
    """Holds nothing that forwards of pairs take in."""

    def start(self, inputs: Sequence[Payload] = ()) -> None:
        super().start()


class Hesitating(Dispatcher):
    """Takes the backward of a pair not at once, as a process may that follows the decisions of another."""

    _last: int | None = None

    def next(self) -> int | None:
        last, self._last = self._last, None
        if last in self.graph.backward_of:
            return None
        self._last = super().next()
        return self._last


def computed(
    name: str,
    seed: int,
    dispatch: str = "frozen",
    forgets: Sequence[int] = (),
    keeps: bool = True,
    decides: type[Dispatcher] = Dispatcher,
) -> tuple[Sums, TwoLanes, list[Worker]]:
    """All ranks of a schedule, on one device."""
    schedule = SCHEDULES[name]
    wiring = wire(schedule)
    change = memory_changes(wiring.graph, Costs.uniform(schedule.num_stages))
    caps = frozen_peaks(wiring.graph, change)
    boxes = [Mailbox() for _ in schedule.order]
    device = TwoLanes(seed, forgets)
    sums, lanes = Sums(device, schedule.num_stages), lanes_of(schedule)
    workers = []
    for rank in range(schedule.num_ranks):
        launched = LaunchedOps(device, MOST_LAUNCHED_OPS, lanes, schedule.pairs, sums.state)
        if not keeps:
            launched = ForgetsInputs(device, MOST_LAUNCHED_OPS, lanes, schedule.pairs)
        handlers = dict.fromkeys({op.kind for op in wiring.graph.ops}, sums.handle)
        dispatcher = decides(wiring.graph, rank, as_dispatch(dispatch), change, caps[rank])
        workers.append(
            Worker(wiring, rank, dispatcher, OpTable(handlers, launched=launched), LoopbackTransport(boxes, rank))
        )
    run_local(workers)
    return sums, device, workers


def test_stages_of_pairs_have_different_lanes() -> None:
    assert lanes_of(SCHEDULES["dualpipe-v"]) == {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 1, 7: 1}
    assert lanes_of(SCHEDULES["dualpipe"]) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert lanes_of(SCHEDULES["one stage a rank"]) == {}
    lanes, pairs = lanes_of(SCHEDULES["interleaved"]), SCHEDULES["interleaved"].pairs
    number = Counter(lanes.get(f.stage, 0) != lanes.get(b.stage, 0) for f, b in pairs)
    assert number[True] > number[False] > 0
    assert lanes_of(ps.build("1f1b", 2, 4)) == {}


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_lanes_in_any_order_compute_what_one_op_after_the_other_does(name: str, dispatch: str) -> None:
    for seed in range(12):
        sums, _, _ = computed(name, seed, dispatch)
        assert sums.wrong() == [], seed


def test_a_backward_that_does_not_come_at_once_waits_for_its_forward() -> None:
    for seed in range(12):
        sums, device, workers = computed("dualpipe-v", seed, decides=Hesitating)
        assert sums.wrong() == [], seed
    times = [time for worker in workers for time in worker.recorder.times]
    assert all(start < end for _, start, end in times)
    waits = device.waits_of[0]
    assert all(computed("dualpipe-v", seed, forgets=waits, decides=Hesitating)[0].wrong() for seed in range(4))


@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_that_does_not_wait_gives_wrong_numbers(lane: int) -> None:
    """Lane 1 for what was launched before, or lane 0 for what came of that."""
    waits = computed("dualpipe-v", 0)[1].waits_of[lane]
    assert len(waits) > 40
    assert all(computed("dualpipe-v", seed, forgets=waits)[0].wrong() for seed in range(4))


@pytest.mark.slow
def test_a_single_wait_that_is_missing_gives_wrong_numbers() -> None:
    """In some order. Not each of them does: a rank launches two ops ahead, and waits itself for those before."""
    num = computed("dualpipe-v", 0)[1].num_waits
    found = [
        any(computed("dualpipe-v", seed, forgets=[wait])[0].wrong() for seed in range(3)) for wait in range(2, num, 5)
    ]
    assert sum(found) > 2, (sum(found), len(found))


def test_memory_that_a_forward_reads_is_kept_until_the_backward_is_launched() -> None:
    wrong = [computed("dualpipe-v", seed, keeps=False)[0].wrong() for seed in range(6)]
    assert any(wrong)


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_a_pair_has_one_time_and_nothing_comes_between_its_two(dispatch: str) -> None:
    schedule = SCHEDULES["dualpipe-v"]
    _, _, workers = computed("dualpipe-v", 3, dispatch)
    for worker in workers:
        times = worker.recorder.times
        assert len(times) == len(schedule.order[worker.rank])
        at = {op: place for place, (op, _, _) in enumerate(times)}
        assert all(end <= times[place + 1][1] for place, (_, _, end) in enumerate(times[:-1]))
        for forward, backward in schedule.pairs:
            if forward in at:
                (_, start, end), (_, then, last) = times[at[forward]], times[at[backward]]
                assert at[backward] == at[forward] + 1
                assert start < end == then == last


# ---- training


class Noting(nn.Module):
    """A layer with all that a forward may change: statistics, a buffer it replaces, and an attribute."""

    running: Tensor

    def __init__(self, keeps: bool = True) -> None:
        super().__init__()
        self.layer, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.register_buffer("running", torch.zeros(6))
        self.scale = {"of all": torch.ones(6)}
        self.num_calls = 0
        self.last = {"output": [torch.zeros(6)]} if keeps else {}

    def forward(self, x: Tensor) -> Tensor:
        x = 0.5 * x  # nobody needs what came in after this
        y = self.dropout(self.norm(self.layer(x))) + self.running + self.scale["of all"]
        self.running = 0.5 * self.running + y.detach().mean(0)
        if self.last:
            y = y + 0.1 * self.last["output"][0]
            self.last = {"output": [y.detach().amax(0)]}
            self.num_calls += 1
            if self.num_calls == 5:  # one made with the model, in the lane of all else
                self.scale = {"of all": 2 * self.scale["of all"]}
        return x + torch.tanh(y)


def build_model(keeps: bool = True, tied: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Noting(keeps) for _ in range(8)))
    if tied:
        first, *_, last = model
        assert isinstance(first, Noting)
        assert isinstance(last, Noting)
        last.layer.weight = first.layer.weight
    return model


def recomputed(schedule: ps.Schedule) -> ps.Schedule:
    """Forwards of every second microbatch run again before their full backwards, or the pairs that these are in."""
    backward_of = dict(schedule.pairs)
    rows = []
    for row in schedule.order:
        made: list[Op] = []
        for op in row:
            backward = backward_of.get(op, op)
            again = Op("R", *backward[1:])
            runs = backward.kind == "B" and backward.microbatch % 2 and again not in made
            made += [again, op] if runs else [op]
        rows.append(tuple(made))
    return replace(schedule, order=tuple(rows))


def partly_away(schedule: ps.Schedule) -> ps.Schedule:
    """With activations of some microbatches in host memory, and the pairs that this leaves side by side."""
    away = offloaded(separate_pairs(schedule), every=3)
    at = {op: step for row in away.order for step, op in enumerate(row)}
    return replace(away, pairs=tuple(pair for pair in schedule.pairs if at[pair.backward] == at[pair.forward] + 1))


CASES: dict[str, tuple[ps.Schedule, dict[str, Any]]] = {
    "dualpipe-v": (SCHEDULES["dualpipe-v"], {}),
    "interleaved": (SCHEDULES["interleaved"], {}),
    "one stage a rank": (overlap_pairs(ps.build("1f1b", 8, 8)), {}),
    "recomputed": (recomputed(SCHEDULES["dualpipe-v"]), {"keeps": False}),
    "offloaded": (partly_away(SCHEDULES["dualpipe-v"]), {}),
    "tied": (SCHEDULES["dualpipe-v"], {"tied": True}),
}


def trained(name: str, clocks: LaneClocks, dispatch: str = "frozen") -> tuple[RaceDetector, bool]:
    """Two steps with updates: what races there would be, and whether numbers are those of the plain loop."""
    schedule, kind = CASES[name]
    ps.check(schedule)
    torch.manual_seed(1)
    x, y = torch.randn(33, 6), torch.randn(33, 6)
    plain, losses = build_model(**kind), []
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in (1, 2):
        losses.append(plain_step(plain, x, y, schedule.num_microbatches, nn.functional.mse_loss, step=step))
        optimizer.step()
        optimizer.zero_grad()
    model, detector = build_model(**kind), RaceDetector(clocks)
    with (
        ps.Pipeline(
            model,
            schedule,
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            dispatch=dispatch,
        ) as pipe,
        detector,
    ):
        found = [pipe.step(x, y).loss for _ in range(2)]
    same = all(map(torch.equal, losses, found)) and all(map(torch.equal, plain.parameters(), model.parameters()))
    return detector, same and all(map(torch.equal, plain.buffers(), model.buffers()))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_training_needs_no_wait_that_is_not_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = LaneClocks()
    monkeypatch.setattr(torch_backend, "queue_of", lambda device: clocks)
    detector, same = trained(name, clocks)
    assert detector.races == []
    assert same
    assert (detector.beside > 100) == (name != "one stage a rank")


@pytest.mark.slow
def test_training_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = LaneClocks()
    monkeypatch.setattr(torch_backend, "queue_of", lambda device: clocks)
    detector, same = trained("dualpipe-v", clocks, "dynamic")
    assert (detector.races, same) == ([], True)
    assert detector.beside > 100


class Forgetful(LaneClocks):
    """A device that leaves out the waits of one lane."""

    def __init__(self, lane: int) -> None:
        super().__init__()
        self._lane = lane

    def after(self, mark: Any) -> None:
        if self.current != self._lane:
            super().after(mark)


@pytest.mark.slow
@pytest.mark.parametrize("lane", [0, 1])
def test_a_lane_that_does_not_wait_is_found_out(lane: int, monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Forgetful(lane)
    monkeypatch.setattr(torch_backend, "queue_of", lambda device: clocks)
    detector, _ = trained("dualpipe-v", clocks)
    assert any("may not have written yet" in race for race in detector.races)


class Unpacking(LoopbackTransport):
    """Messages are copied as they come, in the lane of all else."""

    def arrivals(self) -> list[Edge]:
        came = super().arrivals()
        for edge in came:
            payload = self._came[edge]
            leaves = [None if leaf is None else leaf.clone() for leaf in payload.leaves]
            self._came[edge] = Payload(leaves, payload.skeleton, payload.needs_grad)
        return came


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", ["", "inputs", "state"])
def test_memory_let_go_of_too_soon_is_found_out(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward takes in, and what its stage keeps: where a pair holds no references to it."""
    clocks = LaneClocks()
    monkeypatch.setattr(torch_backend, "queue_of", lambda device: clocks)
    monkeypatch.setattr(loopback, "LoopbackTransport", Unpacking)
    if forgotten == "inputs":
        monkeypatch.setattr(torch_backend, "LaunchedOps", ForgetsInputs)
    elif forgotten == "state":
        monkeypatch.setattr(StageRunner, "state", lambda self: [])
    detector, same = trained("dualpipe-v", clocks)
    assert same
    assert bool(detector.races) == bool(forgotten)
    assert all("may take memory" in race for race in detector.races)


@pytest.mark.slow
@pytest.mark.parametrize("why", ["compiled", "each is waited for"])
def test_pairs_that_run_one_after_the_other(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a stage may replay graphs of CUDA, or ops are waited for one by one, both lie in one lane."""
    clocks = LaneClocks()
    monkeypatch.setattr(torch_backend, "queue_of", lambda device: clocks)
    lanes = []
    monkeypatch.setattr(LaneClocks, "lane", lambda self, number: lanes.append(number))
    model = build_model()
    if why == "compiled":
        for stage in list(model)[:4]:
            stage.compile(backend="eager")
    else:
        monkeypatch.setattr(ProcessMesh, "waits_in_ops", lambda *_: True)
    with ps.Pipeline(model, SCHEDULES["dualpipe-v"], loss_fn=nn.functional.mse_loss) as pipe:
        pipe.step(torch.randn(33, 6), torch.randn(33, 6), update=False)
    assert lanes == []


def test_measured_costs_say_what_pairs_took() -> None:
    """Ops by themselves have the means of those that ran by themselves; a simulation with these costs has the pairs'
    own times."""
    _, _, workers = computed("dualpipe-v", 3)
    schedule = SCHEDULES["dualpipe-v"]
    rows = [worker.recorder.times for worker in workers]
    timeline = measured_timeline(wire(schedule), rows, [0.0] * 4, "frozen")
    costs = measured_costs([timeline])
    took = {timed.op: timed.end - timed.start for timed in timeline.ops}
    paired = {op for pair in schedule.pairs for op in pair}
    for stage in range(8):
        alone = [ms for op, ms in took.items() if op[:2] == ("F", stage) and op not in paired]
        assert costs.duration("F", stage) == pytest.approx(sum(alone) / len(alone))
    assert costs.overlap is not None
    for stages in {(f.stage, b.stage) for f, b in schedule.pairs}:
        here = [took[f] for f, b in schedule.pairs if (f.stage, b.stage) == stages]
        assert costs.overlap.times[stages] == pytest.approx(sum(here) / len(here))
    simulated = ps.simulate(schedule, costs)
    busy = sum(simulated.busy)
    assert busy == pytest.approx(sum(timeline.busy), rel=0.05)
