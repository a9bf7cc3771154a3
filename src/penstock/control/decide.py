"""The choice: simulated iteration time under the measured links, and ski rental for the price of switching.

Ski rental (FALCON, arXiv 2410.12588): a skier does not know how long the snow will last. He rents until the rents add
up to the price, and then buys. This costs at most twice as much as if he had known. Here the rent is what each
iteration loses because the best candidate does not run. So cheap remedies come first, and a dearer one when the loss
has reached its price.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean
from typing import Any

from penstock.control.candidate import Action, Candidate, Measured
from penstock.control.configuration import Configuration, Job, order_of, runner_of
from penstock.control.events import Link, show_link
from penstock.cost import Costs, Links
from penstock.engine.tolerance import EPSILON
from penstock.simulation.runner import RunResult
from penstock.simulation.transport import as_transport


@dataclass(frozen=True)
class Scored:
    """A candidate and its simulated iteration time under the measured links.

    Attributes:
        candidate: the candidate.
        ms: its mean iteration time over the scenarios, in ms.
        each: the time in each scenario, where there are several.
        peaks: the most activations that each rank holds in any of them.
    """

    candidate: Candidate
    ms: float
    each: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()


def score(job: Job, measured: Measured, candidate: Candidate) -> Scored:
    """Simulates a candidate on each scenario.

    Args:
        job: the costs and the placement.
        measured: what has been measured of links and ops, with its scenarios.
        candidate: what would run.
    """
    found = [_tried(job, candidate.configuration, links) for links in measured.scenarios]
    times = tuple(ms for ms, _ in found)
    peaks = tuple(map(max, zip(*(peaks for _, peaks in found), strict=True)))
    return Scored(candidate, fmean(times), times, peaks)


def predict(job: Job, configuration: Configuration, scenarios: Sequence[Links]) -> float:
    """Mean simulated iteration time (ms) of a configuration.

    Args:
        job: the costs and the placement.
        configuration: what runs.
        scenarios: the links' own paths, one value per scenario.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> ps.control.predict(job, start, [ps.Links(), ps.Links({(2, 3): 60.0})])
        425.0
    """
    return fmean(_tried(job, configuration, links)[0] for links in scenarios)


def _tried(job: Job, configuration: Configuration, links: Links) -> tuple[float, tuple[float, ...]]:
    return _one(job.costs, job.transport, configuration, Links.of(links))


@lru_cache(maxsize=4096)
def _one(
    costs: Costs, transport: str, configuration: Configuration, conditions: Links
) -> tuple[float, tuple[float, ...]]:
    """One simulation: time and peaks."""
    ran = run_on(costs, transport, configuration, conditions)
    return ran.makespan, ran.peaks


def run_on(costs: Costs, transport: str, configuration: Configuration, conditions: Links) -> RunResult:
    """Simulates one iteration. See `Job` for `transport`."""
    return runner_of(costs).run(
        order_of(configuration.schedule, costs),
        conditions,
        dispatch=configuration.dispatch,
        transport=as_transport(transport, configuration.delegated),
        caps=configuration.caps,
    )


def choose(
    scored: Sequence[Scored], budget: float, least_gain: float, returning: bool = False
) -> tuple[Scored, float]:
    """The best candidate that can be paid for, and what each iteration loses (ms) while what runs now stays.

    - A candidate that is slower in one of several scenarios is left out: that it is faster in others may be chance.
    - What is saved must be at least `least_gain`.
    - Among equals the cheapest wins, then the one with the fewest delegated links, then one that is not frozen (it
        copes best with a late message), then the first.
    - If what runs now is not among the candidates, a dead link forbids it. Then all can be paid for, and nothing is
        lost.

    Args:
        scored: the candidates; what runs now comes first, if it can go on.
        budget: what switching may cost now, in ms.
        least_gain: the least share of the iteration time that a switch must save.
        returning: whether a candidate that delegates fewer links is taken as soon as it is no slower.
    """
    now = scored[0] if scored[0].candidate.action is Action.KEEP else None
    sure = [each for each in scored if now is None or _never_slower(each, now)]
    within = [each for each in sure if now is None or each.candidate.price <= budget or each is now]
    least = min(each.ms for each in within)
    best = min((each for each in within if each.ms <= least * (1 + EPSILON)), key=_rank)
    if now is None:
        return best, 0.0
    lost = max(0.0, now.ms - min(each.ms for each in sure))
    if best.ms <= now.ms * (1 - least_gain):
        return best, lost
    fewer = [each for each in within if each.candidate.action is Action.UNDELEGATE]
    if returning and fewer:
        back = min(fewer, key=lambda each: (each.ms, *_rank(each)))
        if back.ms <= now.ms * (1 + EPSILON):
            return back, lost
    return now, lost


def _never_slower(scored: Scored, now: Scored) -> bool:
    return all(then <= before * (1 + EPSILON) for then, before in zip(scored.each, now.each, strict=True))


def _rank(scored: Scored) -> tuple[float, int, bool]:
    configuration = scored.candidate.configuration
    return scored.candidate.price, len(configuration.delegated), not configuration.dispatch.is_dynamic


@dataclass(frozen=True)
class Decision:
    """What is to run next.

    Attributes:
        number: decisions are numbered from 1.
        iteration: the iteration after which it was made.
        action: what it changes.
        configuration: what is to run.
        reason: why, in words.
        ms_now: iteration time (ms) of what runs now; None where a dead link leaves none. It is simulated under the
            measured links. If the decision takes a change back, it is measured, with the change.
        ms_then: iteration time (ms) of what is to run. If the decision takes a change back, it is measured, before
            the change.
        price: what the switch costs, in ms.
        causes: what the changes that led to it are attributed to: "latency", "bandwidth", "occupancy", "loss",
            "delay" (of a link), "compute" (of a stage's ops); none where nothing had changed.
        peaks: the most activations that each rank holds, simulated under the measured links, in the units of the
            costs.
        in_host: the most activations of each rank that wait in host memory at once, where OFFLOAD ops of the schedule
            move them: at most the job's `host_memory`.
        moved: links that take another path, each with that path: "delegates" or "its own path".

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> late = ps.Links.parse("2:3=latency:steps:0ms/0ms,1600ms/60ms")
        >>> run = ps.control.rehearse(ps.control.Controller(job), late, until=8_000)
        >>> decision = run.decisions[0]
        >>> decision.number, decision.ms_then < decision.ms_now
        (1, True)
    """

    number: int
    iteration: int
    action: Action
    configuration: Configuration
    reason: str
    ms_now: float | None
    ms_then: float
    price: float
    causes: tuple[str, ...] = ()
    peaks: tuple[float, ...] = ()
    in_host: tuple[float, ...] = ()
    moved: tuple[tuple[Link, str], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The decision as a JSON object."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return value | {
            "action": self.action.value,
            "configuration": json.loads(self.configuration.to_json()),
            "digest": self.configuration.digest,
            "moved": {show_link(link): path for link, path in self.moved},
            "dispatch": self.configuration.dispatch.value,
        }


def what_of(action: Action, then: Configuration) -> tuple[Action, object]:
    """What identifies a change, so that it is not tried again for the same cause."""
    return action, then.nodes if action is Action.MOVE else then.delegated


def moved_by(now: Configuration, then: Configuration) -> tuple[tuple[Link, str], ...]:
    """The links that take another path, and by which they go then."""
    moved = sorted(set(now.delegated) ^ set(then.delegated))
    return tuple((link, "delegates" if link in then.delegated else "its own path") for link in moved)


def reason_of(
    news: Iterable[object],
    now: Configuration,
    then: Configuration,
    ms: tuple[float | None, float],
    down: Iterable[Link],
) -> str:
    """Why something else is to run, in words.

    Args:
        news: what changed.
        now: what runs.
        then: what is to run.
        ms: the simulated time of an iteration of both; None where a dead link leaves none.
        down: the dead links.
    """
    parts = [] if ms[0] is not None else [f"link {', '.join(map(show_link, sorted(down)))} is down"]
    parts += map(str, news)
    parts += [f"link {show_link(link)} goes by {path}" for link, path in moved_by(now, then)]
    parts += [f"dispatch {then.dispatch.value}"] if then.dispatch is not now.dispatch else []
    times = f"{ms[1]:.4g} ms an iteration" + ("" if ms[0] is None else f" instead of {ms[0]:.4g}")
    return "; ".join([*parts, f"simulated {times}"])
