"""Lower bounds that hold for every form of the ops.

    relaxed     every op takes the least time of its forms, halves together no more than a B, and a forward waits
                only for so many microbatches to be freed as can never be in flight together, were all of them to
                run again; then Jackson's bounds (`planning.bounds`)
    memory      a rank runs x forwards again and sends y activations to host memory: that is more work the larger x
                is, more for its link to host memory the larger y is, and the fewer they are the longer its memory is
                taken. The least, over x and y, of the largest of the three

What goes to host memory is either there or on the rank, so a cap of both together holds wherever one of each does.

What memory takes is counted in shares of the cap, and the shares of what is held at one moment add up to 1 at most.
So do many other functions of them (dual feasible functions, as in bin packing): where two microbatches do not fit
together, a share above a half counts as 1. A bound by each; all are true, and the largest is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from penstock.engine.compiled import is_compiled
from penstock.engine.network import NONE
from penstock.engine.tolerance import EPSILON
from penstock.planning.bounds import QueueWaits, jackson_bound, waits, ways, work_seconds
from penstock.planning.joint.problem import JointProblem
from penstock.planning.problem import F, Problem

_WORK_SECONDS = 0.5
"""The most that the bound which counts a rank's own work may take."""

_PARTS = 8
"""Parts of a cap that dual feasible functions round down to."""


def relaxed(problem: JointProblem) -> Problem:
    """The problem in which each op takes the least time of its forms. Where forwards may run again nothing is held;
    else what is held is as given, under caps of rank and host memory together, so that every bound of it holds,
    whatever finds it."""
    costs, forms = problem.costs, problem.forms
    stages = range(costs.num_stages)
    i, w, b = ([costs.duration(kind, s) for s in stages] for kind in "IWB")
    if forms.split and forms.whole:
        least = [min(b[s], i[s] + w[s]) for s in stages]
        i = [min(i[s], b[s]) for s in stages]
        w = [max(0.0, least[s] - i[s]) for s in stages]
        costs = replace(costs, i=i, w=w, b=least)
    held = [(0.0, 0.0)] * len(stages) if forms.again else problem.limits.held
    return problem.of_one_form(problem.total_cap, forms.split, costs, held)


def lower_bound(problem: JointProblem) -> float:
    """ms that no schedule of the problem ends before, whatever the forms of its ops."""
    least = relaxed(problem)
    given = relaxed_waits(problem, least)
    cheap = work_seconds(least) < (_WORK_SECONDS if is_compiled() else 1e-3 * _WORK_SECONDS)
    bound = max(jackson_bound(least, given, work) for work in (False, True)[: 1 + cheap])
    forms = problem.forms
    return max(bound, memory_bound(problem, least)) if forms.again or forms.away else bound


def relaxed_waits(problem: JointProblem, least: Problem) -> QueueWaits:
    """What the queues of the relaxed problem wait for, whatever the forms of their ops.

    Where forwards may run again, microbatches in flight keep what R needs of each stage on the rank, and one of them
    has to be held whole before anything is freed: that is the backward a forward waits for. And whatever the form of
    its forward, at its I a microbatch is all on the rank, beside what those before it keep there till their W.
    """
    forms, ops, number = problem.forms, problem.ops, least.number
    given = waits(least)
    if not forms.again and not forms.away:
        return given
    release, lag = given.release.copy(), given.lag.copy()
    if forms.again:
        release[:] = NONE
        lag[:] = 0

    def wait(q: int, freed: int, left: float, each: float, size: int) -> None:
        if each > 0 and not math.isinf(left):
            room = 1 + max(0, math.floor(left / each + EPSILON))
            if room < size:
                release[0, q], lag[0, q] = freed, room

    for c, (pipeline, stage) in enumerate(problem.chains):
        r, held, size = int(ops.chain_rank[c]), float(ops.forms.held[c]), int(ops.size[c])
        back = number["I" if forms.split else "B", stage, pipeline]
        if forms.again:
            mine = range(ops.chain_first[r], ops.chain_first[r + 1])
            earlier = [k for k in mine if problem.chains[k][0] == pipeline and problem.chains[k][1] < stage]
            before = sum(float(ops.forms.kept[k]) for k in earlier)
            left = problem.total_cap[r] * (1 + EPSILON) - held - before
            wait(number["F", stage, pipeline], back, left, before + float(ops.forms.kept[c]), size)
        if forms.split:
            left = float(ops.cap[r]) * (1 + EPSILON) - held
            wait(back, number["W", stage, pipeline], left, float(held * (1 - ops.forms.freed[c])), size)
    return QueueWaits(given.order, release, lag)


class _ChainBound(NamedTuple):
    """Of one chain: its microbatches, ms of an R, and what one of them holds for how long.

    Attributes:
        host: microbatches that fit into host memory at once, where it may go there. link: ms of both ways there.
        kept, again, away: where its forward is kept, where it runs again, where it goes to host memory: ways to run
            it, each of (amount, ms). Empty where it may not.
    """

    size: int
    time: float
    link: float
    kept: list[list[tuple[float, float]]]
    again: list[list[tuple[float, float]]]
    away: list[list[tuple[float, float]]]


