"""A program: a placement and rules, from which a schedule is built.

    Program(one_to_one(4), 8, Rules(max_in_flight=[4, 3, 2, 1])).build()                     1F1B
    Program(v_shape(4), 16, Rules(max_in_flight=8), split=True).build()                     a V, W in the bubbles
    Program(bidirectional(one_to_one(4)), 8, Rules(max_in_flight=4)).build()                 Chimera

Building simulates the rules over the costs: whenever a rank is free, it takes the op that its rules put first among
those that are ready. (FlexPipe instead moves all ranks on in steps, as if all ops took equally long.) With functions
of the user's, building runs uncompiled; nothing else changes.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from numbers import Integral, Real
from typing import Any

from penstock.cost import CostError, Costs, Links
from penstock.cost.costs import require_costs
from penstock.dispatch.queues import Label, Lister, QueueGraph, queue_graph
from penstock.engine.rule_tables import (
    BACKWARD,
    FORWARD,
    INFINITY,
    NUM_CLASSES,
    WEIGHT,
    QueueRules,
    SlotRules,
    Tables,
)
from penstock.program.new_op import Branch, NewOp, StageName
from penstock.program.rules import KINDS, Rules, joined_rules, of_one_rank
from penstock.program.stepper import Stepper
from penstock.schedule import Needs, Placement, Registered, Schedule, ScheduleError, StageGraph, check
from penstock.schedule.placement import check_all_used, num_ranks_of
from penstock.schedule.short_repr import short_repr
from penstock.unknown_names import refuse_unknown


@refuse_unknown(ScheduleError)
@dataclass(frozen=True)
class Program:
    """A placement and rules, from which a schedule is built.

    Attributes:
        placement: which rank hosts which stage.
        num_microbatches: microbatches of a step, over all pipelines together.
        rules: one `Rules` for all ranks, or a mapping from ranks to `Rules`. Ranks that it leaves out use `Rules()`.
        split: whether backwards are split into I and W, so that W fills bubbles. True or False for all stages, or a
            function of the stage.
        costs: how long ops take while the schedule is built (ms). Default: 1 ms for F, I and W of each rank's share
            of the model, so 0.5 ms per stage with two stages per rank. `uneven` does not steer the order.
        links: how late messages are while it is built (ms). Default: they arrive at once.
        stages: how the stages depend on one another. Default: a chain.
        ops: additional kinds of ops.
        pipelines: the pipeline of each microbatch. Default: pipelines take turns.
        branches: for each branch, by name, its first stage and its number of stages.
        name: the name of the schedule.

    Raises:
        ScheduleError: a placement, rule or op that contradicts another one.
        CostError: costs for another number of stages.

    Examples:
        >>> import penstock as ps
        >>> program = ps.Program(ps.placements.v_shape(2), 4, ps.Rules(max_in_flight=4), split=True)
        >>> s = program.build()
        >>> s.num_stages, ps.simulate(s).makespan
        (4, 14.0)

    References:
        FlexPipe, section 4: the language.
    """

    placement: Placement
    num_microbatches: int
    rules: Rules | Mapping[int, Rules] = field(default_factory=Rules)
    split: bool | Callable[[int], bool] = False
    costs: Costs | None = None
    links: Links | None = None
    stages: StageGraph | None = None
    ops: Sequence[NewOp] = ()
    pipelines: Sequence[int] | None = None
    branches: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    name: str = "program"

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if not isinstance(self.placement, Placement):
            raise ScheduleError(
                f"the placement is {reprlib.repr(self.placement)}: give one of ps.placements, or a ps.Placement",
                rule="placement",
            )
        if not _is_count(self.num_microbatches):
            raise ScheduleError(
                f"a program of {self.num_microbatches!r} microbatches: give a whole number of at least 1",
                rule="options",
            )
        if not isinstance(self.split, bool) and not callable(self.split):
            raise ScheduleError(
                f"split is {reprlib.repr(self.split)}: give True, False or a function of the stage", rule="options"
            )
        _require_ops(self.ops)
        Links.of(self.links)
        if self.costs is not None:
            require_costs(self.costs)
        check_all_used(self.placement)
        by_rank = dict(self.rules) if isinstance(self.rules, Mapping) else {0: self.rules}
        if unknown := [rank for rank in by_rank if not (isinstance(rank, int) and 0 <= rank < self.num_ranks)]:
            raise ScheduleError(
                f"rules are given for rank {unknown[0]!r}; ranks go from 0 to {self.num_ranks - 1}", rule="rules"
            )
        for rank, rules in by_rank.items():
            if not isinstance(rules, Rules):
                raise ScheduleError(
                    f"the rules of rank {rank} are {reprlib.repr(rules)}: give ps.Rules", rule="rules"
                )
            rules.check_stages(self.num_stages)
        if self.pipelines is not None:
            wrong = [k for k in self.pipelines if k not in range(self.placement.num_pipelines)]
            if len(self.pipelines) != self.num_microbatches or wrong:
                raise ScheduleError(
                    f"pipelines is {list(self.pipelines)}: give each of the {self.num_microbatches} microbatches one "
                    f"from 0 to {self.placement.num_pipelines - 1}",
                    rule="placement",
                )
        if self.stages is not None and self.stages.num_stages != self.num_stages:
            raise ScheduleError(
                f"the stage graph has {self.stages.num_stages} stages, the placement {self.num_stages}", rule="stages"
            )

    @classmethod
    def of_branches(
        cls,
        branches: Mapping[str, Branch],
        *,
        split: bool | Callable[[int], bool] = False,
        costs: Costs | None = None,
        links: Links | None = None,
        ops: Sequence[NewOp] = (),
        name: str = "program",
    ) -> Program:
        """A program for a model of several branches side by side. Stages are numbered branch by branch.

        Each branch has its own ranks, rules and microbatches. Raises ScheduleError if two branches want the same rank
        under different rules, or if a branch feeds one that does not exist.
        """
        if not branches:
            raise ScheduleError("a program of no branches: give at least one", rule="stages")
        row: list[int] = []
        shared: list[tuple[int, tuple[int, ...]]] = []
        edges: list[tuple[int, int]] = []
        counts: list[int] = []
        where: dict[str, tuple[int, int]] = {}
        rules: dict[int, Rules] = {}
        next_rank = 0
        for label, branch in branches.items():
            if not isinstance(branch, Branch):
                raise ScheduleError(f"branch {label} is {reprlib.repr(branch)}: give a ps.Branch", rule="stages")
            size = num_ranks_of(branch.placement)
            ranks = branch.ranks or tuple(range(next_rank, next_rank + size))
            if len(ranks) != size or len(set(ranks)) != size or any(not _is_count(rank + 1) for rank in ranks):
                raise ScheduleError(
                    f"branch {label} is placed over {size} ranks and given {ranks}; name as many, each once, from 0",
                    rule="placement",
                )
            next_rank = max(next_rank, max(ranks) + 1)
            where[label] = first, num = len(row), branch.placement.num_stages
            row += [ranks[rank] for rank in branch.placement.pipelines[0]]
            shared += [(first + at, tuple(ranks[rank] for rank in hosts)) for at, hosts in branch.placement.shared]
            counts += [branch.num_microbatches] * num
            edges += [(stage, stage + 1) for stage in range(first, first + num - 1)]
            for place, rank in enumerate(ranks):
                own = of_one_rank(branch.rules, place, size, first, num)
                rules[rank] = joined = joined_rules(rules.get(rank, own), own)
                if joined != joined_rules(own, joined):
                    raise ScheduleError(
                        f"branch {label} shares rank {rank} with another whose rules differ; give both the same, "
                        "or ranks of their own",
                        rule="rules",
                    )
        for label, branch in branches.items():
            for target in branch.feeds:
                if target not in where:
                    raise ScheduleError(
                        f"branch {label} feeds {target!r}, but there are {', '.join(where)}", rule="stages"
                    )
                edges.append((where[label][0] + where[label][1] - 1, where[target][0]))
        graph = StageGraph(len(row), tuple(edges), tuple(counts) if len(set(counts)) > 1 else ())
        return cls(
            Placement((tuple(row),), tuple(shared)),
            max(counts),
            rules,
            split,
            costs,
            links,
            graph,
            _require_ops(ops),
            None,
            where,
            name,
        )

    @cached_property
    def num_ranks(self) -> int:
        return num_ranks_of(self.placement)

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def has_functions(self) -> bool:
        """Whether some rule is a function of the user's, so that building runs uncompiled."""
        return any(self.rules_of(rank).has_functions for rank in range(self.num_ranks))

    def rules_of(self, rank: int) -> Rules:
        """The rules of one rank."""
        return self.rules.get(rank, Rules()) if isinstance(self.rules, Mapping) else self.rules

    def stage(self, name: StageName) -> int:
        """The number of a stage, given as a number or as (branch, number within the branch)."""
        if isinstance(name, int) and 0 <= name < self.num_stages:
            return name
        if not (isinstance(name, tuple) and len(name) == 2 and isinstance(name[1], int)):
            raise ScheduleError(
                f"no stage is called {name!r}: give a number from 0 to {self.num_stages - 1}, or (branch, number)",
                rule="stages",
            )
        branch, within = name
        if branch not in self.branches:
            raise ScheduleError(
                f"no branch named {branch!r}: there are {', '.join(self.branches) or 'none'}", rule="stages"
            )
        first, num = self.branches[branch]
        if not -num <= within < num:
            raise ScheduleError(f"branch {branch} has {num} stages, so none is number {within}", rule="stages")
        return first + within % num

    @cached_property
    def stage_graph(self) -> StageGraph | None:
        """The stages with the registered ops; None for a plain chain without any."""
        if not self.ops:
            return self.stages
        graph = self.stages or StageGraph.chain(self.num_stages)
        registered, needs = list(graph.registered), list(graph.needs)
        for op in self.ops:
            stage = self.stage(op.stage)
            num_ops = self._count(op, graph, registered)
            hosts = tuple(dict.fromkeys(rank for at in op.on for rank in self.placement.hosts(0, self.stage(at))))
            # In several pipelines an op is of one microbatch, and runs where the stage is for that.
            of_one = self.placement.num_pipelines > 1 and not hosts and num_ops == self.num_microbatches
            numbers = tuple(range(num_ops)) if of_one else ()
            registered.append(Registered(op.kind, stage, num_ops, hosts, op.asynchronous, op.holds, numbers))
            if op.passed_on and num_ops > 1:
                ends = (op.kind, stage)
                needs.append(Needs(ends, ends, pairs=tuple((m - 1, m) for m in range(1, num_ops))))
            needs += [Needs((kind, self.stage(at)), (op.kind, stage), n, 1) for (kind, at), n in op.after.items()]
            needs += [Needs((op.kind, stage), (kind, self.stage(at)), 1, n) for (kind, at), n in op.before.items()]
        return replace(graph, registered=tuple(registered), needs=tuple(needs))

    def _count(self, op: NewOp, graph: StageGraph, registered: Sequence[Registered]) -> int:
        """How many ops of a registered kind there are, computed from the sizes of its groups."""
        there = {(known.kind, known.stage): known.num_ops for known in registered}
        counts = {float(op.num_ops)} if op.num_ops is not None else set()
        for (kind, at), size in [*op.after.items(), *op.before.items()]:
            stage = self.stage(at)
            if kind in ("F", "B") or (kind in ("I", "W") and self._splits(stage)):
                number = graph.microbatches_of(stage, self.num_microbatches)
            elif (kind, stage) in there:
                number = there[kind, stage]
            else:
                raise ScheduleError(
                    f"op kind {op.kind} goes before or after {kind} of stage {stage}, which is not there: register "
                    "ops in the order in which they build on one another; I and W are there in split backwards",
                    rule="kind",
                )
            counts.add(number / size)
        if len(counts) != 1 or min(counts) < 1 or min(counts) != int(min(counts)):
            raise ScheduleError(
                f"op kind {op.kind}: its groups ask for {' and '.join(f'{c:g}' for c in sorted(counts))} ops; choose "
                "group sizes that divide the microbatches and agree",
                rule="dependencies",
            )
        return int(counts.pop())

    def _splits(self, stage: int) -> bool:
        if not callable(self.split):
            return bool(self.split)
        try:
            return bool(self.split(stage))
        except Exception as error:
            raise ScheduleError(
                f"split raised {type(error).__name__}: {error}, asked about stage {stage}; see the exception above "
                "for where",
                rule="rules",
            ) from error

    @property
    def callables(self) -> dict[str, Callable[..., Any]]:
        """The function of each kind of op that has a `run`, for `ps.Pipeline(..., ops=program.callables)`.

        Raises ScheduleError if one kind has several functions.
        """
        found: dict[str, Callable[..., Any]] = {}
        for op in self.ops:
            if op.run is not None and found.setdefault(op.kind, op.run) != op.run:
                raise ScheduleError(
                    f"op kind {op.kind} has several functions; give one, which tells its stages apart by the call",
                    rule="kind",
                )
        return found

    @cached_property
    def all_costs(self) -> Costs:
        """The costs with those of the registered ops. Simulate the schedule with these.

        Where a `NewOp` gives no time or no memory, that of `costs` stays.
        """
        costs = self.costs or Costs.assumed(self.num_ranks, self.placement)
        own = [(op, (op.kind, self.stage(op.stage))) for op in self.ops]
        said = {at: (op.time or costs.duration(*at), op.memory or costs.memory_change(*at)) for op, at in own}
        return costs.with_other(said) if said else costs

    def queues(self) -> QueueGraph:
        """The ops as queues, for list scheduling."""
        k = self.placement.num_pipelines
        pipelines = self.pipelines or [m % k for m in range(self.num_microbatches)]
        last = [op.kind for op in self.ops if op.last]
        return queue_graph(
            self.placement,
            self.num_ranks,
            pipelines,
            self.all_costs,
            self.links,
            self.stage_graph,
            self._splits,
            last,
        )

    def tables(self, graph: QueueGraph) -> Tables:
        """The graph as tables, with the rules filled in. Raises ScheduleError for limits that nothing can meet."""
        if self.all_costs.factors.activation and any(
            self.rules_of(rank).memory_limit is not None for rank in range(self.num_ranks)
        ):
            raise CostError(
                "a program with a memory_limit needs microbatches that all keep the same, as it is made before it is "
                "known which of them come together; leave `uneven` out, and then order the microbatches with "
                "ps.planning.order_microbatches(schedule, costs, memory_limit=...)"
            )
        tables, num_ranks = graph.tables, self.num_ranks
        rules = [self.rules_of(rank) for rank in range(num_ranks)]
        caps = [each.cap_of(rank, num_ranks) for rank, each in enumerate(rules)]
        limits = [each.memory_of(rank, num_ranks) for rank, each in enumerate(rules)]
        num_ops = [last - first for first, last in pairwise(tables.network.op_first)]
        own = [tables.ranks.own[a:b] for a, b in pairwise(tables.ranks.own_first)]
        warmup, cap = [], list(tables.queues.cap)
        for rank, each in enumerate(rules):
            forwards = [q for q in own[rank] if tables.queues.op_class[q] == FORWARD]
            warmup.append(min(each.warmup_of(rank, num_ranks), sum(num_ops[q] for q in forwards)))
            self._check_caps(tables.queues, forwards, rank, caps[rank], limits[rank], warmup[rank])
            for q in own[rank]:
                _, kind, stage = graph.labels[q]
                if kind == "F":
                    cap[q] = min(cap[q], each.cap_of_stage(stage))
        said: dict[str, list[Any]] = {
            "mode": [KINDS[each.kinds] for each in rules],
            "strict": [int(each.strict) for each in rules],
            "unit_forward": [each.units[0] for each in rules],
            "unit_backward": [each.units[1] for each in rules],
            "cap_memory": limits,
            "cap_count": caps,
            "patience": [each.patience for each in rules],
            "warmup": warmup,
        }
        for name, values in said.items():
            values += getattr(tables.ranks, name)[num_ranks:]  # streams take what is ready
        return tables._replace(
            queues=tables.queues._replace(cap=cap),
            ranks=tables.ranks._replace(**said),
            slots=_traversed(tables.slots, rules, graph.labels),
        )

    def _check_caps(
        self, queues: QueueRules, forwards: Sequence[int], rank: int, cap: float, limit: float, warmup: int
    ) -> None:
        """Raises ScheduleError if a rank's limits let no forward pass, or not those of its warm-up."""
        for what, most, added, reserve, unit in (
            ("max_in_flight", cap, queues.count, queues.reserve_count, "forwards"),
            ("memory_limit", limit, queues.memory, queues.reserve, "of memory"),
        ):
            least = max((added[q] + reserve[q] for q in forwards), default=0.0)
            if most < least:
                raise ScheduleError(
                    f"rank {rank} hosts stages {list(self.placement.stages_of(rank))}, so one microbatch on its "
                    f"way needs {least:g} {unit} there, but {what} is {most:g}; raise it",
                    rule="memory",
                    rank=rank,
                )
        if warmup > cap:
            needed = warmup + max((int(queues.reserve_count[q]) for q in forwards), default=0)
            raise ScheduleError(
                f"rank {rank} is to run {warmup} forwards as warm-up, but max_in_flight is {cap:g}; raise it to "
                f"{needed}, or lower the warm-up",
                rule="memory",
                rank=rank,
            )

    def build(self) -> Schedule:
        """Builds the schedule and checks it.

        Raises ScheduleError if no rank can go on (the error says what each rank waits for), if a function of the
        user's raises, or if the result breaks a rule of `check`.
        """
        if self.has_functions:
            schedule = Stepper(self).run()
        else:
            graph = self.queues()
            listed = Lister(graph).list_by_rules(self.tables(graph))
            if not listed.complete:
                Stepper(self).run()
            schedule = listed.schedule(self.name, self._limit())
        check(schedule)
        return schedule

    def _limit(self) -> float | None:
        """The limit that the schedule declares, if it is one number for all ranks.

        Raises ScheduleError for other limits if asynchronous ops free memory: only this limit tells ranks how long to
        wait for it.
        """
        kinds = ", ".join(sorted({op.kind for op in self.ops if op.asynchronous and op.holds}))
        rules = self.rules if isinstance(self.rules, Rules) else Rules()
        most, memory = rules.max_in_flight, rules.memory_limit
        if isinstance(most, Real) and (memory is None or not kinds):
            return float(most) if float(most) < INFINITY else None
        if not kinds or (isinstance(self.rules, Rules) and most is None and memory is None):
            return None
        activations = self.all_costs.activation
        if most is None and isinstance(memory, Real) and len(set(activations)) == 1:
            return float(memory) / activations[0]
        raise ScheduleError(
            f"ops of kind {kinds} hold memory and are asynchronous, so ranks wait for room by the schedule's limit, "
            "which is one number of stage activations: give max_in_flight=number (which counts what such ops give "
            "back), or memory_limit=number where the activations of all stages are alike",
            rule="memory",
        )


