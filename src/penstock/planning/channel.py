"""Plans for what carries the messages in another framework (`schedule.messages`), each message placed.

On "gloo" messages keep out of each other's way, so a plan is made as ever and its messages are placed. On the
channels of NCCL a message keeps its stream busy until it arrives. Such a message is an op of one row more, beside
those of the ranks, or of two where each of its ranks has one stream:

    "nccl"          row of rank 0's stream | F0 F1 ... B0         F0, F1: stage 0's activations on the way to rank 1
                    row of rank 1's stream | F0 F1 ... B0         B0: stage 1's gradient on the way back
    "nccl-pair"     row of ranks 0 and 1   | F0 F1 ... B0
    "nccl-edge"     row of 0 to 1          | F0 F1 ...
                    row of 1 to 0          | ... B0

`planning.graph` searches and bounds problems with ops in several rows. So the bound counts streams as it counts
ranks: a link that is late by L ms keeps one communicator busy for 2 L ms per microbatch, in whatever order ops run.

Candidates are what the search found, with each message where its ranks were when it left, and the same compute order
and that of a plan without streams, placed by the arbiter. The fastest in simulation is the plan.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from penstock.cost import CostError, Costs, Links
from penstock.cost.conditions import LinkQueue
from penstock.cost.links import LinkQueues
from penstock.dispatch.queues import QueueGraph, rows_of
from penstock.engine.network import NONE, Array, of_queues
from penstock.passes import add_communication
from penstock.planning.graph import search as searches
from penstock.planning.graph.problem import GraphProblem, pose_graph
from penstock.planning.options import PlanRequest, family_of, in_turn, limits_of
from penstock.planning.result import Plan, certain
from penstock.planning.starts import MOST_OPS, built
from penstock.schedule import Op, Placement, Schedule, check
from penstock.schedule.messages import BUFFERED, GLOO, NCCL, require_channel, send_of, stream_of
from penstock.simulation import simulate
from penstock.simulation.channels import arbitrate, crossings_of, write_rows
from penstock.simulation.runner import Runner

_SHARE_WITHOUT_STREAMS = 0.15
"""Of the time, for the plan in which messages keep out of each other's way. Its order is one to begin with."""
_STARTS_SHARE = 0.3
"""Of the time till which first orders are placed."""
_PROOF_SECONDS_AN_OP = 3e-4
"""What placing, simulating and proving what was found takes."""


class _Message(NamedTuple):
    """The messages of a kind of op to a neighbouring stage: from rank to rank, by whom, and how long one travels."""

    pipeline: int
    made: tuple[str, int]
    source: int
    target: int
    ms: float

    def streams(self, channel: str) -> list[Hashable]:
        """The streams that a message keeps busy. Both ends of a pair or an edge see the same messages, so that the
        stream of one end stands for both."""
        ends = (self.source, self.target) if channel == NCCL else (min(self.source, self.target),)
        return [stream_of(channel, rank, self.source, self.target) for rank in ends]


def plan_on_channel(request: PlanRequest, planned: Callable[[PlanRequest], Plan]) -> Plan:
    """The best schedule found for a channel, with its messages placed, and a bound for the channel.

    Args:
        planned: plans the request where messages are buffered.

    Raises:
        ScheduleError: an unknown channel, or options for runtimes that place messages themselves.
        CostError: links that change.
    """
    began = time.perf_counter()
    costs, links, placement, channel = request.costs, request.links, request.placement, request.channels
    assert placement is not None
    require_channel(channel)
    _require_steady(links)
    messages = list(_messages(costs, links, placement))
    least: dict[tuple[int, int], float] = {}
    for each in messages:
        way = each.source, each.target
        least[way] = min(least.get(way, each.ms), each.ms)
    if placement.num_pipelines > 1 and request.deal == "any":
        request = replace(request, deal="in turn")
    searched = channel != GLOO and any(least.values()) and _is_searched(request)
    seconds = request.time_limit * (_SHARE_WITHOUT_STREAMS if searched else 1.0)
    first = planned(replace(request, links=Links(least), channels=BUFFERED, time_limit=seconds))
    counts = Counter(first.schedule.microbatch_pipeline)
    busy: dict[Hashable, float] = {}
    for each in messages if channel != GLOO else ():
        for stream in each.streams(channel):
            busy[stream] = busy.get(stream, 0.0) + each.ms * counts[each.pipeline]
    bound = max(first.lower_bound, *busy.values(), 0.0)
    place = partial(add_communication, costs=costs, links=links, channels=channel)
    candidates = [(first.how, place(first.schedule))]
    dealt = in_turn(request.num_microbatches, placement.num_pipelines)
    if searched and not first.interrupted and tuple(counts[k] for k in range(placement.num_pipelines)) == dealt:
        search = _search(request, first.schedule, messages, began)
        bound = max(bound, search.lower_bound)
        order, rows = _rows_found(search.problem, search.sequence, costs, first.schedule)
        candidates += [(search.how, place(order)), (search.how, rows)]
    runs = [simulate(schedule, costs, links=links, channels=channel) for _, schedule in candidates]
    best = min(range(len(runs)), key=lambda number: runs[number].makespan)
    how, schedule = candidates[best]
    check(schedule, channels=channel)
    value = runs[best].makespan
    bound = certain(bound, value)
    certificate = replace(first.certificate, channel=channel)
    return replace(
        first, schedule=schedule, makespan=value, value=value, lower_bound=bound, certificate=certificate,
        seconds=time.perf_counter() - began, how=how, timeline=runs[best],
    )  # fmt: skip


