"""Ops that a device runs later than their functions return: when messages leave, what is launched and measured."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from device_queues import LateQueue
from penstock.cost import Costs
from penstock.dispatch import Dispatcher
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute import launched_ops, torch_backend
from penstock.runtime.execute.async_ops import RegisteredAsyncOp
from penstock.runtime.execute.executors import run_local
from penstock.runtime.execute.launched_ops import (
    FEWEST_LOOKS,
    MOST_LAUNCHED_OPS,
    MOST_LOOKS,
    DeviceClock,
    LaunchedOps,
    queue_of,
)
from penstock.runtime.execute.worker import WAITS_FOR_NOBODY, Backend, Worker
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.wiring import WiredOp, wire
from penstock.simulation.lowered import frozen_peaks, memory_changes
from penstock.simulation.simulator import as_dispatch
from plain_loop import plain_step


class WatchedTransport(LoopbackTransport):
    """Takes down every message as it leaves, and asks whether the op that it comes from has ended by then."""

    def __init__(self, boxes: list[Mailbox[Any]], rank: int) -> None:
        super().__init__(boxes, rank)
        self.worker: Worker
        self.sent: list[Edge] = []

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        assert edge.producer in {op for op, _, _ in self.worker.times}
        self.sent.append(edge)
        return super().send(edge, target, payload)


class Ranks:
    """All ranks of a schedule, each with a queue of its own, and what their handlers saw."""

    def __init__(self, schedule: ps.Schedule, dispatch: str, most: int = MOST_LAUNCHED_OPS) -> None:
        self.wiring = wiring = wire(schedule, [])
        change = memory_changes(wiring.graph, Costs.uniform(schedule.num_stages))
        caps = frozen_peaks(wiring.graph, change)
        boxes = [Mailbox() for _ in schedule.order]
        self.queues = [LateQueue() for _ in schedule.order]
        self.launched = [LaunchedOps(queue, most) for queue in self.queues]
        self.under_way: list[tuple[str, int]] = []
        self.workers: list[Worker] = []
        for rank, launched in enumerate(self.launched):
            handlers = dict.fromkeys({op.kind for op in wiring.graph.ops}, self.handler(rank))
            transport = WatchedTransport(boxes, rank)
            dispatcher = Dispatcher(wiring.graph, rank, as_dispatch(dispatch), change, caps[rank])
            worker = Worker(wiring, rank, dispatcher, Backend(handlers, launched=launched), transport)
            transport.worker = worker
            self.workers.append(worker)

    def handler(self, rank: int) -> Any:
        def handle(wired: WiredOp, inputs: Sequence[Payload]) -> list[Payload]:
            launched = self.launched[rank]
            self.under_way.append((wired.op.kind, launched.num_launched - launched.num_ended))
            return [Payload([], edge) for edge in wired.output_edges]

        return handle


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "dualpipe-v"])
def test_messages_leave_when_the_device_has_passed_their_op(name: str, dispatch: str) -> None:
    """And a rank launches one op behind that which runs, no more."""
    ranks = Ranks(ps.build(name, 4, 8), dispatch)
    run_local(ranks.workers)
    assert {count for _, count in ranks.under_way} == {0, 1}
    assert sum(queue.num_beside for queue in ranks.queues) == sum(
        len(worker.transport.sent) for worker in ranks.workers
    )  # type: ignore[attr-defined]


def test_ops_are_timed_by_what_the_device_says() -> None:
    """Each takes one millisecond from mark to mark of the queue, whatever Python took."""
    ranks = Ranks(ps.build("zb-h1", 4, 8), "frozen")
    run_local(ranks.workers)
    for worker, row in zip(ranks.workers, ranks.wiring.schedule.order, strict=True):
        times = worker.times
        assert tuple(op for op, _, _ in times) == row
        assert {end - start for _, start, end in times} == {1_000_000}
        assert all(before[2] <= after[1] for before, after in pairwise(times))


def looks(widths: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> tuple[LateQueue, DeviceClock]:
    """A reading of the clock whose looks lie so many nanoseconds apart, with a millisecond between them."""
    times = iter([0, *accumulate(step for width in widths for step in (width, 1_000_000))])
    monkeypatch.setattr(launched_ops, "perf_counter_ns", lambda: next(times))
    queue = LateQueue()
    clock = DeviceClock(queue)
    clock.read()
    return queue, clock


@pytest.mark.parametrize(
    ("widths", "num_looks", "best"),
    [
        ([20_000, 10_000, 30_000, 1], FEWEST_LOOKS, 1),
        ([4_000_000, 2_000_000, 3_000_000, 20_000, 1], 4, 3),
        ([9_000_000, 2_000_000, *[3_000_000] * 30], MOST_LOOKS, 1),
    ],
    ids=["an idle host", "a busy host", "a host that is never idle"],
)
def test_the_clock_is_read_until_a_mark_was_passed_soon(
    widths: list[int], num_looks: int, best: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mark that was passed soonest counts, halfway between the looks. Only the first rank to ask reads."""
    queue, clock = looks(widths, monkeypatch)
    assert queue.num_marks == 1 + num_looks  # one waits for what the device was given before
    begin = sum(widths[:best]) + best * 1_000_000
    behind = queue.mark()
    behind.synchronize()
    assert clock.moment(behind) == begin + widths[best] // 2 + (behind.number - (1 + best)) * 1_000_000
    clock.read()
    assert queue.num_marks == 2 + num_looks


