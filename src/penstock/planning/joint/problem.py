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
from penstock.engine.network import NONE, Array
from penstock.planning import row_walk
from penstock.planning.options import Limits, OpForms, dealt
from penstock.planning.row_walk import F, I, Ops, Orders, W
from penstock.schedule import Op, Placement, Schedule
from penstock.schedule.offload import OFFLOAD, RELOAD, with_offload

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

    def described(self) -> str:
        """The problem in words, all its numbers given, for a report."""
        return (
            f"{self.num_ranks} ranks, placement {self.placement.pipelines}, pipelines of the microbatches "
            f"{self.microbatch_pipeline}, {self.costs!r}, {self.links!r}, {self.forms!r}, holds {self.limits.held}, "
            f"caps {self.limits.cap}, host memory {self.limits.host}"
        )

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

    def orders(self) -> Orders:
        """Room for orders, with nothing in it."""
        ops, n = self.ops, self.num_ops
        on_rank = np.bincount(ops.rank, minlength=self.num_ranks)
        cells = int(ops.size.sum())
        return Orders(
            row=np.full((self.num_ranks, int(on_rank.max(initial=1))), NONE, np.int64),
            length=np.zeros(self.num_ranks, np.int64),
            again=np.zeros(cells, np.bool_),
            whole=np.zeros(cells, np.bool_),
            away=np.zeros(cells, np.bool_),
            duration=np.zeros(n),
            change=np.zeros(n),
            place=np.full(n, NONE, np.int64),
            wait=np.full(n, NONE, np.int64),
        )

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
        ops, orders = self.ops, self.orders()
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
    chains = sorted(
        ((p, s) for p, hosts in enumerate(placement.pipelines) for s in range(len(hosts))),
        key=lambda key: (placement.pipelines[key[0]][key[1]], key),
    )
    index = {key: c for c, key in enumerate(chains)}
    size = np.array([counts[p] for p, _ in chains], np.int64)
    chain_rank = np.array([placement.pipelines[p][s] for p, s in chains], np.int64)
    num_kinds = len(_KINDS) if forms.away else W + 1
    first = np.concatenate([[0], np.cumsum(num_kinds * size)]).astype(np.int64)
    n = int(first[-1])
    ints = {name: np.full(n, NONE, np.int64) for name in ("message_from", "message_to")}
    delay = np.zeros(n)
    chain = np.repeat(np.arange(len(chains)), num_kinds * size)
    within = np.arange(n) - first[chain]
    kind, number = within // np.maximum(1, size[chain]), within % np.maximum(1, size[chain])
    for c, (p, s) in enumerate(chains):
        for which, other in ((F, s - 1), (I, s + 1)):
            if (p, other) in index:
                before = index[p, other]
                mine = first[c] + which * size[c] + np.arange(size[c])
                theirs = first[before] + which * size[before] + np.arange(size[before])
                ints["message_from"][mine], ints["message_to"][theirs] = theirs, mine
                if chain_rank[c] != chain_rank[before]:
                    delay[mine] = links.delay(int(chain_rank[before]), int(chain_rank[c]))
    cell_first = np.concatenate([[0], np.cumsum(size)]).astype(np.int64)[:-1]
    held = np.array([limits.held[s][0] for _, s in chains], np.float64)
    ops = Ops(
        chain=chain.astype(np.int64),
        kind=kind.astype(np.int64),
        number=number.astype(np.int64),
        cell=(cell_first[chain] + number).astype(np.int64),
        rank=chain_rank[chain],
        delay=delay,
        first=first[:-1].copy(),
        size=size,
        cell_first=cell_first,
        chain_rank=chain_rank,
        chain_first=np.searchsorted(chain_rank, np.arange(num_ranks + 1)).astype(np.int64),
        times=np.array([[costs.duration(k, s) for k in (*_KINDS, "B")] for _, s in chains], np.float64),
        held=held,
        kept=held * costs.kept if forms.again else held,
        freed=np.array([limits.held[s][1] for _, s in chains], np.float64),
        may_again=np.full(len(chains), forms.again),
        may_whole=np.array([forms.whole and (not forms.split or _gains(costs, s)) for _, s in chains]),
        may_split=np.full(len(chains), forms.split),
        may_away=forms.away & (held > 0),
        cap=np.array(limits.cap, np.float64),
        host=np.array(limits.host if forms.away else (0.0,) * num_ranks, np.float64),
        num_kinds=num_kinds,
        **ints,
    )
    return JointProblem(ops, tuple(chains), costs, links, limits, forms, placement, dealt(counts))


def _gains(costs: Costs, stage: int) -> bool:
    """Whether a B can be better than an I and its W right behind it."""
    return costs.duration("B", stage) < costs.duration("I", stage) + costs.duration("W", stage)
