"""What several ranks run together, and what a rank runs beside its computation: timed, proved, kept, run."""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import gang_runs as runs
import penstock as ps
from null_backend import NullBackend
from penstock import passes
from penstock.cost import Costs
from penstock.dispatch import Dispatcher
from penstock.dispatch.queues import Lister
from penstock.formats.native import from_json, to_json
from penstock.runtime import DeadlineExceeded, RuntimeFailure
from penstock.runtime.execute.async_ops import RegisteredAsyncOp
from penstock.runtime.execute.executors import run_local
from penstock.runtime.execute.gang import Gang
from penstock.runtime.execute.worker import Worker
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.wiring import wire
from penstock.schedule import declare_shown_order
from penstock.schedule.dependencies import predecessors
from penstock.simulation.lowered import frozen_peaks, memory_changes
from penstock.simulation.runner import Runner
from penstock.simulation.simulator import as_dispatch
from penstock.simulation.transport import Decoupled
from waiting import PATIENCE


def any_program(rng: random.Random, times: tuple[int, int] = (0, 9)) -> ps.Program:
    """Two towers of one to three ranks, and ops of every sort between them."""
    sizes = [rng.randint(1, 3) for _ in range(2)]
    num = rng.choice([2, 4, 6])
    branches = {
        name: ps.Branch(
            ps.placements.one_to_one(size) if rng.random() < 0.7 else ps.placements.v_shape(size),
            num,
            ps.Rules("interleaved", warmup=rng.randint(0, num)),
        )
        for name, size in zip(("a", "b"), sizes, strict=True)
    }
    last = (("a", -1), ("b", -1))
    every = rng.choice([n for n in (1, 2, 3) if num % n == 0])
    ops = [
        ps.NewOp(
            "GATHER", last[0], {("F", at): every for at in last}, {("B", at): every for at in last}, on=last,
            time=rng.randint(*times), asynchronous=rng.random() < 0.7,
        )
    ]  # fmt: skip
    if rng.random() < 0.5:  # an op of one rank, perhaps after one of another's
        at, after = rng.choice(last), rng.choice([*last, ("a", 0)])
        ops.append(ps.NewOp("COPY", at, {("F", after): 1}, time=rng.randint(*times), asynchronous=True))
    stages = sum(b.placement.num_stages for b in branches.values())
    costs = Costs(*([rng.randint(1, 9) for _ in range(stages)] for _ in range(3)))
    split = rng.random() < 0.5
    return ps.Program.of_branches(branches, ops=ops, costs=costs, split=split, name="any")


def two_ranks(*rows: str, asynchronous: bool = True) -> ps.Schedule:
    """GATHERs after the forward of each of two stages, which their backwards wait for."""
    text = "\n".join(
        [
            "schedule two: 2 ranks, 2 stages, 2 microbatches",
            "pipeline 0: stages on ranks 0 1",
            "edges none",
            f"kind GATHER of stage 0: 2 ops, on ranks 0 1{', asynchronous' if asynchronous else ''}",
            "needs 1 F of stage 0 before 1 GATHER of stage 0",
            "needs 1 F of stage 1 before 1 GATHER of stage 0",
            "needs 1 GATHER of stage 0 before 1 B of stage 0",
            "needs 1 GATHER of stage 0 before 1 B of stage 1",
            *(f"rank {rank} | {row}" for rank, row in enumerate(rows)),
        ]
    )
    return ps.parse(text)


ROWS = "F0 0GATHER0 F1 0GATHER1 B0 B1", "F0 0GATHER0 F1 0GATHER1 B0 B1"


def test_a_rank_goes_on_beside_an_asynchronous_op() -> None:
    costs = Costs.uniform(2, f=10, i=5, w=5).with_other({("GATHER", 0): 10.0})
    waiting = ps.simulate(two_ranks(*ROWS, asynchronous=False), costs)
    beside = ps.simulate(two_ranks(*ROWS), costs)
    assert (waiting.makespan, waiting.busy) == (60, (60, 60))
    assert (beside.makespan, beside.busy) == (40, (40, 40))
    assert [(t.op.microbatch, t.start, t.end) for t in beside.streams[1]] == [(0, 10, 20), (1, 20, 30)]
    late = Costs.uniform(2, f=10, i=5, w=5).with_other({("GATHER", 0): 25.0})
    assert [(t.start, t.end) for t in ps.simulate(two_ranks(*ROWS), late).streams[0]] == [(10, 35), (35, 60)]
    only = two_ranks(*(row.replace("B0 B1", "B1 B0") for row in ROWS))
    assert ps.simulate(only, late).makespan == 80  # the makespan counts it, and both backwards wait for GATHER1


