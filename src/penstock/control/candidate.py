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
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache

from penstock.control.compute import Factors
from penstock.control.configuration import Configuration, Job, fits, fits_within, order_of, runner_of
from penstock.control.events import Link
from penstock.cost import CostError, Costs, Links
from penstock.dispatch import Dispatch
from penstock.passes.reorder import with_orders_of
from penstock.planning import initial_warmups, slow_link_schedule
from penstock.planning.joint.away import with_host_memory
from penstock.planning.slow_links import RULES
from penstock.schedule import Schedule, ScheduleError, one_to_one
from penstock.schedule.offload import without_offload
from penstock.simulation.transport import Decoupled


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
    """

    action: Action
    configuration: Configuration
    price: float


@dataclass(frozen=True)
class Measured:
    """The links as they are.

    Attributes:
        scenarios: all links in each of some recent iterations; one alone where they hardly differ.
        typical, harshest: the median and the largest delay of every link; the same where they hardly differ.
        late: links (lower rank first) with a delay that matters.
        down: links whose own path is dead.
        factors: how many times as long ops take as the job's costs say; see `compute`.

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
    ways = list(dict.fromkeys(above(links, job.smallest_delay) for links in (measured.typical, measured.harshest)))
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


def above(links: Links, least: float) -> Links:
    """The delays of at least `least` ms."""
    return Links({link: float(ms) for link, ms in sorted(links.delays.items()) if ms >= least})


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
