"""What could run next: keep, re-plan, delegate, both, or another dispatch.

    links to delegate       schedules                      dispatch
    as now                  as now, the start's        x   frozen
    every late one     x    Algorithm 2 for the links      hinted
    none that is healthy    Algorithm 1                    dynamic
                            the order a dynamic run took
                            those offered

Each is checked to fit: its own order stays within the cap of every rank's device. While some link is delegated,
schedules are also made for more memory than that. Those that need it get OFFLOAD and RELOAD ops, by which activations
wait in host memory; those that do not fit even then are left out.

The choice among them is by simulated iteration time under the measured links, and by ski rental for the price of a
switch.

Ski rental (FALCON, arXiv 2410.12588): a skier does not know how long the snow will last. He rents until the rents add
up to the price, and then buys. This costs at most twice as much as if he had known. Here the rent is what each
iteration loses because the best candidate does not run. So cheap remedies come first, and a dearer one when the loss
has reached its price.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from statistics import fmean
from typing import Any

from penstock.control.configuration import Configuration, Job, fits, fits_within, order_of, runner_of
from penstock.control.events import Link, show_link
from penstock.control.watches import Factors
from penstock.cost import CostError, Costs, Links
from penstock.dispatch import Dispatch
from penstock.engine.tolerance import EPSILON
from penstock.passes.reorder import with_orders_of
from penstock.planning import initial_warmups, slow_link_schedule
from penstock.planning.joint.away import with_host_memory
from penstock.planning.warmup import RULES
from penstock.schedule import Schedule, ScheduleError, one_to_one
from penstock.schedule.async_ops import without_offload
from penstock.simulation.runner import RunResult
from penstock.simulation.transport import Decoupled, as_transport


class Action(StrEnum):
    """What a candidate changes.

    Examples:
        >>> import penstock as ps
        >>> [action.value for action in ps.control.Action][:4]
        ['keep', 'change dispatch', 're-plan', 'delegate']
    """

    KEEP = "keep"
    DISPATCH = "change dispatch"
    REPLAN = "re-plan"
    DELEGATE = "delegate"
    REPLAN_AND_DELEGATE = "re-plan and delegate"
    UNDELEGATE = "stop delegating"
    MOVE = "move nodes"
    """Nodes of a mesh change places, and perhaps what runs on them."""
    TAKE_BACK = "take back"
    """The configuration before a change that did not bring what was promised."""


@dataclass(frozen=True)
class Candidate:
    """A configuration that could run next.

    Attributes:
        action: what it changes.
        configuration: what would run.
        price: what switching to it costs, in ms. Delegating is priced there and back, so that going back is paid in
            advance.
        ms: its mean simulated iteration time over the measured scenarios, in ms, times by how much its dispatch is
            known to be slower than simulated; not a number before `score`.
        each: the time in each scenario.
        peaks: the most activations that each rank holds in any of them.
    """

    action: Action
    configuration: Configuration
    price: float
    ms: float = math.nan
    each: tuple[float, ...] = ()
    peaks: tuple[float, ...] = ()

    def scaled_by(self, factor: float) -> Candidate:
        """The candidate where steps take `factor` times as long as simulated."""
        return replace(self, ms=self.ms * factor, each=tuple(ms * factor for ms in self.each))


@dataclass(frozen=True)
class Measured:
    """The links as they are.

    Attributes:
        scenarios: all links in each of some recent iterations; one alone where they hardly differ.
        typical, harshest: the median and the largest delay of every link; the same where they hardly differ.
        late: links (lower rank first) with a delay that matters.
        down: links whose own path is dead.
        factors: how many times as long ops take as the job's costs say.

    Examples:
        >>> import penstock as ps
        >>> late = ps.Links({(2, 3): 60.0})
        >>> measured = ps.control.Measured((late,), late, late, late=frozenset({(2, 3)}))
        >>> measured.late, measured.down
        (frozenset({(2, 3)}), frozenset())
    """

    scenarios: tuple[Links, ...]
    typical: Links
    harshest: Links
    late: frozenset[Link] = frozenset()
    down: frozenset[Link] = frozenset()
    factors: Factors = ()

    @classmethod
    def steady(cls, links: Links, late: frozenset[Link] = frozenset()) -> Measured:
        """Delays that do not change."""
        return cls((links,), links, links, late)


def candidates(
    job: Job, now: Configuration, measured: Measured, offered: Sequence[Schedule] = (), may_return: bool = True
) -> tuple[Candidate, ...]:
    """All that could run next. What runs now comes first, and is left out where a dead link forbids it.

    Args:
        job: what may change.
        now: what runs.
        measured: what has been measured of links and ops.
        offered: schedules found elsewhere.
        may_return: whether links may stop being delegated.

    Examples:
        >>> import penstock as ps
        >>> costs, zb = ps.Costs.uniform(4, f=10, i=10, w=10), ps.build("zb", 4, 8)
        >>> start = ps.control.Configuration(zb, "frozen", caps=ps.simulate(zb, costs).peak_activations)
        >>> job = ps.control.Job(costs, start)
        >>> late = ps.Links({(2, 3): 60.0})
        >>> measured = ps.control.Measured((late,), late, late, late=frozenset({(2, 3)}))
        >>> [each.action.value for each in ps.control.candidates(job, start, measured)][:2]
        ['keep', 'change dispatch']
    """
    found: dict[Configuration, Candidate] = {}
    for delegated in _link_sets(job, now, measured, may_return):
        if not measured.down <= set(delegated):
            continue
        for schedule in _schedules(job, now, measured, bool(delegated), offered):
            for dispatch in dict.fromkeys((now.dispatch, *job.dispatches)):
                configuration = Configuration(schedule, dispatch, delegated, job.start.caps, now.nodes)
                if configuration not in found and fits(configuration, job.costs):
                    found[configuration] = _candidate(job, now, configuration)
    return tuple(sorted(found.values(), key=lambda each: each.action is not Action.KEEP))


def _candidate(job: Job, now: Configuration, then: Configuration) -> Candidate:
    replans = then.schedule != now.schedule
    more, fewer = set(then.delegated) - set(now.delegated), set(now.delegated) - set(then.delegated)
    price = job.prices.replan * replans + job.prices.dispatch * (then.dispatch is not now.dispatch)
    if more:
        price = 2 * (price + job.prices.delegate)
        return Candidate(Action.REPLAN_AND_DELEGATE if replans else Action.DELEGATE, then, price)
    if fewer:
        return Candidate(Action.UNDELEGATE, then, 0.0)
    if replans:
        return Candidate(Action.REPLAN, then, price)
    return Candidate(Action.KEEP if then.dispatch is now.dispatch else Action.DISPATCH, then, price)


def _link_sets(job: Job, now: Configuration, measured: Measured, may_return: bool) -> list[tuple[Link, ...]]:
    """The sets of links that may be delegated: those of now, with each late link or all of them, and only those that
    need it. A link that is neither late nor dead is in none of them, but for those that hold it already.
    """
    sets = {frozenset(now.delegated)}
    if job.may_delegate:
        kept = now.delegated if not may_return else set(now.delegated) & (measured.late | measured.down)
        bases = {frozenset(now.delegated), frozenset(kept)}
        more = [frozenset(), measured.late, *(frozenset({link}) for link in measured.late)]
        sets |= {base | each | measured.down for base in bases for each in more}
    return sorted((tuple(sorted(each)) for each in sets), key=lambda links: (links != now.delegated, links))


def _schedules(
    job: Job, now: Configuration, measured: Measured, delegates: bool, offered: Sequence[Schedule]
) -> Iterator[Schedule]:
    start, caps = job.start.schedule, job.start.caps
    # Without delegates nothing may wait in host memory, but what does in the start.
    yield now.schedule if delegates or not now.delegated else without_offload(now.schedule)
    yield start
    if not job.may_replan:
        return
    # Without the small delays that every link has: a plan that knows them starts a W a moment before a message comes.
    ways = list(dict.fromkeys(job.late(links) for links in (measured.typical, measured.harshest)))
    host = job.host_limits if delegates else (0.0,) * job.num_ranks
    made = [(each, ways[0]) for each in offered]
    # A link to host memory that is slow moves few activations in time, so orders that need fewer are made as well.
    for share in _SHARES if any(host) else (0.0,):
        limits = tuple(cap + share * more for cap, more in zip(caps, host, strict=True))
        made += _planned(job, without_offload(now.schedule), ways, limits)
    for each, links in made:
        kept = in_order(each, start)
        if kept is not None and any(host) and not fits_within(kept, job.costs, caps):
            kept = _hosted(kept, job.costs, links, caps, host)
        if kept is not None:
            yield kept


_SHARES = (0.0, 0.25, 0.5, 1.0)
"""The shares of host memory for which orders are made."""
_hosted = lru_cache(maxsize=256)(with_host_memory)


def _planned(
    job: Job, running: Schedule, ways: Sequence[Links], caps: tuple[float, ...]
) -> Iterator[tuple[Schedule, Links]]:
    """Schedules that hold no more than `caps`, each with the delays for which it was made."""
    for links in ways:
        found = _taken(running, job.costs, links, caps)
        if found is None:
            break  # what runs now does not fit in these caps
        yield found, links
    start = job.start.schedule
    if start.placement != one_to_one(job.num_ranks):
        return  # Eq. 1 and its algorithms speak of one stage per rank
    asked = [(links, rule, False) for links in ways for rule in RULES]
    for links, rule, initial in [*asked, (ways[0], "priority", True)]:
        found = _made(job.costs, start.num_microbatches, links, caps, rule, initial)
        if found is not None:
            yield found, links


def in_order(schedule: Schedule, start: Schedule) -> Schedule | None:
    """A schedule with the start's orders of microbatches and of sums; None if they do not fit it."""
    if schedule.microbatch_orders == start.microbatch_orders:
        return schedule
    try:
        return with_orders_of(schedule, start)
    except ScheduleError:
        return None


