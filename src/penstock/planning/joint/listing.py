"""List scheduling that decides forms as it comes to them.

It is no list scheduling by `engine.list_by_values`: whether a forward is kept or runs again, and a backward is whole,
is decided in its turn, by the room that there is then, so what an op takes and holds is not known before.
"""

from __future__ import annotations

import numpy as np

from penstock.engine.arrays import Floats, Ints
from penstock.engine.tolerance import EPSILON
from penstock.planning.joint.rows import F, I, Ops, Orders, R, W, set_form
from penstock.planning.metropolis import seed as seed

INFINITE = 1e300


def listed(
    p: Ops, o: Orders, depth: Ints, keep: Floats, whole: Floats, wait: Floats, early: bool, start: Floats
) -> float:
    """List scheduling that decides forms as it comes to them; returns the makespan, or -1 where the ranks are stuck.

    Backward before forward before weight gradients; R when its gradient is about to arrive.

    Args:
        o: out, all but the durations and places.
        depth: of each rank, most forwards ahead of their backwards.
        keep: of each chain, the chance that a forward which could be kept is.
        whole: of each chain, the chance that a backward is whole.
        wait: of each rank, ms that it waits for a better op.
        early: whether R may run before its gradient is known to come.
        start: out, of each op.
    """
    num_ranks, num_chains = len(p.cap), len(p.size)
    forward, back, weight = (
        np.zeros(num_chains, np.int64),
        np.zeros(num_chains, np.int64),
        np.zeros(num_chains, np.int64),
    )
    ran = np.zeros(num_chains, np.bool_)
    """Of each chain, whether the R of its next backward has run."""
    free, held = np.zeros(num_ranks), np.zeros(num_ranks)
    ahead = np.zeros(num_ranks, np.int64)
    o.again[:] = False
    o.whole[:] = False
    o.away[:] = False
    o.wait[:] = -1
    o.length[:] = 0
    start[:] = -1.0
    drawn_keep, drawn_whole = np.zeros(len(o.again), np.bool_), np.zeros(len(o.again), np.bool_)
    left = 0
    for c in range(num_chains):
        for j in range(p.size[c]):
            cell = p.cell_first[c] + j
            drawn_keep[cell] = not p.may_again[c] or np.random.random() < keep[c]
            drawn_whole[cell] = p.may_whole[c] and (not p.may_split[c] or np.random.random() < whole[c])
            set_form(p, o, c, j)
            left += 3
    makespan = 0.0
    while left > 0:
        best_rank, best_time = -1, INFINITE
        best_op, best_again = -1, False
        for r in range(num_ranks):
            limit = p.cap[r] * (1 + EPSILON)
            reserve = 0.0
            for c in range(p.chain_first[r], p.chain_first[r + 1]):
                for j in range(back[c], forward[c]):
                    if o.again[p.cell_first[c] + j] and not (j == back[c] and ran[c]):
                        reserve = max(reserve, p.held[c] - p.kept[c])
            # Twice: when the rank can start something, then what is best among all it could start soon after.
            soonest = INFINITE
            for turn in range(2):
                chosen, chosen_class, chosen_time, chosen_again = -1, 99, INFINITE, False
                for c in range(p.chain_first[r], p.chain_first[r + 1]):
                    size, first = p.size[c], p.first[c]
                    for kind in range(4):
                        if kind == F:
                            j = forward[c]
                        elif kind == W:
                            j = weight[c]
                        else:
                            j = back[c]
                        if j >= size:
                            continue
                        cell, op = p.cell_first[c] + j, first + kind * size + j
                        ready, rank_class, again = free[r], 3 if kind == W else 2 - kind, False
                        if kind == F:
                            if ahead[r] >= depth[r]:
                                continue
                            again = not drawn_keep[cell]
                            others = 0.0
                            for k in range(p.chain_first[r], p.chain_first[r + 1]):
                                if k != c and forward[k] <= j and j < p.size[k]:
                                    others += min(p.kept[k], p.held[k])
                            if not again and held[r] + p.held[c] + max(reserve, others) > limit:
                                if not p.may_again[c]:
                                    continue
                                again = True
                            if again and held[r] + p.kept[c] + max(reserve, p.held[c] - p.kept[c]) > limit:
                                continue
                        elif kind == W:
                            if weight[c] >= back[c]:
                                continue
                        else:
                            if j >= forward[c]:
                                continue
                            needs_again = o.again[cell] and not ran[c]
                            if (kind == R) != needs_again:
                                continue
                            # B adds to the weights' gradients too, after all W before it.
                            if kind == I and drawn_whole[cell] and weight[c] < j:
                                if p.may_split[c]:
                                    drawn_whole[cell] = False
                                else:
                                    continue
                        before = p.message_from[op] if kind != R else p.message_from[first + I * size + j]
                        if before >= 0:
                            late = p.delay[op] if kind != R else p.delay[first + I * size + j]
                            if start[before] < 0:
                                if kind != R or not early:
                                    continue
                                rank_class = 4
                            elif kind == R:
                                ready = max(ready, start[before] + o.duration[before] + late - p.times[c, R])
                            else:
                                ready = max(ready, start[before] + o.duration[before] + late)
                        if kind == R and held[r] + p.held[c] - p.kept[c] > limit:
                            continue
                        if turn == 0:
                            soonest = min(soonest, ready)
                        elif ready <= soonest + wait[r] and (
                            rank_class < chosen_class or (rank_class == chosen_class and ready < chosen_time)
                        ):
                            chosen, chosen_class, chosen_time, chosen_again = op, rank_class, ready, again
                if soonest >= INFINITE:
                    break
            if chosen >= 0 and soonest < best_time:
                best_rank, best_time = r, soonest
                best_op, best_again = chosen, chosen_again
                best_start = chosen_time
        if best_rank < 0:
            return -1.0
        r, op = best_rank, best_op
        c, j, kind = p.chain[op], p.number[op], p.kind[op]
        cell = p.cell_first[c] + j
        if kind == F:
            o.again[cell] = best_again
            forward[c] += 1
            ahead[r] += 1
            if best_again:
                left += 1
            set_form(p, o, c, j)
        elif kind == R:
            ran[c] = True
        elif kind == I:
            back[c] += 1
            ran[c] = False
            ahead[r] -= 1
            o.whole[cell] = drawn_whole[cell]
            set_form(p, o, c, j)
            if o.whole[cell]:
                weight[c] += 1
                left -= 1
        else:
            weight[c] += 1
        held[r] += o.change[op]
        start[op] = best_start
        free[r] = best_start + o.duration[op]
        makespan = max(makespan, free[r])
        o.row[r, o.length[r]] = op
        o.length[r] += 1
        left -= 1
    return makespan
