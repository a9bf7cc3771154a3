"""What a valid schedule is and how it runs, written again from the design's words, to test the real ones against.

Slow and plain on purpose; it shares no code with penstock beyond the schedule value.
"""

from __future__ import annotations

from collections import Counter

import penstock as ps


def in_flight(schedule: ps.Schedule) -> list[int]:
    """Most activations each rank holds, from F to W or B."""
    peaks = []
    for row in schedule.order:
        levels, held = [0], 0
        for kind, _, _ in row:
            held += 1 if kind == "F" else -1 if kind in "BW" else 0
            levels.append(held)
        peaks.append(max(levels))
    return peaks


def is_covered(schedule: ps.Schedule) -> bool:
    """Every op once, on its rank, with one F and one backward for each stage and microbatch, and no other."""
    counted = Counter((rank, *op) for rank, row in enumerate(schedule.order) for op in row)
    expected: set[tuple[int, str, int, int]] = set()
    for m, pipeline in enumerate(schedule.microbatch_pipeline):
        for stage, rank in enumerate(schedule.placement.pipelines[pipeline]):
            kinds = "FB" if counted[rank, "B", stage, m] else "FIW"
            expected |= {(rank, kind, stage, m) for kind in kinds}
    return set(counted) == expected and all(count == 1 for count in counted.values())


def run(schedule: ps.Schedule, depth: int | None = None) -> int:
    """Runs each rank's order over channels of bounded depth; returns how many ops ran.

    A channel is a pair of ranks and a direction (activations or gradients) and holds `depth` messages, or
    as many as its ranks have in flight. A sender waits while it is full; a message leaves when it is used.
    """
    peaks = in_flight(schedule)
    host = {
        (s, m): schedule.rank_of(s, m) for s in range(schedule.num_stages) for m in range(schedule.num_microbatches)
    }
    position = [0] * schedule.num_ranks
    sending: list[tuple | None] = [None] * schedule.num_ranks
    channels: dict[tuple[int, int, str], list[tuple[int, int]]] = {}
    done: set[tuple[str, int, int]] = set()

    def step(rank: int) -> bool:
        if sending[rank] is not None:
            channel, content = sending[rank]
            room = max(peaks[channel[0]], peaks[channel[1]]) if depth is None else depth
            if len(channels.setdefault(channel, [])) >= room:
                return False
            channels[channel].append(content)
            sending[rank] = None
            return True
        if position[rank] == len(schedule.order[rank]):
            return False
        kind, stage, m = schedule.order[rank][position[rank]]
        source = {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(kind)
        target = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind)
        way = "forward" if kind == "F" else "backward"
        taken = None
        if source is not None and 0 <= source < schedule.num_stages:
            if host[source, m] == rank:
                if not any((k, source, m) in done for k in ("F" if kind == "F" else "BI")):
                    return False
            else:
                taken = channels.get((host[source, m], rank, way), [])
                if (stage, m) not in taken:
                    return False
        if kind != "F" and ("I" if kind == "W" else "F", stage, m) not in done:
            return False
        if taken is not None:
            taken.remove((stage, m))
        done.add((kind, stage, m))
        position[rank] += 1
        if target is not None and 0 <= target < schedule.num_stages and host[target, m] != rank:
            sending[rank] = (rank, host[target, m], way), (target, m)
        return True

    while any(step(rank) for rank in range(schedule.num_ranks)):
        pass
    if any(sending):
        return -1
    return sum(position)


def is_valid(schedule: ps.Schedule) -> bool:
    """Covered, within its own memory limit, and no rank waits for ever."""
    limit = schedule.memory_limit
    within = limit is None or max(in_flight(schedule)) <= limit
    return is_covered(schedule) and within and run(schedule) == schedule.num_ops


def refusal(schedule: ps.Schedule, **options: int) -> ps.ScheduleError | None:
    """The error of `check`, or None if it proves the schedule."""
    try:
        ps.check(schedule, **options)
    except ps.ScheduleError as error:
        return error
    return None