@lru_cache(maxsize=256)
def _taken(schedule: Schedule, costs: Costs, links: Links, caps: tuple[float, ...]) -> Schedule | None:
    """The order in which a dynamic run would execute, over links of any depth; None if the schedule does
    not fit the caps.
    """
    if not fits_within(schedule, costs, caps):
        return None
    order = order_of(schedule, costs)
    ran = runner_of(costs).run(order, links, dispatch=Dispatch.DYNAMIC, transport=Decoupled(), caps=caps)
    return ran.executed()


@lru_cache(maxsize=256)
def _made(
    costs: Costs, num_microbatches: int, links: Links, caps: tuple[float, ...], rule: str, initial: bool
) -> Schedule | None:
    """The schedule of Algorithm 2, or of Algorithm 1 if `initial`; None if there is no room for it."""
    counts = None
    try:
        if initial:
            counts = initial_warmups(costs.num_stages, num_microbatches, caps, costs.activation)
        # Microbatches that differ are counted when it is tried: see `fits`.
        even = replace(costs, uneven=())
        return slow_link_schedule(
            even, num_microbatches, links, warmup=counts, memory_limit=caps, rule=rule, prove=False
        )
    except (CostError, ScheduleError):
        if initial:
            return None
        raise


def late_links(delays: dict[Link, float], least: float) -> frozenset[Link]:
    """Links (lower rank first) with a delay of at least `least` ms in either direction."""
    return frozenset((min(link), max(link)) for link, delay in delays.items() if delay >= least)


