"""What the paper compares, each as a schedule with its updates in it, and the costs that it pays.

    DAPPLE, Inter-1F1B, Chimera, ZB-V     synchronous: a step is one window, drained at its end
    PipeDream                             updates after every microbatch
    XPipe, PipeDream-2BW, AMDP            updates after every window

Every method gathers the same samples in an update, but PipeDream, whose `b` is a microbatch whatever the table says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import penstock as ps
from experiments.amdp.setups import PREDICT_BYTES, Setup
from penstock.schedule.op import FORWARD, UPDATE

COUNTED = 12
"""Windows over which throughput is counted, or a multiple of it: orders repeat every 1, 2, 3 or 4 windows."""
LEAST = 64
"""Microbatches over which it is counted, at the least."""
EDGE = 3
"""Windows, at the least, that are left out at either end, while the pipelines fill and drain."""
RATIOS = (1.9, 2.1, 2.5)
"""Of B to F where stages are taken to be alike, for which orders of AMDP's are made."""


@dataclass(frozen=True)
class Trial:
    """Something to time.

    Attributes:
        method: its name, as `METHODS` has it.
        schedule: of one window, drained, or of several on end.
        costs: of its stages. links: between its ranks.
        window: microbatches between two updates.
        tokens: of a microbatch.
    """

    method: str
    schedule: ps.Schedule
    costs: ps.Costs
    links: ps.Links
    window: int
    tokens: int

    @property
    def num_windows(self) -> int:
        return -(-self.schedule.num_microbatches // self.window)

    def ktokens(self, timeline: ps.Timeline) -> float:
        """Thousands of tokens a second, of a timeline of the schedule.

        A step that is drained counts whole. Of windows on end those at either end are left out: it counts from the
        end of one window's last update to that of another.
        """
        if self.num_windows == 1:
            return self.window * self.tokens / timeline.makespan
        ended = [0.0] * self.num_windows
        copies = self.schedule.placement.num_pipelines
        for timed in timeline.ops:
            if timed.op.kind == UPDATE:
                update = timed.op.microbatch // copies
                ended[update] = max(ended[update], timed.end)
        edge = num_at_an_end(self.window, self.schedule.num_ranks)
        first, last = edge - 1, self.num_windows - 1 - edge
        return (last - first) * self.window * self.tokens / (ended[last] - ended[first])


def num_at_an_end(window: int, num_ranks: int) -> int:
    """Windows that are left out at either end."""
    return max(EDGE, -(-2 * num_ranks // window))


def num_windows(window: int, num_ranks: int) -> int:
    """Of a run of windows on end."""
    counted = COUNTED * -(-LEAST // (COUNTED * window))
    return counted + 2 * num_at_an_end(window, num_ranks)


@cache
def trial_of(method: str, setup: Setup, zero: bool = True) -> Trial:
    """A method at a setup; `zero` as in `Setup.costs`, for those with several copies."""
    return METHODS[method](method, setup, zero)


def _drained(method: str, setup: Setup, zero: bool) -> Trial:
    schedule = ps.build(method, setup.num_ranks, setup.window)
    schedule = ps.schedule.with_updates(schedule, setup.window)
    return _of(method, setup, schedule, setup.costs(schedule.num_stages))


def _chimera(method: str, setup: Setup, zero: bool) -> Trial:
    """Two copies: the owner steps and sends parameters, as AMDP's does."""
    schedule = ps.passes.repeat_windows(ps.build(method, setup.num_ranks, setup.window), 1)
    return _of(method, setup, schedule, setup.costs(copies=2, zero=zero))


def _asynchronous(method: str, setup: Setup, zero: bool) -> Trial:
    window = 1 if method == "pipedream" else setup.window
    num = window * num_windows(window, setup.num_ranks)
    schedule = ps.build(method, setup.num_ranks, num, window=window)
    return _of(method, setup, schedule, setup.costs(), window)


def _xpipe(method: str, setup: Setup, zero: bool) -> Trial:
    found = _asynchronous(method, setup, zero)
    counts = predictions(found.schedule)
    costs, num = found.costs, found.schedule.num_microbatches
    each = [setup.move_ms(PREDICT_BYTES * weights / 2) for weights in costs.weight_bytes]
    f = [ms + count * one / num for ms, count, one in zip(costs.f, counts, each, strict=True)]
    return replace(found, costs=replace(costs, f=f))


def predictions(schedule: ps.Schedule) -> list[int]:
    """By stage, how many different weights XPipe's forwards read that have to be predicted.

    One for each pair of what is newest and of the updates to come before the microbatch's own; where there are none,
    the newest are read as they are.
    """
    windows = schedule.windows
    assert windows is not None
    found = [0] * schedule.num_stages
    for row in schedule.order:
        made, seen = 0, set()
        for op in row:
            if op.kind == UPDATE:
                made += 1
            elif op.kind == FORWARD and (ahead := op.microbatch // windows.window - made):
                seen.add((made, ahead))
        found[row[0].stage] = len(seen)
    return found


def _amdp(method: str, setup: Setup, zero: bool) -> Trial:
    """Of orders made for several guesses at the times of F and B the one that is fastest under the real ones."""
    num_ranks, window = setup.num_ranks, setup.window
    costs = setup.costs(copies=num_ranks // 2, zero=zero)
    num = window * num_windows(window, num_ranks)
    schedules = (ps.build(method, num_ranks, num, window=window, **times) for times in guesses(costs))
    trials = [_of(method, setup, schedule, costs) for schedule in schedules]
    return max(trials, key=lambda trial: trial.ktokens(simulate(trial)))


def guesses(costs: ps.Costs) -> Iterator[dict[str, Any]]:
    """Times for which orders are made: the stages' own, and the same for all stages.

    An order is made from event to event, and which of two events comes first may change much that follows.
    """
    yield {"f": costs.f, "b": costs.b}
    mean = sum(costs.f) / costs.num_stages
    for ratio in RATIOS:
        yield {"f": mean, "b": ratio * mean}


def _of(method: str, setup: Setup, schedule: ps.Schedule, costs: ps.Costs, window: int | None = None) -> Trial:
    ps.check(schedule)
    return Trial(method, schedule, costs, setup.links, window or setup.window, setup.tokens)


def simulate(trial: Trial) -> ps.Timeline:
    return ps.simulate(trial.schedule, trial.costs, links=trial.links)


METHODS: Mapping[str, Callable[[str, Setup, bool], Trial]] = {
    "1f1b": _drained,
    "interleaved-1f1b": _drained,
    "chimera": _chimera,
    "zb-v": _drained,
    "pipedream": _asynchronous,
    "xpipe": _xpipe,
    "pipedream-2bw": _asynchronous,
    "amdp": _amdp,
}
