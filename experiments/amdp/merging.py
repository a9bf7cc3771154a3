"""Microbatches of a window that meet the same weights on every stage, trained as one of more samples.

    one stage, windows of 4, a delay of 1     F0 F1 F2 F3 | F4 B0 .. B3 U0 F5 F6 F7 ..
                                                            `- reads what was there before update 0
    merged                                    F(0 1 2 3) | F4 B(0 .. 3) U0 F(5 6 7) ..

A gradient depends on the samples and on the weights that its forward and its backward read, so microbatches that read
the same ones may be one: their gradients are added up either way, in another order. An update of 32 microbatches then
takes 4 to 12. What remains of the order is what it was, so that every op comes between the same updates as before.

Under rule `tentative` it also comes between the same GIVE and PREDICT as before. A tentative step then knows the same
samples, and the same forwards read the weights that it makes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.schedule import Op, Schedule
from penstock.schedule.op import OF_UPDATES
from penstock.schedule.weight_versions import backward_steps, forward_steps


@dataclass(frozen=True)
class Merged:
    """A schedule of fewer microbatches.

    Attributes:
        schedule: of the merged ones, as many in each window.
        members: of each merged microbatch those of the given schedule, ascending.
    """

    schedule: Schedule
    members: tuple[tuple[int, ...], ...]


def merged(schedule: Schedule) -> Merged:
    """The schedule with the microbatches of a window that come between the same updates on all stages as one.

    Windows have as many merged microbatches as the one that needs most.

    Raises:
        ValueError: no updates as ops, an order of microbatches that was declared, a last window cut short, or a rule
            that would read other weights for windows of so many.
    """
    windows = schedule.windows
    if schedule.updates is None or windows is None or schedule.microbatch_orders or schedule.pairs:
        raise ValueError(f"{schedule.name} has no updates as ops, or declares an order; it is trained as it is")
    if windows.num_microbatches % windows.window:
        raise ValueError(f"{windows.num_microbatches} microbatches are no multiple of a window of {windows.window}")
    places = _places(schedule)
    groups: list[list[tuple[int, ...]]] = []
    for update in range(windows.num_updates):
        by_place: dict[object, list[int]] = defaultdict(list)
        for microbatch in windows.microbatches(update):
            by_place[places[microbatch]].append(microbatch)
        groups.append([tuple(group) for group in by_place.values()])
    size = max(map(len, groups))
    members = tuple(group for of_window in groups for group in _split(of_window, size))
    number = {group[0]: place for place, group in enumerate(members)}
    order = tuple(
        tuple(
            op if op.kind in OF_UPDATES else Op(op.kind, op.stage, number[op.microbatch])
            for op in row
            if op.kind in OF_UPDATES or op.microbatch in number
        )
        for row in schedule.order
    )
    _require_alike(schedule, size)
    return Merged(
        replace(
            schedule,
            order=order,
            microbatch_pipeline=tuple(schedule.microbatch_pipeline[group[0]] for group in members),
            updates=replace(schedule.updates, window=size),
        ),
        members,
    )


def _places(schedule: Schedule) -> dict[int, object]:
    """By microbatch, for each of its ops, how many U, GIVE and PREDICT its copy of the stage has run before it."""
    assert schedule.windows is not None
    found: dict[int, list[tuple[str, int, int, int]]] = defaultdict(list)
    for row in schedule.order:
        taken: Counter[tuple[int, int]] = Counter()
        for op in row:
            copy = schedule.pipeline_of(op), op.stage
            if op.kind in OF_UPDATES:
                taken[copy] += 1
            else:
                found[op.microbatch].append((op.kind, *copy, taken[copy]))
    return {microbatch: tuple(sorted(ops)) for microbatch, ops in found.items()}


def _split(groups: Sequence[tuple[int, ...]], num: int) -> list[tuple[int, ...]]:
    """So many groups, by their first members: the largest are cut in two."""
    groups = list(groups)
    while len(groups) < num:
        largest = max(groups, key=len)
        groups.remove(largest)
        half = len(largest) // 2
        groups += [largest[:half], largest[half:]]
    return sorted(groups)


def _require_alike(schedule: Schedule, size: int) -> None:
    """SpecTrain's steps depend on the size of a window."""
    assert schedule.updates is not None
    if schedule.updates.rule != "spectrain":
        return
    for stage in range(schedule.num_stages):
        before, now = (
            (forward_steps(stage, schedule.num_stages, window), backward_steps(stage, window))
            for window in (schedule.updates.window, size)
        )
        if before != now:
            raise ValueError(f"stage {stage} would predict {now} updates with windows of {size}, not {before}")
