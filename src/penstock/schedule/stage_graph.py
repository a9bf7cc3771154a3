"""How stages depend on one another: a chain where nothing else is said, else a graph with branches.

    chain     0 -> 1 -> 2 -> 3
    branches  0 -> 1 --.                  two towers, joined by stage 4
              2 -> 3 ---> 4

Activations flow along the edges, gradients against them. Stages may work on microbatches of different
sizes: where stage a has 8 of them and stage b has 4, each of b's takes two of a's.

Ops that are neither forward nor backward (a gather between towers, a collective, an offload) are
registered here: how many there are, on which stage or ranks, and what waits for what.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from math import gcd
from numbers import Real

from penstock.schedule.errors import ScheduleError
from penstock.schedule.op import BUILT_IN, KIND_NAME, Op
from penstock.schedule.pairs import Pair
from penstock.schedule.short_repr import short_repr
from penstock.schedule.updates import Windows

_NAME = re.compile(KIND_NAME)


@dataclass(frozen=True)
class Needs:
    """Each group of `num_before` ops of `before` unlocks a group of `num_after` ops of `after`, in order.

    `before` and `after` are (kind, stage). Kind "B" means the backward in whatever form it is there: in `before` the
    op that ends it (B or W), in `after` the op that begins it (B or I).

        Needs(("F", 3), ("GATHER", 3), num_before=4)     one GATHER after every four forwards
        Needs(("GATHER", 3), ("B", 3), num_after=4)      which lets four backwards go

    Or `pairs` names them: op a of `before` comes before op b of `after`, for each (a, b), and other ops need nothing.

        Needs(("OFFLOAD", 0), ("F", 0), pairs=((3, 7),))      F7 starts when OFFLOAD3 has given its memory back

    Attributes:
        before: the (kind, stage) of the ops that unlock.
        after: the (kind, stage) of the ops that wait.
        num_before: how many ops of `before` make a group.
        num_after: how many ops of `after` a group unlocks.
        pairs: numbers of single ops, in place of groups.

    Raises:
        ScheduleError: pairs and groups given together, or groups of less than one op.

    Examples:
        >>> import penstock as ps
        >>> need = ps.schedule.Needs(("F", 3), ("GATHER", 3), num_before=4)
        >>> need.before, need.num_before, need.num_after
        (('F', 3), 4, 1)
    """

    before: tuple[str, int]
    after: tuple[str, int]
    num_before: int = 1
    num_after: int = 1
    pairs: tuple[tuple[int, int], ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.pairs and (self.num_before, self.num_after) != (1, 1):
            raise ScheduleError(
                f"{self.before} before {self.after} is said by pairs and by groups of {self.num_before} and "
                f"{self.num_after}; leave one of the two out",
                rule="dependencies",
            )
        if self.num_before < 1 or self.num_after < 1:
            raise ScheduleError(
                f"{self.before} unlocks {self.after} in groups of {self.num_before} and {self.num_after}: "
                "both are at least 1",
                rule="dependencies",
            )

    def needed(self, index: int) -> Sequence[int]:
        """The ops of `before` that op `index` of `after` waits for."""
        if self.pairs:
            return self._paired.get(index, ())
        group = index // self.num_after
        return range(group * self.num_before, (group + 1) * self.num_before)

    @cached_property
    def _paired(self) -> dict[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for before, after in self.pairs:
            found[after] = (*found.get(after, ()), before)
        return found


@dataclass(frozen=True)
class Registered:
    """Ops of a kind of the user's own: `num_ops` of them on `stage`, numbered from 0, or as `microbatches` says.

    Attributes:
        stage: the stage that the ops belong to.
        num_ops: how many there are.
        kind: one upper-case letter, or at least three letters, digits or `_`, or two of which the second is a digit;
            none of the built-in kinds.
        ranks: the ranks that run it together; empty for those that host the stage.
        asynchronous: a rank starts it and goes on; what needs it waits for its end. See `async_ops`.
        holds: the stage activations that it takes at its start (above 0), or gives back at its end (below 0), on each
            rank that runs it: -1 for an offload, 1 for the reload.
        microbatches: where each op is of one microbatch, and not all have one, theirs, ascending: they are the ops'
            numbers, and each runs where the stage does for its microbatch. A need of one op for one ("F" before
            "OFFLOAD", "RELOAD" before "B") then binds these alone.

    Raises:
        ScheduleError: a name that is no kind or is built in, no ops, a rank named twice, or microbatches that are not
            as many as the ops, ascending.

    Examples:
        >>> import penstock as ps
        >>> gather = ps.schedule.Registered("GATHER", stage=1, num_ops=2, ranks=(1, 3))
        >>> graph = ps.schedule.StageGraph(2, edges=((0, 1),), registered=(gather,))
        >>> graph.registered[0].ranks
        (1, 3)
    """

    kind: str
    stage: int
    num_ops: int
    ranks: tuple[int, ...] = ()
    asynchronous: bool = False
    holds: float = 0.0
    microbatches: tuple[int, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.kind) or self.kind in BUILT_IN:
            raise ScheduleError(
                f"op kind {self.kind!r}: give an upper-case letter or word (of three letters or more, digits among "
                f"them), other than {', '.join(BUILT_IN)}",
                rule="kind",
            )
        if not isinstance(self.holds, Real) or not math.isfinite(self.holds):
            raise ScheduleError(
                f"kind {self.kind} of stage {self.stage} holds {self.holds!r}: give a number of stage activations, "
                "below 0 for what it gives back",
                rule="memory",
            )
        object.__setattr__(self, "holds", float(self.holds))
        if self.num_ops < 1:
            raise ScheduleError(f"kind {self.kind} of stage {self.stage} has {self.num_ops} ops: give at least 1")
        if len(set(self.ranks)) != len(self.ranks) or any(rank < 0 for rank in self.ranks):
            raise ScheduleError(f"kind {self.kind} of stage {self.stage} is on ranks {self.ranks}: name each once")
        given = self.microbatches
        if given and (
            len(given) != self.num_ops or self.ranks or list(given) != sorted({m for m in given if m >= 0})
        ):
            raise ScheduleError(
                f"kind {self.kind} of stage {self.stage} has {self.num_ops} ops, on ranks {self.ranks}, of "
                f"microbatches {given}: give as many microbatches as ops, ascending, each once, and no ranks",
                rule="kind",
            )

    @property
    def numbers(self) -> Sequence[int]:
        """Its ops' numbers, ascending."""
        return self.microbatches or range(self.num_ops)


