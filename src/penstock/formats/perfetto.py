"""Timelines as a trace for ui.perfetto.dev: a process per rank, compute and messages on separate tracks.

The trace is Chrome's JSON, which Perfetto, chrome://tracing and other viewers open, plain or gzipped. A slice
is named by its kind and microbatch ("F 3"): the Perfetto UI gives slices whose names differ by numbers
only one colour, so that colour is the kind. Arrows lead from the op that sent a message over its way on the
link to the op that needed it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from penstock.schedule import Op, Schedule, parse_op
from penstock.schedule.dependencies import predecessors
from penstock.schedule.op import BUILT_IN
from penstock.simulation import Message, TimedOp, Timeline

COMPUTE_TRACK, ASYNCHRONOUS_TRACK, FIRST_LINK_TRACK = 1, 2, 10
TraceEvent = dict[str, Any]


def to_perfetto(timelines: Timeline | Sequence[Timeline]) -> bytes:
    """The trace of one or several timelines. Write it as `.json`, or gzipped as `.json.gz`.

    Args:
        timelines: one or several, simulated or measured.

    Examples:
        >>> import penstock as ps
        >>> import json
        >>> trace = json.loads(ps.formats.to_perfetto(ps.simulate(ps.build("1f1b", 2, 2))))
        >>> sum(event["ph"] == "X" for event in trace["traceEvents"]) >= 8
        True
    """
    given = [timelines] if isinstance(timelines, Timeline) else list(timelines)
    events: list[TraceEvent] = []
    meta = []
    process, flow = 1, 1
    for t in given:
        lead = f"{t.schedule.name} {t.source}, " if len(given) > 1 else ""
        events += _Trace(t, lead, process, flow).events()
        process += t.num_ranks
        flow += len(t.ops) * 2 + 1
        said = {"schedule": t.schedule.name, "source": t.source, "dispatch": t.dispatch}
        meta.append(said | {"makespan_ms": t.makespan, "span_ms": t.span, "bubble_ratio": t.bubble_ratio})
    value = {"displayTimeUnit": "ms", "metadata": {"penstock": meta}, "traceEvents": events}
    return json.dumps(value, separators=(",", ":")).encode()


def from_perfetto(data: bytes, schedule: Schedule) -> list[Timeline]:
    """The timelines of a trace that `to_perfetto` made, without their messages.

    Args:
        data: the trace, not gzipped.
        schedule: whose ops it shows, besides ops of registered kinds; timelines with others are left out.

    Raises:
        ValueError: another trace.

    Examples:
        >>> import penstock as ps
        >>> timeline = ps.simulate(ps.build("1f1b", 2, 2))
        >>> [read] = ps.formats.perfetto.from_perfetto(ps.formats.to_perfetto(timeline), timeline.schedule)
        >>> read.makespan == timeline.makespan
        True
    """
    known = {op for row in schedule.order for op in row}
    found = []
    try:
        trace = json.loads(data)
        slices = [event for event in trace["traceEvents"] if event["ph"] == "X" and "op" in event.get("args", ())]
        for place, meta in enumerate(trace["metadata"]["penstock"]):
            first = 1 + place * schedule.num_ranks
            ops = []
            for each in slices:
                if first <= each["pid"] < first + schedule.num_ranks:
                    start, end = each["ts"] / 1e3, (each["ts"] + each["dur"]) / 1e3
                    ops.append(TimedOp(each["pid"] - first, parse_op(each["args"]["op"]), start, end))
            ops.sort(key=lambda timed: (timed.rank, timed.start))
            if known.issuperset(timed.op for timed in ops if timed.op.kind in BUILT_IN):
                held = (0.0,) * schedule.num_ranks
                found.append(Timeline(schedule, tuple(ops), (), held, meta["source"], meta["dispatch"]))
    except (KeyError, TypeError) as error:
        raise ValueError(f"no trace of Penstock's: {error!r}") from None
    return found


def messages_of(timeline: Timeline) -> list[Message]:
    """What travelled between ranks: the recorded messages or, where none were, those the schedule implies.

    An implied message leaves at its source's end and arrives when its target starts, since nothing tells
    when it really did.
    """
    if timeline.messages:
        return list(timeline.messages)
    ran: dict[Op, list[TimedOp]] = {}
    for timed in timeline.ops:
        ran.setdefault(timed.op, []).append(timed)
    present = {op: together[0].rank for op, together in ran.items()}
    implied = []
    for target in timeline.ops:
        for op in predecessors(target.op, timeline.schedule.graph, present):
            together = ran.get(op, [])
            if together and all(timed.rank != target.rank for timed in together):
                source = together[0]
                taken = max(source.end, target.start)
                implied.append(Message(op, target.op, source.rank, target.rank, source.end, source.end, taken, taken))
    return implied


def held_over_time(
    row: Sequence[TimedOp], holds: Mapping[tuple[str, int], float] | None = None
) -> list[tuple[float, float]]:
    """How many stage activations a rank holds, as (time, count) at every change: F takes one, its B or W frees it,
    and registered ops take and free what `holds` says.
    """
    changes: dict[float, float] = {}
    for timed in row:
        share = {"F": 1, "B": -1, "W": -1}.get(timed.op.kind) or (holds or {}).get(timed.op[:2], 0)
        if share:
            moment = timed.start if share > 0 else timed.end
            changes[moment] = changes.get(moment, 0) + share
    moments = [time for time in sorted(changes) if changes[time]]
    return list(zip(moments, accumulate(changes[time] for time in moments), strict=True))


class _Trace:
    """The events of one timeline, whose ranks are the processes from `first_process` on."""

    def __init__(self, timeline: Timeline, lead: str, first_process: int, first_flow: int) -> None:
        self.timeline = timeline
        self.lead = lead
        self.first_process = first_process
        self.first_flow = first_flow
        self.origin = min((t.start for t in timeline.ops), default=0.0)
        self.ran = {timed.op: timed for timed in timeline.ops}

    def events(self) -> list[TraceEvent]:
        """Names of tracks first, then everything by time."""
        timeline = self.timeline
        timed = [event for row in timeline.rows for t in row for event in self._op(t)]
        for rank, rows in enumerate(zip(timeline.rows, timeline.streams, strict=True)):
            for time, count in held_over_time([*rows[0], *rows[1]], timeline.schedule.graph.holds):
                place = {"pid": self.first_process + rank, "ts": self._time(time)}
                timed.append({"ph": "C", "name": "activations", **place, "args": {"held": count}})
        timed += [event for row in timeline.streams for t in row for event in self._op(t)]
        named, sent = self._messages()
        timed += sent
        # A flow step binds to the slice around it, so at equal times slices come first; longer ones outside.
        timed.sort(key=lambda e: (e["ts"], e["ph"] != "X", -e.get("dur", 0.0)))
        return [*self._processes(), *named, *timed]

    def _processes(self) -> Iterator[TraceEvent]:
        for rank in range(self.timeline.num_ranks):
            process = self.first_process + rank
            yield _meta("process_name", process, {"name": f"{self.lead}rank {rank}"})
            yield _meta("process_sort_index", process, {"sort_index": process})
            yield from _track_named("compute", process, COMPUTE_TRACK, 0)
            if self.timeline.streams[rank]:
                yield from _track_named("asynchronous", process, ASYNCHRONOUS_TRACK, 0)

    def _track(self, op: Op) -> int:
        return ASYNCHRONOUS_TRACK if op[:2] in self.timeline.schedule.asynchronous else COMPUTE_TRACK

    def _op(self, timed: TimedOp) -> Iterator[TraceEvent]:
        op = timed.op
        args: dict[str, Any] = {"op": str(op), "stage": op.stage, "microbatch": op.microbatch}
        args["waited_ms"] = timed.waited
        if timed.waited_for is not None:
            args["waited_for"] = str(timed.waited_for)
        if timed.blocked > 0:
            args["blocked_ms"] = timed.blocked
        name = f"{op.kind} {op.microbatch}"
        event = self._slice(name, "compute", timed.rank, self._track(op), timed.start, timed.end)
        yield event | {"args": args}
        if timed.blocked > 0:
            after = timed.end + timed.blocked
            yield self._slice("blocked: link full", "wait", timed.rank, COMPUTE_TRACK, timed.end, after)

    def _slice(self, name: str, category: str, rank: int, track: int, start: float, end: float) -> TraceEvent:
        begin = self._time(start)
        event = {
            "ph": "X",
            "name": name,
            "cat": category,
            "pid": self.first_process + rank,
            "tid": track,
            "ts": begin,
        }
        return event | {"dur": round(self._time(end) - begin, 3)}

    def _messages(self) -> tuple[list[TraceEvent], list[TraceEvent]]:
        """Names of the link tracks, and slices and arrows of the messages.

        Slices of one track must not overlap, so messages under way at once on a link get lanes.
        """
        recorded = bool(self.timeline.messages)
        lanes: dict[tuple[int, int], list[float]] = {}
        named: list[TraceEvent] = []
        events: list[TraceEvent] = []
        tracks: dict[tuple[int, int, int], int] = {}
        next_track = [FIRST_LINK_TRACK] * self.timeline.num_ranks
        for index, message in enumerate(sorted(messages_of(self.timeline), key=lambda m: (m.sent, m.arrived))):
            source, target = self.ran.get(message.source), self.ran.get(message.target)
            if source is None or target is None:
                continue
            # The arrow leaves in the last nanosecond of its op, so that it still belongs to that.
            leaves = max(self._time(source.start), round(self._time(source.end) - 0.001, 3))
            steps = [(message.source_rank, self._track(message.source), leaves)]
            if recorded and self._time(message.arrived) > self._time(message.sent):
                ends = lanes.setdefault((message.source_rank, message.target_rank), [])
                lane = next((k for k, end in enumerate(ends) if end <= message.sent), len(ends))
                ends[lane:] = [message.arrived, *ends[lane + 1 :]]
                key = (message.source_rank, message.target_rank, lane)
                if key not in tracks:
                    tracks[key] = next_track[message.source_rank]
                    next_track[message.source_rank] += 1
                    name = f"to rank {message.target_rank}" + (f", {lane + 1}" if lane else "")
                    process, sort = self.first_process + message.source_rank, 1 + message.target_rank * 1000 + lane
                    named += _track_named(name, process, tracks[key], sort)
                events += self._sent(message, tracks[key])
                steps.append((message.source_rank, tracks[key], self._time(message.sent)))
            steps.append((message.target_rank, self._track(message.target), self._time(target.start)))
            events += self._flow(self.first_flow + index, steps)
        return named, events

    def _sent(self, message: Message, track: int) -> Iterator[TraceEvent]:
        name = f"{'activation' if message.source.kind == 'F' else 'gradient'} {message.source.microbatch}"
        args: dict[str, Any] = {
            "from": str(message.source),
            "to": str(message.target),
            "to_rank": message.target_rank,
        }
        if message.posted is not None:
            args |= {"receive_posted_ms": message.posted, "taken_ms": message.taken}
        times = message.sent, message.left, message.arrived
        for said, begin, end in zip((f"{name} waits to leave", name), times, times[1:], strict=False):
            if self._time(end) > self._time(begin):
                yield self._slice(said, "message", message.source_rank, track, begin, end) | {"args": args}

    def _flow(self, number: int, steps: Sequence[tuple[int, int, float]]) -> Iterator[TraceEvent]:
        for k, (rank, track, time) in enumerate(steps):
            phase = "s" if k == 0 else "f" if k == len(steps) - 1 else "t"
            event: TraceEvent = {"ph": phase, "name": "message", "cat": "message", "id": number}
            event |= {"pid": self.first_process + rank, "tid": track, "ts": time}
            yield event if phase == "s" else event | {"bp": "e"}

    def _time(self, ms: float) -> float:
        """Microseconds from the first op's start, to the nanosecond: the unit of the format."""
        return round((ms - self.origin) * 1000, 3)


def _track_named(name: str, process: int, track: int, sort: int) -> Iterator[TraceEvent]:
    yield _meta("thread_name", process, {"name": name}, track)
    yield _meta("thread_sort_index", process, {"sort_index": sort}, track)


def _meta(name: str, process: int, args: dict[str, Any], track: int = 0) -> TraceEvent:
    return {"ph": "M", "name": name, "pid": process, "tid": track, "args": args}
