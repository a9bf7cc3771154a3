"""The null runtime: real order and bounded channels, no tensors. What is proved completes; what is not, says why."""

from __future__ import annotations

import random
import re
from collections import Counter
from typing import Any

import pytest

import penstock as ps
from mutations import BASES, bases, mutants
from null_backend import NullBackend
from penstock.cost import Costs
from penstock.dispatch import Dispatcher
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.execute.executors import run_local
from penstock.runtime.execute.worker import Worker
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.loopback import LoopbackTransport, Mailbox
from penstock.runtime.transport.wiring import Wiring, wire
from penstock.schedule.liveness import needed_channel_depth
from penstock.simulation.lowered import frozen_peaks, memory_changes
from penstock.simulation.simulator import as_dispatch
from strategies import RUN_TOGETHER
from tiers import sample

pytestmark = pytest.mark.property

EACH = sample(250, 50)
ALONE = [name for name in BASES if name not in RUN_TOGETHER]
"""Schedules in which each op is one rank's: devices that compute nothing do not meet."""


class HeldUntilTaken(LoopbackTransport):
    """Channels of bounded depth, one a directed pair of ranks and direction of the model: a message takes room in one
    from its sending until it is taken, as a receiver with no buffers of its own would have it.
    """

    def __init__(
        self,
        boxes: list[Mailbox[Any]],
        rank: int,
        held: Counter[tuple[int, int, bool]],
        depth: int | None,
        wiring: Wiring,
    ) -> None:
        super().__init__(boxes, rank)
        self._held, self._depth, self._wiring = held, depth, wiring

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        # Tied gradients ride along with the message of the chain, tokens hold nothing: both take no room.
        if edge.slot == 0:
            channel = (self.rank, target, edge.producer.kind == "F")
            if self._depth is not None and self._held[channel] >= self._depth:
                return False
            self._held[channel] += 1
        return super().send(edge, target, payload)

    def take(self, edge: Edge) -> Payload:
        if edge.slot == 0:
            self._held[self._wiring.rank_of(edge.producer), self.rank, edge.producer.kind == "F"] -= 1
        return super().take(edge)


def run_null(schedule: ps.Schedule, dispatch: str, depth: int | None, tied: bool = False) -> list[NullBackend]:
    """Runs a schedule without a proof; returns the devices of its ranks.

    Raises ScheduleError where it can't even be lowered, RuntimeFailure where it gets stuck.
    """
    stages = schedule.num_stages
    wiring = wire(schedule, [range(stages), [0, stages - 1]] if tied and stages > 1 else [])
    change = memory_changes(wiring.graph, Costs.uniform(stages))
    caps = frozen_peaks(wiring.graph, change) if dispatch == "dynamic" else [0.0] * schedule.num_ranks
    boxes = [Mailbox() for _ in schedule.order]
    held: Counter[tuple[int, int, bool]] = Counter()
    devices = [NullBackend() for _ in schedule.order]
    workers = [
        Worker(
            wiring,
            rank,
            Dispatcher(wiring.graph, rank, as_dispatch(dispatch), change, caps[rank]),
            devices[rank],
            HeldUntilTaken(boxes, rank, held, depth, wiring),
        )
        for rank in range(schedule.num_ranks)
    ]
    run_local(workers)
    assert not any(box.entries for box in boxes)
    assert not any(held.values())
    return devices


def assert_completes(schedule: ps.Schedule) -> None:
    depth = needed_channel_depth(schedule)
    for dispatch in ("frozen", "dynamic"):
        for tied in (False, True):
            # A dynamic rank may run ahead of the frozen order, so its channels have no bound but memory's.
            devices = run_null(schedule, dispatch, depth if dispatch == "frozen" else None, tied)
            for row, device in zip(schedule.order, devices, strict=True):
                assert sorted(device.ran) == sorted(row)
                if dispatch == "frozen":
                    assert tuple(device.ran) == row


def failure(schedule: ps.Schedule) -> ps.ScheduleError | RuntimeFailure | None:
    """How an unproved schedule ends; any other error is a bug."""
    try:
        run_null(schedule, "frozen", 8)
    except (ps.ScheduleError, RuntimeFailure) as error:
        return error
    return None


@pytest.mark.parametrize("name", ALONE)
def test_library_schedules_complete(name: str) -> None:
    for base in bases(name):
        assert_completes(base)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_edits_complete_or_say_who_waits_for_what(name: str) -> None:
    rng = random.Random(f"null {name}")
    completed = stuck = refused = 0
    for base in bases(name):
        for edit, mutant in mutants(base, rng, EACH):
            try:
                ps.check(mutant)
                accepted = True
            except ps.ScheduleError:
                accepted = False
            if accepted:
                assert_completes(mutant)
                completed += 1
                continue
            error = failure(mutant)
            if error is None:
                completed += 1
            elif isinstance(error, ps.ScheduleError):
                refused += 1
                assert error.op is not None, f"{edit}: {error}"
            else:
                stuck += 1
                assert re.search(r"no rank can go on:\n  rank \d+ waits to (run|send) .*rank \d+", str(error)), edit
    assert completed + stuck + refused == 2 * EACH
    assert completed > EACH // 20
    assert refused > 0
