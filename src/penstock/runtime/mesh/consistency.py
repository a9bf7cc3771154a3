"""Whether all ranks were asked the same: what differs would else end in a wait, or in wrong numbers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple

from penstock.runtime.errors import RuntimeFailure
from penstock.schedule import Schedule


def require_same(told: Sequence[Mapping[str, object]], rule: str) -> None:
    """Compares what each rank told, by subject.

    Raises:
        RuntimeFailure: names the first subject that differs, and the ranks whose is not the first rank's.
    """
    for subject in dict.fromkeys(subject for mine in told for subject in mine):
        ranks = [rank for rank, mine in enumerate(told) if mine.get(subject) != told[0].get(subject)]
        if ranks:
            *others, last = map(str, ranks)
            which = f"ranks {', '.join(others)} and {last} were" if others else f"rank {last} was"
            raise RuntimeFailure(f"{which} given another {subject} than rank 0; {rule}")


def schedule_digest(schedule: Schedule) -> str:
    """Tells schedules apart by what runs, whatever they are called."""
    whole = (each and astuple(each) for each in (schedule.placement, schedule.stage_graph, schedule.updates))
    orders = [astuple(each) for each in schedule.microbatch_orders]
    fields = schedule.order, schedule.microbatch_pipeline, orders, *whole
    return hashlib.sha256(repr(fields).encode()).hexdigest()
