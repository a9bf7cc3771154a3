"""Any schedule with forwards run again, whether memory asks or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import penstock as ps


def with_recompute(schedule: ps.Schedule, every: int = 1) -> ps.Schedule:
    """An R before each backward of every `every`-th microbatch."""

    def row(ops: tuple[ps.Op, ...]) -> Iterator[ps.Op]:
        for op in ops:
            if op.kind in "BI" and op.microbatch % every == 0:
                yield ps.Op("R", op.stage, op.microbatch)
            yield op

    result = replace(schedule, order=tuple(tuple(row(ops)) for ops in schedule.order))
    ps.check(result)
    return result
