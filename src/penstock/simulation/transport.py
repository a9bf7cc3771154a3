"""What carries messages: how many a sender may hand to a link before it waits, and when a line carries the next.

`run_links` lays links and transports out as the engine takes them: as arrays where that is possible, as a function
where lots are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import numpy as np

from penstock.cost import CostError, Costs, LinkCondition, Links
from penstock.cost.conditions import NOTHING, Constant, LinkQueue, Trace, raised
from penstock.cost.links import LinkQueues
from penstock.engine.event_loop import LinkArrays
from penstock.schedule.messages import BUFFERED, GLOO, NCCL_EDGE
from penstock.schedule.short_repr import short_repr
from penstock.simulation.lowered import Order
from penstock.unknown_names import refuse_unknown


@dataclass(frozen=True)
class Decoupled:
    """A transport whose messages never make their sender wait. Some wait on their line.

        buffered     no message waits
        gloo         a rank posts its receives as the run begins; a line carries messages once news of that is there
        nccl-edge    a rank posts a receive when its message is announced; a line carries one message at a time

    These are the lines of Penstock's runtime. On `schedule.messages`, rows say when receives are posted.

    Attributes:
        channel: one of these.
        delegated: links that use delegates and no line, by their two ranks in either order.

    Examples:
        >>> import penstock as ps
        >>> late, gpipe = ps.Links({(0, 1): 20.0}), ps.build("gpipe", 2, 4)
        >>> ps.simulate(gpipe, links=late).makespan, ps.simulate(gpipe, links=late, transport="nccl-edge").makespan
        (55.0, 166.0)
    """

    channel: str = BUFFERED
    delegated: frozenset[tuple[int, int]] = frozenset()

    def carry(self, links: Links, ways: Iterable[tuple[int, int]], soonest: float, at: float) -> Links | LinkQueues:
        """The links as messages on their lines find them.

        Args:
            links: their conditions.
            ways: the directions that messages take.
            soonest: ms after which a first message may be sent: news that comes sooner makes no difference.
            at: when the run begins, in ms of the links' own time.
        """
        if self.channel == BUFFERED:
            return links
        conditions = {way: each for way in ways if (each := links.named(*way)[1]) is not None}
        by_line = {way for way in conditions if not {way, way[::-1]} & self.delegated}
        if self.channel == NCCL_EDGE:
            return Links(conditions | {way: _in_turn(conditions[way]) for way in by_line}, base=links.base)
        told = {(a, b): links.delay_of(b, a, 0, at, LinkQueue()).arrived for a, b in by_line}
        late = {way: then for way, then in told.items() if then > at + soonest}
        return LinkQueues(links, late) if late else links


def _in_turn(condition: LinkCondition) -> LinkCondition:
    """The condition of a link that is busy with a message until it has arrived."""
    busy = raised(condition.latency, condition.occupancy.at(0.0, ""))
    return replace(condition, latency=NOTHING, occupancy=busy)


@refuse_unknown(CostError)
@dataclass(frozen=True)
class Blocking:
    """A transport whose links hold at most `depth` messages. When a link is full, its sender waits.

    This is head-of-line blocking: the queue of a slow link fills up, and the next send keeps later ops from starting
    although they are ready.

    Attributes:
        depth: most messages on their way over a link, in each direction; at least 1.
        delegated: links whose messages go through delegates and block nothing, by their two ranks in either order.

    Raises:
        CostError: a depth below 1.

    Examples:
        >>> import penstock as ps
        >>> s, late = ps.build("1f1b", 4, 8), ps.Links({(0, 1): 8.0})
        >>> ps.simulate(s, links=late).makespan
        81.0
        >>> ps.simulate(s, links=late, transport=ps.Blocking(1)).makespan
        106.0

    References:
        PipeMorph (NSDI 2026), section 3.2.
    """

    depth: int = 2
    delegated: frozenset[tuple[int, int]] = frozenset()

    __repr__ = short_repr

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise CostError(f"a blocking link of depth {self.depth} can carry nothing: give at least 1")

    def depth_of(self, source: int, target: int) -> int:
        """How many messages a direction holds; 0 for any number."""
        return 0 if {(source, target), (target, source)} & self.delegated else self.depth


SimulatedTransport = Decoupled | Blocking


def as_transport(value: SimulatedTransport | str, delegated: Collection[tuple[int, int]] = ()) -> SimulatedTransport:
    """Reads "decoupled", "blocking", "blocking:4", "gloo" or "nccl-edge". Raises CostError for anything else.

    Args:
        value: a text, or the transport itself.
        delegated: links that use delegates, besides those of the transport.
    """
    if isinstance(value, str):
        word, colon, depth = value.partition(":")
        if word == "blocking" and (depth.isdecimal() or not colon):
            value = Blocking(int(depth or 2))
        elif value in ("decoupled", GLOO, NCCL_EDGE):
            value = Decoupled(BUFFERED if value == "decoupled" else value)
        else:
            raise CostError(f"transport {value!r}: give 'decoupled', 'blocking', 'blocking:4', 'gloo' or 'nccl-edge'")
    return replace(value, delegated=value.delegated | set(delegated)) if delegated else value


Arrival = Callable[[int, float], float]
"""Says when a message arrives, by its edge and the time of sending."""


def run_links(
    order: Order, links: Links | LinkQueues, costs: Costs, links_at: float, transport: SimulatedTransport
) -> tuple[LinkArrays, Arrival | None]:
    """Lays out links for the runs of an order that start at `links_at` ms of their own time.

    Where lots are drawn, or messages of an earlier run stand in the links, a function says when each message arrives.
    """
    num_rows, nothing = order.num_rows, np.zeros(0)
    edges, sources, on = order.crossing
    used = {link: order.ends(link) for link in np.flatnonzero(np.bincount(on)).tolist()}
    depth = np.zeros(num_rows**2 if isinstance(transport, Blocking) else 0, np.int64)
    if isinstance(transport, Blocking):
        for link, ends in used.items():
            if link < order.num_ranks * num_rows:  # what a stream sends holds nobody up
                depth[link] = transport.depth_of(*ends)
    elif isinstance(links, Links):
        links = transport.carry(links, used.values(), float(order.duration.min(initial=np.inf)), links_at)
    arrays = LinkArrays(
        delay=np.zeros(num_rows**2), depth=depth, bounded=bool(depth.any()), lines=False, base=0.0, busy=nothing,
        late_first=nothing, late_from=nothing, late_ms=nothing, line_free=nothing, line_last=nothing,
    )  # fmt: skip
    if isinstance(links, Links) and links.is_constant:
        for link, ends in used.items():
            arrays.delay[link] = links.delay(*ends)
        return arrays, None
    if isinstance(links, LinkQueues) or links_at or not _is_plain(links, used.values()):
        lines = links if isinstance(links, LinkQueues) else LinkQueues(links)
        return arrays, _arrival(order, costs, lines, links_at)
    late_first: list[int] = [0]
    late_from: list[float] = []
    late_ms: list[float] = []
    each, rate = np.zeros(num_rows**2), np.zeros(num_rows**2)
    conditions = {link: links.named(*ends)[1] for link, ends in used.items()}
    for link in range(num_rows**2):
        condition = conditions.get(link)
        if condition is not None:
            latency = condition.latency
            late_from += latency.times if isinstance(latency, Trace) else (0.0,)
            late_ms += latency.values if isinstance(latency, Trace) else (latency.at(0.0, ""),)
            each[link] = condition.occupancy.at(0.0, "")
            rate[link] = 0.0 if condition.bandwidth is None else condition.bandwidth.at(0.0, "")
        late_first.append(len(late_ms))
    busy = np.zeros(len(order.graph.arrays.edge_to))
    busy[edges] = each[on]
    if rate.any():
        for edge, source, link in zip(edges.tolist(), sources.tolist(), on.tolist(), strict=True):
            if rate[link]:
                busy[edge] += _size(order, costs, source, edge) / rate[link] * 1e3
    conditioned = arrays._replace(
        lines=True,
        base=links.base,
        busy=busy,
        late_first=np.array(late_first, np.int64),
        late_from=np.array(late_from),
        late_ms=np.array(late_ms),
        line_free=np.zeros(num_rows**2),
        line_last=np.zeros(num_rows**2),
    )
    return conditioned, None


def _is_plain(links: Links, used: Iterable[tuple[int, int]]) -> bool:
    """Whether nothing is drawn by lots, only latencies change over time, and no two directions share a queue."""
    conditions = (links.named(*ends)[1] for ends in used)
    return all(
        each is None
        or (
            (isinstance(each.latency, Constant | Trace) and replace(each, latency=NOTHING).is_steady)
            and not each.half_duplex
        )
        for each in conditions
    )


def _size(order: Order, costs: Costs, source: int, edge: int) -> float:
    graph = order.graph
    return costs.message_size(graph.ops[source], graph.receives(source, graph.edge_to[edge]))


def _arrival(order: Order, costs: Costs, lines: LinkQueues, at: float) -> Arrival:
    """When the message of an edge, sent at some time, arrives."""
    graph, sources = order.graph, order.graph.sources.tolist()

    def arrival(edge: int, now: float) -> float:
        source, target = graph.host(sources[edge]), graph.host(graph.edge_to[edge])
        return lines.arrival_in_run(source, target, _size(order, costs, sources[edge], edge), now, at)

    return arrival
