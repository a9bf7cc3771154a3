"""Chooses how ranks pick their ops, by simulation: no one rule is the best for every schedule and every delay.

    choice = choose_policy(schedule, costs, links=links, jitter=0.2)
    choice.policy, choice.means

`simulate(..., dispatch="auto")` does the same where nothing is left to chance, and runs what it chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite, sqrt
from statistics import fmean, stdev

import numpy as np

from penstock.cost import CostError, Costs, Links
from penstock.cost.links import LinkQueues
from penstock.dispatch import Dispatch, Policy
from penstock.engine.arrays import Array
from penstock.engine.tolerance import EPSILON
from penstock.schedule import Schedule
from penstock.schedule.messages import remove_communication
from penstock.simulation.lowered import Order, frozen_caps
from penstock.simulation.runner import Runner
from penstock.simulation.transport import SimulatedTransport, as_transport

FROZEN = Policy(Dispatch.FROZEN)
POLICIES = (
    Policy(Dispatch.HINTED),
    Policy(Dispatch.HINTED, 0.5),
    Policy(Dispatch.HINTED, 1.0),
    Policy(Dispatch.DYNAMIC),
    FROZEN,
)
"""What is tried. Of equals the first is taken: one that absorbs what nobody foresaw."""
WITHOUT_WAITING = tuple(policy for policy in POLICIES if not policy.wait)
"""What the runtime runs too: it does not know when ops are due."""


@dataclass(frozen=True)
class PolicyChoice:
    """The policy that was chosen, and the makespans (ms) of all that were tried, one for each draw.

    Attributes:
        policy: no slower than frozen: over several draws, by more than the standard error of the difference.
        makespans: by policy, in the order in which they were given.
    """

    policy: Policy
    makespans: tuple[tuple[Policy, tuple[float, ...]], ...]

    @cached_property
    def means(self) -> dict[str, float]:
        """The mean makespan (ms) under each policy, by its text."""
        return {str(policy): fmean(each) for policy, each in self.makespans}


def choose_policy(
    schedule: Schedule,
    costs: Costs,
    *,
    links: Links | None = None,
    transport: SimulatedTransport | str = "decoupled",
    memory_limit: float | Sequence[float] | None = None,
    jitter: float = 0.0,
    num_draws: int = 8,
    seed: int = 0,
    policies: Sequence[Policy] = POLICIES,
) -> PolicyChoice:
    """The policy under which `schedule` is fastest, by simulation under what is known of costs, links and noise.

    Args:
        links, transport, memory_limit: as in `simulate`.
        jitter: standard deviation of the logarithm of each op's duration about what the costs say; 0.2 for about
            20%. All policies are tried on the same draws, and wait, where they do, by times planned without jitter.
        num_draws: how many, where there is jitter; seed: of the draws.
        policies: what is tried besides frozen.

    Raises:
        ScheduleError, CostError: as `simulate`; a jitter or a number of draws that makes no sense.
    """
    if not (isfinite(jitter) and jitter >= 0) or num_draws < 1:
        raise CostError(f"jitter {jitter!r}, {num_draws!r} draws: give a share of at least 0, and at least 1 draw")
    schedule = remove_communication(schedule)
    runner = Runner(costs)
    order = runner.order(schedule)
    draws = jittered(order, jitter, num_draws, seed) if jitter else ()
    caps = frozen_caps(order.graph, order.change.tolist(), memory_limit)
    given = Links.of(links)
    return choose(runner, order, given, as_transport(transport), caps, draws=draws, policies=policies)


def choose(
    runner: Runner,
    order: Order,
    links: Links | LinkQueues,
    transport: SimulatedTransport,
    caps: Sequence[float],
    *,
    links_at: float = 0.0,
    draws: Sequence[Order] = (),
    policies: Sequence[Policy] = POLICIES,
) -> PolicyChoice:
    """The fastest policy for an order.

    Args:
        draws: the same order with other durations; none where its own are known. Then a policy must beat frozen by
            the standard error of the difference, or frozen stays: what is faster on a few draws may be chance.

    Raises:
        ScheduleError: the order deadlocks.
    """
    due = None
    if draws and any(policy.wait for policy in policies):
        due = runner.run(order, deepcopy(links), transport=transport, links_at=links_at).start_time

    def run(policy: Policy) -> tuple[float, ...]:
        return tuple(
            runner.run(
                each, deepcopy(links), dispatch=policy, transport=transport, caps=caps, links_at=links_at, due=due
            ).makespan
            for each in draws or (order,)
        )

    tried = {policy: run(policy) for policy in dict.fromkeys((*policies, FROZEN))}
    sure = [policy for policy in tried if _is_no_slower(tried[policy], tried[FROZEN])]
    least = min(fmean(tried[policy]) for policy in sure) * (1 + EPSILON)
    return PolicyChoice(next(p for p in sure if fmean(tried[p]) <= least), tuple(tried.items()))


def jittered(order: Order, jitter: float, num_draws: int, seed: int) -> tuple[Order, ...]:
    """The order with every op's duration drawn anew: log-normal, its mean that of the order."""
    rng = np.random.default_rng(seed)
    factors: list[Array] = [rng.lognormal(-(jitter**2) / 2, jitter, order.num_ops) for _ in range(num_draws)]
    for first, last in pairwise(order.graph.gang_first):  # ranks that run an op together take as long
        members = order.graph.gang_ops[first:last]
        for each in factors:
            each[members] = each[members[:1]]
    return tuple(replace(order, duration=order.duration * each) for each in factors)


def _is_no_slower(tried: Sequence[float], frozen: Sequence[float]) -> bool:
    saved = [before - then for then, before in zip(tried, frozen, strict=True)]
    error = stdev(saved) / sqrt(len(saved)) if len(saved) > 1 else 0.0
    return fmean(saved) - error >= -EPSILON * fmean(frozen)
