"""The schedule: one immutable value that says what every rank does and in which order.

It holds no module, tensor or process group. `str()` draws it as a text grid, which `ps.parse` reads back.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.schedule import picture
from penstock.schedule.columns import Columns, columns_of, op_of, rows_of_ops
from penstock.schedule.errors import ScheduleError
from penstock.schedule.microbatch_order import MicrobatchOrder, ascending_order, declared, order_kind
from penstock.schedule.op import FORWARD, OF_UPDATES, Op
from penstock.schedule.pairs import Pair, sorted_pairs
from penstock.schedule.placement import Placement
from penstock.schedule.stage_graph import StageGraph
from penstock.schedule.text import to_text
from penstock.schedule.updates import OWNER, Updates, Windows

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


@dataclass(frozen=True)
class Schedule:
    """What every rank does, and in which order.

    Attributes:
        name: letters, digits and `._+-`.
        placement: which rank hosts which stage.
        order: `order[rank]` lists that rank's ops, first to last.
        microbatch_pipeline: the pipeline of each microbatch. Its length is the number of microbatches.
        max_in_flight: most stage activations that a rank may hold in this order (B or W frees one). None: no limit.
            A rank that picks among ready ops is held to the memory of this order instead, in the unit of the costs.
        stage_graph: how the stages depend on one another, and which ops are registered. None: a chain.
        updates: the window of the optimizer's updates, if these are ops (U) of the order. None: they are not.
        microbatch_orders: the order of microbatches in each queue of ops that does not run them in ascending order;
            see `microbatch_order`.
        pairs: the forwards and backwards that a rank runs as one, in ascending order; see `pairs`.

    A schedule is immutable and holds no model, so it can be printed, compared, saved and sent. It may be invalid:
    `check` proves that it is not.

    Raises:
        ScheduleError: a name with other characters, a cap that is not above 0, or a stage graph with another number
            of stages.

    Examples:
        >>> import penstock as ps
        >>> s = ps.build("zb-h1", num_ranks=2, num_microbatches=2)
        >>> print(s)
        schedule zb-h1: 2 ranks, 2 stages, 2 microbatches
        pipeline 0: stages on ranks 0 1
        rank 0 | F0 F1 .  I0 W0 I1 W1
        rank 1 | .  F0 I0 F1 I1 W0 W1
        >>> ps.parse(str(s)) == s
        True
    """

    name: str
    placement: Placement
    order: tuple[tuple[Op, ...], ...]
    microbatch_pipeline: tuple[int, ...]
    max_in_flight: float | None = None
    stage_graph: StageGraph | None = None
    updates: Updates | None = None
    microbatch_orders: tuple[MicrobatchOrder, ...] = ()
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ScheduleError(f"schedule name {self.name!r}: use letters, digits and ._+- only", rule="name")
        if self.max_in_flight is not None and not 0 < self.max_in_flight < math.inf:
            raise ScheduleError(
                f"max_in_flight is {self.max_in_flight}: give a number of activations above 0, or None",
                rule="memory",
            )
        if self.stage_graph is not None and self.stage_graph.num_stages != self.num_stages:
            raise ScheduleError(
                f"the stage graph has {self.stage_graph.num_stages} stages, the placement {self.num_stages}",
                rule="stages",
            )
        if self.microbatch_orders:
            object.__setattr__(self, "microbatch_orders", declared(self, self.microbatch_orders))
        if self.pairs:
            object.__setattr__(self, "pairs", sorted_pairs(self.pairs))

    def __repr__(self) -> str:
        pipelines = self.placement.num_pipelines
        several = f", {pipelines} pipelines" if pipelines > 1 else ""
        return (
            f"<Schedule {self.name}: {self.num_ranks} ranks, {self.num_stages} stages{several}, "
            f"{self.num_microbatches} microbatches, {self.num_ops} ops>"
        )

    def save(self, path: str | Path) -> None:
        """Writes the schedule, by the ending: .json, .txt and .csv for `ps.load`, .svg and .html as a picture.

        Raises:
            ScheduleError: another ending, a schedule that cannot be drawn, or no such folder.
        """
        picture.save(self, path)

    def _repr_html_(self) -> str:
        return picture.shown(self, self.num_ops)

    def __getstate__(self) -> dict[str, Any]:
        # Columns are soon made again, unless they are what the ops are made of.
        left_out = {"columns"} if "order" in vars(self) else set()
        return {name: value for name, value in vars(self).items() if name not in left_out}

    def __getattr__(self, name: str) -> Any:
        """Makes the order of a schedule of columns: its ops are created when somebody first asks for them."""
        columns = vars(self).get("columns") if name == "order" else None
        if columns is None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return vars(self).setdefault("order", rows_of_ops(columns))

    @classmethod
    def of(
        cls,
        name: str,
        placement: Placement,
        order: Iterable[Iterable[Op]],
        num_microbatches: int,
        max_in_flight: float | None = None,
    ) -> Schedule:
        """Makes a schedule with one pipeline."""
        rows = tuple(tuple(row) for row in order)
        return cls(name, placement, rows, (0,) * num_microbatches, max_in_flight)

    @classmethod
    def of_columns(
        cls,
        name: str,
        placement: Placement,
        columns: Columns,
        microbatch_pipeline: tuple[int, ...],
        max_in_flight: float | None = None,
    ) -> Schedule:
        """Makes a schedule of plain ops from columns.

        `check`, `lower` and `simulate` read the columns. Ops are created only when somebody asks for them.
        """
        return cls(name, placement, (), microbatch_pipeline, max_in_flight).with_columns(columns)

    def with_columns(self, columns: Columns) -> Schedule:
        """The same schedule with other ops, or with its own in another order, given as columns. It has no pairs."""
        made = object.__new__(Schedule)
        vars(made).update({f.name: vars(self)[f.name] for f in fields(self) if f.name != "order"} | {"pairs": ()})
        vars(made)["columns"] = columns
        return made

    @property
    def num_ranks(self) -> int:
        return len(self.order) if "order" in vars(self) else len(vars(self)["columns"].first) - 1

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def num_microbatches(self) -> int:
        return len(self.microbatch_pipeline)

    @property
    def num_ops(self) -> int:
        return sum(len(row) for row in self.order) if "order" in vars(self) else int(vars(self)["columns"].num_ops)

    def op_at(self, rank: int, step: int) -> Op:
        """The op at one step of a rank's order."""
        if "order" in vars(self):
            return self.order[rank][step]
        return op_of(vars(self)["columns"], rank, step)

    @cached_property
    def graph(self) -> StageGraph:
        """How the stages depend on one another, with what updates and pairs wait for."""
        graph = self.stage_graph or StageGraph.chain(self.num_stages)
        if self.updates is None and not self.pairs:
            return graph
        return replace(graph, updates=self.windows, pairs=self.pairs)

    @property
    def windows(self) -> Windows | None:
        """The updates and their numbers. None if updates are not in the order."""
        if self.updates is None:
            return None
        return Windows(self.updates.window, self.num_microbatches, self.placement.num_pipelines)

    @cached_property
    def asynchronous(self) -> frozenset[tuple[str, int]]:
        """The (kind, stage) of all asynchronous ops, which run beside their rank's other ops; see `async_ops`."""
        registered = self.stage_graph.registered if self.stage_graph is not None else ()
        return frozenset((r.kind, r.stage) for r in registered if r.asynchronous)

    @cached_property
    def columns(self) -> Columns | None:
        """The ops as arrays. None if some are not plain; see `columns`."""
        return columns_of(self)

    def pipeline_of(self, op: Op) -> int:
        """The pipeline whose copy of the stage runs `op`; 0 for registered ops that belong to no one microbatch."""
        if op.kind in OF_UPDATES and (windows := self.windows) is not None:
            return windows.update_of(op.microbatch)[1]
        if self.stage_graph is not None and (registered := self.stage_graph.registered_of.get((op.kind, op.stage))):
            return self.microbatch_pipeline[op.microbatch] if registered.microbatches else OWNER
        return self.microbatch_pipeline[op.microbatch]

    def rank_of(self, stage: int, microbatch: int) -> int:
        """The rank that hosts `stage` for `microbatch`. If several ranks share the stage, the first of them."""
        return self.placement.pipelines[self.microbatch_pipeline[microbatch]][stage]

    def hosts(self, op: Op) -> tuple[int, ...]:
        """The ranks that run `op`: one rank, or all ranks that run it together."""
        if self.stage_graph is not None and (registered := self.stage_graph.registered_of.get((op.kind, op.stage))):
            return registered.ranks or self.placement.hosts(self.pipeline_of(op), op.stage)
        return self.placement.hosts(self.pipeline_of(op), op.stage)

    @property
    def has_shared_ops(self) -> bool:
        """Whether several ranks run some op together."""
        graph = self.stage_graph
        return bool(self.placement.shared) or (graph is not None and any(len(r.ranks) > 1 for r in graph.registered))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        return self.placement.stages_of(rank)

    @cached_property
    def pipeline_microbatches(self) -> tuple[tuple[int, ...], ...]:
        """The microbatches of each pipeline, ascending."""
        found: list[list[int]] = [[] for _ in range(self.placement.num_pipelines)]
        for m, pipeline in enumerate(self.microbatch_pipeline):
            if 0 <= pipeline < len(found):  # `check` refuses others
                found[pipeline].append(m)
        return tuple(map(tuple, found))

    def microbatches_of(self, kind: str, stage: int, pipeline: int = 0) -> Sequence[int]:
        """The microbatches of a queue in the order in which they run: as declared, or ascending.

        A queue is all ops of one kind and stage in one pipeline. For a registered kind the result is the numbers of
        its ops.
        """
        kind = order_kind(kind)
        given = self._orders.get((kind, stage, pipeline))
        return ascending_order(self, kind, stage, pipeline) if given is None else given

    @cached_property
    def _orders(self) -> dict[tuple[str, int, int], tuple[int, ...]]:
        return {(o.kind, o.stage, o.pipeline): o.microbatches for o in self.microbatch_orders}

    def splits_backward(self) -> bool:
        """Whether any backward is split into I and W."""
        return any(op.kind == "I" for row in self.order for op in row)

    def renamed(self, name: str) -> Schedule:
        return replace(self, name=name)

    def forward_only(self, num_microbatches: int | None = None) -> Schedule:
        """Only the F ops of the first `num_microbatches`, for evaluation. The result is not valid for training."""
        rows = tuple(tuple(op for op in row if op.kind == FORWARD) for row in self.order)
        orders = tuple(order for order in self.microbatch_orders if order.kind == FORWARD)
        forward = replace(self, order=rows, updates=None, microbatch_orders=orders, pairs=())
        num = self.num_microbatches if num_microbatches is None else num_microbatches
        return forward if num == self.num_microbatches else forward.first_microbatches(num)

    def first_microbatches(self, num: int) -> Schedule:
        """Only the ops of the first `num` microbatches, each rank's in the same order, for a smaller batch.

        With two:

            F0 F1 F2 F3 B0 B1 B2 B3  ->  F0 F1 B0 B1
        """
        rows = tuple(tuple(op for op in row if op.microbatch < num) for row in self.order)
        orders = (
            replace(order, microbatches=tuple(m for m in order.microbatches if m < num))
            for order in self.microbatch_orders
        )
        pairs = (pair for pair in self.pairs if max(pair.forward.microbatch, pair.backward.microbatch) < num)
        return replace(
            self,
            order=rows,
            microbatch_pipeline=self.microbatch_pipeline[:num],
            microbatch_orders=tuple(orders),
            pairs=tuple(pairs),
        )

    def __str__(self) -> str:
        return to_text(self)


def require_schedule(value: object) -> None:
    """Raises ScheduleError for a value that is not a Schedule, and says how to get one."""
    if isinstance(value, Schedule):
        return
    hint = 'ps.build("1f1b", num_ranks=4, num_microbatches=8) makes one, ps.load reads one'
    if isinstance(getattr(value, "schedule", None), Schedule):
        hint = "give its .schedule"
    elif callable(getattr(value, "build", None)):
        hint = "give what its .build() returns"
    raise ScheduleError(f"a ps.Schedule is needed here, got {type(value).__name__}: {hint}", rule="options")
