"""The best schedules without mismatch: synchronous ones, window after window, each run as suits it best.

A synchronous schedule over many steps is not its makespan times their number: ranks need no barrier between
windows (see `passes.repeated`). This tries those of the library, and plans for the costs at hand, with whole and with
split backwards, frozen and under dynamic dispatch. It is what asynchronous schedules have to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from penstock.cost import CostError, Costs, Links
from penstock.engine.tolerance import is_within
from penstock.library import ASYNCHRONOUS, SCHEDULES, build
from penstock.passes import repeat_windows, separate_gradients
from penstock.planning.planner import plan
from penstock.schedule import Schedule, ScheduleError, one_to_one, v_shape
from penstock.simulation import Timeline, simulate

VARIANTS: dict[str, tuple[dict[str, Any], ...]] = {
    "interleaved-1f1b": ({"num_stages": 2}, {"num_stages": 3}, {"num_stages": 4}),
    "looped-bfs": ({"num_stages": 2}, {"num_stages": 4}),
    "chimera": ({}, {"backward": "split"}),
    "hanayo": ({"waves": 1}, {"waves": 1, "backward": "split"}, {}, {"backward": "split"}),
    "bitpipe": ({}, {"backward": "split"}),
    "vchimera": ({}, {"backward": "split"}),
}
"""Options to try besides none; stages are a rank's."""


@dataclass(frozen=True)
class Flushed:
    """A schedule of several windows without mismatch, and how it runs.

    Attributes:
        name: the library's, with what was done to it; or "plan" with the placement.
        schedule: all windows, with updates as ops; checked.
        dispatch: how it runs best, "frozen" or "dynamic".
        makespan: ms of all windows, filling and draining included.
        peaks: most that each rank holds, in the unit of the costs' activations.

    Examples:
        >>> import penstock as ps
        >>> def costs_of(num_stages):
        ...     return ps.Costs.uniform(num_stages, f=10, i=10, w=10)
        >>> best = ps.planning.flushed_schedules(costs_of, num_ranks=2, window=4, num_windows=2)[0]
        >>> best.dispatch in ("frozen", "dynamic"), best.schedule.updates.window
        (True, 4)
    """

    name: str
    schedule: Schedule
    dispatch: str
    makespan: float
    peaks: tuple[float, ...]


def flushed_schedules(
    costs_of: Callable[[int], Costs],
    num_ranks: int,
    window: int,
    num_windows: int = 8,
    *,
    links: Links | None = None,
    memory_limit: float | None = None,
    fits: Callable[[Timeline], bool] | None = None,
    plan_seconds: float = 0.0,
) -> list[Flushed]:
    """The schedules without mismatch for these costs, the shortest makespan first.

    Args:
        costs_of: the model's costs by the number of stages it is cut into; it may raise CostError for numbers that
            cannot be.
        num_ranks: devices of the pipeline.
        window: microbatches between two updates.
        num_windows: how many such windows run one after the other.
        links: delays (ms); none where not given.
        memory_limit: most memory a rank may hold, in the unit of the costs' activations.
        fits: whether a schedule may be taken, by the frozen timeline of one window; for limits that also count the
            weights, of which schedules with several pipelines hold more.
        plan_seconds: also search an order for the span (`ps.plan`), so long for each of one and two stages per rank.

    Raises:
        ScheduleError: nothing fits.

    Examples:
        >>> import penstock as ps
        >>> def costs_of(num_stages):
        ...     return ps.Costs.uniform(num_stages, f=10, i=10, w=10)
        >>> found = ps.planning.flushed_schedules(costs_of, num_ranks=2, window=4, num_windows=2)
        >>> all(max(ps.schedule.count_mismatch(each.schedule).values()) == 0 for each in found)
        True
    """
    links = links or Links()
    found: list[Flushed] = []
    for name, schedule in _candidates(costs_of, num_ranks, window, links, memory_limit, plan_seconds):
        costs = costs_of(schedule.num_stages)
        once = simulate(schedule, costs, links=links)
        if memory_limit is not None and not is_within(max(once.peak_activations), memory_limit):
            continue
        if fits is None or fits(once):
            found.append(_best_run(name, repeat_windows(schedule, num_windows), costs, links, memory_limit))
    if not found:
        raise ScheduleError(
            f"no synchronous schedule of {window} microbatches over {num_ranks} ranks fits; raise the memory limit, "
            "or cut the model into more stages",
            rule="memory",
        )
    return sorted(found, key=lambda each: each.makespan)


def _candidates(
    costs_of: Callable[[int], Costs],
    num_ranks: int,
    window: int,
    links: Links,
    memory_limit: float | None,
    plan_seconds: float,
) -> Iterator[tuple[str, Schedule]]:
    for name in SCHEDULES:
        for options in VARIANTS.get(name, ({},)) if name not in ASYNCHRONOUS else ():
            given = {k: v * num_ranks if k == "num_stages" else v for k, v in options.items()}
            try:
                schedule = build(name, num_ranks, window, **given)
                costs = costs_of(schedule.num_stages)
            except (ScheduleError, CostError):  # not for so many ranks or microbatches, or not to be cut so
                continue
            if schedule.stage_graph is not None or schedule.placement.shared:
                continue
            said = " ".join(f"{k}={v}" for k, v in options.items())
            label = f"{name} ({said})" if said else name
            yield label, schedule
            if not schedule.splits_backward():
                try:
                    yield f"{label}, separated", separate_gradients(schedule, costs, links, memory_limit)
                except ScheduleError:  # above the limit
                    continue
    if plan_seconds > 0:
        for label, placement in (("one-to-one", one_to_one(num_ranks)), ("v", v_shape(num_ranks))):
            try:
                costs = costs_of(placement.num_stages)
                planned = plan(
                    costs, num_ranks, window, links, memory_limit=memory_limit,
                    time_limit=plan_seconds, objective="span", placement=placement,
                )  # fmt: skip
            except (ScheduleError, CostError):
                continue
            yield f"plan ({label})", planned.schedule


def _best_run(name: str, schedule: Schedule, costs: Costs, links: Links, memory_limit: float | None) -> Flushed:
    runs: list[Flushed] = []
    frozen = simulate(schedule, costs, links=links)
    caps = max(frozen.peak_activations) if memory_limit is None else memory_limit
    dynamic = simulate(schedule, costs, links=links, dispatch="dynamic", memory_limit=caps)
    for dispatch, ran in (("frozen", frozen), ("dynamic", dynamic)):
        runs.append(Flushed(name, schedule, dispatch, ran.makespan, ran.peak_activations))
    return min(runs, key=lambda run: run.makespan)
