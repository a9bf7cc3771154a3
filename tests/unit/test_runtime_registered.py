"""Ops of registered kinds in the runtime: called in their place, told what they are, and no number changes."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from backends import Backend, backends
from null_backend import NullBackend
from packed import packed
from penstock.cost import Costs
from penstock.dispatch import Dispatcher
from penstock.draw import to_svg
from penstock.runtime import RuntimeFailure
from penstock.runtime.execute.executors import run_local
from penstock.runtime.execute.timeline import measured_costs
from penstock.runtime.execute.worker import Worker
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.wiring import wire
from penstock.schedule.dependencies import predecessors
from penstock.simulation.lowered import frozen_peaks, memory_changes
from penstock.simulation.simulator import as_dispatch
from plain_loop import differences, gradients, plain_evaluate, plain_step
from registered_cases import (
    CASES,
    LOSS,
    NUM_MICROBATCHES,
    NUM_RANKS,
    batch,
    compare_all,
    meddle,
    model,
    program,
)


def pipeline(schedule: ps.Schedule, **options: Any) -> ps.Pipeline:
    return ps.Pipeline(model(schedule.num_stages), schedule, loss_fn=LOSS, **packed(**options))


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends(NUM_RANKS))
def test_as_the_plain_loop_and_in_place(backend: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "MERGE_WORK", slot_module.MERGE_WORK)  # given back after the comparison
    assert not backend.wrong(compare_all)


def test_what_a_function_is_told() -> None:
    calls: list[ps.runtime.OpCall] = []
    snapshot = ps.NewOp(
        "SNAPSHOT", 1, after={("F", 1): 2}, before={("B", 1): 2}, run=lambda call: calls.append(call) or 7
    )
    report = ps.NewOp("REPORT", 2, after={("SNAPSHOT", 1): 2, ("F", 0): 4}, on=(3,), run=calls.append)
    made = program(snapshot, report)
    pipe = pipeline(made.build(), ops=made.callables)
    x, y = batch(1)
    pipe.step(x, y)
    snapshots = [call for call in calls if call.op.kind == "SNAPSHOT"]
    assert [(c.rank, c.stage, c.index, c.op, c.microbatches) for c in snapshots] == [
        (1, 1, k, ps.Op("SNAPSHOT", 1, k), (2 * k, 2 * k + 1)) for k in range(4)
    ]
    assert [name for name, _ in snapshots[0].module.named_parameters()] == ["1.0.weight", "1.0.bias"]
    reports = [call for call in calls if call.op.kind == "REPORT"]
    assert [(c.rank, c.stage, c.index, c.microbatches, c.module) for c in reports] == [
        (3, 2, 0, (0, 1, 2, 3), None),
        (3, 2, 1, (4, 5, 6, 7), None),
    ]


def test_evaluation_leaves_them_out() -> None:
    calls: list[ps.runtime.OpCall] = []
    made = CASES["before a stage of another rank"]()
    schedule = made.build()
    pipe = pipeline(schedule, ops={"FETCH": calls.append})
    plain = model(schedule.num_stages)
    x, y = batch(1)
    assert torch.equal(pipe.evaluate(x, y).loss, plain_evaluate(plain, x, y, NUM_MICROBATCHES, LOSS))
    few = x[:3], y[:3]
    assert torch.equal(pipe.evaluate(*few).loss, plain_evaluate(plain, *few, 3, LOSS))
    assert len(pipe.predict(x)) == NUM_MICROBATCHES
    assert not calls
    pipe.step(x, y)
    assert len(calls) == 4


def test_a_function_may_change_the_model() -> None:
    """What it does to the model counts, at its place: weights doubled before the first forward that waits for it."""
    made = program(ps.NewOp("DOUBLE", 0, before={("F", 0): NUM_MICROBATCHES}))
    schedule = made.build()
    plain, piped = model(schedule.num_stages), model(schedule.num_stages)

    def double(call: ps.runtime.OpCall) -> None:
        with torch.no_grad():
            for parameter in call.module.parameters():
                parameter.mul_(2)

    pipe = ps.Pipeline(piped, schedule, loss_fn=LOSS, ops={"DOUBLE": double})
    with torch.no_grad():
        for parameter in plain[0].parameters():
            parameter.mul_(2)
    x, y = batch(1)
    assert torch.equal(pipe.step(x, y, update=False).loss, plain_step(plain, x, y, NUM_MICROBATCHES, LOSS))
    assert not differences(gradients(plain), gradients(piped))


def fails_at_the_second(call: ps.runtime.OpCall) -> None:
    if call.index == 1:
        raise ValueError("the disk is full")


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
def test_an_error_in_a_function(dispatch: str) -> None:
    schedule = CASES["beside its stage"]().build()
    pipe = pipeline(schedule, dispatch=dispatch, ops={"SNAPSHOT": fails_at_the_second})
    with pytest.raises(ValueError, match="the disk is full") as caught:
        pipe.step(*batch(1))
    assert caught.value.__notes__ == [
        "in function fails_at_the_second, which ops= has for kind SNAPSHOT",
        "in SNAPSHOT1 of stage 1 on rank 1",
    ]
    assert all(p.grad is None for p in pipe.parameters())


def test_bug_a_function_after_the_backwards_missed_the_last_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_module, "MERGE_WORK", 0)
    seen: dict[int, list[torch.Tensor]] = {}

    def clip(call: ps.runtime.OpCall) -> None:
        assert call.module is not None
        seen[call.stage] = [torch.zeros(1) if p.grad is None else p.grad.clone() for p in call.module.parameters()]

    made = program(*(ps.NewOp("CLIP", s, {("B", s): NUM_MICROBATCHES}, run=clip) for s in range(4)), split=True)
    pipe = pipeline(made.build(), ops=made.callables)
    pipe.step(*batch(1))
    found = [gradient for stage in sorted(seen) for gradient in seen[stage]]
    assert all(map(torch.equal, found, [p.grad for _, p in pipe.named_parameters()]))


def test_functions_must_fit_the_schedule() -> None:
    schedule = CASES["one after another"]().build()
    tell = r"no function was given for them; give one, ps.Pipeline\(..., ops=\{'TELL': function\}\)"
    with pytest.raises(RuntimeFailure, match=rf"program has ops of kind TELL, and {tell}"):
        pipeline(schedule, ops={"ASK": print})
    with pytest.raises(RuntimeFailure, match=r"program has ops of kind ASK, and no function"):
        pipeline(schedule)
    unknown = r"ops= has a function for kind SHOUT, of which program has no ops \(its registered kinds: ASK, TELL\)"
    with pytest.raises(RuntimeFailure, match=unknown):
        pipeline(schedule, ops={"ASK": print, "TELL": print, "SHOUT": print})
    with pytest.raises(RuntimeFailure, match=r"kind ASK, of which 1f1b has no ops \(its registered kinds: none\)"):
        pipeline(ps.build("1f1b", 4, 8), ops={"ASK": print})


def test_a_program_s_functions() -> None:
    other = ps.NewOp("LOG", 0, after={("B", 0): 4})
    both = [ps.NewOp("SNAPSHOT", s, after={("F", s): 2}, run=print) for s in (0, 1)]
    assert program(*both, other).callables == {"SNAPSHOT": print}
    assert program().callables == {}
    with pytest.raises(ps.ScheduleError, match="op kind LOG has several functions; give one"):
        _ = program(*(ps.NewOp("LOG", s, after={("F", s): 2}, run=f) for s, f in ((0, print), (1, repr)))).callables


def test_they_are_timed_and_drawn() -> None:
    made = CASES["after a stage of another rank"]()
    pipe = pipeline(made.build(), ops={"OFFLOAD": meddle})
    pipe.step(*batch(1))
    timeline = pipe.timeline()
    offloads = [timed for timed in timeline.ops if timed.op.kind == "OFFLOAD"]
    assert [(t.rank, t.op) for t in offloads] == [(1, ps.Op("OFFLOAD", 1, k)) for k in range(2)]
    tokens = [m for m in timeline.messages if m.target.kind == "OFFLOAD"]
    assert sorted(m.source.microbatch for m in tokens) == list(range(NUM_MICROBATCHES))
    assert {(m.source_rank, m.target_rank) for m in tokens} == {(3, 1)}
    mean = sum(t.end - t.start for t in offloads) / 2
    assert measured_costs([timeline]).duration("OFFLOAD", 1) == pytest.approx(mean)
    assert "OFFLOAD" in to_svg(timeline)


def test_others_pay_nothing() -> None:
    pipe = pipeline(ps.build("1f1b", NUM_RANKS, NUM_MICROBATCHES))
    pipe.step(*batch(1))
    _, workers = pipe._local.last
    assert all(set(worker._backend.handlers) == set("FBIWR") for worker in workers)


def any_program(rng: random.Random) -> ps.Program:
    """A program over few ranks with registered ops whose needs go anywhere that allows them."""
    num_ranks, each, num = rng.randint(1, 4), rng.randint(1, 2), rng.choice([2, 4, 8])
    stages = num_ranks * each
    sizes = [size for size in (1, 2, 4, 8) if num % size == 0]
    ops: list[ps.NewOp] = []
    for kind in ("ALPHA", "BETA", "GAMMA")[: rng.randint(1, 3)]:
        size = rng.choice(sizes)
        stage, source, target = (rng.randrange(stages) for _ in range(3))
        shape = rng.choice(["after F", "after B", "before B", "between", "before F"])
        after = {"after F": {("F", source): size}, "after B": {("B", source): size}, "between": {("F", source): size}}
        before = {"before B": {("B", target): size}, "between": {("B", 0): size}, "before F": {("F", target): size}}
        on = (rng.randrange(stages),) if rng.random() < 0.3 else ()
        ops.append(ps.NewOp(kind, stage, after=after.get(shape, {}), before=before.get(shape, {}), on=on))
    place = ps.placements.circular(num_ranks, stages)
    return ps.Program(place, num, ps.Rules("backward-first"), split=rng.random() < 0.5, ops=ops)


def test_any_of_them_complete_without_numbers() -> None:
    """The null backend proves that each op gets just what was meant for it; recorded times, that it waited."""
    rng = random.Random("registered")
    tokens = 0
    for _ in range(150):
        schedule = any_program(rng).build()
        wiring = wire(schedule, [range(schedule.num_stages)] if schedule.num_stages > 1 else [])
        change = memory_changes(wiring.graph, Costs.uniform(schedule.num_stages))
        caps = frozen_peaks(wiring.graph, change)
        for dispatch in ("frozen", "dynamic"):
            boxes = [Mailbox() for _ in schedule.order]
            workers = [
                Worker(
                    wiring,
                    rank,
                    Dispatcher(wiring.graph, rank, as_dispatch(dispatch), change, caps[rank]),
                    NullBackend(),
                    LoopbackTransport(boxes, rank),
                )
                for rank in range(schedule.num_ranks)
            ]
            run_local(workers)
            assert not any(box.entries for box in boxes)
            ended = {op: end for worker in workers for op, _, end in worker.times}
            started = {op: start for worker in workers for op, start, _ in worker.times}
            assert sorted(ended) == sorted(op for row in schedule.order for op in row)
            for op, start in started.items():
                assert all(ended[before] <= start for before in predecessors(op, schedule.graph, wiring.graph.number))
        tokens += sum(wired.num_tokens for wired in wiring.wired_ops)
    assert tokens > 500