def _traversed(slots: SlotRules, rules: Sequence[Rules], labels: Sequence[Label]) -> SlotRules:
    """The classes of queues, in the order in which each rank's rules go through them."""
    queues = list(slots.queues)
    pick, interval, hold = list(slots.pick), list(slots.interval), list(slots.hold)
    for rank, each in enumerate(rules):
        for kind, traversal in ((FORWARD, each.forward), (BACKWARD, each.backward), (WEIGHT, each.backward)):
            slot, sign = rank * NUM_CLASSES + kind, -1 if traversal.deepest_first else 1
            first, last = slots.first[slot], slots.first[slot + 1]
            own = sorted(slots.queues[first:last], key=lambda q: (sign * labels[q][2], labels[q][0]))
            queues[first:last] = own
            pick[slot], interval[slot], hold[slot] = traversal.pick, traversal.interval or 0, int(traversal.strict)
    return slots._replace(queues=queues, pick=pick, interval=interval, hold=hold)


def _is_count(value: object) -> bool:
    """Whether a value is a whole number of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _require_ops(ops: object) -> tuple[NewOp, ...]:
    """The registered ops. Raises ScheduleError for anything but a sequence of `NewOp`."""
    if not isinstance(ops, Sequence) or not all(isinstance(op, NewOp) for op in ops):
        raise ScheduleError(f"ops is {reprlib.repr(ops)}: give a list of ps.NewOp", rule="options")
    return tuple(ops)
