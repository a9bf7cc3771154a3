"""Where AMDP's updates stand: all ranks' at one moment, so that they cost their own time once and no more.

The pipelines are tightly coupled, each waiting for the others' ranks. An update that runs on one rank as soon as it
can holds up one pipeline, the next rank's a moment later the same one again. Where all ranks update at the same
moment, nobody waits for anybody:

    each when it can    rank 0 | F F B B F U B F B        all at once    rank 0 | F F B B F B U F B
                        rank 1 | F F B U B F B F B                       rank 1 | F F B B F B U F B

That moment is when the gradients of the window are there on every stage, the first one's being the last. No
update comes so late that a forward would miss it which must not (`amdp_order`), or between the F and the B of the
last stage.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import inf

from penstock.library.amdp_order import Pipelines, RanRows, StageTimes
from penstock.schedule import Op, Updates, Windows
from penstock.schedule.updates import OWNER


def with_updates_at_once(
    ran: RanRows, pipelines: Pipelines, windows: Windows, updates: Updates, times: StageTimes
) -> list[list[Op]]:
    """The rows with all updates in them.

    An update goes before the first op that starts at its moment or later, so all rows are in one order of time: an
    owner's after the backwards that it waits for, and not after its copies'. Those are meant to come later than it by
    what parameters take to them.
    """
    num_stages, num_pipelines = len(pipelines[0]), len(pipelines)
    reach = num_stages * (updates.max_mismatch or 0)
    placed: list[list[tuple[int, int, bool, Op]]] = [[] for _ in ran.rows]
    starts = [[ran.starts[op] for op in row] for row in ran.rows]
    copies = {
        (stage, k): _Copy(ran.rows[rank], starts[rank], stage, k, pipelines)
        for k, ranks in enumerate(pipelines)
        for stage, rank in enumerate(ranks)
    }
    moment = 0.0
    for update in range(windows.num_updates):
        window = windows.microbatches(update)
        # A short last window may have its gradients earlier than the one before, and still updates after it.
        moment = max(moment, *(_summed(ran, times, stage, window, num_pipelines) for stage in range(num_stages)))
        for stage in range(num_stages):
            owner_latest = inf
            for k in reversed(range(num_pipelines)):
                u = Op("U", stage, windows.number(update, k))
                wanted = moment if k == OWNER else moment + times.update_message
                if stage == num_stages - 1:  # there not every slot may be taken; the one it ran in may
                    wanted = max(wanted, ran.updates[u])
                slot, time = copies[stage, k].slot(min(wanted, owner_latest), window.stop + reach)
                owner_latest = min(owner_latest, time)
                placed[pipelines[k][stage]].append((slot, update, k != OWNER, u))
    return [_merged(row, sorted(found)) for row, found in zip(ran.rows, placed, strict=True)]


def _summed(ran: RanRows, times: StageTimes, stage: int, window: range, num_pipelines: int) -> float:
    """When the owner of a stage has the gradients of a window from all copies (ms)."""
    return max(
        ran.starts[Op("B", stage, m)] + times.b[stage] + (0.0 if m % num_pipelines == OWNER else times.update_message)
        for m in window
    )


class _Copy:
    """The ops of one copy of a stage in its rank's row, and the slots between which its updates may stand."""

    def __init__(
        self, row: Sequence[Op], starts: Sequence[float], stage: int, pipeline: int, pipelines: Pipelines
    ) -> None:
        self._starts = starts
        mine = [
            (step, op)
            for step, op in enumerate(row)
            if op.stage == stage and op.microbatch % len(pipelines) == pipeline
        ]
        self._forwards = [(op.microbatch, step) for step, op in mine if op.kind == "F"]
        self._open = [False] * (len(row) + 1)
        """Slots between a forward and its backward, where none may be: on the last stage."""
        if stage == len(pipelines[0]) - 1:
            begun = dict(self._forwards)
            for step, op in mine:
                if op.kind == "B":
                    self._open[begun[op.microbatch] + 1 : step + 1] = [True] * (step - begun[op.microbatch])

    def slot(self, time: float, first_to_wait: int) -> tuple[int, float]:
        """The last slot up to a time and before the forwards that wait for the update; when what follows starts."""
        slot = bisect_left(self._starts, time)
        place = bisect_left(self._forwards, (first_to_wait, -1))
        if place < len(self._forwards):
            slot = min(slot, self._forwards[place][1])
        while self._open[slot]:
            slot -= 1
        return slot, self._starts[slot] if slot < len(self._starts) else inf


def _merged(row: Sequence[Op], placed: Sequence[tuple[int, int, bool, Op]]) -> list[Op]:
    found: list[Op] = []
    done = 0
    for slot, _, _, op in placed:
        found += [*row[done:slot], op]
        done = slot
    return [*found, *row[done:]]
