"""What replicas of a pipeline measured, as that of one pipeline: they run the same, and the slowest sets the pace.

replica 0   link 0:1 0.2 ms   link 1:2 0.2 ms   stage 1: F 10 ms
replica 1   link 0:1 0.2 ms   link 1:2  30 ms   stage 1: F 11 ms
together    link 0:1 0.2 ms   link 1:2  30 ms   stage 1: F 11 ms
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from penstock.control.events import Event, IterationEnded, OpTimes, Transfers


def slowest_of(replicas: Iterable[Sequence[Event]]) -> list[Event]:
    """The events of one iteration: of each link and each stage those of the replica where it was slowest, each other
    event once, in the order in which they first came."""
    found: dict[object, Event] = {}
    for events in replicas:
        for event in events:
            key: object = event
            if isinstance(event, Transfers):
                key = "link", event.link
            elif isinstance(event, OpTimes):
                key = "ops", event.rank, event.stage
            elif isinstance(event, IterationEnded):
                key = "end", event.number
            known = found.get(key)
            if known is None or _slowness(event) > _slowness(known):
                found[key] = event
    return list(found.values())


def _slowness(event: Event) -> float:
    if isinstance(event, Transfers):
        return fmean(event.ms)
    if isinstance(event, OpTimes):
        return sum(sum(halves) for _, halves in event.ms)
    return event.ms if isinstance(event, IterationEnded) else 0.0
