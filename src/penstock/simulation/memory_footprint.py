"""The most memory that each rank holds: weights, older versions, gradients, optimizer state, activations, messages.

    two pipelines over two ranks        weights       optimizer, copies    and none
    rank 0 | 0F0 ..  1F1 ..             W0 + W1       O0                   O0 + O1
    rank 1 | 1F0 ..  0F1 ..             W1 + W0       O1                   O1 + O0

A rank holds the weights of every copy of every stage that it hosts. The copy in pipeline 0 owns its stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from penstock.cost import CostError, Costs, Links
from penstock.dispatch import Dispatch
from penstock.engine import memory
from penstock.schedule import Placement, Schedule, count_versions
from penstock.schedule.op import BACKWARD, PREDICT, UPDATE, WEIGHT
from penstock.schedule.short_repr import short_repr
from penstock.schedule.updates import OWNER
from penstock.schedule.weight_versions import PREDICTING, SHARDINGS
from penstock.simulation.simulator import simulate
from penstock.simulation.timeline import Timeline
from penstock.unknown_names import refuse_unknown


class RankFootprint(NamedTuple):
    """The most that one rank holds, part by part, in the units of the costs (bytes).

    Attributes:
        weights: the newest parameters of each copy of a stage, as ops read them.
        versions: other versions of the parameters: older ones, predicted ones, and those that came with the weights.
        gradients: one buffer per copy; two if gradients of two windows are under way at once.
        optimizer: moments, and parameters in full precision; while a PREDICT runs, those of its stage twice.
        activations: what forwards keep for their backwards.
        messages: messages that have been sent and not arrived, or have arrived and not been used.

    Examples:
        >>> import penstock as ps
        >>> held = ps.footprint(ps.build("1f1b", 4, 8), ps.cost.costs_preset("gpt2-7b"))
        >>> first, last = held.ranks[0], held.ranks[-1]
        >>> first.activations > last.activations, first.gradients > 0
        (True, True)
    """

    weights: float
    versions: float
    gradients: float
    optimizer: float
    activations: float
    messages: float

    @property
    def total(self) -> float:
        """The sum of all parts, as if all of them peaked at the same moment."""
        return sum(self)


@dataclass(frozen=True)
class Footprint:
    """The most that each rank of a schedule holds.

    Attributes:
        ranks: the most that each rank holds, part by part.

    Examples:
        >>> import penstock as ps
        >>> held = ps.footprint(ps.build("1f1b", 4, 8), ps.cost.costs_preset("gpt2-7b"))
        >>> len(held.ranks), held.peak == max(sum(rank) for rank in held.ranks)
        (4, True)
    """

    ranks: tuple[RankFootprint, ...]

    __repr__ = short_repr

    @cached_property
    def totals(self) -> tuple[float, ...]:
        return tuple(rank.total for rank in self.ranks)

    @property
    def peak(self) -> float:
        """The total of the rank that holds the most."""
        return max(self.totals)

    @property
    def mean(self) -> float:
        """The average total."""
        return sum(self.totals) / len(self.totals)

    @property
    def balance(self) -> float:
        """`mean / peak`: 1 if all ranks hold the same. The rest up to 1 is memory that most ranks leave unused."""
        return self.mean / self.peak if self.peak else 1.0


@refuse_unknown(CostError)
def footprint(
    schedule: Schedule,
    costs: Costs,
    links: Links | None = None,
    *,
    dispatch: Dispatch | str = "frozen",
    memory_limit: float | Sequence[float] | None = None,
    sharding: str = "copies",
    masters: bool = False,
    channels: str = "buffered",
) -> Footprint:
    """Computes the most bytes that each rank holds while a schedule runs.

    Weights, versions, gradients and optimizer state follow from the order alone; with frozen dispatch activations do
    too. Messages are those of a simulated run. A stage that several ranks share costs each of them what the costs
    say. Parameters that two stages share (embedding and head) count in both.

    Args:
        schedule: the schedule to run.
        costs: costs of its stages, with `weight_bytes`.
        links: delays or conditions of links. Default: messages arrive at once.
        dispatch: how ranks pick their ops, as for `simulate`.
        memory_limit: limit of activations, as for `simulate`.
        sharding: who has the optimizer's state. "none": each copy of a stage. "copies": only the copy that owns the
            stage; after each update it sends the others the parameters, with the predicted ones if a rule predicts
            (ZeRO; AMDP, section 3.4). "zero1" and "fsdp" shard over replicas. A schedule knows no replicas, so these
            count as "copies".
        masters: whether `optimizer_bytes` include the parameters in full precision. If so, rules that predict need no
            second version, because the weights that ops read are written from those in any case.
        channels: what carries the messages, as for `simulate`. On any but "buffered" a rank holds the buffer of a
            message from when it posts the receive, as torch does from 2.15 on. Earlier ones make all at the start.

    Raises:
        CostError: costs without weights, or for another number of stages.
        ScheduleError: the schedule and options that `simulate` refuses.

    Examples:
        >>> import penstock as ps
        >>> costs = ps.cost.costs_preset("amdp-gpt", num_stages=8)
        >>> held = ps.footprint(ps.build("1f1b", 8, 64), costs)
        >>> f"{held.peak / 1e9:.1f} GB on the fullest rank"
        '40.2 GB on the fullest rank'

    References:
        AMDP, section 3.4: optimizer state over several pipelines.
    """
    _require_weights(costs, sharding)
    costs = costs.with_predictions(schedule, sharding)
    timeline = simulate(schedule, costs, links=links, dispatch=dispatch, memory_limit=memory_limit, channels=channels)
    versions, buffers = count_versions(schedule, sharding=sharding), count_buffers(schedule)
    if masters and schedule.updates is not None and schedule.updates.rule in PREDICTING:
        versions |= {(s, k): max(1, num - 1) for (s, k), num in versions.items() if k == OWNER or sharding == "none"}
    state = _state(schedule.placement, schedule.num_ranks, costs, sharding, versions, buffers)
    state = _with_predicts(state, schedule, costs, sharding)
    peaks = zip(state, timeline.peak_activations, _message_peaks(timeline, costs), strict=True)
    return Footprint(tuple(mine._replace(activations=held, messages=messages) for mine, held, messages in peaks))


def room_for_activations(
    placement: Placement, costs: Costs, memory_limit: float | Sequence[float], *, sharding: str = "copies"
) -> tuple[float, ...]:
    """Computes how much each rank may hold of activations under a limit of its total memory.

    The result is the limit minus weights, gradients and optimizer state, for a schedule whose updates are not ops.
    `ps.plan` and `ps.simulate` take it as `memory_limit`. Messages are not subtracted; `footprint` gives them.

    Args:
        placement: which rank hosts which stage.
        costs: costs of its stages, with `weight_bytes`.
        memory_limit: total memory in bytes: one number for all ranks, or one per rank.
        sharding: who has the optimizer's state, as for `footprint`.

    Raises:
        CostError: costs without weights, limits for another number of ranks, or a rank with no room left.

    Examples:
        >>> import penstock as ps
        >>> placement = ps.build("1f1b", 4, 8).placement
        >>> room = ps.simulation.room_for_activations(placement, ps.cost.costs_preset("gpt2-7b"), 35 * 2**30)
        >>> [f"{each / 1e9:.2f}" for each in room]
        ['8.12', '7.38', '7.38', '8.29']
    """
    _require_weights(costs, sharding)
    num_ranks = 1 + max(rank for _, _, rank in _copies(placement))
    limits = list(memory_limit) if isinstance(memory_limit, Sequence) else [float(memory_limit)] * num_ranks
    if len(limits) != num_ranks:
        raise CostError(f"{len(limits)} memory limits for {num_ranks} ranks; give one, or one for each")
    copies = {(stage, k): 1 for k in range(placement.num_pipelines) for stage in range(placement.num_stages)}
    found = []
    for rank, (limit, mine) in enumerate(
        zip(limits, _state(placement, num_ranks, costs, sharding, copies, copies), strict=True)
    ):
        if limit <= mine.total:
            raise CostError(
                f"rank {rank} holds {in_bytes(mine.total, 4)} of weights, gradients and optimizer state, and may "
                f"hold {in_bytes(limit, 4)} in all; raise the limit, or take more ranks"
            )
        found.append(limit - mine.total)
    return tuple(found)


def in_bytes(value: float, digits: int = 3) -> str:
    """Bytes as text, such as `1.5 GiB`, `22 MiB` or `800 KiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.{digits}g} {unit}" if value < 1000 * size else f"{value / size:.0f} {unit}"
    return f"{value:.0f} bytes"


def _require_weights(costs: Costs, sharding: str) -> None:
    if sharding not in SHARDINGS:
        raise CostError(f"no sharding {sharding!r}; choose none, copies, zero1 or fsdp")
    if not costs.weight_bytes:
        raise CostError(
            "the costs do not say what weights take; give weight_bytes (and gradient_bytes, optimizer_bytes), or "
            "take the costs of a preset (ps.cost.costs_preset)"
        )


def _state(
    placement: Placement,
    num_ranks: int,
    costs: Costs,
    sharding: str,
    versions: Mapping[tuple[int, int], int],
    buffers: Mapping[tuple[int, int], int],
) -> list[RankFootprint]:
    """What each rank holds all the time. Versions and gradient buffers are given per copy, by (stage, pipeline)."""
    if costs.num_stages != placement.num_stages:
        raise CostError(f"costs of {costs.num_stages} stages for a placement of {placement.num_stages}")
    assert costs.weight_bytes
    gradients, optimizer = costs.gradient_bytes or costs.weight_bytes, costs.optimizer_bytes
    ranks = [RankFootprint(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)] * num_ranks
    for stage, pipeline, rank in _copies(placement):
        mine, copy = ranks[rank], (stage, pipeline)
        has_state = optimizer and (pipeline == OWNER or sharding == "none")
        ranks[rank] = mine._replace(
            weights=mine.weights + costs.weight_bytes[stage],
            versions=mine.versions + costs.weight_bytes[stage] * (versions[copy] - 1),
            gradients=mine.gradients + gradients[stage] * buffers[copy],
            optimizer=mine.optimizer + (optimizer[stage] if has_state else 0.0),
        )
    return ranks


def count_buffers(schedule: Schedule) -> dict[tuple[int, int], int]:
    """Of how many windows each copy holds gradients at once, at most, by (stage, pipeline).

    A copy holds gradients of a window from the first op that computes some (B, or W if the backward is split). The
    owner holds them until its update. Another copy holds them until the last such op, when their sum goes to the
    owner. If updates are not ops of the schedule, all gradients belong to one window.

        owner, windows of two    B0 B1 B2 U0 B3 U1        2: those of window 1 begin before U0
        another                  B0 B1 B2 .. B3 ..        1
    """
    most = {(stage, k): 1 for k in range(schedule.placement.num_pipelines) for stage in range(schedule.num_stages)}
    windows = schedule.windows
    if windows is None:
        return most
    of_pipeline = schedule.microbatch_pipeline
    num = Counter((m // windows.window, of_pipeline[m]) for m in range(schedule.num_microbatches))
    for row in schedule.order:
        under_way: dict[tuple[int, int], dict[int, int]] = {}
        for op in row:
            if op.kind not in (BACKWARD, WEIGHT, UPDATE):
                continue
            copy = op.stage, schedule.pipeline_of(op)
            left = under_way.setdefault(copy, {})  # window -> ops of it still to give gradients
            if op.kind == UPDATE:
                left.pop(windows.update_of(op.microbatch)[0], None)
                continue
            window = op.microbatch // windows.window
            left[window] = left[window] - 1 if window in left else num[window, copy[1]] - 1
            most[copy] = max(most[copy], len(left))
            if not left[window] and copy[1] != OWNER:
                del left[window]
    return most


def _with_predicts(
    state: Sequence[RankFootprint], schedule: Schedule, costs: Costs, sharding: str
) -> list[RankFootprint]:
    """Adds the most that a PREDICT of each rank holds: the weights and the optimizer's state a second time."""
    most = [0.0] * schedule.num_ranks
    for rank, row in enumerate(schedule.order if schedule.updates is not None else ()):
        for op in row:
            if op.kind == PREDICT and (schedule.pipeline_of(op) == OWNER or sharding == "none"):
                held = sum(each[op.stage] for each in (costs.weight_bytes, costs.optimizer_bytes) if each)
                most[rank] = max(most[rank], held)
    return [mine._replace(optimizer=mine.optimizer + again) for mine, again in zip(state, most, strict=True)]


def _copies(placement: Placement) -> Iterator[tuple[int, int, int]]:
    """(stage, pipeline, rank) of each copy of each stage, on each rank that hosts it."""
    shared = {stage for stage, _ in placement.shared}
    for pipeline in range(placement.num_pipelines):
        for stage in range(placement.num_stages):
            if stage in shared and pipeline != OWNER:
                continue  # one stage on all of these ranks, whichever pipeline it works for
            for rank in placement.hosts(pipeline, stage):
                yield stage, pipeline, rank


def _message_peaks(timeline: Timeline, costs: Costs) -> list[float]:
    """Most bytes of messages that each rank holds. The sender holds a message from the end of its op to the arrival,
    the receiver from the arrival, or from when it posts a receive, to the end of the op that uses it.
    """
    ends = {(timed.rank, timed.op): timed.end for timed in timeline.ops}
    changes: list[list[tuple[float, float]]] = [[] for _ in range(timeline.num_ranks)]
    for message in timeline.messages:
        size, target = costs.message_size(message.source, message.target), message.target_rank
        held = message.arrived if message.posted is None else message.posted
        sending = message.source_rank, message.sent, message.arrived
        for rank, since, until in (sending, (target, held, ends[target, message.target])):
            if size and until > since:
                changes[rank] += [(since, size), (until, -size)]
    # What goes at a moment goes before what comes.
    in_order = [change for of_rank in changes for _, change in sorted(of_rank)]
    return memory.peaks(in_order, list(accumulate(map(len, changes), initial=0)))
