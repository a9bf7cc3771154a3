"""How many forwards each stage runs before its first backward, so that slow links cost little (PipeMorph, section 4).

Stage i has x_i warm-up forwards; x_i - x_(i+1) is the slack of the link between them. While one link is late,
the backward of microbatch a comes home and sets free the forward of microbatch a + x_i; with slack s the stage
below has s more forwards and backwards to run meanwhile:

    stage i     ... ---> B_a F_b --->           t_i^F + t_i^B, and a delay c before and after
                   /             \\
    stage i+1   B_a  F  B  F  B   F_b           s (t_(i+1)^F + t_(i+1)^B)

So the link's delay is absorbed as long as (Eq. 1)

    t_i^F + t_i^B + 2 c <= s (t_(i+1)^F + t_(i+1)^B).

Past that every round trip is late and the lateness adds up over the microbatches (Theorem 1). The statement is
about one stage per rank, in strict alternation of backward and forward.

`slow_link_schedule` makes a schedule with such counts for links that are known to be late (Algorithms 3 and 4, driven
by events). The order is made while the delays are there, so it spends its waiting on weight gradients where a
schedule made without them would stand still: 4 stages, 12 microbatches, 10 ms ops and the first link 20 ms late take
410 ms, against 440 for the order that was made without delay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from numbers import Real

from penstock.cost import CostError, Costs, Links
from penstock.dispatch.queues import Lister
from penstock.engine.tolerance import EPSILON
from penstock.planning.options import per_rank
from penstock.program import Program, Rules
from penstock.schedule import Schedule, ScheduleError, one_to_one

MIN_SLACK = 2
"""The slack that Algorithm 2 gives every link where it can: one more than a link without delay needs."""


def tolerance(costs: Costs, stage: int, slack: float, kind: str = "I") -> float:
    """The largest delay (ms each way) of the link from `stage` to the next that `slack` absorbs, by Eq. 1.

    Negative where the slack is too small even for a link without delay.

    Args:
        costs: of each stage.
        stage: the stage above the link.
        slack: how many more forwards that stage runs before its first backward than the next one.
        kind: what passes the gradient on: "I", or "B" where backwards are not split.

    Examples:
        >>> import penstock as ps
        >>> ps.planning.tolerance(ps.Costs.uniform(4, f=10, i=10, w=10), stage=0, slack=3)
        20.0
    """
    _check_link(costs, stage)
    return (slack * _round(costs, stage + 1, kind) - _round(costs, stage, kind)) / 2


def needed_slack(costs: Costs, stage: int, delay: float, kind: str = "I") -> int:
    """The least slack with which the link from `stage` to the next absorbs `delay` (ms each way), by Eq. 1.

    Corrects Algorithm 2, which takes the backward time of the wrong stage and rounds down: with t = 20 and
    c = 30 that gives slack 2, which tolerates 20 only; 3 is needed.

    Args:
        costs: of each stage.
        stage: the stage above the link.
        delay: of the link, each way (ms).
        kind: what passes the gradient on: "I", or "B" where backwards are not split.

    Raises:
        CostError: the next stage takes no time, so that no number of its rounds lasts long enough.

    Examples:
        >>> import penstock as ps
        >>> ps.planning.needed_slack(ps.Costs.uniform(4, f=20, i=20, w=20), stage=0, delay=30)
        3
    """
    _check_link(costs, stage)
    if not isinstance(delay, Real) or not 0 <= delay < math.inf:
        raise CostError(f"the delay is {delay!r}: give milliseconds of at least 0")
    rounds = _needed(_round(costs, stage, kind) + 2 * delay, _round(costs, stage + 1, kind))
    if math.isinf(rounds):
        raise CostError(
            f"stage {stage + 1} takes no time, so no slack absorbs {delay:g} ms before it; give it a cost above 0"
        )
    return int(rounds)


def tolerances(schedule: Schedule, costs: Costs) -> dict[tuple[int, int], float]:
    """What each link of a schedule absorbs (ms each way), read off its own warm-up counts by Eq. 1.

    Keys are (rank of stage i, rank of stage i + 1). A stage that runs all its forwards before its first
    backward waits for no backward: its link absorbs any delay (inf). A negative value says that the slack is
    too small even without delay.

    Args:
        schedule: with one stage per rank.
        costs: of each stage.

    Raises:
        ScheduleError: a rank hosts more than one stage: Eq. 1 speaks of one stage per rank.
        CostError: costs for another number of stages.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("zb", 4, 12, warmup=[7, 5, 3, 1])
        >>> ps.planning.tolerances(s, ps.Costs.uniform(4, f=10, i=10, w=10))
        {(0, 1): 10.0, (1, 2): 10.0, (2, 3): 10.0}
    """
    costs.require_stages(schedule.num_stages)
    hosts = schedule.placement.pipelines[0]
    if schedule.placement.num_pipelines > 1 or len(set(hosts)) != len(hosts):
        raise ScheduleError(
            f"tolerances: Eq. 1 speaks of one stage per rank, but {schedule.name} places its stages on ranks "
            f"{schedule.placement.pipelines}; simulate it with ps.Links instead",
            rule="placement",
        )
    counts, kinds = [], []
    for host in hosts:
        row = schedule.order[host]
        first = next((place for place, op in enumerate(row) if op.kind in "BI"), len(row))
        counts.append(sum(op.kind == "F" for op in row[:first]))
        kinds.append("B" if any(op.kind == "B" for op in row) else "I")
    found = {}
    for stage in range(len(hosts) - 1):
        rounds = [costs.duration("F", s) + costs.duration(kinds[s], s) for s in (stage, stage + 1)]
        absorbed = ((counts[stage] - counts[stage + 1]) * rounds[1] - rounds[0]) / 2
        found[hosts[stage], hosts[stage + 1]] = absorbed if counts[stage] < schedule.num_microbatches else math.inf
    return found


def initial_warmups(
    num_stages: int,
    num_microbatches: int,
    memory: float | Sequence[float],
    activation: float | Sequence[float],
    reserved: float | Sequence[float] = 0.0,
) -> tuple[int, ...]:
    """PipeMorph's Algorithm 1: before any delay is known, as much slack as memory allows, spread evenly.

        4 stages, memory for 10 activations    x = 10 7 4 1
        with one stage capped at 4             x = 10 4 3 1       each slack as large as the caps allow

    The least slack is made as large as possible, then the least of the others, and so on; what can't be
    spread evenly goes to the first links, as printed.

    Corrections to the paper: one stage has no link to keep safe and gets 1, instead of a division by zero;
    counts are clipped to the number of microbatches; `reserved` (weights, gradients, optimizer state) is taken
    off the memory first; memory, activation and what is reserved may differ from stage to stage.

    Args:
        num_stages: of the pipeline.
        num_microbatches: of a step.
        memory: of each rank, in bytes or activation units; one number for all, or one per stage.
        activation: what one forward keeps, alike.
        reserved: what else the rank holds, alike.

    Raises:
        CostError: a number that makes no sense, or a stage without room for one forward.

    Examples:
        >>> import penstock as ps
        >>> ps.planning.initial_warmups(4, num_microbatches=12, memory=10, activation=1)
        (10, 7, 4, 1)
    """
    _check_counts(num_stages, num_microbatches)
    rows = [_each(name, value, num_stages) for name, value in (("memory", memory), ("reserved", reserved))]
    kept = _each("activation", activation, num_stages)
    caps = []
    for stage, (whole, taken, one) in enumerate(zip(*rows, kept, strict=True)):
        room = whole - taken
        fitting = num_microbatches if one == 0 else math.floor(min(room / one + EPSILON, float(num_microbatches)))
        if room < 0 or fitting < 1:
            raise CostError(
                f"stage {stage} has memory {whole:g}, of which {taken:g} is reserved: no room for one forward, "
                f"which keeps {one:g}; give it more memory, smaller microbatches, or fewer layers"
            )
        caps.append(fitting)
    caps = _never_rising(caps)
    slacks = [0] * (num_stages - 1)
    growing = list(range(num_stages - 1))
    while growing:
        growing = [link for link in growing if _grow(slacks, link, caps)]
    return _counts(slacks)


def adapted_warmups(
    costs: Costs,
    links: Links,
    num_microbatches: int,
    *,
    max_in_flight: int | Sequence[int] | None = None,
    kind: str = "I",
) -> tuple[int, ...]:
    """PipeMorph's Algorithm 2: the slack that each link's delay needs, from the last stage up.

        10 ms ops, 4 stages, link 0 20 ms late     slack 3 2 2     x = 8 5 3 1

    Stage i is on rank i. Where the two directions of a link differ, their sum stands for 2c.

    Corrections to the paper: the backward time in Eq. 1 is that of stage i; the quotient is rounded up; the
    clip is x_i <= N instead of a slack of at most N - 2S, which can undercut the minimum of 2 and go negative
    (a stage that has run all N forwards waits for no backward, so nothing is lost by that clip); and memory may
    stay bounded: under `max_in_flight` the link with most to spare beyond its delay gives way first, so that the
    least margin is as large as the caps allow.

    Args:
        costs: of each stage.
        links: the delays (ms).
        num_microbatches: of a step.
        kind: what passes the gradient on: "I", or "B" where backwards are not split.
        max_in_flight: most forwards a stage may hold before its first backward; one number for all, or one per
            stage. None where activations go to host memory, as in the paper.

    Raises:
        CostError: links between ranks that are not there, or a cap below 1.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs.uniform(4, f=10, i=10, w=10)
        >>> ps.planning.adapted_warmups(costs, ps.Links({(0, 1): 20.0}), num_microbatches=12)
        (8, 5, 3, 1)
    """
    num_stages = costs.num_stages
    _check_counts(num_stages, num_microbatches)
    links.check_ranks(num_stages)
    given = [num_microbatches] * num_stages if max_in_flight is None else max_in_flight
    caps = _each("max_in_flight", given, num_stages)
    if low := [stage for stage, cap in enumerate(caps) if cap < 1]:
        raise CostError(f"max_in_flight of stage {low[0]} is {caps[low[0]]:g}: every stage holds at least 1 forward")
    whole = _never_rising([math.floor(min(cap, float(num_microbatches))) for cap in caps])
    slacks: list[int] = []
    for stage in range(num_stages - 1):
        late = links.delay(stage, stage + 1) + links.delay(stage + 1, stage)
        rounds = _needed(_round(costs, stage, kind) + late, _round(costs, stage + 1, kind))
        slacks.append(int(min(max(rounds, MIN_SLACK), num_microbatches)))

    def margin(link: int) -> float:
        late = links.delay(link, link + 1) + links.delay(link + 1, link)
        return tolerance(costs, link, slacks[link], kind) - late / 2

    for stage in range(num_stages - 2, -1, -1):
        while 1 + sum(slacks[stage:]) > whole[stage] and whole[stage] < num_microbatches:
            slacks[max((link for link in range(stage, num_stages - 1) if slacks[link] > 0), key=margin)] -= 1
    return tuple(min(count, num_microbatches) for count in _counts(slacks))


def _grow(slacks: list[int], link: int, caps: Sequence[int]) -> bool:
    """Gives `link` one more slack if all stages above it have room for that."""
    counts = _counts(slacks)
    if any(counts[stage] >= caps[stage] for stage in range(link + 1)):
        return False
    slacks[link] += 1
    return True


def _counts(slacks: Sequence[int]) -> tuple[int, ...]:
    """x_i from the slacks: the last stage has one warm-up forward."""
    return tuple(accumulate(reversed(slacks), initial=1))[::-1]


def _never_rising(caps: Sequence[int]) -> list[int]:
    """A stage cannot hold more warm-up forwards than the one before it (Lemma 1)."""
    return [min(caps[: stage + 1]) for stage in range(len(caps))]


def _round(costs: Costs, stage: int, kind: str) -> float:
    if kind not in ("B", "I"):
        raise CostError(f"kind is {kind!r}: the gradient is passed on by 'I', or by 'B' where it is not split")
    return costs.duration("F", stage) + costs.duration(kind, stage)


def _needed(time: float, round_time: float) -> float:
    """How many rounds last at least `time`."""
    if time <= 0:
        return 0
    if round_time == 0:
        return math.inf
    return math.ceil(time / round_time * (1 - EPSILON))


def _check_link(costs: Costs, stage: int) -> None:
    if not 0 <= stage < costs.num_stages - 1:
        raise CostError(f"stage {stage} has no next stage: links start at stages 0 to {costs.num_stages - 2}")


def _check_counts(num_stages: int, num_microbatches: int) -> None:
    for what, count in (("stage", num_stages), ("microbatch", num_microbatches)):
        if count < 1:
            raise CostError(f"warm-up counts need at least one {what}, got {count}")


def _each(name: str, value: float | Sequence[float], num_stages: int) -> list[float]:
    """One number per stage, at least 0."""
    values = [value] * num_stages if isinstance(value, Real) else list(value)  # type: ignore[arg-type]
    if len(values) != num_stages:
        raise CostError(f"{name} has {len(values)} entries; give one per stage, {num_stages} in all")
    for stage, each in enumerate(values):
        if not isinstance(each, Real) or math.isnan(each) or each < 0:
            raise CostError(f"{name} of stage {stage} is {each!r}: give a number of at least 0")
    return [float(each) for each in values]


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
    counts = _counts_within(costs, num_microbatches, links, warmup, memory_limit)
    rules = replace(rules, warmup=counts, memory_limit=memory_limit)
    placement = one_to_one(costs.num_stages)
    program = Program(placement, num_microbatches, rules, split=True, costs=costs, links=links, name=name)
    if prove:
        return program.build()
    graph = program.queues()
    listed = Lister(graph).list_by_rules(program.tables(graph))
    return listed.schedule(program.name) if listed.complete else program.build()


def _counts_within(
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
