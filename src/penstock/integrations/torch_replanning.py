"""Measures the steps of torch's own pipelining, and plans anew when links have changed.

`StepRecorder` is with every rank, and `PlanUpdater` with rank 0. See `penstock.integrations.torch`, which has the
picture of what happens when.
"""

from __future__ import annotations

import math
import queue
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from penstock.cost import Costs, Links
from penstock.formats.native import from_json, to_json
from penstock.passes import add_communication
from penstock.planning import plan
from penstock.runtime.adapt.agent import CLOCK_COMPARISON_ITERATIONS
from penstock.runtime.mesh.interfaces import clock_name
from penstock.runtime.mesh.peers import GroupPeers
from penstock.runtime.mesh.probe import ahead_of_first
from penstock.schedule import Schedule, ScheduleError, check, peak_in_flight
from penstock.schedule.messages import has_communication, remove_communication
from penstock.simulation import simulate

if TYPE_CHECKING:
    from penstock.integrations.torch import PlannedSchedule

_KINDS = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Replanner:
    """When a running plan is replaced, and by what.

    Attributes:
        planner: (costs, links, the running schedule) -> a schedule for them; if it raises ScheduleError, a warning
            says why and no other plan is tried. Default: `ps.plan` with the same placement, within the memory that
            the first plan needs on each rank. It splits the backwards of those stages that the first plan splits.
        seconds: how long the default planner may search, in a thread of rank 0 beside the steps.
        least_gain: by how much, as a share, a new plan must beat the running one in simulation.
        least_change: by how many milliseconds a link must change; by default a tenth of a mean op, at least 2 ms.
        patience: for how many steps in a row a change must be seen.
        group: all processes that must change their plan between the same two steps, with gloo. Default: those of the
            pipeline. With replicas give the group of all pipelines, which must all start with the same plan: they
            then take the same new plan, made for the slowest ops and the latest links of any.
    """

    planner: Callable[[Costs, Links, Schedule], Schedule] | None = None
    seconds: float = 2.0
    least_gain: float = 0.02
    least_change: float | None = None
    patience: int = 2
    group: Any = None


@dataclass(frozen=True)
class Replanned:
    """A plan that replaced another between two steps.

    Attributes:
        step: the number of the first training step that ran the plan, from 0.
        detected: the number of the step after which the planner began; on rank 0, -1 on others.
        links: what was measured, (source, target) -> ms; on rank 0, empty on others.
        before, after: the simulated milliseconds of a step under these links; nan on other ranks than 0.
    """

    step: int
    detected: int
    links: Mapping[tuple[int, int], float]
    before: float
    after: float


def _now() -> float:
    """Milliseconds of this machine's monotonic clock, which does not jump when the time of day is set."""
    return time.perf_counter() * 1e3


class _Arrival:
    """One receive, waited for by a thread that notes when it is there."""

    def __init__(self, work: Any) -> None:
        self._work, self._there = work, threading.Event()
        self._error: BaseException | None = None
        self.posted, self.at = _now(), math.nan

    def receive(self) -> None:
        try:
            self._work.wait()
        except BaseException as error:
            self._error = error
        self.at = _now()
        self._there.set()

    def wait(self) -> None:
        self._there.wait()
        if self._error is not None:
            raise self._error


class _Receives(dict[tuple[int, int], list[Any]]):
    """torch's receives by (stage, microbatch), each with the moments when it was posted and when it arrived.

    A thread for each sender waits for its messages, which arrive in the order in which they were posted.
    """

    def __init__(self, sender_of: Callable[[int], int]) -> None:
        super().__init__()
        self._sender_of = sender_of
        self._queues: dict[int, queue.SimpleQueue[_Arrival]] = {}
        self.arrivals: dict[tuple[int, int], list[_Arrival]] = {}

    def __setitem__(self, key: tuple[int, int], works: list[Any]) -> None:
        self.arrivals[key] = arrivals = [_Arrival(work) for work in works]
        sender = self._sender_of(key[0])
        if sender not in self._queues:
            self._queues[sender] = queue.SimpleQueue()
            threading.Thread(target=_receive_all, args=(self._queues[sender],), daemon=True).start()
        for arrival in arrivals:
            self._queues[sender].put(arrival)
        super().__setitem__(key, arrivals)


def _receive_all(arrivals: queue.SimpleQueue[_Arrival]) -> None:
    while True:
        arrivals.get().receive()