def score(job: Job, measured: Measured, candidate: Candidate) -> Candidate:
    """A candidate with its time, simulated on each scenario.

    Args:
        job: the costs and the placement.
        measured: what has been measured of links and ops, with its scenarios.
        candidate: what would run.
    """
    found = [_one(job.costs, job.transport, candidate.configuration, Links.of(links)) for links in measured.scenarios]
    times = tuple(ms for ms, _ in found)
    peaks = tuple(map(max, zip(*(peaks for _, peaks in found), strict=True)))
    return replace(candidate, ms=fmean(times), each=times, peaks=peaks)


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
    return fmean(_one(job.costs, job.transport, configuration, Links.of(links))[0] for links in scenarios)


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
    scored: Sequence[Candidate], budget: float, least_gain: float, returning: bool = False
) -> tuple[Candidate, float]:
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
    now = scored[0] if scored[0].action is Action.KEEP else None
    sure = [each for each in scored if now is None or _never_slower(each, now)]
    within = [each for each in sure if now is None or each.price <= budget or each is now]
    least = min(each.ms for each in within)
    best = min((each for each in within if each.ms <= least * (1 + EPSILON)), key=_rank)
    if now is None:
        return best, 0.0
    lost = max(0.0, now.ms - min(each.ms for each in sure))
    if best.ms <= now.ms * (1 - least_gain):
        return best, lost
    fewer = [each for each in within if each.action is Action.UNDELEGATE]
    if returning and fewer:
        back = min(fewer, key=lambda each: (each.ms, *_rank(each)))
        if back.ms <= now.ms * (1 + EPSILON):
            return back, lost
    return now, lost


def _never_slower(scored: Candidate, now: Candidate) -> bool:
    return all(then <= before * (1 + EPSILON) for then, before in zip(scored.each, now.each, strict=True))


def _rank(scored: Candidate) -> tuple[float, int, bool]:
    configuration = scored.configuration
    return scored.price, len(configuration.delegated), not configuration.dispatch.is_dynamic


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
            measured links, as `Candidate.ms`. If the decision takes a change back, it is measured, with the change.
        ms_then: iteration time (ms) of what is to run. If the decision takes a change back, it is measured, before
            the change.
        price: what the switch costs, in ms.
        causes: what the changes that led to it are attributed to: "latency", "bandwidth", "occupancy", "loss",
            "delay" (of a link), "compute" (of a stage's ops); none where nothing had changed.
        peaks: the most activations that each rank holds, simulated under the measured links, in the units of the
            costs.
        in_host: the most activations of each rank that wait in host memory at once, where OFFLOAD ops of the schedule
            move them: at most the job's `host_memory`.

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

    def to_json(self) -> dict[str, Any]:
        """The decision as a JSON object."""
        value = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return value | {
            "action": self.action.value,
            "configuration": json.loads(self.configuration.to_json()),
            "digest": self.configuration.digest,
        }


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
    for link in sorted(set(now.delegated) ^ set(then.delegated)):
        parts.append(f"link {show_link(link)} goes by {'delegates' if link in then.delegated else 'its own path'}")
    parts += ["ops run in another order"] if then.schedule != now.schedule else []
    parts += [f"dispatch becomes {then.dispatch.value}"] if then.dispatch is not now.dispatch else []
    times = f"{ms[1]:.4g} ms a step" + ("" if ms[0] is None else f" instead of {ms[0]:.4g}")
    return "; ".join([*parts, f"by simulation {times}"])