def memory_bound(problem: JointProblem, least: Problem) -> float:
    """The largest over ranks of: the least over how many forwards run again, of its work and of what memory takes."""
    ops, queues = problem.ops, least.queues
    to, onwards = ways(queues), ways(queues.turned())
    number = least.number
    back_kind = "I" if problem.forms.split else "B"
    bound = 0.0
    for r in range(problem.num_ranks):
        chains = [c for c in range(ops.chain_first[r], ops.chain_first[r + 1]) if ops.size[c] > 0]
        cap = float(ops.cap[r]) * (1 + EPSILON)
        is_open = (ops.forms.may_away | (ops.forms.kept < ops.forms.held))[chains]
        if not chains or math.isinf(cap) or not is_open.any():
            continue
        forward = [number["F", problem.chains[c][1], problem.chains[c][0]] for c in chains]
        back = [number[back_kind, problem.chains[c][1], problem.chains[c][0]] for c in chains]
        head = min(to[q] for q in forward)
        weight = [int(queues.local_to[q]) if problem.forms.split else q for q in back]
        work = head + float(sum(queues.duration[q] * queues.size[q] for q in (*forward, *back)))
        if problem.forms.split:
            work += float(sum(queues.duration[q] * queues.size[q] for q in weight))
        # Of an activation that goes to host memory, its forward before and its backward after.
        beside = head + min(float(ops.forms.times[c, F]) for c in chains)
        beside += min(onwards[q] + queues.duration[q] for q in back)
        # The last of the rank's ops is a weight gradient, or a backward and the way up from it.
        work += min(onwards[q] for q in weight)
        for ends_at_weight in (True, False):
            tail = 0.0 if ends_at_weight else min(onwards[q] for q in back)
            sides = [
                _side(problem, c, to[b] - to[f], ends_at_weight)
                for c, f, b in zip(chains, forward, back, strict=True)
            ]
            bound = max(bound, _least(sides, work, head + tail, beside, cap))
    return bound


def _side(problem: JointProblem, c: int, way: float, ends_at_weight: bool) -> _ChainBound:
    """What a chain holds; `way` is from the start of a forward to the start of its backward at least (ms)."""
    forms, given = problem.forms, problem.ops.forms
    f, again, i, w, out, there, b = (float(x) for x in given.times[c])
    held, kept, left = float(given.held[c]), float(given.kept[c]), float(given.held[c] * (1 - given.freed[c]))
    last: list[list[tuple[float, float]]] = []
    if forms.split:
        last.append([(held, i)] + ([(left, w)] if ends_at_weight else []))
    if forms.whole:
        last.append([(held, b)])
    first_kept = [(held, way)]
    first_again = [(kept, max(f, way - again)), (held, again)]
    first_away = [(held, f + out), (held, there)]
    return _ChainBound(
        int(problem.ops.size[c]),
        again,
        out + there,
        [first_kept + each for each in last],
        [first_again + each for each in last] if given.may_again[c] else [],
        [first_away + each for each in last] if given.may_away[c] else [],
    )


def _least(sides: list[_ChainBound], work: float, around: float, beside: float, cap: float) -> float:
    """The least, over how many forwards run again and how many activations go away, of what the rank's work, its link
    to host memory and its memory take (ms)."""
    amounts = {a / cap for side in sides for way in (*side.kept, *side.again, *side.away) for a, _ in way}
    rows = []
    for feasible in _feasible(amounts):

        def area(ways: list[list[tuple[float, float]]], g: Callable[[float], float] = feasible) -> float:
            return min((sum(g(amount / cap) * ms for amount, ms in way) for way in ways), default=math.inf)

        rows.append([(area(side.kept), area(side.again), area(side.away)) for side in sides])
    if len(sides) == 1:
        # One chain: how many are whole numbers, and the functions hold for the same ones.
        side = sides[0]
        redone, gone = (
            np.arange(side.size + 1 if there else 1).reshape(shape)
            for there, shape in ((side.again, (-1, 1)), (side.away, (1, -1)))
        )
        stay = side.size - redone - gone
        taken = np.zeros(stay.shape)
        for ((kept, again, away),) in rows:
            made = stay * kept + (redone * again if side.again else 0.0) + (gone * away if side.away else 0.0)
            taken = np.maximum(taken, made)
        link = np.where(gone > 0, beside + gone * side.link, 0.0)
        least = np.maximum(np.maximum(work + redone * side.time, link), around + taken)
        return float(np.where(stay >= 0, least, math.inf).min())
    bound = work
    for full in rows:
        # With several chains the way to host memory counts as free.
        row = [(min(kept, away), min(kept, again, away)) for kept, again, away in full]
        left = around + sum(side.size * kept for side, (kept, _) in zip(sides, row, strict=True))
        spent = work
        # The larger of the two is least where they meet: those first that save most for their time.
        saving = [(kept - again, side.time, side.size) for side, (kept, again) in zip(sides, row, strict=True)]
        for less, time, size in sorted(saving, key=lambda s: -s[0] / s[1] if s[1] > 0 else -math.inf):
            if less <= 0 or left <= spent:
                continue
            x = min(float(size), (left - spent) / (less + time))
            left, spent = left - x * less, spent + x * time
        bound = max(bound, spent, left) if left > spent else max(bound, spent)
    return bound


def _feasible(amounts: set[float]) -> Iterator[Callable[[float], float]]:
    """Functions of shares of a cap whose values add up to 1 at most wherever the shares do."""
    yield lambda x: x
    for least in sorted({a + EPSILON for a in amounts} | {1 - a - EPSILON for a in amounts} | {1 / 3, 1 / 2}):
        if 0 < least <= 0.5:
            yield lambda x, least=least: 1.0 if x > 1 - least else 0.0 if x < least else x  # type: ignore[misc]
    for k in range(1, _PARTS):

        def whole(x: float, k: int = k) -> float:
            parts = x * (k + 1)
            return x if abs(parts - round(parts)) < 1e-7 else math.floor(parts) / k

        yield whole
