"""Merges the halves of split backwards where the split buys nothing: fewer ops to launch."""

from __future__ import annotations

from dataclasses import replace

from penstock.cost import Costs, Links
from penstock.engine.tolerance import slack
from penstock.passes.network import PassNetwork, network
from penstock.schedule import Op, Schedule


def merged(schedule: Schedule, costs: Costs, links: Links) -> Schedule:
    """I and its W become B again, at I's place, wherever every op still starts by its latest start.

        before, 7 ms                          after, 7 ms (B takes two columns)
        rank 0 | F0 F1 .  I0 W0 I1 W1         rank 0 | F0 F1 .  B0 -- B1 --
        rank 1 | .  F0 I0 F1 I1 W0 W1         rank 1 | .  F0 I0 F1 I1 W0 W1

    On rank 0 nothing waits for the gradient. On rank 1 it must leave early, so its halves stay apart.

    The backwards of a stage keep the order in which they add to the weights' gradients, so sums of floats stay
    the same; a half that a registered op waits for by its name stays a half, and so do those that several ranks
    run together. Memory and the makespan (frozen order, decoupled messages) never grow.
    """
    net = network(schedule, costs, links)
    whole = _MergeCandidates(schedule, costs, net).whole()
    if not whole:
        return schedule
    graph = net.graph
    gone = {Op("W", op.stage, op.microbatch) for op in whole}
    rows = tuple(
        tuple(Op("B", op.stage, op.microbatch) if op in whole else op for op in row if op not in gone)
        for row in (graph.ops[graph.first[r] : graph.first[r + 1]] for r in range(graph.num_ranks))
    )
    return replace(schedule, order=rows)


class _MergeCandidates:
    """Which halves can be merged while every op still starts by its latest start."""

    def __init__(self, schedule: Schedule, costs: Costs, net: PassNetwork) -> None:
        self._net, self._costs = net, costs
        graph = net.graph
        named = {end for need in schedule.graph.needs for end in (need.before, need.after) if end[0] in "IW"}
        self._weight: dict[int, int] = {}
        """The W of each I that may be merged, by their nodes."""
        self._adder_before: dict[int, int] = {}
        """The B or W that adds to the same gradients just before this one, on the same rank."""
        last: dict[tuple[int, int], int] = {}
        for node, op in enumerate(graph.ops):
            if op.kind in "BW":
                key = graph.rank[node], op.stage
                if key in last:
                    self._adder_before[node] = last[key]
                last[key] = node
            both = [(kind, op.stage) for kind in "IW"]
            if op.kind == "I" and graph.gang[node] < 0 and not named.intersection(both):
                self._weight[node] = graph.number[Op("W", op.stage, op.microbatch)]

    def whole(self) -> set[Op]:
        """The I ops to become B."""
        durations = list(self._net.durations)
        place = {w: w for w in self._weight.values()}
        _, horizon = self._net.earliest(durations)
        found: set[int] = set()
        while more := self._round(durations, place, horizon):
            found.update(more)
            for node in more:
                weight = self._weight.pop(node)
                durations[node], durations[weight] = self._costs.duration("B", *self._net.graph.ops[node][1:]), 0.0
                place[weight] = node
        return {self._net.graph.ops[node] for node in found}

    def _round(self, durations: list[float], place: dict[int, int], horizon: float) -> list[int]:
        """One walk through the ops in the order of time; merging here moves later ops within their slack.

        The W that is merged stays in its row and takes no time: that is the same as being gone.
        """
        net = self._net
        latest = net.latest(durations, horizon)
        margin = slack(horizon)
        starts = [0.0] * len(durations)
        taken = list(durations)
        place = dict(place)
        found = []
        for node in net.order:
            start = max(
                [0.0]
                + [starts[s] + taken[s] + late for s, late in net.before[node]]
                + [starts[s] + taken[s] for s in net.row_before[node]]
            )
            starts[node] = start
            weight = self._weight.get(node)
            if weight is None:
                continue
            adder = self._adder_before.get(weight)
            if adder is not None and place.get(adder, adder) > node:
                continue
            end = start + self._costs.duration("B", *net.graph.ops[node][1:])
            if end > latest[weight] + durations[weight] + margin:
                continue
            if any(end + late > latest[t] + margin for t, late in net.after[node] if t != weight):
                continue
            if any(end > latest[t] + margin for t in net.row_after[node] if t != weight):
                continue
            taken[node], taken[weight] = end - start, 0.0
            place[weight] = node
            found.append(node)
        return found
