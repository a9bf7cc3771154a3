"""The ops inside the ranges of a profile. A range of torch's schedules also holds the wait for its op's message.

    |-- Forward 1 -----------------|            the range of GPipe
    |-- gloo:recv ---|             .            ends when the wait for the message ends
                     |== F1 =======|= loss =|   the op, and on the last stage the loss, which GPipe computes after it

If a profile shows no receives, `analyze.messages` lets an op begin when its message was sent.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from penstock.formats.traces.op_names import Names
from penstock.formats.traces.run_trace import Scope

CPU, GPU = "user_annotation", "gpu_user_annotation"
RECEIVE, SEND = re.compile(r"\w+:i?recv.*"), re.compile(r"\w+::?i?send.*")
"""Names that torch gives messages: gloo:recv, nccl:send 0->1; and its call c10d::send, which begins before these."""
_PAIR = re.compile(r"PP:\((.+);(.+)\)OVERLAP_F_B")
_BACKWARD = "autograd::engine::evaluate_function"
FORWARDS_SHARE = 1 / 3
"""Of a range that holds a forward and a backward, where nothing recorded says when the backward begins."""


class ProfileEvent(NamedTuple):
    """One event of a profile; `worker` is the number of its process among all of the job. Times in milliseconds."""

    name: str
    worker: int
    start: float
    end: float
    category: str
    args: dict[str, Any]
    track: tuple[Any, Any] = (None, None)


Recorded = defaultdict[str, list[float]]
"""When what happened in a process besides its ops, each in order: waits for messages ended (`received`), messages
were `sent`, messages of both kinds were `begun`, torch's operators ended (`computed`), autograd's functions began
(`backward`)."""


def pairs_divided(events: Sequence[ProfileEvent]) -> list[ProfileEvent]:
    """The events, with a range of a forward and a backward (DualPipeV's `PP:(0F3;3B1)OVERLAP_F_B`) as two of them."""
    if not any(_PAIR.fullmatch(name) for name in {event.name for event in events}):
        return list(events)
    recorded = _recorded(events)
    found = []
    for event in events:
        pair = _PAIR.fullmatch(event.name)
        if pair is None:
            found.append(event)
            continue
        end = begin = event.start + FORWARDS_SHARE * (event.end - event.start)
        if event.category == CPU:
            process = recorded[event.worker]
            waits = _within(process["received"], event)
            if len(waits) > 1:  # the second is the backward's; the forward ended with the operator before
                begin = waits[-1]
                end = max([each for each in _within(process["computed"], event) if each <= begin], default=begin)
            elif backward := _within(process["backward"], event):
                end = begin = backward[0]
        found.append(event._replace(name=f"PP:{pair[1]}", end=end))
        found.append(event._replace(name=f"PP:{pair[2]}", start=begin))
    return found


def ops_inside(matched: Sequence[ProfileEvent], events: Sequence[ProfileEvent], reader: Names) -> list[ProfileEvent]:
    """The ops of ranges: without the wait for their message, with the loss, and each once.

    Args:
        matched: the events that `reader` knows. Those of a GPU hold no waits.
        events: all that was recorded.
    """
    recorded = _recorded(events)
    by_worker: defaultdict[int, list[ProfileEvent]] = defaultdict(list)
    found = []
    for event in matched:
        if _kind(reader, event):
            by_worker[event.worker].append(event)
        else:
            found.append(event)
    for worker, ranges in by_worker.items():
        begins = sorted(event.start for event in ranges)
        for event in _each_once(ranges, reader):
            if event.category != GPU:
                loss_follows = _kind(reader, event) == "F" and not event.name.startswith("PP:")
                event = _without_waits(event, recorded[worker], begins, loss_follows)
            found.append(event)
    return found


def _without_waits(event: ProfileEvent, process: Recorded, begins: list[float], loss_follows: bool) -> ProfileEvent:
    """From the end of its wait for a message until it sends one.

    Args:
        begins: of its process's ranges.
        loss_follows: if it sends none, and so is of the last stage. torch computes the loss after a range of a
            schedule of one stage, and inside those of others.
    """
    start = max(_within(process["received"], event), default=event.start)
    done = max(_within(process["computed"], event), default=event.start)
    end = min((each for each in _within(process["sent"], event) if each >= done), default=event.end)
    following = begins[bisect_left(begins, end) :][:1]
    if loss_follows and process["received"] and following:
        gap = event._replace(start=end, end=following[0])
        if not _within(process["begun"], gap) and not _within(process["sent"], gap._replace(start=event.start)):
            end = following[0]
    return event._replace(start=start, end=end)


def _kind(reader: Names, event: ProfileEvent) -> str:
    """Penstock's letter of an op of a microbatch; empty for other events."""
    found = reader.read(event.name, event.args)
    return found[0].kind if found is not None and found[0].scope is Scope.COMPUTE else ""


def _recorded(events: Sequence[ProfileEvent]) -> defaultdict[int, Recorded]:
    found: defaultdict[int, Recorded] = defaultdict(lambda: defaultdict(list))
    for event in events:
        process = found[event.worker]
        is_sent = SEND.fullmatch(event.name) is not None
        if is_sent or RECEIVE.fullmatch(event.name):
            process["begun"].append(event.start)
            process["sent" if is_sent else "received"].append(event.start if is_sent else event.end)
        elif event.name.startswith(_BACKWARD):
            process["backward"].append(event.start)
        elif event.category == "cpu_op" and not event.name.startswith("c10d::"):
            process["computed"].append(event.end)
    for process in found.values():
        for column in process.values():
            column.sort()
    return found


def _within(moments: list[float], event: ProfileEvent) -> list[float]:
    return moments[bisect_right(moments, event.start) : bisect_left(moments, event.end)]


def _each_once(ranges: Sequence[ProfileEvent], reader: Names) -> list[ProfileEvent]:
    """Ranges without those inside another. A backward with both of its halves inside gives way to them."""
    outer: list[tuple[ProfileEvent, list[ProfileEvent]]] = []
    for event in sorted(ranges, key=lambda each: (each.start, -each.end)):
        if outer and event.start < event.end <= outer[-1][0].end:
            outer[-1][1].append(event)
        else:
            outer.append((event, []))
    found = []
    for event, inside in outer:
        halves = [each for each in inside if _kind(reader, each) in ("I", "W")]
        is_halved = _kind(reader, event) == "B" and len({_kind(reader, each) for each in halves}) == 2
        found += halves if is_halved else [event]
    return found
