"""A panel: one timeline made ready for drawing, whatever it came from.

A schedule has no times of its own, so it is drawn as it would run where each rank's share of the model takes
F = I = W = 1 and B = 2 (`Costs.assumed`), and U on every copy and ops of registered kinds half as long as F;
the caption says so.
A measured timeline may start anywhere; on a picture time starts with its first op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.cost import Costs
from penstock.draw.style import kind_order, percent, shade, short
from penstock.formats.perfetto import messages_of
from penstock.schedule import Op, Schedule, ScheduleError
from penstock.schedule.op import OF_UPDATES
from penstock.schedule.updates import OWNER
from penstock.simulation import Message, TimedOp, Timeline, simulate
from penstock.simulation.simulator import untimed_kinds

Drawable = Schedule | Timeline

COPY = "'"
"""Marks the number of an update that a copy takes over from its owner."""

_OTHER_SHARE = 0.5
"""Of a forward: what updates and registered ops take where a schedule is drawn without times, to be seen at all."""


@dataclass(frozen=True)
class Panel:
    """A timeline with its title and the unit of its times ("ms", or "" for units of a bare schedule)."""

    timeline: Timeline
    title: str
    unit: str

    @property
    def schedule(self) -> Schedule:
        return self.timeline.schedule

    @cached_property
    def origin(self) -> float:
        return min((t.start for t in self.timeline.ops), default=0.0)

    @cached_property
    def rows(self) -> list[list[TimedOp]]:
        """The ops of each rank by start. The two of a pair share its time, half each."""
        rows = [sorted(row, key=lambda t: (t.start, t.end)) for row in self.timeline.rows]
        backward_of = dict(self.schedule.pairs)
        return [_in_halves(row, backward_of) for row in rows] if backward_of else rows

    @cached_property
    def streams(self) -> list[list[TimedOp]]:
        """The asynchronous ops of each rank by start."""
        return [sorted(row, key=lambda t: (t.start, t.end)) for row in self.timeline.streams]

    @cached_property
    def messages(self) -> list[Message]:
        """The messages between ranks, their times counted from the origin."""
        times = ("sent", "left", "arrived", "taken", "posted")
        return [
            replace(m, **{name: at - self.origin for name in times if (at := getattr(m, name)) is not None})
            for m in messages_of(self.timeline)
        ]

    @cached_property
    def kinds(self) -> list[str]:
        return kind_order(t.op.kind for t in self.timeline.ops)

    @cached_property
    def _chunks(self) -> list[dict[tuple[int, int], int]]:
        pairs: list[list[tuple[int, int]]] = [[] for _ in range(self.timeline.num_ranks)]
        for stage in range(self.schedule.num_stages):
            for pipeline in range(self.schedule.placement.num_pipelines):
                for rank in self.schedule.placement.hosts(pipeline, stage):
                    if rank < len(pairs):
                        pairs[rank].append((stage, pipeline))
        return [{pair: chunk for chunk, pair in enumerate(mine)} for mine in pairs]

    @cached_property
    def num_chunks(self) -> int:
        """Most stages that a rank hosts."""
        return max((len(mine) for mine in self._chunks), default=1) or 1

    def chunk(self, rank: int, op: Op) -> int:
        """Which of the rank's stages the op belongs to, from 0."""
        pipelines = self.schedule.microbatch_pipeline
        if update := self.update(op):
            pipeline = update[1]
        else:
            pipeline = pipelines[op.microbatch] if op.microbatch < len(pipelines) else 0
        return self._chunks[rank].get((op.stage, pipeline), 0)

    def update(self, op: Op) -> tuple[int, int] | None:
        """The (update, pipeline) of an op of an update; None for other ops."""
        windows = self.schedule.windows
        return windows.update_of(op.microbatch) if op.kind in OF_UPDATES and windows is not None else None

    def number(self, op: Op) -> str:
        """What stands on a bar: the microbatch, or of a U the update, marked where a copy takes it over."""
        update = self.update(op)
        if update is None:
            return str(op.microbatch)
        return f"{update[0]}{'' if update[1] == OWNER else COPY}"

    @cached_property
    def busy_shares(self) -> list[float]:
        """The part of the makespan each rank spends in ops."""
        return [busy / self.timeline.makespan if self.timeline.makespan else 0.0 for busy in self.timeline.busy]

    def time(self, value: float) -> str:
        """A time with its unit."""
        return f"{short(value)} {self.unit}".rstrip()

    @property
    def dispatch(self) -> str:
        """How ranks chose their ops, and what carried messages that ranks posted."""
        t = self.timeline
        return f"{t.dispatch}, {t.channels}" if t.channels else t.dispatch

    def facts(self) -> list[str]:
        """What a caption says of the run, most telling last."""
        t, s = self.timeline, self.schedule
        facts = [self._assumed()] if self.unit == "" else [f"{t.source}, {self.dispatch}"]
        facts.append(f"{s.num_ranks} {'rank' if s.num_ranks == 1 else 'ranks'}")
        facts.append(f"{s.num_microbatches} {'microbatch' if s.num_microbatches == 1 else 'microbatches'}")
        facts.append(f"makespan {self.time(t.makespan)}")
        if t.makespan - t.span > 1e-6 * t.makespan:
            facts.append(f"span {self.time(t.span)}")
        facts.append(f"bubble {percent(t.bubble_ratio)}")
        return facts

    def _assumed(self) -> str:
        """What a bare schedule is drawn with."""
        each = Costs.assumed(self.schedule.num_ranks, self.schedule.placement).f[0]
        said = f"F = I = W = {short(each)}" + (" per stage" if each != 1 else "")
        others = _other_kinds(self.schedule)
        return said + (f", {' = '.join(others)} = {short(each * _OTHER_SHARE)}" if others else "")

    def sentence(self, timed: TimedOp) -> str:
        """All that is known of one op, for a tooltip."""
        op, start = timed.op, timed.start - self.origin
        beside = ", asynchronous" if op[:2] in self.schedule.asynchronous else ""
        text = f"{op}{beside}: rank {timed.rank}, {short(start)} to {self.time(timed.end - self.origin)}"
        if update := self.update(op):
            text += f", update {update[0]}"
            text += ", by its owner" if update[1] == OWNER else f", taken over by pipeline {update[1]}'s copy"
        if timed.waited_for is not None:
            text += f", waited {self.time(timed.waited)} for {timed.waited_for}"
        elif timed.waited > 0:
            text += f", idle {self.time(timed.waited)} before"
        if timed.blocked > 0:
            text += f", then blocked {self.time(timed.blocked)}"
        return text

    def message_sentence(self, message: Message) -> str:
        """All that is known of one message, for a tooltip."""
        m, ends = message, f"{message.source} to {message.target}: sent by rank {message.source_rank}"
        receive = "" if m.posted is None else f", received by rank {m.target_rank} from {short(m.posted)} on"
        then = f"left {short(m.left)}, arrived {short(m.arrived)}, taken {self.time(m.taken)}"
        return f"{ends} at {short(m.sent)}{receive}; {then}"


