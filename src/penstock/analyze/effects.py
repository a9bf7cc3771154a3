"""What made compute ops as long as they were: their stage, replica, worker, microbatch, or chance.

    time of an op = its kind's mean x its stage x its replica x its worker x its microbatch x the rest

Each factor is 1 where nothing is special. A stage takes what it takes on a healthy worker: the lower median over
replicas, so that one slow worker does not pass for a slow stage. With one replica only, it takes what it took in its
faster steps. A microbatch is long by as much as it is on the middle one of all stages, so that neither a slow stage
nor a slow worker passes for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from penstock.analyze.replayed_run import ReplayedRun
from penstock.engine.network import Array

FASTER_STEPS = 0.1
"""The quantile over steps that stands for a healthy worker where there is one replica."""


@dataclass(frozen=True, eq=False)
class Effects:
    """The factors of all compute ops, (K, C) for K steps and C ops, unless said otherwise.

    Attributes:
        ops: which ops of the table they are, (C,).
        stage: of the stage, against the mean over stages of its kind. replica, worker, microbatch: of these.
        rest: what none of them explains.
        by_stage: mean ms of each kind (row) and stage on a healthy worker; NaN where a stage has none.
        letters: the kinds, as `by_stage` has them.
        by_replica: (D,). by_worker: the mean over steps by replica and rank, (D, P).
        by_microbatch: the factor of each step, replica and microbatch, (K, D, N); NaN where there is none.
    """

    ops: Array
    stage: Array
    replica: Array
    worker: Array
    microbatch: Array
    rest: Array
    by_stage: Array
    letters: tuple[str, ...]
    by_replica: Array
    by_worker: Array
    by_microbatch: Array

    def without(self, own: Array, factor: Array, chosen: Array | None = None) -> Array:
        """What parts of steps take, (K, M + L), if compute ops lack a factor, (K, C); all, or some of them, (C,)."""
        by = factor if chosen is None else np.where(chosen, factor, 1.0)
        found = own.copy()
        found[:, self.ops] /= np.where(by > 0, by, 1.0)
        return found


def effects_of(run: ReplayedRun) -> Effects:
    """The factors that make up the times of a run's compute ops."""
    table = run.table
    ops = table.compute
    own = np.maximum(run.own[:, ops], 1e-9)
    letters, kind = np.unique(table.letters[ops], return_inverse=True)
    replica, stage, microbatch = table.replica[ops], table.stage[ops], table.microbatch[ops]
    sizes = len(letters), table.trace.num_replicas, table.trace.num_stages
    # Of the many microbatches of many steps the middle one is what a worker takes, whatever lengths it drew.
    usual = np.full(sizes, np.nan)
    for each, members in _groups((kind, replica, stage)):
        usual[each] = np.median(own[:, members])
    within = own / usual[kind, replica, stage]
    num_microbatches = int(microbatch.max()) + 1
    by_microbatch = np.full((len(own), sizes[1], num_microbatches), np.nan)
    for each, members in _groups((replica, microbatch)):
        by_microbatch[:, each[0], each[1]] = np.median(within[:, members], axis=1)
    by_microbatch /= np.nanmean(by_microbatch)
    microbatches = by_microbatch[:, replica, microbatch]
    alike = own / microbatches
    healthy = np.full(sizes[:1] + sizes[2:], np.nan)
    if sizes[1] > 1:
        healthy = _low_median(usual, axis=1)
    else:
        for each, members in _groups((kind, stage)):
            healthy[each] = np.quantile(np.median(alike[:, members], axis=1), FASTER_STEPS)
    by_replica = _low_median((usual / healthy[:, None, :]).transpose(1, 0, 2).reshape(sizes[1], -1), axis=1)
    by_replica = by_replica / _low_median(by_replica, axis=0)
    expected = healthy[kind, stage] * by_replica[replica]
    workers = np.ones((len(own), sizes[1], sizes[2]))
    for each, members in _groups((replica, stage)):
        workers[:, each[0], each[1]] = alike[:, members].sum(axis=1) / expected[members].sum()
    workers /= _low_median(workers.reshape(-1, sizes[2]), axis=0)
    worker = workers[:, replica, stage]
    rank = table.rank[ops]
    by_worker = np.ones((sizes[1], table.trace.num_ranks))
    for each, members in _groups((replica, rank)):  # by the time it works, so that a short op counts little
        by_worker[each] = own[:, members].sum() / (own[:, members] / worker[:, members]).sum()
    of_stage = healthy / np.nanmean(healthy, axis=1, keepdims=True)
    rest = own / (expected * worker * microbatches)
    return Effects(
        ops,
        np.broadcast_to(of_stage[kind, stage], own.shape),
        np.broadcast_to(by_replica[replica], own.shape),
        worker,
        microbatches,
        rest / rest.mean(),
        healthy,
        tuple(letters.tolist()),
        by_replica,
        by_worker,
        by_microbatch,
    )


def _groups(columns: tuple[Array, ...]) -> Iterator[tuple[tuple[int, ...], Array]]:
    """The places at which columns have the same values, with these."""
    stacked = np.stack(columns, axis=1)
    values, group = np.unique(stacked, axis=0, return_inverse=True)
    order = np.argsort(group.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(group.reshape(-1), minlength=len(values)))
    for value, members in zip(values.tolist(), np.split(order, ends[:-1])):
        yield tuple(value), members


def _low_median(values: Array, axis: int) -> Array:
    """The lower of the two middle values where their number is even; NaN values left out."""
    ordered = np.sort(values, axis=axis)
    count = np.sum(~np.isnan(values), axis=axis, keepdims=True)
    place = np.maximum((count - 1) // 2, 0)
    return np.take_along_axis(ordered, place, axis=axis).squeeze(axis)
