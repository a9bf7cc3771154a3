"""The measured timeline of a step, in the same form as a simulated one, and the costs computed from it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.control import Event
from penstock.cost import Costs
from penstock.cost.measured import costs_of_ops
from penstock.runtime.adapt import MeasuredStep
from penstock.runtime.execute.worker import Worker
from penstock.runtime.mesh.interfaces import clock_name
from penstock.runtime.mesh.peers import GroupPeers, Peers
from penstock.runtime.mesh.probe import ahead_of_first
from penstock.runtime.transport.wiring import Wiring
from penstock.schedule import Op
from penstock.schedule.op import COMMUNICATION, KINDS, OF_UPDATES
from penstock.schedule.updates import OWNER
from penstock.simulation import Message, TimedOp, Timeline

RankTimes = Sequence[tuple[Op, int, int]]
"""(op, start, end) in nanoseconds of a clock that the ranks share."""


def measured_of(
    worker: Worker, begin: int, end: int, events: Sequence[Event], counters: Mapping[str, int] | None
) -> MeasuredStep:
    """What a worker measured of the step that it has run."""
    crossings = worker.transport.crossings()
    return MeasuredStep(worker.rank, begin, end, worker.times, crossings, events, worker.peak_held, counters)


def measured_timeline(
    wiring: Wiring,
    times: Sequence[RankTimes],
    peaks: Sequence[float],
    dispatch: str,
    async_times: Sequence[RankTimes] = (),
) -> Timeline:
    """Builds the timeline from every rank's recorded times, and those of its asynchronous ops."""
    everything = [*enumerate(times), *enumerate(async_times)]
    origin = min((start for _, row in everything for _, start, _ in row), default=0)
    ended = {(op, rank): (end - origin) / 1e6 for rank, row in everything for op, _, end in row}
    ops: list[TimedOp] = []
    messages: list[Message] = []
    for rank, row in enumerate(times):
        previous = 0.0
        for op, start_ns, end_ns in row:
            start, end = (start_ns - origin) / 1e6, (end_ns - origin) / 1e6
            cause, cause_end = None, previous
            for edge in wiring.incoming[op]:
                source = wiring.sender(edge, rank)
                if (sent := ended.get((edge.producer, source))) is None:
                    continue
                if source != rank:
                    messages.append(Message(edge.producer, op, source, rank, sent, sent, *[max(sent, start)] * 2))
                if sent > cause_end:
                    cause, cause_end = edge.producer, sent
            ops.append(TimedOp(rank, op, start, end, cause, max(0.0, start - previous)))
            previous = end
        for op, start_ns, end_ns in async_times[rank] if async_times else ():
            ops.append(TimedOp(rank, op, (start_ns - origin) / 1e6, (end_ns - origin) / 1e6))
    return Timeline(wiring.schedule, tuple(ops), tuple(messages), tuple(peaks), "measured", dispatch)


def gathered_timeline(peers: Peers, wiring: Wiring, workers: Sequence[Worker]) -> Timeline:
    """The timeline of a step of which each process has some ranks' workers. Every process must call it.

    The clock of a machine began when the machine was started, and drifts: every call compares the clocks.
    """
    ahead = ahead_of_first(peers, peers.gather(clock_name()))[peers.here[0]] if isinstance(peers, GroupPeers) else 0

    def by_first(rows: RankTimes) -> RankTimes:
        return [(op, start - ahead, end - ahead) for op, start, end in rows]

    mine = [(w.rank, by_first(w.times), w.peak_held, by_first(w.async_times)) for w in workers]
    rows = sorted(row for part in peers.gather(mine) for row in part)
    _, times, peaks, async_times = zip(*rows, strict=True)
    return measured_timeline(wiring, times, peaks, workers[0].dispatcher.dispatch.value, async_times)


def measured_costs(timelines: Sequence[Timeline]) -> Costs:
    """Per stage the mean duration of each kind of op over some measured steps: means add up to the time spent.

    Backwards and their halves are as in `costs_of_ops`. Forwards that ran again (R), updates on the owner of a stage
    (U) and registered kinds are among the costs of other ops; updates on other copies are `take_over`.
    """
    num_stages = timelines[0].schedule.num_stages
    found: dict[tuple[str, int], list[float]] = {}
    taken: dict[int, list[float]] = {}
    for timeline in timelines:
        schedule = timeline.schedule
        for timed in timeline.ops:
            op, ms = timed.op, timed.end - timed.start
            if op.kind in OF_UPDATES and schedule.pipeline_of(op) != OWNER:
                taken.setdefault(op.stage, []).append(ms)
            else:
                found.setdefault((op.kind, op.stage), []).append(ms)
    mean = {key: statistics.fmean(values) for key, values in found.items()}
    take_over = [statistics.fmean(taken.get(s, [0.0])) for s in range(num_stages)] if taken else ()
    costs = replace(costs_of_ops(mean, num_stages), take_over=take_over)
    other = {key: ms for key, ms in mean.items() if key[0] not in (*KINDS, *COMMUNICATION)}
    return costs.with_other(other) if other else costs
