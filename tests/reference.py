"""What a valid schedule is and how it runs, written again from the design's words, to test the real ones against.

Slow and plain on purpose; it shares no code with penstock beyond the schedule value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from math import inf
from typing import Any

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


def pipeline_of(schedule: ps.Schedule, kind: str, number: int) -> int:
    """The pipeline whose copy of a stage runs an op of that number."""
    if kind in "FBIW":
        return schedule.microbatch_pipeline[number]
    return number % schedule.placement.num_pipelines if kind == "U" else 0


def registered_of(schedule: ps.Schedule) -> dict[tuple[str, int], ps.schedule.Registered]:
    graph = schedule.stage_graph
    return {} if graph is None else {(r.kind, r.stage): r for r in graph.registered}


def hosts_of(schedule: ps.Schedule, pipeline: int, stage: int) -> tuple[int, ...]:
    shared = dict(schedule.placement.shared)
    return shared.get(stage, (schedule.placement.pipelines[pipeline][stage],))


def counts_of(schedule: ps.Schedule) -> list[int]:
    """The number of microbatches of each stage."""
    graph = schedule.stage_graph
    own = () if graph is None else graph.num_microbatches
    return list(own or [len(schedule.microbatch_pipeline)] * schedule.placement.num_stages)


def num_updates(schedule: ps.Schedule) -> int:
    return 0 if schedule.updates is None else -(-len(schedule.microbatch_pipeline) // schedule.updates.window)


def is_covered(schedule: ps.Schedule) -> bool:
    """Every op once on each of its ranks: one F and one backward for each stage and microbatch, an update of each
    copy for each window, the ops that are registered, and no other."""
    counted = Counter((rank, *op) for rank, row in enumerate(schedule.order) for op in row)
    expected: set[tuple[int, str, int, int]] = set()
    for stage, count in enumerate(counts_of(schedule)):
        for m in range(count):
            hosts = hosts_of(schedule, schedule.microbatch_pipeline[m], stage)
            kinds = "FB" if counted[hosts[0], "B", stage, m] else "FIW"
            expected |= {(rank, kind, stage, m) for kind in kinds for rank in hosts}
        for number in range(num_updates(schedule) * schedule.placement.num_pipelines):
            pipeline = pipeline_of(schedule, "U", number)
            expected |= {(rank, "U", stage, number) for rank in hosts_of(schedule, pipeline, stage)}
    for (kind, stage), one in registered_of(schedule).items():
        ranks = one.ranks or hosts_of(schedule, 0, stage)
        expected |= {(rank, kind, stage, number) for number in range(one.num_ops) for rank in ranks}
    return set(counted) == expected and all(count == 1 for count in counted.values())


def in_order(schedule: ps.Schedule) -> bool:
    """Each stage of each pipeline runs its forwards in the order declared for F, its backwards (B or I, and B or W)
    in that for B, other kinds in theirs; ascending where none is declared."""
    declared = {(o.kind, o.stage, o.pipeline): o.microbatches for o in schedule.microbatch_orders}
    chains = {"F": ["F"], "I": ["BI"], "B": ["BI", "BW"], "W": ["BW"], "U": []}
    for row in schedule.order:
        seen: dict[tuple[str, int, int], list[int]] = {}
        for kind, stage, number in row:
            pipeline = pipeline_of(schedule, kind, number)
            for chain in chains.get(kind, [kind]):
                seen.setdefault((chain, stage, pipeline), []).append(number)
        for (chain, stage, pipeline), numbers in seen.items():
            order = declared.get((chain[0] if chain[0] in "FB" else chain, stage, pipeline), sorted(numbers))
            if [number for number in order if number in numbers] != numbers:
                return False
    return True


def needs_of(schedule: ps.Schedule) -> Callable[[str, int, int], list[tuple[str, int, int]]]:
    """What an op waits for, in the words of the design. A backward is asked for as B and may be there as I."""
    num_stages, window = schedule.placement.num_stages, schedule.updates.window if schedule.updates else 0
    graph, counts = schedule.stage_graph, counts_of(schedule)
    edges = [(s, s + 1) for s in range(num_stages - 1)] if graph is None else list(graph.edges)
    present = {op for row in schedule.order for op in row}

    def backward(stage: int, m: int) -> tuple[str, int, int]:
        return ("B", stage, m) if ("B", stage, m) in present else ("I", stage, m)

    def gives_gradients(stage: int, m: int) -> tuple[str, int, int]:
        return ("B", stage, m) if ("B", stage, m) in present else ("W", stage, m)

    def same_samples(stage: int, m: int, other: int) -> list[int]:
        mine, theirs = counts[stage], counts[other]
        return [n for n in range(theirs) if m * theirs < (n + 1) * mine and n * mine < (m + 1) * theirs]

    def needs(kind: str, stage: int, number: int) -> list[tuple[str, int, int]]:
        found: list[tuple[str, int, int]] = []
        if kind == "F":
            found = [("F", a, n) for a, b in edges if b == stage for n in same_samples(stage, number, a)]
        elif kind in "BI":
            found = [("F", stage, number)]
            found += [backward(b, n) for a, b in edges if a == stage for n in same_samples(stage, number, b)]
        elif kind == "W":
            found = [("I", stage, number)]
        elif kind == "U":
            pipelines = schedule.placement.num_pipelines
            update, pipeline = divmod(number, pipelines)
            found = [("U", stage, number - pipelines)] if update else []
            if pipeline:
                found.append(("U", stage, number - pipeline))
            else:
                last = min((update + 1) * window, len(schedule.microbatch_pipeline))
                found += [gives_gradients(stage, m) for m in range(update * window, last)]
        for need in () if graph is None else graph.needs:
            if need.after[1] == stage and kind in ("BI" if need.after[0] == "B" else (need.after[0],)):
                first = number // need.num_after * need.num_before
                before, at = need.before
                for n in range(first, first + need.num_before):
                    found.append(backward(at, n) if before == "B" else (before, at, n))
        return found

    return needs


def completes(schedule: ps.Schedule) -> bool:
    """Whether the ranks, each following its row, all reach its end. Ops of several ranks run when all have come to
    them. An asynchronous op is left to the rank's stream, which runs them one after the other; it stands after what
    it needs of its rank."""
    own, registered = needs_of(schedule), registered_of(schedule)
    backward_of = dict(schedule.pairs)

    def needs(*op: Any) -> list[tuple[str, int, int]]:
        return own(*op) + ([need for need in own(*backward_of[op]) if need != op] if op in backward_of else [])

    apart = {key for key, one in registered.items() if one.asynchronous}
    done: set[tuple[str, int, int]] = set()
    position = [0] * len(schedule.order)
    streams: list[list[tuple[str, int, int]]] = [[] for _ in schedule.order]

    def is_next(rank: int, op: tuple[str, int, int]) -> bool:
        row = schedule.order[rank]
        if op[:2] in apart:
            return streams[rank][:1] == [op]
        return position[rank] < len(row) and row[position[rank]] == op

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.order):
            while position[rank] < len(row) and row[position[rank]][:2] in apart:
                op = row[position[rank]]
                if set(needs(*op)) & set(row[position[rank] :]):
                    return False
                streams[rank].append(op)  # its rank has come to it
                position[rank] += 1
                moved = True
            heads = [*row[position[rank] : position[rank] + 1], *streams[rank][:1]]
            for kind, stage, number in heads:
                op = kind, stage, number
                one = registered.get((kind, stage))
                ranks = hosts_of(schedule, pipeline_of(schedule, kind, number), stage)
                ranks = one.ranks or ranks if one else ranks
                if not all(is_next(r, op) for r in ranks) or not all(need in done for need in needs(*op)):
                    continue
                done.add(op)
                moved = True
                for r in ranks:
                    if op[:2] in apart:
                        streams[r].pop(0)
                    else:
                        position[r] += 1
    return all(position[r] == len(row) for r, row in enumerate(schedule.order)) and not any(streams)


def keeps_versions(schedule: ps.Schedule) -> bool:
    """No more updates of a copy between a forward and its backward than allowed; and by the double buffer's rule a
    forward of window t comes after its copy's update t - 2. Of a schedule that completes."""
    updates = schedule.updates
    if updates is None:
        return True
    most = inf if updates.max_mismatch is None else updates.max_mismatch
    for row in schedule.order:
        passed: Counter[tuple[int, int]] = Counter()
        begun: dict[tuple[int, int], int] = {}
        for kind, stage, number in row:
            copy = stage, pipeline_of(schedule, kind, number)
            if kind == "U":
                passed[copy] += 1
            elif kind == "F":
                begun[stage, number] = passed[copy]
                if updates.rule == "pipedream-2bw" and passed[copy] < number // updates.window - 1:
                    return False
            elif kind in "BI" and passed[copy] - begun[stage, number] > most:
                return False
    return True


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
    """Covered, in order, within its own cap, and no rank waits forever."""
    limit = schedule.max_in_flight
    within = limit is None or max(in_flight(schedule)) <= limit
    together = [pair for row in schedule.order for pair in pairwise(row)]
    side_by_side = all(pair in together for pair in schedule.pairs)
    right = is_covered(schedule) and in_order(schedule) and within and side_by_side
    return right and completes(schedule) and keeps_versions(schedule)


def refusal(schedule: ps.Schedule, **options: int) -> ps.ScheduleError | None:
    """The error of `check`, or None if it proves the schedule."""
    try:
        ps.check(schedule, **options)
    except ps.ScheduleError as error:
        return error
    return None
