"""Links and transports as the engine takes them: arrays where that is possible, a function where lots are drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from penstock.cost import Costs, Links
from penstock.cost.conditions import NOTHING, Constant, Trace
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

    @property
    def bounded(self) -> bool:
        """Whether a sender may have to wait until a link has room."""
        return bool(self.arrays["depth"].any())


def passed(
    order: Order, links: Links | LinkQueues, costs: Costs, links_at: float, transport: SimulatedTransport
) -> LinkArrays:
    """Lays out links for the runs of an order that start at `links_at` ms of their own time."""
    num_rows, is_bounded = order.num_rows, isinstance(transport, Blocking)
    edges, sources, on = order.crossing
    used = {link: order.ends(link) for link in np.flatnonzero(np.bincount(on)).tolist()}
    unused = ("delay", "busy", "late_from", "late_ms", "line_free", "line_last")
    arrays: dict[str, Array] = dict.fromkeys(unused, np.zeros(1))
    arrays |= {"late_first": np.zeros(1, np.int64), "depth": np.zeros(num_rows**2 if is_bounded else 1, np.int64)}
    if isinstance(transport, Blocking):
        for link, ends in used.items():
            if link < order.num_ranks * num_rows:  # what a stream sends holds nobody up
                arrays["depth"][link] = transport.depth_of(*ends)
    elif isinstance(links, Links):
        links = transport.carry(links, used.values(), float(order.duration.min(initial=np.inf)), links_at)
    if isinstance(links, Links) and links.is_constant:
        arrays["delay"] = np.zeros(num_rows**2)
        for link, ends in used.items():
            arrays["delay"][link] = links.delay(*ends)
        return LinkArrays(False, 0.0, None, arrays)
    if isinstance(links, LinkQueues) or links_at or not _is_plain(links, used.values()):
        lines = links if isinstance(links, LinkQueues) else LinkQueues(links)
        return LinkArrays(False, 0.0, _arrival(order, costs, lines, links_at), arrays)
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
        size = _size(order, costs, source, edge)
        return lines.arrival_in_run(rank[source] % num_ranks, rank[target] % num_ranks, size, now, at)

    return arrival
