"""Links and transports as the engine takes them: arrays where that is possible, a function where lots are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import numpy as np

from penstock.cost import Costs, Links
from penstock.cost.conditions import NOTHING, Constant, Trace
from penstock.cost.links import LinkQueues
from penstock.engine.event_loop import LinkArrays
from penstock.simulation.lowered import Order
from penstock.simulation.transport import Blocking, SimulatedTransport

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