def test_all_ranks_begin_it_together_and_the_order_on_their_streams_is_proved() -> None:
    costs = Costs(f=[10, 30], i=[5, 5], w=[5, 5]).with_other({("GATHER", 0): 10.0})
    timeline = ps.simulate(two_ranks(*ROWS), costs)
    assert timeline.streams[0] == tuple(replace(t, rank=0) for t in timeline.streams[1])
    assert timeline.streams[0][0].start == 30
    crossed = two_ranks("F0 F1 0GATHER0 0GATHER1 B0 B1", "F0 F1 0GATHER1 0GATHER0 B0 B1")
    with pytest.raises(
        ps.ScheduleError, match="GATHER1 of stage 0 comes before it, at step 2, but the order of GATHER"
    ):
        ps.check(crossed)
    kinds = tuple(ps.schedule.Registered(kind, 0, 1, (0, 1), asynchronous=True) for kind in ("GATHER", "MERGE"))
    rows = tuple(
        tuple(ps.Op("MERGE", 0, 0) if op == ps.Op("GATHER", 0, 1) else op for op in row) for row in crossed.order
    )
    two_kinds = replace(crossed, order=rows, stage_graph=replace(crossed.graph, registered=kinds, needs=()))
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(two_kinds)
    assert caught.value.rule == "deadlock"
    assert "rank 0 (its stream) at step 2 waits for GATHER0 of stage 0 from rank 1" in str(caught.value)
    with pytest.raises(ps.ScheduleError, match="the run stops after"):
        ps.simulate(crossed)
    with pytest.raises(ps.ScheduleError, match="needs F1 of stage 0, which comes later"):
        ps.check(two_ranks("F0 0GATHER0 0GATHER1 F1 B0 B1", ROWS[1]))


def test_what_waits_for_a_message_may_do_so_on_the_stream_alone() -> None:
    """One rank comes to the gather later; the other one has run a forward meanwhile, or stood still."""
    rows = "F0 0GATHER0 F1 0GATHER1 B0 B1", "F0 F1 0GATHER0 0GATHER1 B0 B1"
    costs = Costs.uniform(2, f=10, i=5, w=5).with_other({("GATHER", 0): 10.0})
    for asynchronous, end in ((False, 70), (True, 50)):
        schedule = two_ranks(*rows, asynchronous=asynchronous)
        ps.check(schedule)
        assert ps.simulate(schedule, costs).makespan == end


@pytest.mark.parametrize("seed", range(3))
def test_any_of_them_is_listed_timed_proved_and_kept_alike(seed: int) -> None:
    rng = random.Random(seed)
    apart = 0
    for _ in range(40):
        program = any_program(rng)
        graph = program.queues()
        listed = Lister(graph).list_by_rules(program.tables(graph))
        schedule = program.build()
        ps.check(schedule)
        assert ps.program.Stepper(program).run().order == schedule.order
        for dispatch in ("frozen", "dynamic"):
            timeline = ps.simulate(schedule, program.all_costs, dispatch=dispatch)
            ps.check(timeline.executed())
            assert sum(map(len, timeline.rows)) + sum(map(len, timeline.streams)) == schedule.num_ops
            order = Runner(program.all_costs, compile=False).order(schedule)
            peaks = timeline.peak_activations
            ran = Runner(program.all_costs).run(
                order, ps.Links(), dispatch=dispatch, transport=Decoupled(), caps=order.peaks
            )
            assert (ran.makespan, ran.peaks) == (timeline.makespan, peaks)
            ps.check(ran.executed())
            if dispatch == "frozen":
                assert timeline.makespan == listed.makespan
                assert timeline.executed() == ran.executed() == schedule
        assert ps.parse(str(schedule)) == schedule
        assert from_json(to_json(schedule)) == schedule
        apart += bool(schedule.asynchronous)
    assert apart > 10


def test_check_refuses_what_stands_still_and_nothing_else() -> None:
    rng = random.Random("mixed")
    verdicts = {"": 0, "order": 0, "microbatches": 0, "deadlock": 0}
    for _ in range(250):
        program = any_program(rng)
        schedule = program.build()
        rows = [list(row) for row in schedule.order]
        for _ in range(rng.randint(1, 4)):
            row = rng.choice(rows)
            at = rng.randrange(len(row))
            row.insert(rng.randrange(len(row)), row.pop(at))
        mixed = declare_shown_order(replace(schedule, order=tuple(map(tuple, rows))))
        rule = ""
        try:
            ps.check(mixed)
        except ps.ScheduleError as error:
            rule = error.rule
        verdicts[rule] += 1
        if rule == "":
            ps.check(ps.simulate(mixed, program.all_costs, dispatch="dynamic").executed())
            assert ps.simulate(mixed, program.all_costs).executed() == mixed
        elif rule == "deadlock":
            with pytest.raises(ps.ScheduleError, match="the run stops after"):
                ps.simulate(mixed, program.all_costs)
    assert min(verdicts.values()) > 5, verdicts


