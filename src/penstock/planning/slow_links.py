"""A schedule for links that are known to be late: PipeMorph's Algorithms 3 and 4, driven by events.

The order is made while the delays are there, so it spends its waiting on weight gradients where a schedule
made without them would stand still: 4 stages, 12 microbatches, 10 ms ops and the first link 20 ms late take
410 ms, against 440 for the order that was made without delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import Lister
from penstock.engine.tolerance import EPSILON
from penstock.planning.options import per_rank
from penstock.planning.warmup import adapted_warmups
from penstock.program import Program, Rules
from penstock.schedule import Schedule, ScheduleError, one_to_one

RULES = {
    "priority": (Rules("backward-first"), "slow-links"),
    "alternate": (Rules("interleaved", strict=True), "slow-links-alternate"),
}
"""What a stage runs after its warm-up, and the name of schedules made so."""


def slow_link_schedule(
    costs: Costs,
    num_microbatches: int,
    links: Links | None = None,
    *,
    warmup: Sequence[int] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    rule: str = "priority",
    prove: bool = True,
) -> Schedule:
    """Warm-up counts x_i, then I, F and W by a rule, with the delays known. Stage i is on rank i.

    warmup = 5, 3, 1, alternate (I, then F, then I ...; W where neither can run):

        rank 0 | F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 ...
        rank 1 | .  F0 F1 F2 I0 F3 I1 F4 I2 F5 ...
        rank 2 | .  .  F0 I0 F1 I1 F2 I2 F3 I3 ...

    - "priority": any ready op, I before F before W, as printed. Two I that come together run together, and the
      F that feeds the stage below waits for both: that lowers what a link tolerates below (slack - 1) t.
    - "alternate": one I, then one F, in strict turn. Theorem 1 holds for this rule: a link tolerates exactly
      (slack - 1) t where all ops take t; past that each ms costs 2 N / (slack + 1), as the paper's proof gives it
      (the theorem states N / (slack - 1)).

    Corrections to Algorithms 3 and 4: time goes from event to event instead of by steps of a fixed size; an op is
    ready when the one it waits for has ended and its message has arrived (not a delay after that one's start);
    the last stage's I follows its own F; W follows I on every stage, the last one too; a stage may be busy or
    waiting when no op is ready; counts above N are clipped to N; and forwards respect a memory cap.

    Args:
        num_microbatches: of a step.
        rule: what a stage does after its warm-up: "priority" or "alternate".
        costs: per stage; they need not be alike.
        links: delays between neighbouring ranks; by default none.
        warmup: x_i, one per stage, never rising; by default `adapted_warmups` for these links, within the limit.
        memory_limit: most a rank may hold, in the units of the costs' activations; one for all or one per rank.
            None for no limit, as in the paper, which moves activations to host memory.
        prove: False where many are compared, and only the one that is chosen is to be proved.

    Raises:
        ScheduleError: counts that rise or do not fit in the limit, or an unknown rule.
        CostError: links between ranks that are not there.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs.uniform(4, f=10, i=10, w=10)
        >>> late = ps.Links({(0, 1): 20.0})
        >>> s = ps.planning.slow_link_schedule(costs, 12, late)
        >>> ps.simulate(s, costs, links=late).makespan
        410.0
    """
    if rule not in RULES:
        raise ScheduleError(f"rule {rule!r}: give 'priority' or 'alternate'", rule="options")
    links = links or Links()
    links.check_ranks(costs.num_stages)
    rules, name = RULES[rule]
    counts = _counts(costs, num_microbatches, links, warmup, memory_limit)
    rules = replace(rules, warmup=counts, memory_limit=memory_limit)
    placement = one_to_one(costs.num_stages)
    program = Program(placement, num_microbatches, rules, split=True, costs=costs, links=links, name=name)
    if prove:
        return program.build()
    graph = program.queues()
    listed = Lister(graph).list_by_rules(program.tables(graph))
    return listed.schedule(program.name) if listed.complete else program.build()


def _counts(
    costs: Costs,
    num_microbatches: int,
    links: Links,
    warmup: Sequence[int] | None,
    memory_limit: float | Sequence[float] | None,
) -> list[int]:
    """The warm-up counts, given or adapted, each at most N and within the memory limit."""
    if num_microbatches < 1:
        raise ScheduleError(f"a schedule needs at least 1 microbatch, got {num_microbatches}", rule="options")
    most = _most_in_flight(costs, num_microbatches, memory_limit)
    if warmup is None:
        return list(adapted_warmups(costs, links, num_microbatches, max_in_flight=most))
    counts = [min(count, num_microbatches) for count in warmup]
    if len(counts) != costs.num_stages:
        raise ScheduleError(
            f"warmup has {len(counts)} counts; give one per stage, {costs.num_stages} in all", rule="options"
        )
    for stage, count in enumerate(counts):
        if count < 1 or (stage and count > counts[stage - 1]):
            raise ScheduleError(f"warm-up counts must be at least 1 and never rise: {list(warmup)}", rule="options")
        if count > most[stage]:
            raise ScheduleError(
                f"stage {stage}: {count} warm-up forwards are more than its memory holds, {most[stage]}; give fewer, "
                f"or a larger memory_limit",
                rule="memory",
                rank=stage,
            )
    return counts


def _most_in_flight(costs: Costs, num_microbatches: int, memory_limit: float | Sequence[float] | None) -> list[int]:
    """How many forwards each stage may hold whole, at most N."""
    if memory_limit is None:
        return [num_microbatches] * costs.num_stages
    num = costs.num_stages
    most = []
    for stage, limit in enumerate(per_rank("memory_limit", memory_limit, num)):
        kept = costs.memory_change("F", stage)
        if not limit >= kept:
            raise CostError(f"rank {stage}: memory_limit {limit:g} has no room for one forward, which keeps {kept:g}")
        most.append(num_microbatches if kept == 0 else math.floor(min(limit / kept + EPSILON, num_microbatches)))
    return most
