"""How many versions of its weights a copy of a stage holds, by the rule that says which ones its ops read.

    pipedream, window 1, rank 0 of 3    F0 F1 F2 B0 U0 F3 B1 U1 F4 ...
    the newest                          0           1        2
    read in flight, after each U                    0        0 1        (by F1 F2, and by F2 F3)

What an update replaces is still there where a microbatch in flight must find it again. It is a matter of the order
alone, as mismatch is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BACKWARD, FORWARD, INPUT, UPDATE
from penstock.schedule.staleness import predictions_of, reads_of
from penstock.schedule.updates import NEWEST, OWNER

if TYPE_CHECKING:
    from penstock.schedule.schedule import Schedule

STASHING = ("pipedream", "vnag")
"""Rules by which a backward reads the version that its forward read."""

TWO_BUFFERS = "pipedream-2bw"
"""The rule by which microbatches of window t read what t - 1 updates made, forwards and backwards alike."""

SHARDINGS = ("none", "copies", "zero1", "fsdp")
"""Who of those that hold a stage has its optimizer's state, as `ps.ParallelOptions` has it."""

Copies = dict[tuple[int, int], int]
"""Numbers by (stage, pipeline)."""


def count_versions(
    schedule: Schedule,
    *,
    sharding: str = "none",
    num_replicas: int = 1,
    tied_stages: Sequence[Sequence[int]] = (),
) -> Copies:
    """By (stage, pipeline), the most versions of its weights that the copy holds at once.

    - none: 1. Updates overwrite it.
    - pipedream, vnag: the newest, and each older one that the forward of a microbatch in flight (its B
      or I still to come) read: p - i on rank i of 1F1B with windows of one microbatch (PipeDream, section 3.3).
    - pipedream-2bw: 2, the newest and the one before (PipeDream-2BW, section 3.1).
    - spectrain, xpipe, tentative: 2, the newest and what predictions are written to; 1 where nothing is
      predicted. A copy that can't predict for itself holds besides all predictions that it is sent with a version,
      and any copy what a PREDICT has made.

    Where no updates are ops of the schedule it is 1.

    Args:
        schedule: any schedule.
        sharding: who has the optimizer's state and predicts: "none" (each copy for itself), "copies" (the owner for
            all copies of a stage), "zero1" or "fsdp" (that, and each replica for the part that it has).
        num_replicas: of the pipelines.
        tied_stages: of each parameter that stages share these, ascending; the first one predicts for the others.

    Raises:
        ScheduleError: another sharding.

    Examples:
        >>> import penstock as ps
        >>> ps.schedule.count_versions(ps.build("pipedream", 3, 6, window=1))
        {(0, 0): 3, (1, 0): 2, (2, 0): 1}
    """
    if sharding not in SHARDINGS:
        raise ScheduleError(f"no sharding {sharding!r}; choose {', '.join(SHARDINGS)}", rule="options")
    copies = {(stage, k): 1 for k in range(schedule.placement.num_pipelines) for stage in range(schedule.num_stages)}
    rule = NEWEST if schedule.updates is None else schedule.updates.rule
    if rule == NEWEST:
        return copies
    if rule in STASHING:
        return _stashed(schedule, copies)
    if rule == TWO_BUFFERS:
        return dict.fromkeys(copies, 2)
    sent = predictions_of(schedule, tied_stages, one_copy_steps=sharding != "none")
    predicted = {s for s in range(schedule.num_stages) if any(each.needs for each in reads_of(schedule, s).values())}
    in_parts = num_replicas > 1 and sharding in ("zero1", "fsdp")
    found = {}
    for stage, pipeline in copies:
        is_sent = in_parts or (pipeline != OWNER and sharding != "none")
        # What a PREDICT makes is held even where it is made: after odd moments.
        ahead = [s for when, s in sent.get((pipeline, stage), {}).items() if is_sent or when % 2]
        found[stage, pipeline] = 1 + (stage in predicted) + max(map(len, ahead), default=0)
    return found


def _stashed(schedule: Schedule, most: Copies) -> Copies:
    most, newest = dict(most), dict.fromkeys(most, 0)
    read: dict[tuple[int, int], dict[int, int]] = {copy: {} for copy in most}
    for row in schedule.order:
        for op in row:
            copy = op.stage, schedule.pipeline_of(op)
            if op.kind == FORWARD:
                read[copy][op.microbatch] = newest[copy]
            elif op.kind in (BACKWARD, INPUT):
                read[copy].pop(op.microbatch, None)
            elif op.kind == UPDATE:
                newest[copy] += 1
                most[copy] = max(most[copy], len({newest[copy], *read[copy].values()}))
    return most