@pytest.mark.parametrize(("num_ranks", "num", "every"), [(4, 8, 2), (6, 12, 4), (5, 9, 3), (2, 4, 4), (4, 16, 1)])
def test_distmm_hides_gathers_behind_forwards(num_ranks: int, num: int, every: int) -> None:
    def makespan(overlap: bool, time: float) -> float:
        schedule = ps.build("distmm", num_ranks, num, gather_every=every, overlap=overlap)
        (gather,) = schedule.graph.registered
        costs = Costs.uniform(num_ranks, f=10, i=10, w=10).with_other({(gather.kind, gather.stage): time})
        timeline = ps.simulate(schedule, costs)
        longest = max(num_ranks // 2, num_ranks - num_ranks // 2)
        assert max(timeline.peak_activations) <= min(longest - 1 + (2 if overlap else 1) * every, num)
        assert timeline.executed() == schedule
        return timeline.makespan

    gathers, hidden = num // every, 10.0 * every
    if gathers == 1:  # there is nothing to hide it behind
        assert makespan(True, 10) == makespan(False, 10) == makespan(True, 0) + 10
    else:
        assert makespan(True, hidden) == makespan(True, 0) <= makespan(False, 0) < makespan(False, hidden)


def test_any_of_them_run_by_workers_in_their_order_and_none_before_what_it_needs() -> None:
    rng = random.Random("workers")
    for _ in range(60):
        schedule = any_program(rng).build()
        wiring = wire(schedule)
        change = memory_changes(wiring.graph, Costs.uniform(schedule.num_stages))
        caps = frozen_peaks(wiring.graph, change)
        for dispatch in ("frozen", "dynamic"):
            boxes, gang = [Mailbox() for _ in schedule.order], Gang(wiring.graph)
            workers = [
                Worker(
                    wiring,
                    rank,
                    Dispatcher(wiring.graph, rank, as_dispatch(dispatch), change, caps[rank]),
                    Meets(gang, rank, schedule),
                    LoopbackTransport(boxes, rank),
                    gang,
                )
                for rank in range(schedule.num_ranks)
            ]
            run_local(workers)
            assert not any(box.entries for box in boxes)
            times = [(w.rank, *t) for w in workers for t in (*w.times, *w.async_times)]
            ended = {(op, rank): end for rank, op, _, end in times}
            assert sorted((rank, op) for rank, op, _, _ in times) == sorted(
                (rank, op) for rank, row in enumerate(schedule.order) for op in row
            )
            for rank, op, start, _ in times:
                for before in predecessors(op, schedule.graph, wiring.graph.number):
                    assert ended[before, wiring.sender(Edge(before, op), rank)] <= start


class Meets(NullBackend):
    """Leaves word for the other ranks, as handlers do that run something."""

    def __init__(self, gang: Gang, rank: int, schedule: ps.Schedule) -> None:
        super().__init__()
        self._gang, self._rank, self._schedule = gang, rank, schedule

    def run(self, wired: Any, inputs: Any) -> Any:
        outputs = super().run(wired, [payload for payload in inputs if payload.skeleton is not None])
        self.meet(wired.op)
        return outputs

    def start(self, op: ps.Op, received: Any) -> RegisteredAsyncOp:
        self.meet(op)
        return RegisteredAsyncOp(op, None, 1.0)

    def meet(self, op: ps.Op) -> None:
        ranks = self._schedule.hosts(op)
        if len(ranks) > 1:
            self._gang.once(op, self._rank == ranks[0], lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", [False, True])
def test_simulated_and_measured_order_agree(asynchronous: bool) -> None:
    rng = random.Random(asynchronous)
    for _ in range(4):
        program = any_program(rng, times=(1, 4))
        run = ps.emulate(program.build(), program.all_costs, timeout=PATIENCE)
        measured, simulated = run.timelines[0], run.simulated[0]
        for rows, others in ((measured.rows, simulated.rows), (measured.streams, simulated.streams)):
            assert [[t.op for t in row] for row in rows] == [[t.op for t in row] for row in others]
        assert measured.makespan > 0.99 * simulated.makespan
        assert measured.executed() == program.build()


@pytest.mark.parametrize(("asynchronous", "split"), [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_towers_whose_loss_a_gather_makes(asynchronous: bool, split: bool, dispatch: str) -> None:
    program = runs.towers(asynchronous, split)
    steps, timeline = runs.train_towers(program, dispatch=dispatch)
    assert not runs.differences(runs.plain_towers(), steps)
    if dispatch == "frozen":
        assert timeline.executed() == program.build()
    assert sum(t.op.kind == "GATHER" for row in timeline.streams for t in row) == (8 if asynchronous else 0)


@pytest.mark.parametrize(("tied", "dispatch"), [(False, "frozen"), (True, "frozen"), (False, "dynamic")])
def test_a_stage_of_several_ranks_runs_on_the_first_of_them_in_one_process(tied: bool, dispatch: str) -> None:
    plain = runs.train_gpt(ps.build("gpipe", runs.NUM_RANKS + 2, runs.NUM), tied, False)
    shared = runs.train_gpt(ps.build("mllm", runs.NUM_RANKS, runs.NUM), tied, False, dispatch=dispatch)
    assert not runs.differences(plain[0], shared[0], exact=True)
    assert plain[1] == shared[1]


def lost(call: ps.runtime.OpCall) -> None:
    """An op that gives no loss."""


WRONG: dict[str, tuple[Any, str]] = {
    "no loss": (lost, "no loss was given for microbatch 0 of stage 1, which feeds no other stage; an op that comes"),
    "two numbers": (lambda call: call.add_loss(torch.ones(2)), "a loss is one number, not a tensor of shape"),
    "a failure": (lambda call: 1 / 0, "division by zero"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_about_a_loss_of_ops_is_said(name: str) -> None:
    function, message = WRONG[name]
    pipe = ps.Pipeline(runs.tower_stages(), runs.towers(False).build(), ops={"GATHER": function})
    with pytest.raises((RuntimeFailure, ZeroDivisionError), match=message):
        pipe.step(runs.pairs())
    assert all(p.grad is None for p in pipe.parameters())


def fails() -> None:
    raise ValueError("the link is gone")


ENDLESS: dict[str, tuple[Any, type[Exception], str]] = {
    "never": (Future, DeadlineExceeded, "1GATHER0 did not end within 0.2 s; what its function returned waits"),
    "a failure": (lambda: ThreadPoolExecutor(1).submit(fails), ValueError, "the link is gone"),
    "a number": (
        lambda: 3,
        RuntimeFailure,
        "the function of 1GATHER0, which is asynchronous, returned int; return what",
    ),
}


@pytest.mark.parametrize("name", ENDLESS)
def test_what_an_asynchronous_op_waits_for_has_a_deadline_and_may_fail(name: str) -> None:
    handle, error, message = ENDLESS[name]
    functions = {"GATHER": lambda call: handle(), "LOSS": lost}
    pipe = ps.Pipeline(runs.tower_stages(), runs.towers(True).build(), ops=functions, timeout=0.2)
    with pytest.raises(error, match=message) as caught:
        pipe.step(runs.pairs())
    if name == "a failure":
        assert any("at the end of 1GATHER0, which is asynchronous" in note for note in caught.value.__notes__)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ps.ScheduleError, match="op kind COPY is asynchronous and has memory=1, last=False"):
        ps.NewOp("COPY", 0, {("F", 0): 1}, memory=1.0, asynchronous=True)
    beside = runs.towers(True)
    with pytest.raises(ps.ScheduleError, match=r"towers has asynchronous ops \(GATHER\), and this pass times what"):
        passes.separate_gradients(beside.build(), beside.all_costs)
    with pytest.raises(ps.ScheduleError, match=r"asynchronous ops \(GATHER\), and recompute counts what ranks run"):
        passes.recompute(beside.build(), beside.all_costs, 5)
    ends = ps.schedule.StageGraph(2, ())
    schedule = ps.Program(ps.placements.one_to_one(2), 2, stages=ends).build()
    with pytest.raises(RuntimeFailure, match="stages 0, 1 feed no other stage, and the loss is one stage's"):
        ps.Pipeline([nn.Linear(2, 2) for _ in range(2)], schedule, loss_fn=nn.MSELoss())
    plain = ps.Program(
        ps.placements.one_to_one(2), 2, ops=[ps.NewOp("TELL", 1, {("F", 1): 1}, {("B", 1): 1})]
    ).build()
    told = {"TELL": lambda call: call.add_loss(sum(call.outputs.values()).sum())}
    pipe = ps.Pipeline([nn.Linear(2, 2) for _ in range(2)], plain, loss_fn=nn.MSELoss(), ops=told)
    with pytest.raises(RuntimeFailure, match="one stage has the loss, by loss_fn; an op may add one where no stage"):
        pipe.step(torch.ones(4, 2), torch.ones(4, 2))
    towers = ps.Pipeline(runs.tower_stages(), runs.towers(False).build(), ops={"GATHER": runs.compare})
    with pytest.raises(RuntimeFailure, match="what compares them are ops, which run in training alone"):
        towers.evaluate(runs.pairs())
