"""What keeps a cap on memory from locking ranks up: an op that takes memory starts only if its rank can still finish
what it has begun.

A rank gives memory back by the ops that come later. So it is safe as long as there is some order of what it has begun
that keeps to its cap to the end; then what is started never stands in the way of what it needs. Which order that is
depends on what is known when an op is to start:

    decider.fits, fits_beside
                 the rest of the rank's given order, where it takes ready ops out of turn
    can_finish   the microbatches begun, one after the other, the oldest first, where there is no order yet and a
                 rank has a chain of stages (`list_by_values`)
    reserves     a forward of every deeper stage in turn, where there is no order yet and stages form any graph: room
                 that is known ahead, and that each forward leaves (`list_by_rules`)
"""

from __future__ import annotations

from penstock.engine.arrays import Floats, Ints


def can_finish(
    taken: int, room: float, first: int, last: int, head: Ints, count: Ints, memory: Floats, pipeline: Ints
) -> bool:
    """Whether a rank, the next op of `taken` run and `room` left, can finish its microbatches one after another.

    Its queues are `first` to `last - 1`.
    """
    oldest, newest = count[taken], 0
    least_pipeline, last_pipeline = pipeline[taken], pipeline[taken]
    most = 0.0  # that a microbatch takes
    for q in range(first, last):
        reached = head[q] + (1 if q == taken else 0)
        if count[q] > 0:
            oldest = min(oldest, reached)
        if memory[q] > 0:
            newest = max(newest, reached)
            most += memory[q]
        least_pipeline, last_pipeline = min(least_pipeline, pipeline[q]), max(last_pipeline, pipeline[q])
    for j in range(oldest, newest):
        for current in range(least_pipeline, last_pipeline + 1):
            if room >= most:  # and what ends leaves no less: none of those that follow can want for it
                return True
            need = kept = 0.0
            for q in range(first, last):
                if pipeline[q] != current or j >= count[q]:
                    continue
                if head[q] + (1 if q == taken else 0) > j:
                    kept += memory[q]
                elif memory[q] > 0:
                    need += memory[q]
            if need > room:
                return False
            room += kept
    return True


def reserves(
    added: list[float], taking: list[list[int]], hosts: list[tuple[int, ...]], depths: list[int], num_ranks: int
) -> list[float]:
    """Of each queue, the room that must stay free on its ranks when an F of it starts, so that one of each deeper
    F queue there can still run, and so on downwards; 0 for kinds that take nothing.

    With it no cap locks stages out. Take the deepest F that a cap holds back on some rank. All that the rank holds
    is of less deep stages (what is deeper moves on), and when the last of those started, room for this F was left.
    What was given back must be taken again before a backward, the deepest first: every F leaves room for that.

    Args:
        added: what an op of each queue adds to what its ranks hold.
        taking: the queues that take again what was given back, then the F queues; `depths` of each queue.
    """
    reserve = [0.0] * len(added)
    room = [0.0] * num_ranks
    for queues_of in taking:
        deepest_first = sorted(queues_of, key=lambda q: -depths[q])
        first, last = 0, 0
        while first < len(deepest_first):
            while last < len(deepest_first) and depths[deepest_first[last]] == depths[deepest_first[first]]:
                q = deepest_first[last]
                for rank in hosts[q]:
                    reserve[q] = max(reserve[q], room[rank])
                last += 1
            for place in range(first, last):
                q = deepest_first[place]
                for rank in hosts[q]:
                    room[rank] = max(room[rank], added[q] + reserve[q])
            first = last
    return reserve
