"""A schedule for links that are known to be late: PipeMorph's Algorithms 3 and 4, driven by events.

The order is made while the delays are there, so it spends its waiting on weight gradients where a schedule
made without them would stand still: 4 stages, 12 microbatches, 10 ms ops and the first link 20 ms late take
410 ms, against 440 for the order that was made without delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from enum import StrEnum

from penstock.cost import CostError, Costs, Links
from penstock.passes.network import memory_of, network
from penstock.passes.separate import Separation
from penstock.plan.warmup import adapted_warmups
from penstock.schedule import Op, Schedule, ScheduleError, check, one_to_one
from penstock.simulate import simulate


class Rule(StrEnum):
    """What a stage runs after its warm-up."""

    PRIORITY = "priority"
    ALTERNATE = "alternate"


def slow_link_schedule(
    costs: Costs,
    num_microbatches: int,
    links: Links | None = None,
    *,
    warmup: Sequence[int] | None = None,
    memory_limit: float | Sequence[float] | None = None,
    rule: Rule | str = Rule.PRIORITY,
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
      (the theorem states N / (slack - 1)). Its F and I are as in the run without W; the W lie in what is idle then.

    Corrections to Algorithms 3 and 4: time goes from event to event instead of by steps of a fixed size; an op is
    ready when the one it waits for has ended and its message has arrived (not a delay after that one's start);
    the last stage's I follows its own F; W follows I on every stage, the last one too; a stage may be busy or
    waiting when no op is ready; counts above N are clipped to N; and forwards respect a memory cap.

    Args:
        costs: per stage; they need not be alike.
        links: delays between neighbouring ranks; by default none.
        warmup: x_i, one a stage, never rising; by default `adapted_warmups` for these links, within the limit.
        memory_limit: most a rank may hold, in the units of the costs' activations; one for all or one a rank.
            None for no limit, as in the paper, which moves activations to host memory.

    Raises:
        ScheduleError: counts that rise or do not fit in the limit, or an unknown rule.
        CostError: links between ranks that are not there.
    """
    chosen = _rule(rule)
    links = links or Links()
    links.check_ranks(costs.num_stages)
    counts = _counts(costs, num_microbatches, links, warmup, memory_limit)
    name = "slow-links" if chosen is Rule.PRIORITY else "slow-links-alternate"
    alternating = _alternating(name, costs.num_stages, num_microbatches, counts)
    if chosen is Rule.PRIORITY:
        result = _by_priority(alternating, costs, links, counts, memory_limit)
    else:
        result = _in_turn(alternating, costs, links, memory_limit)
    check(result)
    return result


def _rule(value: Rule | str) -> Rule:
    try:
        return Rule(value)
    except ValueError:
        raise ScheduleError(f"rule {value!r}: give 'priority' or 'alternate'", rule="options") from None


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
            f"warmup has {len(counts)} counts, one a stage is needed: {costs.num_stages}", rule="options"
        )
    for stage, count in enumerate(counts):
        if count < 1 or (stage and count > counts[stage - 1]):
            raise ScheduleError(
                f"warm-up counts are at least 1 and never rise from one stage to the next, got {list(warmup)}",
                rule="options",
            )
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
    limits = [memory_limit] * num if isinstance(memory_limit, int | float) else list(memory_limit)
    if len(limits) != num:
        raise CostError(f"memory_limit has {len(limits)} entries, one a rank is needed: {num}")
    most = []
    for stage, limit in enumerate(limits):
        kept = costs.memory_change("F", stage)
        if not limit >= kept:
            raise CostError(f"rank {stage}: memory_limit {limit:g} has no room for one forward, which keeps {kept:g}")
        most.append(num_microbatches if kept == 0 else math.floor(min(limit / kept + 1e-9, num_microbatches)))
    return most


def _alternating(name: str, num_stages: int, num_microbatches: int, counts: Sequence[int]) -> Schedule:
    """The warm-up forwards, then one whole backward and one forward in turn."""
    rows = []
    for stage, count in enumerate(counts):
        row = [Op("F", stage, m) for m in range(count)]
        for m in range(num_microbatches):
            row.append(Op("B", stage, m))
            if count + m < num_microbatches:
                row.append(Op("F", stage, count + m))
        rows.append(row)
    return Schedule.of(name, one_to_one(num_stages), rows, num_microbatches)


def _by_priority(
    alternating: Schedule,
    costs: Costs,
    links: Links,
    counts: Sequence[int],
    memory_limit: float | Sequence[float] | None,
) -> Schedule:
    """Runs the decision core over the delays and keeps the order in which the ops ran."""
    split = replace(
        alternating,
        order=tuple(
            tuple(part for op in row for part in (_halves(op) if op.kind == "B" else (op,)))
            for row in alternating.order
        ),
    )
    held = [alternating.num_microbatches * costs.memory_change("F", stage) for stage in range(costs.num_stages)]
    return simulate(
        split,
        costs,
        links=links,
        dispatch="dynamic",
        max_held=held if memory_limit is None else memory_limit,
        warmup=counts,
    ).executed()


def _halves(op: Op) -> tuple[Op, Op]:
    return Op("I", op.stage, op.microbatch), Op("W", op.stage, op.microbatch)


def _in_turn(
    alternating: Schedule, costs: Costs, links: Links, memory_limit: float | Sequence[float] | None
) -> Schedule:
    """Keeps F and I in strict turn and lays W where they leave a rank idle."""
    net = network(alternating, costs, links)
    split = {node for node, op in enumerate(net.graph.ops) if op.kind == "B"}
    durations = [
        costs.duration("I", net.graph.ops[node].stage) if node in split else duration
        for node, duration in enumerate(net.durations)
    ]
    _, least = net.earliest(durations)
    memory = memory_of(alternating, net.graph, costs, memory_limit)
    rows = Separation(alternating, costs, net, memory).filled_lazily(split, durations, least)
    return replace(alternating, order=tuple(map(tuple, rows)))
