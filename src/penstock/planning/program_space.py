"""The space of programs that a search tries: placements by name, rules for each, and stages made of a model's parts.

    eight parts, two ranks      0 1 2 3 4 5 6 7
    one-to-one                 [0 1 2 3|4 5 6 7]      on ranks 0 1
    v-shape                    [0 1|2 3|4 5|6 7]      on ranks 0 1 1 0

The values are those of FlexPipe's Table 2, and some more (see `program_search`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from penstock.cost import CostError, Costs
from penstock.planning.options import per_rank
from penstock.program import Program, Rules, breadth_first, by_microbatch, depth_first, earliest_first, placements
from penstock.program.rules import Traversal
from penstock.schedule import Placement, ScheduleError
from penstock.schedule.op import UPDATE

NUM_STAGE_CAPS = 4
"""Number of sets of caps on single stages that are tried under a memory limit."""


def placements_of(num_ranks: int, num_parts: int, shared_ends: bool = False) -> dict[str, Placement]:
    """The placements by name for a model of `num_parts` equal parts, if its parts can be divided among their stages.

    one-to-one, circular (2 or more stages per rank), v-shape, wave, and each of them in both directions.
    """
    a_rank = num_parts // num_ranks
    names = [
        name
        for name in placements.NAMES
        if a_rank % placements.STAGES_PER_RANK[name.removesuffix(placements.BOTH_WAYS)] == 0
    ]
    plain = {name: placements.named(name, num_ranks) for name in (names if num_ranks > 1 else names[:1])}
    if shared_ends:
        plain = {name: placements.shared_ends(placement) for name, placement in plain.items()}
    return plain


def check_names(names: Sequence[str], layouts: dict[str, Placement], num_ranks: int, num_parts: int) -> None:
    """Raises ScheduleError for a name that is no placement, or none for this number of ranks and parts."""
    for name in names:
        placements.named(name, max(2, num_ranks))
        if name in layouts:
            continue
        if num_ranks == 1:
            raise ScheduleError(
                f"{name} on 1 rank runs as one-to-one does; name that, or give more ranks", rule="options"
            )
        each = placements.STAGES_PER_RANK[name.removesuffix(placements.BOTH_WAYS)]
        raise ScheduleError(
            f"{name} has {each} stages per rank, of equally many parts each, and there are "
            f"{num_parts // num_ranks} parts per rank; give a multiple of {each * num_ranks} parts, or name others: "
            f"{', '.join(layouts)}",
            rule="options",
        )


def rules_of(
    name: str,
    placement: Placement,
    num_ranks: int,
    num_microbatches: int,
    memory_limit: float | Sequence[float] | None,
    costs: Costs,
    forward_first: bool,
) -> Iterator[Rules]:
    """The rules to try on one placement; the costs are those of its stages."""
    alone = len(placement.stages_of(0)) == 1
    plain: list[tuple[Traversal, Traversal]] = [(breadth_first(), breadth_first())]
    if not alone:
        forwards = [breadth_first(), depth_first()]
        backwards = [breadth_first(), depth_first()]
        if name.startswith("circular"):
            forwards += [breadth_first(num_ranks), depth_first(num_ranks)]
            backwards += [breadth_first(num_ranks), depth_first(num_ranks)]
        plain = [(f, b) for f in forwards for b in backwards]
        plain += [(earliest_first(), earliest_first()), (by_microbatch(), by_microbatch())]
    kinds = ["backward-first", "interleaved", *(["forward-first"] if forward_first else [])]
    for kind in kinds:
        for forward, backward in plain:
            for warmup in _warmups(placement, num_ranks, num_microbatches):
                yield Rules(kind, forward=forward, backward=backward, warmup=warmup, memory_limit=memory_limit)
    if memory_limit is None or alone or placement.num_pipelines > 1 or placement.shared:
        return
    room = per_rank("memory_limit", memory_limit, num_ranks)
    for limits in _stage_caps(placement, num_ranks, num_microbatches, room, costs):
        for kind in kinds:
            for pair in ((depth_first(), earliest_first()), (depth_first(), by_microbatch())):
                yield Rules(kind, forward=pair[0], backward=pair[1], max_in_flight=limits)


def _stage_caps(
    placement: Placement, num_ranks: int, num_microbatches: int, room: Sequence[float], costs: Costs
) -> Iterator[dict[int, float]]:
    """In-flight limits by stage, in proportion to the life of its activations: from its F down to the loss and back
    up to its W. They are the largest that fit under the limit on every rank, and some that leave room.
    """
    ranks = range(num_ranks)
    rate = max(sum(costs.f[s] + costs.i[s] + costs.w[s] for s in placement.stages_of(r)) for r in ranks)
    life = [sum(costs.f[s:]) + sum(costs.i[s:]) + costs.w[s] for s in range(placement.num_stages)]
    seen: list[dict[int, float]] = []
    for step in range(40, 0, -1):
        share = step / 20
        caps = {
            s: float(min(num_microbatches, max(1, ceil(share * life[s] / (rate or 1))))) for s in range(len(life))
        }
        if any(sum(caps[s] * costs.activation[s] for s in placement.stages_of(r)) > room[r] for r in ranks):
            continue
        if caps not in seen:
            seen.append(caps)
            yield caps
        if len(seen) == NUM_STAGE_CAPS:
            return


def _warmups(placement: Placement, num_ranks: int, num_microbatches: int) -> list[list[int] | None]:
    """No warm-up counts and, for a single pipeline, those of ZB-H2 and (with several stages per rank) ZB-V."""
    if placement.num_pipelines > 1 or placement.shared:
        return [None]
    return [None, [min(num_microbatches, 2 * (num_ranks - rank) - 1) for rank in range(num_ranks)]]


def work_of(program: Program) -> float:
    """A lower bound (ms) for every schedule of a program: the work of the busiest rank."""
    costs, placement = program.all_costs, program.placement
    busy = [0.0] * program.num_ranks
    for pipeline in range(placement.num_pipelines):
        count = len(range(pipeline, program.num_microbatches, placement.num_pipelines))
        for stage in range(program.num_stages):
            backward = min(costs.i[stage] + costs.w[stage], costs.duration("B", stage))
            for rank in placement.hosts(pipeline, stage):
                busy[rank] += count * (costs.f[stage] + backward)
    return max(busy)


def least_of(program: Program) -> float:
    """A lower bound (ms) for every schedule of one pipeline: a rank's own work, after the first forward
    has reached it.
    """
    costs, placement = program.all_costs, program.placement
    return max(
        sum(costs.f[: stages[0]])
        + program.num_microbatches * sum(costs.f[s] + costs.i[s] + costs.w[s] for s in stages)
        for stages in (placement.stages_of(rank) for rank in range(program.num_ranks))
    )


def fold(costs: Costs, num_stages: int, shared_ends: bool = False) -> Costs:
    """Costs of `num_stages` stages, each made of equally many consecutive parts. Shared ends stay as they are.

    Raises CostError if the parts can't be divided evenly.
    """
    inner, outer = (num_stages - 2, 1) if shared_ends else (num_stages, 0)
    parts = costs.num_stages - 2 * outer
    if inner < 1 or parts % inner:
        raise CostError(
            f"costs of {parts} parts do not fold into {inner} stages; give a number of parts that {inner} divides"
        )
    each = parts // inner

    def folded(values: Sequence[float]) -> list[float]:
        body = values[outer : len(values) - outer]
        sums = [sum(body[s * each : (s + 1) * each]) for s in range(inner)]
        return [*values[:outer], *sums, *values[len(values) - outer :]] if values else []

    def stage_of(part: int) -> int:
        return part if part < outer else min(outer + (part - outer) // each, num_stages - 1)

    others: dict[str | tuple[str, int], tuple[float, float]] = {}
    for kind, part, ms, memory in costs.other_entries:
        if kind == UPDATE:  # a stage's update is its parts' together
            continue
        key = kind if part is None else (kind, stage_of(part))
        before = others.get(key, (0.0, 0.0))
        others[key] = before[0] + ms, before[1] + memory
    for part in range(costs.num_stages):
        if (ms := costs.duration(UPDATE, part)) > 0:
            key = UPDATE, stage_of(part)
            others[key] = others.get(key, (0.0, 0.0))[0] + ms, 0.0

    sent = [costs.message_bytes[outer + (s + 1) * each - 1] for s in range(inner)]
    return replace(
        costs,
        f=folded(costs.f),
        i=folded(costs.i),
        w=folded(costs.w),
        b=folded(costs.b),
        activation=folded(costs.activation),
        message_bytes=[*costs.message_bytes[:outer], *sent, *costs.message_bytes[len(costs.message_bytes) - outer :]],
        update_bytes=folded(costs.update_bytes),
        take_over=folded(costs.take_over),
        weight_bytes=folded(costs.weight_bytes),
        gradient_bytes=folded(costs.gradient_bytes),
        optimizer_bytes=folded(costs.optimizer_bytes),
        other=others,
    )


def parts_of(costs: Costs, num_ranks: int, shared_ends: bool) -> int:
    parts = costs.num_stages - (2 if shared_ends else 0)
    if parts < num_ranks or parts % num_ranks:
        raise CostError(
            f"the costs are for {parts} parts{' between the ends' if shared_ends else ''}, which do not divide among "
            f"{num_ranks} ranks; give a multiple of {num_ranks}"
        )
    return parts