@dataclass(frozen=True)
class StageGraph:
    """The stages of the model as a directed graph without cycles.

    Attributes:
        num_stages: how many there are.
        edges: (a, b) where b's forward takes a's output.
        num_microbatches: of each stage; empty where all stages have the schedule's.
        registered: ops of the user's own kinds.
        needs: what waits for what, besides what the edges say.
        updates: the windows of a schedule that has updates as ops; `Schedule.graph` fills it in.
        pairs: those of the schedule, whose ops wait for one another's needs; filled in alike.

    Raises:
        ScheduleError: an edge or op names a stage that is not there, the edges form a cycle (it is named), or
            a need counts more ops than there are.

    Examples:
        >>> import penstock as ps
        >>> towers = ps.schedule.StageGraph(3, edges=((0, 2), (1, 2)))
        >>> costs = ps.Costs.uniform(3, f=10, i=10, w=10)
        >>> plan = ps.plan(costs, num_ranks=3, num_microbatches=4, stages=towers)
        >>> plan.makespan, plan.lower_bound
        (130.0, 130.0)
    """

    num_stages: int
    edges: tuple[tuple[int, int], ...]
    num_microbatches: tuple[int, ...] = ()
    registered: tuple[Registered, ...] = ()
    needs: tuple[Needs, ...] = ()
    updates: Windows | None = None
    pairs: tuple[Pair, ...] = ()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        for a, b in self.edges:
            if not (0 <= a < self.num_stages and 0 <= b < self.num_stages):
                raise ScheduleError(
                    f"edge {a} -> {b} names a stage that is not there: they go from 0 to {self.num_stages - 1}",
                    rule="stages",
                )
        if len(set(self.edges)) != len(self.edges):
            raise ScheduleError(f"an edge is there twice: {self.edges}", rule="stages")
        if self.num_microbatches and (
            len(self.num_microbatches) != self.num_stages or min(self.num_microbatches) < 1
        ):
            raise ScheduleError(
                f"num_microbatches is {self.num_microbatches}: give one count per stage, each at least 1",
                rule="stages",
            )
        try:
            TopologicalSorter(dict(enumerate(self.sources))).prepare()
        except CycleError as error:
            path = " -> ".join(map(str, error.args[1]))
            message = f"the stages form a cycle, {path}; activations must flow one way"
            raise ScheduleError(message, rule="stages") from None
        self._check_registered()

    def _check_registered(self) -> None:
        names = [(r.kind, r.stage) for r in self.registered]
        if len(set(names)) != len(names):
            raise ScheduleError(f"a kind is registered twice for one stage: {names}", rule="kind")
        for kind, stage in [*names, *(end for need in self.needs for end in (need.before, need.after))]:
            if not 0 <= stage < self.num_stages:
                raise ScheduleError(
                    f"{kind} names stage {stage}, which is not there: they go from 0 to {self.num_stages - 1}",
                    rule="stages",
                )
            if kind not in BUILT_IN and (kind, stage) not in names:
                raise ScheduleError(
                    f"kind {kind} is not registered for stage {stage}; register it first", rule="kind"
                )

    @classmethod
    def chain(cls, num_stages: int) -> StageGraph:
        """Stage s feeds stage s + 1."""
        return _chain(num_stages)

    @cached_property
    def sources(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, those whose outputs it takes."""
        return _grouped(self.num_stages, ((b, a) for a, b in self.edges))

    @cached_property
    def targets(self) -> tuple[tuple[int, ...], ...]:
        """Of each stage, those that take its output."""
        return _grouped(self.num_stages, self.edges)

    @cached_property
    def needs_of(self) -> dict[tuple[str, int], tuple[Needs, ...]]:
        """By (kind, stage), what those ops wait for besides the edges; I is found where B is said."""
        found: dict[tuple[str, int], tuple[Needs, ...]] = {}
        for need in self.needs:
            kind, stage = need.after
            for name in ("B", "I") if kind == "B" else (kind,):
                found[name, stage] = (*found.get((name, stage), ()), need)
        return found

    @cached_property
    def backward_of(self) -> dict[Op, Op]:
        """Of each forward that is in a pair its backward."""
        return dict(self.pairs)

    @cached_property
    def forward_of(self) -> dict[Op, Op]:
        """Of each backward that is in a pair its forward."""
        return {backward: forward for forward, backward in self.pairs}

    @cached_property
    def registered_of(self) -> dict[tuple[str, int], Registered]:
        """The registered ops by (kind, stage)."""
        return {(r.kind, r.stage): r for r in self.registered}

    def needed(self, need: Needs, index: int) -> Sequence[int]:
        """The ops of `need.before` that op `index` of `need.after` waits for: those that are there."""
        found = need.needed(index)
        some = self.some_of.get(need.before) if self.some_of else None
        return found if some is None or need.pairs else [number for number in found if number in some]

    @cached_property
    def some_of(self) -> dict[tuple[str, int], frozenset[int]]:
        """By (kind, stage) the microbatches of registered ops that only some have."""
        return {(r.kind, r.stage): frozenset(r.microbatches) for r in self.registered if r.microbatches}

    @cached_property
    def holds(self) -> dict[tuple[str, int], float]:
        """The registered ops that hold or give back activations, by (kind, stage)."""
        return {(r.kind, r.stage): r.holds for r in self.registered if r.holds}

    @property
    def is_chain(self) -> bool:
        """Whether this says no more of the stages than that s feeds s + 1."""
        return replace(self, updates=None, pairs=()) == _chain(self.num_stages)

    def microbatches_of(self, stage: int, otherwise: int) -> int:
        """How many microbatches the stage works on; `otherwise` is the schedule's number."""
        return self.num_microbatches[stage] if self.num_microbatches else otherwise

    def numbers_of(self, end: tuple[str, int], otherwise: int) -> Sequence[int]:
        """The numbers of all ops of a (kind, stage); `otherwise` is the schedule's number of microbatches."""
        registered = self.registered_of.get(end)
        return range(self.microbatches_of(end[1], otherwise)) if registered is None else registered.numbers

    def matching(self, stage: int, microbatch: int, other: int) -> Iterable[int]:
        """The microbatches of stage `other` that hold the same samples as `microbatch` of `stage`, or share some."""
        if not self.num_microbatches or self.num_microbatches[stage] == self.num_microbatches[other]:
            return (microbatch,)
        mine, theirs = self.num_microbatches[stage], self.num_microbatches[other]
        unit = gcd(mine, theirs)
        group = microbatch // (mine // unit)
        return range(group * (theirs // unit), (group + 1) * (theirs // unit))


@cache
def _chain(num_stages: int) -> StageGraph:
    return StageGraph(num_stages, tuple((s, s + 1) for s in range(num_stages - 1)))


def _grouped(num_stages: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    rows: list[list[int]] = [[] for _ in range(num_stages)]
    for key, value in pairs:
        rows[key].append(value)
    return tuple(tuple(sorted(row)) for row in rows)
