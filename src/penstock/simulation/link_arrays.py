"""Links and transports as the engine takes them: arrays where that is possible, a function where lots are drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.cost import Costs, Links
from penstock.cost.conditions import Constant, Trace
from penstock.cost.links import LinkQueues
from penstock.simulation.lowered import Array, Order
from penstock.simulation.transport import Blocking, SimulatedTransport


@dataclass(frozen=True)
class LinkArrays:
    """Links as the engine takes them."""

    lines: bool
    base: float
    arrival: Callable[[int, float], float] | None
    arrays: dict[str, Array]


def passed(order: Order, links: Links | LinkQueues, costs: Costs, links_at: float) -> LinkArrays:
    """Lays out links for the runs of an order that start at `links_at` ms of their own time."""
    num_rows = order.num_rows
    arrays: dict[str, Array] = {
        "delay": np.zeros(1),
        "busy": np.zeros(1),
        "late_first": np.zeros(1, np.int64),
        "late_from": np.zeros(1),
        "late_ms": np.zeros(1),
        "line_free": np.zeros(1),
        "line_last": np.zeros(1),
    }
    if links == Links():
        arrays["delay"] = np.zeros(num_rows**2)
        return LinkArrays(False, 0.0, None, arrays)
    edges, sources, on = order.crossing
    used = np.flatnonzero(np.bincount(on)).tolist()
    if isinstance(links, Links) and links.is_constant:
        arrays["delay"] = np.zeros(num_rows**2)
        for link in used:
            arrays["delay"][link] = links.delay(*order.ends(link))
        return LinkArrays(False, 0.0, None, arrays)
    if isinstance(links, LinkQueues) or links_at or not _is_plain(links, [order.ends(link) for link in used]):
        lines = links if isinstance(links, LinkQueues) else LinkQueues(links)
        return LinkArrays(False, 0.0, _arrival(order, costs, lines, links_at), arrays)
    late_first: list[int] = [0]
    late_from: list[float] = []
    late_ms: list[float] = []
    each, rate = np.zeros(num_rows**2), np.zeros(num_rows**2)
    conditions = {link: links.named(*order.ends(link))[1] for link in used}
    for link in range(num_rows**2):
        condition = conditions.get(link)
        if condition is not None:
            latency = condition.latency
            late_from += latency.times if isinstance(latency, Trace) else (0.0,)
            late_ms += latency.values if isinstance(latency, Trace) else (latency.at(0.0, ""),)
            each[link] = condition.occupancy.at(0.0, "")
            rate[link] = 0.0 if condition.bandwidth is None else condition.bandwidth.at(0.0, "")
        late_first.append(len(late_ms))
    busy = np.zeros(len(order.ints["edge_to"]))
    busy[edges] = each[on]
    if rate.any():
        for edge, source, link in zip(edges.tolist(), sources.tolist(), on.tolist(), strict=True):
            if rate[link]:
                busy[edge] += _size(order, costs, source, edge) / rate[link] * 1e3
    arrays |= {
        "busy": busy,
        "late_first": np.array(late_first, np.int64),
        "late_from": np.array(late_from or [0.0]),
        "late_ms": np.array(late_ms or [0.0]),
        "line_free": np.zeros(num_rows**2),
        "line_last": np.zeros(num_rows**2),
    }
    return LinkArrays(True, links.base, None, arrays)


def _is_plain(links: Links, used: Sequence[tuple[int, int]]) -> bool:
    """Whether nothing is drawn by lots, only latencies change over time, and no two directions share a queue."""
    for ends in used:
        condition = links.named(*ends)[1]
        if condition is None:
            continue
        fixed = [each for each in (condition.occupancy, condition.bandwidth) if each is not None]
        if (
            condition.loss is not None
            or condition.half_duplex
            or not all(isinstance(each, Constant) for each in fixed)
        ):
            return False
        if not isinstance(condition.latency, Constant | Trace):
            return False
    return True


def _size(order: Order, costs: Costs, source: int, edge: int) -> float:
    graph, base = order.graph, order.base
    producer = int(base[source])
    return costs.message_size(graph.ops[producer], graph.receives(producer, int(base[order.ints["edge_to"][edge]])))


def _arrival(order: Order, costs: Costs, lines: LinkQueues, at: float) -> Callable[[int, float], float]:
    """When the message of an edge, sent at some time, arrives."""
    sources = order.sources.tolist()
    num_ranks = order.num_ranks
    targets, rank = order.ints["edge_to"].tolist(), order.ints["rank_of"].tolist()

    def arrival(edge: int, now: float) -> float:
        source, target = sources[edge], targets[edge]
        sent = now + at
        # Rounded, or what a sum leaves over would part what happens at one moment, and turn ties.
        size = _size(order, costs, source, edge)
        return now + round(lines.arrival(rank[source] % num_ranks, rank[target] % num_ranks, size, sent) - sent, 9)

    return arrival


def depths(order: Order, transport: SimulatedTransport) -> Array:
    """How many messages each link holds under way, by link; 0 for any number."""
    if not isinstance(transport, Blocking):
        return np.zeros(1, np.int64)
    found = np.zeros(order.num_rows**2, np.int64)
    for link in np.unique(order.crossing[2]).tolist():
        if link < order.num_ranks * order.num_rows:  # what a stream sends holds nobody up
            found[link] = transport.depth_of(*order.ends(link))
    return found