def _require_steady(links: Links) -> None:
    for condition in (*links.conditions.values(), links.default):
        if condition is not None and not condition.is_steady:
            raise CostError(
                "ps.plan needs links that do not change, such as 0:1=latency:20ms+bandwidth:1GB/s, but one link has "
                f"{condition}; give a typical delay, and simulate the result under the real conditions"
            )


def _is_searched(request: PlanRequest) -> bool:
    """Whether orders are searched with streams: microbatches are alike, and forms of ops are not decided besides."""
    simple = request.total_limit is None and not request.offloads and not family_of(request).joint
    return simple and request.costs.overlap is None and not request.costs.factors


def _messages(costs: Costs, links: Links, placement: Placement) -> Iterator[_Message]:
    for pipeline, hosts in enumerate(placement.pipelines):
        for stage in range(placement.num_stages - 1):
            above, below = hosts[stage], hosts[stage + 1]
            if above == below:
                continue
            # Where sizes differ from microbatch to microbatch, each takes at least the latency.
            size = 0.0 if costs.factors.message else costs.message_size(("F", stage), ("F", stage + 1))
            for made, source, target in (("F", stage), above, below), (("B", stage + 1), below, above):
                ms = links.delay_of(source, target, size, 0.0, LinkQueue()).arrived
                yield _Message(pipeline, made, source, target, ms)


def _search(request: PlanRequest, first: Schedule, messages: list[_Message], began: float) -> searches.GraphSearch:
    """Searches orders of ops and messages together, from `first` and the library's schedules on."""
    costs, links, channel, split = request.costs, request.links, request.channels, request.split is not False
    placement, time_limit = first.placement, request.time_limit
    limits = limits_of(costs, placement, first.num_ranks, request.max_in_flight, request.memory_limit, split)
    problem = pose_graph(
        costs, placement, first.num_ranks, first.num_microbatches, Links(), limits, split,
        counted=request.max_in_flight is not None,
        more_queues=lambda graph: _with_streams(graph, messages, channel),
    )  # fmt: skip

    def starts() -> Iterator[tuple[Any, str]]:
        yield problem.serial(), "serial"
        library = built(placement, first.num_ranks, first.num_microbatches) if problem.num_ops <= MOST_OPS else ()
        for name, schedule in (("plan", first), *library):
            if time.perf_counter() - began > _STARTS_SHARE * time_limit and name != "plan":
                return
            schedule = searches.split_backwards(schedule) if split else schedule
            sequence = _sequence_of(problem, schedule, costs, links, channel)
            if sequence is not None:
                yield sequence, name

    search = searches.begin(problem, starts(), (), 0.0, request.seed, request.stop_at_gap, request.progress, began)
    search.until = time_limit - _PROOF_SECONDS_AN_OP * problem.num_ops
    searches.run(search)
    return search


