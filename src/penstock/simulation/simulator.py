"""Times a schedule: the decision core driven over costs and links."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

from penstock.cost import CostError, Costs, Links
from penstock.cost.costs import require_costs
from penstock.cost.links import Lines
from penstock.dispatch import Dispatch, Policy
from penstock.renamed import refuse_old
from penstock.schedule import Schedule, ScheduleError
from penstock.schedule.send_recv import remove_communication
from penstock.simulation.auto import choose
from penstock.simulation.memory import frozen_caps, frozen_peaks, memory_changes
from penstock.simulation.runner import Runner
from penstock.simulation.timeline import Timeline, timeline_of
from penstock.simulation.transport import Blocking, Decoupled, Transport, as_transport

__all__ = [
    "Blocking", "Decoupled", "Transport", "as_dispatch", "frozen_caps", "frozen_peaks", "memory_changes", "simulate",
]  # fmt: skip
AUTO = "auto"
COMPILE_ABOVE = 50_000
"""Ops above which loading the compiled loop pays for a single run (it takes about 0.6 s to load, once)."""


@refuse_old({"max_held": "memory_limit=..., as ps.plan takes"}, ScheduleError)
def simulate(
    schedule: Schedule,
    costs: Costs | None = None,
    links: Links | Lines | None = None,
    *,
    dispatch: Dispatch | Policy | str = Dispatch.FROZEN,
    transport: Transport | str = "decoupled",
    memory_limit: float | Sequence[float] | None = None,
    warmup: Sequence[int] | None = None,
    links_at: float = 0.0,
) -> Timeline:
    """Runs `schedule` over `costs` and `links` and returns the timeline. Deterministic.

    Messages that are ops of the schedule are timed as all messages are: a rank waits for one where an op needs
    it, not where its receive is posted.

    Args:
        costs: per stage; by default F = I = W = 1 ms for each rank's share of the model (`Costs.assumed`).
        links: delays in ms (pure latency), or conditions: latency, occupancy, bandwidth and loss that may change
            over time; by default none. `Lines` go on from what a run before left on them. These, losses
            and what is drawn by lots run uncompiled: a million ops take some ten seconds.
        dispatch: "frozen"; "hinted": a rank runs, of the ready ops that fit, the earliest in its order; or "dynamic":
            any ready op by priority B or I, then F, then W. "hinted:0.5" waits for an op that is nearly due, see
            `Policy`; its planned times are those of the frozen run over the same costs and links. "auto" tries these
            (`auto.POLICIES`) and takes the fastest, which the timeline names.
        transport: "decoupled", or `Blocking(depth)`.
        memory_limit: most activations per rank (or each rank) may hold, in the units of the costs. By default a rank
            of a
            run that is not frozen is capped at its own peak in the frozen run without delays. A cap below that is
            refused, as a rank must be able to finish in its frozen order; so in a frozen run it changes nothing else.
        warmup: not where frozen: forwards each rank runs before anything else.
        links_at: the moment (ms) of the conditions' own time at which the run starts.

    Raises:
        ScheduleError: the order deadlocks, a cap is below what the frozen order itself needs, or warm-up counts
            are above what a cap lets in, or given for a frozen run.
        CostError: costs for another number of stages, or a link between ranks that are not there.
    """
    schedule = remove_communication(schedule)
    costs = Costs.assumed(schedule.num_ranks, schedule.placement) if costs is None else costs
    through_lines = links if isinstance(links, Lines) else Links.of(links)
    require_costs(costs)
    if costs.num_stages != schedule.num_stages:
        raise CostError(f"the costs are for {costs.num_stages} stages, the schedule has {schedule.num_stages}")
    (through_lines.links if isinstance(through_lines, Lines) else through_lines).check_ranks(schedule.num_ranks)
    policy = None if dispatch == AUTO else Policy.of(dispatch)
    runner = Runner(costs, compile=schedule.num_ops > COMPILE_ABOVE)
    order = runner.lowered(schedule)
    caps = None
    if warmup is not None:
        _check_warmup(warmup, order.num_ranks, policy)
    if (
        policy is None or policy.dispatch.is_dynamic or memory_limit is not None
    ):  # what a frozen run holds is known: under the cap, or not
        caps = frozen_caps(order.graph, order.change.tolist(), memory_limit)
    through = as_transport(transport)
    considered: tuple[tuple[str, float], ...] = ()
    if policy is None:
        choice = choose(runner, order, through_lines, through, caps or (), links_at=links_at)
        policy, considered = choice.policy, tuple(choice.means.items())
    ran = runner.run(
        order,
        through_lines,
        dispatch=policy,
        transport=through,
        caps=caps,
        warmup=warmup,
        links_at=links_at,
    )
    return timeline_of(schedule, order.graph, str(policy), ran.arrays, considered)


def _check_warmup(warmup: Sequence[int], num_ranks: int, policy: Policy | None) -> None:
    """Raises ScheduleError for counts that are none, not one per rank, or for a run that has its order already."""
    if len(warmup) != num_ranks:
        raise ScheduleError(f"warmup has {len(warmup)} counts, one a rank is needed: {num_ranks}", rule="options")
    for rank, count in enumerate(warmup):
        if not isinstance(count, Integral) or count < 0:
            raise ScheduleError(
                f"warmup of rank {rank} is {count!r}: give a whole number of at least 0", rule="options"
            )
    if policy is None or not policy.dispatch.is_dynamic:
        raise ScheduleError(
            f"warmup {list(warmup)} steers a dynamic run, and a frozen one follows its order, warm-up and all, which "
            "'auto' may choose; give dispatch='dynamic', or build the schedule with these counts (zb takes warmup)",
            rule="options",
        )


def as_dispatch(value: Dispatch | str) -> Dispatch:
    """Reads "frozen", "hinted" or "dynamic", for what takes no policy that waits; else raises ScheduleError."""
    try:
        return Dispatch(value)
    except ValueError:
        raise ScheduleError(
            f"dispatch {value!r}: give 'frozen', 'hinted' or 'dynamic'; policies that wait are for ps.simulate, "
            "which knows when each op is due",
            rule="dispatch",
        ) from None