@dataclass
class _Notes:
    """A rank's measurements of one step: the milliseconds of its ops, and the moments when it sent messages."""

    took: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    sent: dict[tuple[str, int, int], float] = field(default_factory=dict)


StageReports = dict[int, tuple[list[float], torch.Tensor]]
"""Of each stage of a pipeline the milliseconds of its ops by kind, and the moments of its messages as (F or B; sent,
posted or arrived; microbatch): when this stage sent its own, and when those that it receives were posted and came.
"""


class StepRecorder:
    """Measures the steps of a schedule, and changes its plan when links have changed.

    Attributes:
        ahead: milliseconds that this process's clock is ahead of that of the group's rank 0.
    """

    HEAD = 3
    """Numbers before a report's measurements: the size of an announced plan, the pipeline, and the rank in it."""

    def __init__(self, schedule: PlannedSchedule, group: Any, options: Replanner) -> None:
        self.schedule, self.options = schedule, options
        self.group = group if options.group is None else options.group
        self.pipeline = min(dist.get_process_group_ranks(group))
        self.first = schedule.plan
        self.num_steps, self.ahead = 0, 0.0
        self.peers = GroupPeers(self.group, dist.default_pg_timeout.total_seconds())
        self.notes = _Notes()
        self.slots = max(len(schedule.plan.stages_of(rank)) for rank in range(schedule.pp_group_size))
        self.pending: tuple[Any, list[torch.Tensor]] | None = None
        self.offer: tuple[bytes, Replanned] | None = None
        self.announced: tuple[bytes, Replanned] | None = None
        self.updater = PlanUpdater(self) if dist.get_rank(self.group) == 0 else None
        self.receives = {
            "F": _Receives(lambda stage: schedule.plan.rank_of(stage - 1, 0)),
            "B": _Receives(lambda stage: schedule.plan.rank_of(stage + 1, 0)),
        }
        schedule.fwd_recv_ops, schedule.bwd_recv_ops = self.receives.values()
        for stage in schedule._stages:
            self._observe(stage)

    def _observe(self, stage: Any) -> None:
        """Notes when the ops of a stage run and when its messages are sent, by wrapping what torch calls."""
        number = stage.stage_index

        def timed(call: Callable[..., Any], kind_of: Callable[[Mapping[str, Any]], str]) -> Callable[..., Any]:
            def run(*args: Any, **kwargs: Any) -> Any:
                begun = _now()
                result = call(*args, **kwargs)
                self.notes.took.setdefault((kind_of(kwargs), number), []).append(_now() - begun)
                return result

            return run

        def sends(call: Callable[[int], Any], kind: str) -> Callable[[int], Any]:
            def get(microbatch: int) -> Any:
                self.notes.sent[kind, number, microbatch] = _now()
                return call(microbatch)

            return get

        stage.forward_one_chunk = timed(stage.forward_one_chunk, lambda _: "F")
        stage.backward_one_chunk = timed(
            stage.backward_one_chunk, lambda given: "B" if given.get("full_backward", True) else "I"
        )
        stage.backward_weight_one_chunk = timed(stage.backward_weight_one_chunk, lambda _: "W")
        stage.get_fwd_send_ops = sends(stage.get_fwd_send_ops, "F")
        stage.get_bwd_send_ops = sends(stage.get_bwd_send_ops, "B")

    def begin_step(self) -> None:
        self.notes = _Notes()
        for receives in self.receives.values():
            receives.arrivals.clear()

    def end_step(self) -> None:
        """Takes the notes of the step before, which have come meanwhile, and sends those of this one."""
        if self.num_steps % CLOCK_COMPARISON_ITERATIONS == 0:
            ahead = ahead_of_first(self.peers, self.peers.gather(clock_name()))
            self.ahead = ahead[self.peers.here[0]] / 1e6
        self.num_steps += 1
        if self.pending is not None:
            work, reports = self.pending
            work.wait()
            size = int(reports[0][0])
            if size:
                self._switch(size)
            elif self.updater is not None and self.num_steps > 2:  # the first step makes connections
                self.updater.consider(self._by_pipeline(reports))
        report = self._report()
        if self.offer is not None:
            self.announced, self.offer = self.offer, None
            report[0] = len(self.announced[0])
        reports = [torch.empty_like(report) for _ in range(dist.get_world_size(self.group))]
        self.pending = dist.all_gather(reports, report, group=self.group, async_op=True), reports

    def _switch(self, size: int) -> None:
        """All ranks take the schedule that rank 0 has announced."""
        payload = torch.zeros(size, dtype=torch.uint8)
        record = Replanned(self.num_steps, -1, {}, math.nan, math.nan)
        if self.announced is not None:
            text, record = self.announced
            payload = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            self.announced = None
        dist.broadcast(payload, group=self.group, group_src=0)
        schedule = from_json(payload.numpy().tobytes().decode())
        try:
            self.schedule.load(schedule)
            self.schedule.replanned.append(replace(record, step=self.num_steps))
        except ScheduleError as error:  # on all ranks, such as for the limit of sends that torch was given
            warnings.warn(f"the plan stays as it is, since the new one can't run: {error}", stacklevel=2)

    def _report(self) -> torch.Tensor:
        """The head, the ms of each slot's ops, and the moments of its messages by the clock of the group's rank 0."""
        num = self.schedule._n_microbatches
        report = torch.full((self.HEAD + (4 + 6 * num) * self.slots,), math.nan, dtype=torch.float64)
        report[: self.HEAD] = torch.tensor([0, self.pipeline, self.schedule.rank])
        ops, messages = self._parts(report)
        for slot, stage in enumerate(self.schedule.plan.stages_of(self.schedule.rank)):
            for kind, name in enumerate(_KINDS):
                if took := self.notes.took.get((name, stage)):
                    ops[slot, kind] = median(took)
            for way, (kind_name, receives) in enumerate(self.receives.items()):
                for microbatch in range(num):
                    at = messages[slot, way, :, microbatch]
                    at[0] = self.notes.sent.get((kind_name, stage, microbatch), math.nan)
                    arrivals = receives.arrivals.get((stage, microbatch), ())
                    at[1] = min((each.posted for each in arrivals), default=math.nan)
                    at[2] = max((each.at for each in arrivals), default=math.nan)
        messages -= self.ahead
        return report

    def _parts(self, report: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a report the ops as (slot, kind), and the messages as (slot, F or B, moment, microbatch)."""
        ops = self.HEAD + 4 * self.slots
        return report[self.HEAD : ops].view(self.slots, 4), report[ops:].view(self.slots, 2, 3, -1)

    def _by_pipeline(self, reports: Sequence[torch.Tensor]) -> dict[int, StageReports]:
        """What each pipeline has measured."""
        found: dict[int, StageReports] = {}
        for report in reports:
            ops, messages = self._parts(report)
            stages = self.schedule.plan.stages_of(int(report[2]))
            measured = {stage: (ops[slot].tolist(), messages[slot]) for slot, stage in enumerate(stages)}
            found.setdefault(int(report[1]), {}).update(measured)
        return found


class PlanUpdater:
    """Turns the measurements of all ranks into costs and links, and plans anew if links have changed. On rank 0."""

    KEPT = 5
    """Steps whose medians count for the costs."""

    def __init__(self, recorder: StepRecorder) -> None:
        self.recorder = recorder
        self.ops: dict[tuple[str, int], deque[float]] = {}
        self.planned_for: dict[tuple[int, int], float] = {}
        self.seen = 0
        self.thread: threading.Thread | None = None

    def consider(self, pipelines: Mapping[int, StageReports]) -> None:
        """Plans anew, in a thread, if links differ from those of the plan for some steps in a row."""
        took: dict[tuple[str, int], float] = {}
        delays: dict[tuple[int, int], float] = {}
        for stages in pipelines.values():
            for stage, (ops, _) in stages.items():
                for key, ms in zip(((kind, stage) for kind in _KINDS), ops, strict=True):
                    if not math.isnan(ms):
                        took[key] = max(ms, took.get(key, ms))
            for link, ms in self._delays(stages).items():
                delays[link] = max(ms, delays.get(link, ms))
        for key, ms in took.items():
            self.ops.setdefault(key, deque(maxlen=self.KEPT)).append(ms)
        if (self.thread is not None and self.thread.is_alive()) or self.recorder.offer is not None:
            return
        costs = self._costs()
        least = self.recorder.options.least_change
        if least is None:
            least = max(2.0, 0.1 * sum(costs.f) / len(costs.f))
        is_changed = any(abs(ms - self.planned_for.get(link, 0.0)) > least for link, ms in delays.items())
        self.seen = self.seen + 1 if is_changed else 0
        if self.seen < self.recorder.options.patience:
            return
        self.seen = 0
        self.planned_for |= delays
        arguments = costs, dict(self.planned_for), self.recorder.schedule.plan, self.recorder.num_steps - 1
        self.thread = threading.Thread(target=self._plan, args=arguments, daemon=True)
        self.thread.start()

    def _plan(self, costs: Costs, delays: Mapping[tuple[int, int], float], running: Schedule, detected: int) -> None:
        """Offers the best of three plans: the first one, the running one, and one for these delays.

        The first plan counts as the best if no other is faster by the least gain, so it comes back when links heal.
        """
        options, first, channel = self.recorder.options, self.recorder.first, self.recorder.schedule.channels
        links = Links({link: round(ms, 3) for link, ms in delays.items()})
        found = running
        try:
            found = (options.planner or self._best)(costs, links, running)
        except ScheduleError as error:
            warnings.warn(f"no new plan is tried for {links}: {error}", stacklevel=2)
        runs = [simulate(each, costs, links, channels=channel) for each in (first, running, found)]
        home, now, then = (run.makespan for run in runs)
        least = 1 - options.least_gain
        best, ms = (found, then) if then <= least * now else (running, now)
        if least * home <= ms:
            best, ms = first, home
        if remove_communication(best).order == remove_communication(running).order:
            return
        if not has_communication(best):
            best = add_communication(best, costs, links, channels=channel)
        check(best, channels=channel)
        self.recorder.offer = to_json(best).encode(), Replanned(0, detected, delays, now, ms)

    def _best(self, costs: Costs, links: Links, running: Schedule) -> Schedule:
        """The best plan in which each stage's backwards are split, or whole, as in the first plan.

        In another form gradients may differ in their last bits, and some losses can't be split. Of the first stage
        torch runs I and W as a whole backward anyway.
        """
        first = self.recorder.first
        split = {op.stage for row in first.order for op in row if op.kind == "I"} - {0}
        found = plan(
            costs,
            first.num_ranks,
            first.num_microbatches,
            links,
            max_in_flight=peak_in_flight(first),
            placement=first.placement,
            split=None if split else False,
            time_limit=self.recorder.options.seconds,
        ).schedule
        whole = set(range(1, first.num_stages)) - split
        rows = ([op for op in row if op.kind != "W" or op.stage not in whole] for row in found.order)
        rows = ([op._replace(kind="B") if op.kind == "I" and op.stage in whole else op for op in row] for row in rows)
        return replace(found, order=tuple(map(tuple, rows)))

    def _costs(self) -> Costs:
        """Milliseconds of each stage's ops. Where a backward ran whole, half of it is taken for each half."""
        num_stages = self.recorder.schedule.plan.num_stages
        known = {key: median(found) for key, found in self.ops.items()}
        f, i, w, b = ([known.get((kind, stage), math.nan) for stage in range(num_stages)] for kind in "FIWB")
        for stage in range(num_stages):
            if math.isnan(w[stage]):
                w[stage] = b[stage] / 2 if stage else b[0]
                i[stage] = b[stage] - w[stage]
            if math.isnan(b[stage]):
                b[stage] = i[stage] + w[stage]
        return Costs(f, i, w, b)

    def _delays(self, by_stage: StageReports) -> dict[tuple[int, int], float]:
        """Milliseconds of each directed link that carried messages in a pipeline. All moments are by one clock."""
        plan = self.recorder.schedule.plan
        raw: dict[tuple[int, int], list[tuple[float, ...]]] = {}
        for stage in by_stage:
            for way, target in ((0, stage + 1), (1, stage - 1)):
                if target not in by_stage or plan.rank_of(stage, 0) == plan.rank_of(target, 0):
                    continue
                link = plan.rank_of(stage, 0), plan.rank_of(target, 0)
                moments = by_stage[stage][1][way, 0], by_stage[target][1][way, 1], by_stage[target][1][way, 2]
                whole = torch.stack(moments).T
                raw.setdefault(link, []).extend(whole[~whole.isnan().any(1)].tolist())
        found = {}
        for (source, target), messages in raw.items():
            # A message leaves when its sender knows that the receive is posted, which takes the way back.
            known = self.planned_for.get((target, source), 0.0)
            early = [a - s for s, p, a in messages if s >= p + known + 1.0]
            if took := early or [a - max(s, p) for s, p, a in messages]:
                found[source, target] = max(0.0, median(took))
        return found