def _with_streams(graph: QueueGraph, messages: list[_Message], channel: str) -> QueueGraph:
    """The queues of ops, and one for the messages of each kind that may wait for a stream, or make another wait."""
    network, more = graph.network
    busy: dict[Hashable, int] = {}
    for each in messages:
        for stream in each.streams(channel) if each.ms > 0 else ():
            busy.setdefault(stream, graph.num_rows + len(busy))
    queues = range(graph.num_queues)
    size = [network.op_first[q + 1] - network.op_first[q] for q in queues]
    duration, hosts, labels = list(network.duration), list(map(graph.hosts, queues)), list(graph.labels)
    needs = [
        [(more.need_queue[n], 0.0, 1, 1) for n in range(more.need_first[q], more.need_first[q + 1])] for q in queues
    ]
    by_maker = {(each.pipeline, send_of(Op(*each.made, 0))): each for each in messages}
    for q in queues:
        for place, (made, *_) in enumerate(needs[q]):
            pipeline, kind, stage = graph.labels[made]
            message = by_maker.get((pipeline, send_of(Op(kind, stage, 0))))
            rows = [] if message is None else [busy[name] for name in message.streams(channel) if name in busy]
            if message is None or hosts[made] == hosts[q] or not rows:
                continue
            needs[q][place] = (len(labels), 0.0, 1, 1)
            needs.append([(made, 0.0, 1, 1)])
            labels.append((pipeline, "SEND_F" if kind == "F" else "SEND_B", stage))
            size.append(size[made])
            duration.append(message.ms)
            hosts.append(rows)
    made_network, made_more = of_queues(size, duration, hosts, needs, graph.num_rows + len(busy))
    tables = graph.tables._replace(network=made_network, more=made_more)
    return replace(graph, labels=tuple(labels), tables=tables)


def _sequence_of(
    problem: GraphProblem, schedule: Schedule, costs: Costs, links: Links, channel: str
) -> list[int] | None:
    """A compute order with its messages as the arbiter serves them, as a sequence; None where it is of other ops."""
    graph = problem.graph
    try:
        rows = rows_of(graph, schedule)
    except ValueError:
        return None
    rows += [[] for _ in range(graph.num_rows - len(rows))]
    number = {label: q for q, label in enumerate(graph.labels)}
    crossings, run = arbitrate(Runner(costs).lowered(schedule), costs, lambda: LinkQueues(links), channel)
    for served, *_ in sorted(run.served, key=lambda each: run.left[each[0]]):
        send = crossings[served].send
        q = number.get((schedule.microbatch_pipeline[send.microbatch], send.kind, send.stage), NONE)
        for row in graph.hosts(q) if q != NONE else ():
            rows[row].append(q)
    return problem.lined_up(rows)


def _rows_found(problem: GraphProblem, sequence: Array, costs: Costs, like: Schedule) -> tuple[Schedule, Schedule]:
    """The compute order of a sequence sorted by starts, and the same with each message where its ranks were when it
    left.

    At one moment the order of the sequence counts: an op that takes no time may need a message of that moment.
    """
    graph, first = problem.graph, problem.network.op_first.tolist()
    _, start = problem.placed(sequence)
    rows: list[list[Op]] = [[] for _ in range(graph.num_ranks)]
    spans: dict[Op, tuple[float, float, float]] = {}
    for place, (q, op) in enumerate(
        zip(np.asarray(sequence).tolist(), problem.ops_of(sequence).tolist(), strict=True)
    ):
        name, begin = graph.op(q, op - first[q]), float(start[op])
        spans[name] = begin, begin + float(problem.network.duration[q]), place
        row = graph.hosts(q)[0]
        if row < graph.num_ranks:
            rows[row].append(name)
    schedule = replace(like, order=tuple(map(tuple, rows)))
    order = Runner(costs).lowered(schedule)
    crossings = list(crossings_of(order.graph, costs))
    moments: list[tuple[float, float, tuple[int, int, int]]] = []
    for number, crossing in enumerate(crossings):
        _, end, made = spans[order.graph.ops[crossing.made]]
        at, _, turn = spans.get(crossing.send, (end, end, made + 0.5))

        def num_ran(rank: int, at: float = at, turn: float = turn) -> int:
            return sum(spans[op][1] <= at and (spans[op][2] < turn or spans[op][0] < at) for op in rows[rank])

        moments.append((at, turn, (number, num_ran(crossing.source), num_ran(crossing.target))))
    served = [each for *_, each in sorted(moments)]
    return schedule, replace(schedule, order=tuple(map(tuple, write_rows(order, crossings, served))))
