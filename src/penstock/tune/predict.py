"""How long a step takes: simulated over measured costs, plus what happens around the ops.

    step  =  fixed costs of a step  +  makespan  +  reducing gradients  +  the slowest rank's update

If updates are ops of the schedule, both lie within the makespan, which is that of all its steps over their number.

If several pipelines have copies of a stage, the copies' gradients first go to the owner. Only the owner updates, and
its values then go to the copies (`sharding="copies"`, the default of `penstock train`).

Between ops a rank packs, sends and takes in messages. This time is added to the ops themselves. The remaining time
between two ranks' ops is the delay of their link:

    rank 0 | F0 send |F1 ...                     F0's end to F0's start on rank 1: `delay`, as measured
    rank 1 |         `- link -> receive F0 ...

The part of that delay which grows with a message's size keeps the link busy, so the next message waits for it.

Ranks that share a stage run each of its ops together. Each of them then has the result, so nothing of it is sent to
any of them. The inputs of the stage are sent to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from penstock.cost import Costs, LinkCondition, Links
from penstock.cost.conditions import Constant
from penstock.dispatch import Dispatch, Policy
from penstock.formats.profile import MessageCosts, Profile
from penstock.schedule import Placement, Schedule
from penstock.schedule.op import UPDATE
from penstock.simulation import simulate
from penstock.simulation.auto import WITHOUT_WAITING, choose_policy
from penstock.simulation.memory_footprint import RankFootprint
from penstock.simulation.simulator import AUTO
from penstock.tune.memory import memory_of, owned_by


@dataclass(frozen=True)
class Prediction:
    """The predicted step.

    Attributes:
        step: milliseconds. makespan: the part of them from the first op to the last.
        update: of the slowest rank. reduce: time to sum gradients over copies of stages and of the pipeline, and to
            give copies of stages the values of their owners.
        bubble_ratio: of the simulated ops. memory: by rank of one pipeline.
    """

    step: float
    makespan: float
    update: float
    reduce: float
    bubble_ratio: float
    memory: tuple[RankFootprint, ...]

    @property
    def peak_bytes(self) -> float:
        """Of the rank that needs most."""
        return max(memory.total for memory in self.memory)

    @property
    def has_weights(self) -> bool:
        """Whether the costs say what weights take, so that memory is in bytes and complete."""
        return any(memory.weights for memory in self.memory)


def stage_costs(
    schedule: Schedule, cut: Sequence[range], profile: Profile, transfer: MessageCosts, crowded: bool = False
) -> Costs:
    """Milliseconds of every stage's ops, with the messages they send and receive, and bytes they keep.

    `crowded`: every core has a rank, so the threads that carry messages take time from the ranks.
    """
    halved = {op.stage for row in schedule.order for op in row if op.kind == "I"}

    def sent(stage: int, others: Iterable[tuple[int, int]], forward: bool) -> list[float]:
        return [
            size
            for edge in others
            for size in _sizes(schedule, cut, profile, stage, *edge) * num_sent(schedule.placement, edge, forward)
        ]

    def received(stage: int, others: Iterable[tuple[int, int]], forward: bool) -> list[float]:
        there = [edge for edge in others if num_sent(schedule.placement, edge, forward)]
        return [size for edge in there for size in _sizes(schedule, cut, profile, stage, *edge)]

    f: list[float] = []
    b: list[float] = []
    i: list[float] = []
    w: list[float] = []
    graph = schedule.graph
    for stage, layers in enumerate(cut):
        above = [(other, stage) for other in graph.sources[stage]]
        below = [(stage, other) for other in graph.targets[stage]]
        forward = _messages(transfer, sent(stage, below, True), received(stage, above, True), crowded)
        backward = _messages(transfer, sent(stage, above, False), received(stage, below, False), crowded)
        if profile.tied and _apart(schedule):
            if stage == 0:
                backward += transfer.at("receive", profile.tied)
            if stage == len(cut) - 1:
                backward += transfer.at("send", profile.tied)
        f.append(profile.time("f_split" if stage in halved else "f", layers) + forward + transfer.gap)
        b.append(profile.time("b", layers) + backward + transfer.gap)
        i.append(profile.time("i", layers) + backward + transfer.gap)
        w.append(profile.time("w", layers) + transfer.gap)
    return Costs(f, i, w, b, [profile.total("activation", layers) for layers in cut])


def links_of(
    schedule: Schedule, cut: Sequence[range], profile: Profile, transfer: MessageCosts, crowded: bool = False
) -> Links:
    """The links between ranks, each for the largest message that passes it."""
    largest: dict[tuple[int, int], float] = {}
    for pipeline in range(schedule.placement.num_pipelines):
        for source, target in schedule.graph.edges:
            makers, takers = (schedule.placement.hosts(pipeline, stage) for stage in (source, target))
            pairs = [(makers[0], rank) for rank in takers if rank not in makers]
            if len(makers) > 1:  # each of them gets the gradient
                pairs += [(takers[0], rank) for rank in makers if rank not in takers]
            for pair in pairs:
                size = max(_sizes(schedule, cut, profile, source, source, target))
                largest[pair] = max(size, largest.get(pair, 0.0))
    return Links({pair: link_of(size, transfer, crowded) for pair, size in largest.items()})


def link_of(size: float, transfer: MessageCosts, crowded: bool = False) -> LinkCondition:
    """A link of messages of `size` bytes: busy with each for the part of its delay that grows with the size."""
    delay = _delay(size, transfer, crowded)
    latency = min(delay, _delay(0.0, transfer, crowded))
    return LinkCondition(Constant(latency), occupancy=Constant(delay - latency))


def uniform_links(profile: Profile, transfer: MessageCosts) -> Links:
    """Links between any two ranks for a planner, which knows delays alone: that of the largest message by itself."""
    return Links(default=_delay(max(profile.output), transfer))


def _delay(size: float, transfer: MessageCosts, crowded: bool = False) -> float:
    """The delay (ms) of a message by itself, without the part that counts as time of the ops."""
    own = transfer.gap + _messages(transfer, [size], [size], crowded)
    return max(0.0, transfer.at("delay", size) - own)


def predict(
    schedule: Schedule,
    cut: Sequence[range],
    profile: Profile,
    transfer: MessageCosts,
    num_copies: int = 1,
    num_devices: int | None = None,
    dispatch: Dispatch | str = Dispatch.FROZEN,
) -> Prediction:
    """Predicts a step.

    Args:
        cut: the layers of each stage.
        num_copies: copies of the whole pipeline, each on its part of the batch (data parallel).
        num_devices: ranks that can work at the same time; by default all. If there are more ranks, a step takes at
            least the work of all ranks divided by the devices.
        dispatch: of the run; "auto" for the fastest of those that the runtime has.
    """
    crowded = num_devices is not None and schedule.num_ranks * num_copies >= num_devices
    costs = stage_costs(schedule, cut, profile, transfer, crowded)
    links = links_of(schedule, cut, profile, transfer, crowded)
    num_steps = 1 if schedule.windows is None else schedule.windows.num_updates
    if schedule.windows is not None:
        costs, links = with_updates(costs, schedule, cut, profile, transfer, num_copies)
    policy = None if dispatch == AUTO else Policy.of(dispatch)
    if policy is None:
        policy = choose_policy(schedule, costs, links=links, policies=WITHOUT_WAITING).policy
    timeline = simulate(schedule, costs, links=links, dispatch=policy)
    makespan = timeline.makespan / num_steps
    if num_devices is not None:
        makespan = max(makespan, num_copies * sum(timeline.busy) / num_devices / num_steps)
    memory = memory_of(schedule, cut, profile)
    updates, reduce = [0.0], 0.0
    if schedule.windows is None:
        updates = [
            sum(profile.total("update", cut[stage]) for stage in owned_by(schedule.placement, rank))
            for rank in range(schedule.num_ranks)
        ]
        reduce = reduce_time(schedule, cut, profile, transfer, num_copies)
    update = max(updates)
    alone = schedule.num_ranks * num_copies == 1
    around = transfer.step_alone if alone else transfer.step
    if profile.tied and _apart(schedule):
        around += transfer.at("delay", profile.tied)  # the sum goes back to the other copy
    step = around + profile.step + makespan + reduce + update
    return Prediction(step, makespan, update, reduce, timeline.bubble_ratio, tuple(memory))


def with_updates(
    costs: Costs, schedule: Schedule, cut: Sequence[range], profile: Profile, transfer: MessageCosts, num_copies: int
) -> tuple[Costs, Links]:
    """The costs with those of updates as ops, and links that carry the messages of updates beside the ops.

    The owner of a stage adds up the gradients of all copies and replicas, and the optimizer makes its step, both in U
    and in PREDICT. Another copy takes in the owner's values. The delay of these messages is the links'.
    """
    weights, tensors = ([profile.total(name, layers) for layers in cut] for name in ("weight", "tensors"))

    def on_rank(what: str, stage: int) -> float:
        delay = transfer.at("delay", weights[stage])
        return max(0.0, transfer.of_stage(what, weights[stage], tensors[stage]) - delay)

    owned, others = {}, schedule.placement.num_pipelines - 1
    for stage, layers in enumerate(cut):
        owned[UPDATE, stage] = profile.total("update", layers) + others * on_rank("sums", stage)
        if num_copies > 1:
            owned[UPDATE, stage] += transfer.over_replicas(weights[stage], tensors[stage], num_copies)
    taken = [on_rank("values", stage) for stage in range(len(cut))]
    link = replace(link_of(max(profile.output), transfer), bandwidth=Constant(transfer.bandwidth * 1e3))
    return replace(costs.with_other(owned), take_over=taken, update_bytes=weights), Links(default=link)


def reduce_time(
    schedule: Schedule, cut: Sequence[range], profile: Profile, transfer: MessageCosts, num_copies: int
) -> float:
    """Milliseconds to synchronize the ranks that hold the same stage, outside the makespan.

    A copy in another pipeline sends its gradients to the owner and gets the sum, and after the update the weights. If
    there are several copies, they do so one after another. Replicas sum in a ring. Over k ranks it moves 2 (k - 1) /
    k of the bytes through each; over two ranks that is what was measured.
    """
    slowest = 0.0
    for rank in range(schedule.num_ranks):
        total = 0.0
        together: dict[tuple[int, ...], tuple[float, float]] = {}
        for stage in schedule.stages_of(rank):
            size, tensors = profile.total("weight", cut[stage]), profile.total("tensors", cut[stage])
            hosts = tuple(ranks[stage] for ranks in schedule.placement.pipelines)
            known_size, known_tensors = together.get(hosts, (0.0, 0.0))
            together[hosts] = known_size + size, known_tensors + tensors
            if num_copies > 1:
                total += transfer.over_replicas(size, tensors, num_copies)
        for hosts, (size, tensors) in together.items():
            exchanged = sum(transfer.of_stage(what, size, tensors) for what in ("sums", "values"))
            total += exchanged * (len(set(hosts)) - 1)
        slowest = max(slowest, total)
    return slowest


def num_sent(placement: Placement, edge: tuple[int, int], forward: bool) -> int:
    """To how many ranks a message between two stages, or its gradient, is sent: to those that run the receiving stage
    and not the sending one.
    """
    maker, taker = edge if forward else edge[::-1]
    return max(
        len(set(placement.hosts(pipeline, taker)) - set(placement.hosts(pipeline, maker)))
        for pipeline in range(placement.num_pipelines)
    )


def _sizes(
    schedule: Schedule, cut: Sequence[range], profile: Profile, own: int, source: int, target: int
) -> list[float]:
    """Bytes of each message from stage `source` to stage `target` in an op of stage `own`, which is one of them, on
    whichever ranks they are. A larger microbatch is cut for a stage with smaller ones.
    """
    graph, most = schedule.graph, schedule.num_microbatches
    sent, taken = graph.microbatches_of(source, most), graph.microbatches_of(target, most)
    size = profile.output[cut[source][-1]] * min(1.0, sent / taken)
    return [size] * max(1, (sent if own == target else taken) // graph.microbatches_of(own, most))


def _messages(transfer: MessageCosts, sent: Sequence[float], received: Sequence[float], crowded: bool) -> float:
    cost = 0.0
    for what, sizes in (("send", sent), ("receive", received)):
        for size in sizes:
            cost += transfer.at(what, size) + (transfer.at("threads", size) if crowded else 0.0)
    return cost


def _apart(schedule: Schedule) -> bool:
    """Whether the first and the last stage are on different ranks."""
    return any(ranks[0] != ranks[-1] for ranks in schedule.placement.pipelines)