def test_ops_of_ranks_that_share_a_device_never_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the host looks at its clock. Ranks once had a reading each, and ops overlapped by what these
    differed by."""
    queue, random_ones, seen = LateQueue(), random.Random(1), [0]

    def busy() -> int:
        now = queue.num_marks * 1_000_000 + random_ones.randrange(6_000_000)  # the device passes a mark a millisecond
        seen.append(max(seen[-1], now))
        return seen[-1]

    monkeypatch.setattr(torch_backend, "queue_of", lambda device: queue)
    monkeypatch.setattr(launched_ops, "perf_counter_ns", busy)
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
    with ps.Pipeline(model, ps.build("1f1b", 4, 8), loss_fn=nn.MSELoss()) as pipe:
        for _ in range(3):
            pipe.step(torch.randn(16, 6), torch.randn(16, 6), update=False)
            ops = sorted(pipe.timeline().ops, key=lambda timed: timed.start)
            assert len(ops) == pipe.schedule.num_ops
            assert max(before.end - after.start for before, after in pairwise(ops)) <= 1e-9  # of a millisecond


def test_where_nothing_can_end_a_wait_each_op_is_waited_for() -> None:
    ranks = Ranks(ps.build("1f1b", 4, 8), "frozen", most=1)
    run_local(ranks.workers)
    assert {count for _, count in ranks.under_way} == {0}


def registered(on: tuple[int, ...]) -> ps.Schedule:
    place = ps.placements.circular(num_ranks=2, num_stages=2)
    sync = ps.NewOp("SYNC", 0, after={("F", 0): 2}, before={("B", 1): 2}, on=on)
    return ps.Program(place, 8, ps.Rules("backward-first"), ops=[sync]).build()


def test_an_op_that_may_wait_for_others_comes_when_all_messages_have_left() -> None:
    """A rank that stands in the middle of it sends nothing, and others may need just that to come there."""
    ranks = Ranks(registered(()), "frozen")
    run_local(ranks.workers)
    found = {kind: {count for other, count in ranks.under_way if other == kind} for kind, _ in ranks.under_way}
    assert found["SYNC"] == {0}
    assert found["F"] == {0, 1}
    assert "SYNC" not in WAITS_FOR_NOBODY


def test_a_device_that_fails_names_the_op() -> None:
    ranks = Ranks(ps.build("1f1b", 2, 4), "frozen")
    ranks.queues[1].mark()
    original = ranks.queues[1].pass_to

    def broken(number: int) -> None:
        ranks.queues[1].fails = ranks.launched[1].num_launched > 0
        original(number)

    ranks.queues[1].pass_to = broken  # type: ignore[method-assign]
    with pytest.raises(RuntimeFailure, match=r"the device failed in F0 of stage 1: device-side assert"):
        run_local(ranks.workers)


def test_a_rank_whose_device_is_busy_looks_again_and_gives_up_on_nobody() -> None:
    ranks = Ranks(ps.build("1f1b", 2, 4), "frozen")
    first = ranks.workers[0]
    assert first.looks_again() is None
    first.begin(None)
    assert first.run_ready()
    assert first.looks_again() is not None
    assert "waits for its device to end" in first.stuck_on()


class Handle:
    """What a function of an asynchronous op returns."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


def test_an_asynchronous_op_ends_when_the_device_has_done_what_its_function_gave_it() -> None:
    queue, handle = LateQueue(), Handle()
    GATHER = ps.Op("GATHER", 0, 0)
    for op in (RegisteredAsyncOp(GATHER, handle, 1.0, queue), RegisteredAsyncOp(GATHER, None, 1.0, queue)):
        assert not op.has_ended  # the device has not come there
        given = queue.num_marks
        start, end = op.wait()
        assert start <= end
        assert queue.num_passed >= given
    assert handle.waited
    assert RegisteredAsyncOp(GATHER, None, 1.0).has_ended


def build_model() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(6, 6), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(6)]
    return nn.Sequential(*layers)


def test_a_processor_has_no_queue() -> None:
    assert queue_of(torch.device("cpu")) is None


@pytest.mark.parametrize("dispatch", ["frozen", "dynamic"])
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-1f1b", "chimera", "amdp"])
def test_training_through_a_queue_is_training(name: str, dispatch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks in one process: loss, gradients and parameters as without, and a whole timeline."""
    x, y = torch.randn(17, 6), torch.randn(17, 6)
    found = []
    for queue in (None, LateQueue()):
        monkeypatch.setattr(torch_backend, "queue_of", lambda device, queue=queue: queue)
        model = build_model()
        split = nn.Sequential(*model, *(nn.Identity() for _ in range(16)))
        schedule = ps.build(name, 4, 8)
        with ps.Pipeline(
            split, schedule, loss_fn=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), dispatch=dispatch
        ) as pipe:
            losses = [pipe.step(x, y).loss for _ in range(2)]
            assert len(pipe.timeline().ops) == schedule.num_ops
            losses.append(pipe.evaluate(x, y).loss)
            found.append([*losses, *(parameter.detach().clone() for parameter in model.parameters())])
        if queue is not None:
            assert queue.num_passed > schedule.num_ops
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_gradients_through_a_queue_are_the_plain_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_backend, "queue_of", lambda device: LateQueue())
    torch.manual_seed(1)
    x, y = torch.randn(17, 6), torch.randn(17, 6)
    plain = build_model()
    loss = plain_step(plain, x, y, 8, nn.MSELoss())
    model = build_model()
    with ps.Pipeline(model, ps.build("zb", 4, 8), loss_fn=nn.MSELoss()) as pipe:
        assert torch.equal(pipe.step(x, y, update=False).loss, loss)
    for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        assert torch.equal(own.grad, expected.grad)
