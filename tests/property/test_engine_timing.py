"""The sweep against a plain loop over ops, on random networks: windows, delays, ops of several rows, deadlocks."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock as ps
from penstock.engine.network import NONE, Irregularities, Network, OpGraph, of_queues
from penstock.engine.sweep import OrderTimes, Timer
from penstock.schedule.columns import edges_of, numbered
from penstock.schedule.liveness import run_untimed
from penstock.schedule.proof_columns import are_in_local_order, run_to_their_ends
from tiers import examples

Needs = list[list[tuple[int, float, int, int]]]


class Case:
    """Queues over rows with random needs, and rows that may wait for one another."""

    def __init__(self, draw: random.Random) -> None:
        self.num_rows = draw.randint(1, 4)
        num_queues = draw.randint(1, 7)
        self.size = [draw.randint(0, 4) for _ in range(num_queues)]
        self.duration = [draw.choice([0.0, 0.1, 1.0, 2.5]) for _ in range(num_queues)]
        self.hosts = [draw.sample(range(self.num_rows), draw.choice([1, 1, 1, self.num_rows])) for _ in self.size]
        self.needs: Needs = [[] for _ in self.size]
        for q in range(1, num_queues):
            for source in draw.sample(range(q), draw.randint(0, min(2, q))):
                before, after = draw.choice([(1, 1), (1, 1), (2, 1), (1, 2), (3, 2)])
                if -(-self.size[q] // after) * before <= self.size[source]:
                    self.needs[q].append((source, draw.choice([0.0, 0.3, 4.0]), before, after))
        self.rows: list[list[int]] = [[] for _ in range(self.num_rows)]
        left = list(self.size)
        while any(left):  # in an order that runs
            q = draw.choice([q for q, count in enumerate(left) if count and self._is_ready(q, left)])
            left[q] -= 1
            for row in self.hosts[q]:
                self.rows[row].append(q)
        if draw.random() < 0.5:  # in any order
            draw.shuffle(self.rows[draw.randrange(self.num_rows)])

    def _is_ready(self, q: int, left: list[int]) -> bool:
        number = self.size[q] - left[q]
        return all(self.size[s] - left[s] >= (number // after + 1) * before for s, _, before, after in self.needs[q])

    def by_hand(self) -> tuple[dict[tuple[int, int], float], list[int]]:
        """Starts of all ops that ever run, and how far rows come: any op that can run runs, till none can."""
        starts: dict[tuple[int, int], float] = {}
        place, free, ran = [0] * self.num_rows, [0.0] * self.num_rows, [0] * len(self.size)
        moved = True
        while moved:
            moved = False
            for q in range(len(self.size)):
                rows = self.hosts[q]
                if not all(self.rows[r][place[r] : place[r] + 1] == [q] for r in rows):
                    continue
                needed = [(s, (ran[q] // a + 1) * b - 1, late) for s, late, b, a in self.needs[q]]
                if any(ran[s] <= last for s, last, _ in needed):
                    continue
                there = [starts[s, n] + self.duration[s] + late for s, n, late in needed]
                time = max([free[r] for r in rows] + there)
                starts[q, ran[q]] = time
                ran[q] += 1
                for r in rows:
                    place[r] += 1
                    free[r] = time + self.duration[q]
                moved = True
        return starts, place

    def networks(self) -> list[tuple[Network, Irregularities | None]]:
        """All needs beside the network; and as many in it as have a place there."""
        outside = of_queues(self.size, self.duration, self.hosts, self.needs, self.num_rows)
        if any(len(rows) > 1 for rows in self.hosts):
            return [outside]
        inside = {name: [NONE] * len(self.size) for name in ("message_from", "local_from", "message_to")}
        delay, rest = [0.0] * len(self.size), []
        for q, found in enumerate(self.needs):
            rest.append(list(found))
            for need in found:
                source, late, before, after = need
                same_row = self.hosts[source] == self.hosts[q]
                if before == after == 1 and inside["message_from"][q] == inside["message_to"][source] == NONE:
                    inside["message_from"][q], inside["message_to"][source], delay[q] = source, q, late
                    rest[q].remove(need)
                elif before == after == 1 and late == 0 and same_row and inside["local_from"][q] == NONE:
                    inside["local_from"][q] = source
                    rest[q].remove(need)
        network, irregular = of_queues(self.size, self.duration, self.hosts, rest, self.num_rows)
        network = network._replace(delay=delay, **inside)
        irregular = irregular._replace(unlock_first=outside[1].unlock_first, unlocks=outside[1].unlocks)
        return [outside, (network, irregular if any(rest) else None)]


def check_case(seed: int, compile: bool) -> None:
    case = Case(random.Random(seed))
    starts, place = case.by_hand()
    for network, irregular in case.networks():
        timed = Timer(network, irregular, compile).time([q for row in case.rows for q in row])
        first = list(accumulate(case.size, initial=0))
        assert timed.reached == place
        assert {key: timed.start[first[key[0]] + key[1]] for key in starts} == starts
        assert timed.complete == (place == [len(row) for row in case.rows])
        if timed.complete:
            assert timed.makespan == max((t + case.duration[q] for (q, _), t in starts.items()), default=0.0)


@given(st.integers(0, 2**32))
@settings(max_examples=examples(300), deadline=None)
def test_starts_are_those_of_a_plain_loop(seed: int) -> None:
    check_case(seed, compile=False)


def test_compiled_code_finds_the_same() -> None:
    for seed in range(200):
        check_case(seed, compile=True)


def test_orders_with_ops_moved_end_or_do_not_as_op_by_op() -> None:
    """`check` sweeps over queues of one op each; a run of sets of ops says the same."""
    draw, ends = random.Random(0), []
    for name in ["zb", "zb-v", "interleaved-1f1b", "chimera"] * 40:
        schedule = ps.build(name, 4, 8)
        rows = [list(row) for row in schedule.order]
        for _ in range(draw.randint(1, 3)):
            row = draw.choice(rows)
            place = draw.randrange(len(row))
            row.insert(max(0, place - draw.randint(1, 5)), row.pop(place))
        other = ps.Schedule("other", schedule.placement, tuple(map(tuple, rows)), schedule.microbatch_pipeline)
        found = numbered(other)
        assert found is not None
        edges = edges_of(found, other.graph.targets)
        if not are_in_local_order(found.columns, edges):
            continue  # refused before
        ends.append(run_to_their_ends(found.columns, edges))
        assert ends[-1] == (not run_untimed(other, None).blocked)
    assert min(ends.count(True), ends.count(False)) > 10


def test_what_never_runs_has_no_makespan() -> None:
    network, irregular = of_queues([1, 1], [1.0, 1.0], [[0], [1]], [[(1, 0.0, 1, 1)], [(0, 0.0, 1, 1)]], 2)
    timed = Timer(network, irregular, compile=False).time([0, 1])
    assert timed == OrderTimes([0.0, 0.0], [0, 0], -1.0)
    assert not timed.complete


@settings(max_examples=examples(150), deadline=None)
@given(st.randoms(use_true_random=False))
def test_what_starts_as_late_as_it_can_is_early_once_time_is_turned_round(draw: random.Random) -> None:
    """Ops in rows, some in several at once: both ends against the longest paths, counted op by op."""
    num_rows, num = draw.randint(1, 3), draw.randint(1, 8)
    rows: list[list[int]] = [[] for _ in range(num_rows)]
    for op in range(num):
        for r in draw.sample(range(num_rows), draw.choice([1, 1, num_rows])):
            rows[r].append(op)
    places = [(r, op) for r, row in enumerate(rows) for op in row]
    number = {op: places.index(next(place for place in places if place[1] == op)) for op in range(num)}
    pairs = [(a, b, draw.choice([0.0, 2.5])) for b in range(num) for a in range(b) if draw.random() < 0.3]
    asked = [(a, b, ms) for a, b, ms in pairs if places[number[a]][0] != places[number[b]][0] or ms == 0]
    took = [draw.choice([0.0, 1.0, 3.5]) for _ in range(num)]
    graph = OpGraph(
        np.array([0, *accumulate(map(len, rows))]),
        np.array([r for r, _ in places]),
        np.array([number[a] for a, _, _ in asked], np.int64),
        np.array([number[b] for _, b, _ in asked], np.int64),
        np.array([ms for _, _, ms in asked]),
        np.array([number[op] for _, op in places]),
    )
    late = [*asked, *((a, b, 0.0) for row in rows for a, b in pairwise(row))]
    first, last = [0.0] * num, [0.0] * num
    for op in range(num):
        first[op] = max([0.0, *(first[a] + took[a] + ms for a, b, ms in late if b == op)])
    for op in reversed(range(num)):
        last[op] = max([0.0, *(last[b] + took[b] + ms for a, b, ms in late if a == op)])
    duration = np.array([took[op] for _, op in places])
    early = Timer(*graph.network(duration)).time(graph.row)
    turned = graph.turned()
    behind = Timer(*turned.network(duration[::-1])).time(turned.row)
    assert [early.start[number[op]] for op in range(num)] == pytest.approx(first)
    assert [behind.start[::-1][number[op]] for op in range(num)] == pytest.approx(last)
    assert early.makespan == pytest.approx(behind.makespan)