def colors_used(shown: Sequence[Panel]) -> dict[str, list[str]]:
    """The colours of each kind in the panels, dark to light."""
    used: dict[str, set[str]] = {}
    for panel in shown:
        for timed in panel.timeline.ops:
            color = shade(timed.op.kind, panel.chunk(timed.rank, timed.op), panel.num_chunks)
            used.setdefault(timed.op.kind, set()).add(color)
    return {kind: sorted(colors) for kind, colors in used.items()}


def panels(drawn: Drawable | Sequence[Drawable], titles: Sequence[str] | None = None) -> list[Panel]:
    """The panels of what is to be drawn, from top to bottom.

    Raises:
        ScheduleError: nothing to draw, titles that do not match, or a schedule that cannot run.
    """
    if not isinstance(drawn, Schedule | Timeline | Iterable):
        raise ScheduleError(
            f"a schedule or a timeline can be drawn, or a list of them, not {type(drawn).__name__}", rule="draw"
        )
    given: list[Drawable] = [drawn] if isinstance(drawn, Schedule | Timeline) else list(drawn)
    if not given:
        raise ScheduleError("nothing to draw: give a schedule or a timeline", rule="draw")
    if titles is not None and len(titles) != len(given):
        raise ScheduleError(f"{len(titles)} titles for {len(given)} timelines: give one each", rule="draw")
    result = []
    for index, one in enumerate(given):
        if not isinstance(one, Schedule | Timeline):
            raise ScheduleError(f"a schedule or a timeline can be drawn, not {type(one).__name__}", rule="draw")
        timeline, unit = (one, "ms") if isinstance(one, Timeline) else (_in_units(one), "")
        result.append(Panel(timeline, titles[index] if titles else timeline.schedule.name, unit))
    return result


def _in_halves(row: list[TimedOp], backward_of: dict[Op, Op]) -> list[TimedOp]:
    """A rank's ops as they are drawn: a pair's backward, which takes no time of its own, has half of the pair's."""
    drawn: list[TimedOp] = []
    for timed in row:
        before = drawn[-1] if drawn else None
        if before is not None and backward_of.get(before.op) == timed.op and timed.start == timed.end == before.end:
            middle = (before.start + before.end) / 2
            drawn[-1] = replace(before, end=middle)
            timed = replace(timed, start=middle)
        drawn.append(timed)
    return drawn


def _other_kinds(schedule: Schedule) -> list[str]:
    """The kinds of op that no costs are assumed for: registered ones and updates."""
    return untimed_kinds(schedule, Costs.assumed(schedule.num_ranks, schedule.placement))


def _in_units(schedule: Schedule) -> Timeline:
    kinds = _other_kinds(schedule)
    if not kinds:
        return simulate(schedule)
    costs = Costs.assumed(schedule.num_ranks, schedule.placement)
    other = costs.f[0] * _OTHER_SHARE
    take_over = [other] * schedule.num_stages if schedule.updates is not None else []
    return simulate(schedule, replace(costs, other=dict.fromkeys(kinds, other), take_over=take_over))
