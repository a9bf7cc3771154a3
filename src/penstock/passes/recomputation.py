"""Recomputes activations where memory asks: less is held between a forward and its backward, for more time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.cost import Costs
from penstock.dispatch import Graph, lower
from penstock.schedule import Op, Schedule, ScheduleError, check, require_no_updates
from penstock.schedule.async_ops import require_no_streams
from penstock.simulation.lowered import Memory, memory_of


def recompute(schedule: Schedule, costs: Costs, memory_limit: float | Sequence[float]) -> Schedule:
    """Puts an R before the backwards whose forwards shall keep only their input, until every rank is under its limit.

        before, peak 3                          limit 2 (nothing kept by recompute)
        rank 0 | F0 F1 F2 .  .  B0 B1 B2        rank 0 | F0 F1 F2 .  .  B0 B1 R2 B2

    R runs the forward again right before its backward, from the input that F kept (`costs.kept_by_recompute` of
    the activation), and then holds the whole activation. Each rank's row is walked from its start; where it is
    above the limit, the forward is chosen that saves most above the limit for its time, until it is not; at the
    end every R that turned out not to be needed is taken out again. On a rank whose stages cost and keep alike
    this is the fewest R that do. An R that the row had of the same stage moves right before its backward too.

    Ops that several ranks run together are not recomputed, nor is what a split backward holds from I to W: to do
    both, recompute first and separate gradients then, under the same limit. The order of the other ops stays.

    Args:
        schedule: whose forwards may run again.
        costs: per stage, with `kept_by_recompute`.
        memory_limit: most a rank may hold, in the units of the costs' activations; one for all or one per rank.

    Raises:
        ScheduleError: the schedule is not valid, or a rank is above its limit even with every R that helps.
        CostError: costs for another number of stages.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.Costs(f=[10] * 2, i=[10] * 2, w=[10] * 2, kept_by_recompute=0.0)
        >>> s = ps.passes.recompute(ps.build("gpipe", 2, 3), costs, memory_limit=2.0)
        >>> max(ps.simulate(s, costs).peak_activations)
        2.0
    """
    require_no_streams(schedule, "recompute counts what ranks run themselves")
    require_no_updates(schedule, "a forward that recompute runs again would read newer parameters than the first")
    check(schedule)
    costs.require_stages(schedule.num_stages)
    graph = lower(schedule)
    memory = memory_of(schedule, graph, costs, memory_limit)
    rows = []
    for rank in range(graph.num_ranks):
        chosen = _RankSavings(schedule, graph, costs, memory, rank).chosen()
        rows.append(_with_recomputation(schedule, schedule.order[rank], chosen))
    if tuple(rows) == schedule.order:
        return schedule
    result = replace(schedule, order=tuple(rows))
    check(result)
    return result


def _with_recomputation(schedule: Schedule, row: Sequence[Op], chosen: set[tuple[int, int]]) -> tuple[Op, ...]:
    """A row with an R right before the backward of each chosen (stage, microbatch).

    An R that the row has of the same queue moves there too, which never holds more: where it came early, those of
    backwards before its own must not come after it.
    """
    queues = {(stage, schedule.microbatch_pipeline[m]) for stage, m in chosen}

    def in_queue(op: Op) -> bool:
        return op.kind == "R" and (op.stage, schedule.pipeline_of(op)) in queues

    moved = {(op.stage, op.microbatch) for op in row if in_queue(op)}
    found: list[Op] = []
    for op in row:
        if op.kind in "BI" and (op.stage, op.microbatch) in chosen | moved:
            found.append(Op("R", op.stage, op.microbatch))
        if not in_queue(op):
            found.append(op)
    return tuple(found)


@dataclass(frozen=True)
class _RecomputeSaving:
    """What recomputing one forward saves: `amount` at the steps `first` to `last` of the row, for `time` ms."""

    key: tuple[int, int]
    first: int
    last: int
    amount: float
    time: float


class _RankSavings:
    """The row of one rank: what it holds above its limit, and the savings to choose from."""

    def __init__(self, schedule: Schedule, graph: Graph, costs: Costs, memory: Memory, rank: int) -> None:
        self._row = schedule.order[rank]
        self._rank, self._cap = rank, memory.caps[rank]
        room = memory.room(rank)
        self._levels = memory.levels(graph, rank)
        self._excess = [level - room for level in self._levels]
        again = {(op.stage, op.microbatch) for op in self._row if op.kind == "R"}
        start: dict[tuple[int, int], int] = {}
        self._savings = []
        for step, op in enumerate(self._row):
            key = op.stage, op.microbatch
            if graph.gang[graph.first[rank] + step] >= 0 or key in again:
                continue
            if op.kind == "F":
                start[key] = step
            elif op.kind in ("B", "I") and key in start:
                # While R itself runs, right before the backward, all is held again: the last step saved is the
                # one before the op before it.
                amount, time = costs.memory_change("R", *key), costs.duration("R", *key)
                if amount > 0 and step - 2 >= start[key]:
                    self._savings.append(_RecomputeSaving(key, start[key], step - 2, amount, time))

    def chosen(self) -> set[tuple[int, int]]:
        """The (stage, microbatch) pairs to recompute."""
        left = sorted(self._savings, key=lambda saving: saving.first)
        open_savings: list[_RecomputeSaving] = []
        chosen: list[_RecomputeSaving] = []
        for step in range(len(self._row)):
            while left and left[0].first <= step:
                open_savings.append(left.pop(0))
            open_savings = [saving for saving in open_savings if saving.last >= step]
            while self._excess[step] > 0:
                if not open_savings:
                    raise self._too_much(step, chosen)
                best = min(open_savings, key=lambda saving: self._price(saving, step))
                open_savings.remove(best)
                self._save(best, 1.0)
                chosen.append(best)
        for saving in sorted(chosen, key=lambda saving: -saving.time):
            if all(self._excess[step] + saving.amount <= 0 for step in range(saving.first, saving.last + 1)):
                self._save(saving, -1.0)
                chosen.remove(saving)
        return {saving.key for saving in chosen}

    def _price(self, saving: _RecomputeSaving, step: int) -> tuple[float, int]:
        """Its time for each unit that it saves above the limit from `step` on."""
        useful = sum(
            min(saving.amount, self._excess[later])
            for later in range(step, saving.last + 1)
            if self._excess[later] > 0
        )
        return saving.time / useful, -saving.last

    def _save(self, saving: _RecomputeSaving, sign: float) -> None:
        for step in range(saving.first, saving.last + 1):
            self._excess[step] -= sign * saving.amount

    def _too_much(self, step: int, chosen: list[_RecomputeSaving]) -> ScheduleError:
        op = self._row[step]
        saved = sum(saving.amount for saving in chosen if saving.first <= step <= saving.last)
        return ScheduleError(
            f"rank {self._rank}, step {step}, {op.short()} of stage {op.stage}: the rank would hold "
            f"{self._levels[step] - saved:g} even with every forward recomputed that can be, the limit is "
            f"{self._cap:g} (rule: memory); give more memory, or build the schedule with fewer in flight",
            rule="memory",
            rank=self._rank,
            step=step,
            op=op,
        )
