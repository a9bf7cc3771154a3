"""A problem in which forms are decided with the order: which forwards run again, which backwards are whole.

A *chain* is one stage of one pipeline. It has four ops for each of its microbatches, of which some are not there, and
two more where activations may go to host memory:

    F R I W O L     from a chain's first op onwards: all F, all R, ..., each in the order of microbatches
    again           R is there, and F keeps only what R needs
    whole           the I is a B, and there is no W
    away            O and L are there: what F holds is in host memory from the end of O to the start of L

O and L stand in the row of their rank where it starts them, and run on its stream, one after the other.

Order and form are plain arrays, so that one move changes both. All queues of a chain run in the order of
microbatches, as `check` demands; B counts among the I and among the W.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.cost import Costs, Links
from penstock.engine.compiled import compiled
from penstock.engine.network import Array
from penstock.planning import row_walk
from penstock.planning.options import Limits, OpForms
from penstock.planning.problem import ChainForms, I, Ops, Orders, Problem, W, pose, walk_ops
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.async_ops import OFFLOAD, RELOAD, with_offload

_KINDS = ("F", "R", "I", "W", OFFLOAD, RELOAD)
"""By number, as `row_walk` has them."""


@dataclass(frozen=True)
class JointProblem:
    """The arrays, and what they stand for: (pipeline, stage) of each chain, and the problem as it was given."""

    ops: Ops
    chains: tuple[tuple[int, int], ...]
    costs: Costs
    links: Links
    limits: Limits
    forms: OpForms
    placement: Placement
    microbatch_pipeline: tuple[int, ...]

    @property
    def num_ranks(self) -> int:
        return len(self.ops.cap)

    @property
    def num_ops(self) -> int:
        return len(self.ops.chain)

    @property
    def total_cap(self) -> tuple[float, ...]:
        """Most that each rank may hold with its host memory."""
        if not self.forms.away:
            return self.limits.cap
        return tuple(cap + host for cap, host in zip(self.limits.cap, self.limits.host, strict=True))

    @property
    def counts(self) -> list[int]:
        """How many microbatches each pipeline has."""
        return [self.microbatch_pipeline.count(p) for p in range(self.placement.num_pipelines)]

    def of_one_form(
        self, cap: Sequence[float], split: bool, costs: Costs | None = None,
        held: Sequence[tuple[float, float]] | None = None,
    ) -> Problem:  # fmt: skip
        """The problem in which all ops have one form, under other caps; costs and what is held may be others too."""
        return pose(
            costs or self.costs, self.placement, self.num_ranks, len(self.microbatch_pipeline), self.links,
            held or self.limits.held, cap, split, self.counts,
        )  # fmt: skip

    def fits(self, orders: Orders) -> bool:
        """Whether orders keep to the caps; what follows from their rows and forms is filled in."""
        module: Any = compiled(row_walk)
        module.set_forms(self.ops, orders)
        return all(module.fits(self.ops, orders, r) for r in range(self.num_ranks))

    def timed(self, orders: Orders, start: Array | None = None) -> float:
        """The makespan of orders whose forms are filled in, started as soon as possible; -1 where they deadlock.

        Args:
            start: room for when each op starts.
        """
        module: Any = compiled(row_walk)
        start = np.empty(self.num_ops) if start is None else start
        return float(module.timed(self.ops, orders, start))

    def schedule(self, orders: Orders, name: str) -> Schedule:
        """The schedule of orders."""
        ops = self.ops
        microbatches = [[m for m, k in enumerate(self.microbatch_pipeline) if k == p] for p, _ in self.chains]
        made_rows = []
        for r in range(self.num_ranks):
            found = []
            for op in orders.row[r, : orders.length[r]].tolist():
                c = int(ops.chain[op])
                kind = "B" if ops.kind[op] == I and orders.whole[ops.cell[op]] else _KINDS[ops.kind[op]]
                found.append(Op(kind, self.chains[c][1], microbatches[c][int(ops.number[op])]))
            made_rows.append(tuple(found))
        limit = self.limits.in_flight
        made = Schedule(name, self.placement, tuple(made_rows), self.microbatch_pipeline, limit)
        if not orders.away.any():
            return made
        row_of = [
            {op: at for at, op in enumerate(row[:length])}
            for row, length in zip(orders.row.tolist(), orders.length.tolist(), strict=True)
        ]
        waits = []
        for op in np.flatnonzero(orders.wait >= 0).tolist() if limit is None else ():
            r, before = int(ops.rank[op]), int(orders.wait[op])
            if orders.place[op] >= 0:
                waits.append((made_rows[r][row_of[r][before]], made_rows[r][row_of[r][op]]))
        return with_offload(made, waits)

    def read(self, schedule: Schedule) -> Orders:
        """The other way: a schedule of this placement and these forms as orders."""
        ops, orders = self.ops, Orders.of(self.ops)
        chain = {key: c for c, key in enumerate(self.chains)}
        number: dict[int, int] = {}
        counts = [0] * self.placement.num_pipelines
        for m, p in enumerate(schedule.microbatch_pipeline):
            number[m] = counts[p]
            counts[p] += 1
        kinds = {"B": I} | {kind: number for number, kind in enumerate(_KINDS)}
        for r, row in enumerate(schedule.order):
            for op in row:
                c = chain[schedule.microbatch_pipeline[op.microbatch], op.stage]
                j = number[op.microbatch]
                at = int(ops.first[c]) + kinds[op.kind] * int(ops.size[c]) + j
                orders.row[r, orders.length[r]] = at
                orders.length[r] += 1
                if op.kind == OFFLOAD:
                    orders.away[ops.cell_first[c] + j] = True
                if op.kind == "R":
                    orders.again[ops.cell_first[c] + j] = True
                if op.kind == "B":
                    orders.whole[ops.cell_first[c] + j] = True
        return orders


def pose_joint(
    costs: Costs,
    placement: Placement,
    num_ranks: int,
    counts: Sequence[int],
    links: Links,
    limits: Limits,
    forms: OpForms,
) -> JointProblem:
    """Lays out the arrays.

    Args:
        counts: how many microbatches each pipeline has.
    """
    plain = pose(costs, placement, num_ranks, sum(counts), links, limits.held, limits.cap, forms.split, counts)
    chains = [
        (int(pipeline), stage)
        for pipeline, stage, kind in zip(plain.queues.pipeline, plain.stage, plain.kind, strict=True)
        if kind == "F"
    ]
    every = np.ones(len(chains), np.bool_)
    held = np.array([limits.held[s][0] for _, s in chains], np.float64)
    given = ChainForms(
        times=np.array([[costs.duration(k, s) for k in (*_KINDS, "B")] for _, s in chains], np.float64),
        held=held,
        kept=held * costs.kept if forms.again else held,
        freed=np.array([limits.held[s][1] for _, s in chains], np.float64),
        may_again=forms.again & every,
        may_whole=np.array([forms.whole and (not forms.split or _gains(costs, s)) for _, s in chains]),
        may_split=forms.split & every,
        may_away=forms.away & (held > 0),
        is_open=True,
    )
    host = np.array(limits.host if forms.away else (0.0,) * num_ranks, np.float64)
    ops = walk_ops(plain, len(_KINDS) if forms.away else W + 1)._replace(forms=given, host=host)
    return JointProblem(ops, tuple(chains), costs, links, limits, forms, placement, plain.microbatch_pipeline)


def _gains(costs: Costs, stage: int) -> bool:
    """Whether a B can be better than an I and its W right behind it."""
    return costs.duration("B", stage) < costs.duration("I", stage) + costs.duration("W", stage)
