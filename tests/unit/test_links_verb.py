"""What `penstock links` measures and says, with ranks as threads that share a simulated clock."""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

import penstock as ps
from penstock.cli import links as verb
from penstock.cli import main
from penstock.cost.conditions import LinkQueue
from penstock.runtime.mesh import probe
from penstock.tune import links as measuring
from penstock.tune.links import MeasuredLinks, PairTimes, measure_links

pytestmark = pytest.mark.unit

HEALTHY = "latency:0.1ms+bandwidth:100MB/s"


class Network:
    """Links between ranks in threads. Each rank has its own clock, which waiting for a message moves on."""

    def __init__(self, num_ranks: int, conditions: ps.Links) -> None:
        self.num_ranks, self.conditions = num_ranks, conditions
        # All of them at once: two threads that first look for one could each make their own.
        self.lines: dict[tuple[int, int], Any] = {pair: queue.Queue() for pair in product(range(num_ranks), repeat=2)}
        self.busy: dict[tuple[int, int], LinkQueue] = defaultdict(LinkQueue)
        self.shared: list[Any] = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks)
        self.clock = threading.local()

    def now(self) -> float:
        """Milliseconds of this thread's clock."""
        return float(getattr(self.clock, "ms", 0.0))

    def run(self, seconds: float) -> list[MeasuredLinks]:
        found: list[Any] = [None] * self.num_ranks

        def rank(number: int) -> None:
            found[number] = measure_links(SimulatedPeers(self, number), seconds)  # type: ignore[arg-type]

        threads = [threading.Thread(target=rank, args=(number,), daemon=True) for number in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        return found


class SimulatedPeers:
    """What measuring asks of peers: messages, and what all share."""

    def __init__(self, network: Network, rank: int) -> None:
        self.network, self.here, self.num_ranks = network, (rank,), network.num_ranks

    def send(self, tensor: Tensor, target: int, what: str) -> None:
        network, way = self.network, (self.here[0], target)
        passage = network.conditions.delay_of(*way, tensor.numel(), network.now(), network.busy[way])
        network.busy[way] = passage.queue
        network.lines[way].put((passage.arrived, tensor.clone()))

    def receive(self, tensor: Tensor, source: int, what: str) -> None:
        arrived, sent = self.network.lines[source, self.here[0]].get(timeout=120)
        tensor.copy_(sent)
        self.network.clock.ms = max(self.network.now(), arrived)

    def gather(self, value: Any) -> list[Any]:
        self.network.shared[self.here[0]] = value
        self.network.barrier.wait(120)
        shared = list(self.network.shared)
        self.network.barrier.wait(120)
        return shared


def measured(
    monkeypatch: pytest.MonkeyPatch, num_ranks: int, late: Sequence[str], seconds: float = 10.0
) -> MeasuredLinks:
    """Links measured between hosts of their own, of which those in `late` are as they say, and the others healthy."""
    network = Network(num_ranks, ps.Links.parse(late, default=HEALTHY))
    clock = SimpleNamespace(perf_counter_ns=lambda: round(network.now() * 1e6), monotonic=lambda: network.now() / 1e3)
    for module in (probe, measuring):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(measuring, "network_name", lambda: f"host {threading.get_ident()}")
    found = network.run(seconds)
    assert all(each.pairs == found[0].pairs for each in found)
    return found[0]


@pytest.mark.parametrize("num_ranks", [4, 5, 8])
def test_a_late_link_and_a_slow_one_are_named_with_their_values(
    num_ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = ["2:3=latency:30ms+bandwidth:100MB/s", "0:1=latency:0.1ms+bandwidth:5Mbit/s"]
    found = measured(monkeypatch, num_ranks, late)
    assert len(found.pairs) == num_ranks * (num_ranks - 1) // 2
    assert found.late == [(0, 1), (2, 3)]
    assert found.pairs[2, 3].latency == pytest.approx(30, rel=0.2)
    assert found.rate(0, 1) == pytest.approx(625_000, rel=0.2)
    assert found.rate(1, 0) == pytest.approx(625_000, rel=0.2)
    assert found.pairs[0, 2].latency == pytest.approx(0.1, rel=0.2)
    assert found.rate(3, 0) == pytest.approx(100e6, rel=0.2)
    assert found.is_late((2, 3))
    assert found.is_slow(0, 1)
    assert found.seconds < 10


def test_a_link_that_is_slow_in_one_direction_has_an_option_for_each(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = ["0:1=latency:5ms+bandwidth:1MB/s", "1:0=latency:5ms+bandwidth:100MB/s"]
    found = measured(monkeypatch, 4, slow)
    assert found.links.conditions.keys() == {(0, 1), (1, 0)}
    assert found.links.conditions[1, 0].bandwidth is None
    assert found.links == ps.Links.parse(found.links.texts(), default=found.links.default)


def test_the_two_directions_of_the_only_link_were_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a loaded machine the one link under torchrun was called late, as a message back took a fifth of the time."""
    found = measured(monkeypatch, 2, ["0:1=latency:0.1ms+bandwidth:1MB/s", "1:0=latency:0.1ms+bandwidth:100MB/s"])
    assert found.late == []
    assert found.links.conditions == {}


def test_all_ranks_keep_the_time_though_every_link_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    links = [f"{a}:{b}=latency:1ms+bandwidth:2MB/s" for a in range(8) for b in range(a + 1, 8)]
    found = measured(monkeypatch, 8, links, seconds=2.0)
    assert found.seconds < 3.0
    assert found.late == []
    assert found.links.conditions == {}
    assert found.links.default is not None


def of(latencies: dict[tuple[int, int], float], slow: dict[tuple[int, int], float] | None = None) -> MeasuredLinks:
    """Links between four hosts with these latencies (ms), else 0.2; with these bandwidths, else 1 GB/s."""
    pairs = {}
    for a in range(4):
        for b in range(a + 1, 4):
            ms, rate = latencies.get((a, b), 0.2), (slow or {}).get((a, b), 1e9)
            pairs[a, b] = PairTimes(ms, ms, rate, rate)
    names = [f"host{rank}" for rank in range(4)]
    return MeasuredLinks(names, names, pairs, 1.0)


def run(monkeypatch: pytest.MonkeyPatch, found: MeasuredLinks, line: str) -> int:
    monkeypatch.setattr(verb, "_measured", lambda *given: found)
    return main(["links", "--ranks", "4", *line.split()])


def test_printed_options_are_read_by_simulate_and_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = of({(2, 3): 30.42}, {(0, 1): 625_400.0})
    assert run(monkeypatch, late, "--seconds 1") == 0
    out = capsys.readouterr().out
    (options,) = [line.split()[1:] for line in out.splitlines() if line.startswith("options")]
    assert [each for each in options if each != "--link"] == [
        "0:1=latency:0.2ms+bandwidth:625KB/s",
        "2:3=latency:30.4ms",
    ]
    counts = ["--ranks", "4", "--microbatches", "8", "--f", "10", "--i", "10", "--w", "10", *options]
    assert main(["simulate", "zb", *counts, "--cost", "message_bytes=2000", "--link", "default=0.2"]) == 0
    assert main(["plan", *counts, "--time", "1"]) == 0
    assert ps.Links.parse([each for each in options if each != "--link"]) is not None


def test_json_is_one_object(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import json

    assert run(monkeypatch, of({(2, 3): 30.0}), "--seconds 1 --json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["links"] == ["2:3=latency:30ms"]
    assert [pair["link"] for pair in found["pairs"] if pair["late"]] == ["2:3"]


def test_links_that_are_all_alike_are_not_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, of({}), "") == 0
    out = capsys.readouterr().out
    assert "No link stands out of the others." in out
    assert "options   none: no link is late" in out


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("", "give --ranks 4"),
        ("--ranks 1", "--ranks 1: links are between 2 ranks or more"),
        ("--ranks 4 --transport tcp", "--transport tcp: write gloo or nccl"),
    ],
)
def test_misuse_is_told_before_anything_starts(line: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["links", *line.split()]) == 2
    assert word in capsys.readouterr().err


def test_plan_refused_a_link_with_a_bandwidth(capsys: pytest.CaptureFixture[str]) -> None:
    """`penstock links` prints such options. Messages of a known size are late by a known time there."""
    counts = ["--ranks", "2", "--microbatches", "4", "--time", "0.5", "--json", "--cost", "message_bytes=1000"]
    assert main(["plan", *counts, "--link", "0:1=latency:3ms+bandwidth:1MB/s"]) == 0
    with_bandwidth = capsys.readouterr().out.split('"grid"')[0]
    assert main(["plan", *counts, "--link", "0:1=4"]) == 0
    assert with_bandwidth.split('"seconds"')[0] == capsys.readouterr().out.split('"seconds"')[0]
    assert main(["plan", *counts, "--link", "0:1=loss:1%"]) == 2
