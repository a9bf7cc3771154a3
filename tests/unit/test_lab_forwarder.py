"""Packets: what a way's queue does to them, and that the forwarder carries them, over sockets for devices."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from penstock.cost import CostError, LinkCondition
from penstock.lab import LabError, LabMisuse, Layout
from penstock.lab.forwarder import Forwarder
from penstock.lab.keeper import serve
from penstock.lab.layout import NetworkWay
from penstock.lab.links import WayChange, read_change, read_links
from penstock.lab.packets import PacketQueue
from penstock.lab.removal import MOST_BYTES
from waiting import PATIENCE, wait_until

WAY = NetworkWay(0, 1, 0)
LAYOUT = Layout("7", 3, 2)


def queue(condition: str) -> PacketQueue:
    return PacketQueue(WAY, LinkCondition.parse(condition))


def test_without_a_condition_packets_are_due_at_once() -> None:
    plain = PacketQueue(WAY)
    assert [plain.take(100, now) for now in (5.0, 6.0)] == [5.0, 6.0]
    assert (plain.num_packets, plain.num_bytes) == (2, 200)


def test_latency_and_bandwidth_are_those_of_the_conditions() -> None:
    assert queue("latency:30ms").take(1500, 7.0) == 37.0
    slow = queue("bandwidth:1MB/s+latency:2ms")
    assert [slow.take(1000, 0.0) for _ in range(3)] == [3.0, 4.0, 5.0]


def test_a_trace_begins_when_it_is_set() -> None:
    changed = PacketQueue(WAY)
    changed.change(read_change("latency:steps:0ms/10ms,100ms/50ms"), 1000.0)
    assert changed.take(1, 1050.0) == pytest.approx(1060.0)
    assert changed.take(1, 1100.0) == pytest.approx(1150.0)


def test_packets_sent_after_a_change_do_not_overtake() -> None:
    late = queue("latency:60ms")
    first = late.take(1, 0.0)
    late.change(WayChange(), 10.0)
    assert late.take(1, 20.0) == first == 60.0
    assert late.take(1, 70.0) == 70.0


def test_the_share_that_is_lost() -> None:
    lossy = queue("loss:10%#3")
    kept = [lossy.take(1, 0.0) is not None for _ in range(10_000)]
    assert 850 < lossy.num_lost < 1150
    assert lossy.num_lost == kept.count(False)
    again = queue("loss:10%#3")
    assert kept == [again.take(1, 0.0) is not None for _ in range(10_000)]


def test_a_cut_loses_what_is_under_way_and_keeps_the_condition() -> None:
    cut = queue("latency:30ms")
    cut.held.append((30.0, b"packet"))
    cut.change(read_change("down"), 1.0)
    assert cut.take(1, 2.0) is None
    assert (len(cut.held), cut.num_refused) == (0, 2)
    cut.change(read_change("up"), 3.0)
    assert cut.take(1, 4.0) == 34.0


def test_more_than_a_buffer_does_not_wait() -> None:
    slow = queue("bandwidth:1MB/s")
    taken = [slow.take(2**16, 0.0) for _ in range(1200)]
    assert taken.count(None) == slow.num_refused > 0
    assert sum(due is not None for due in taken) * 2**16 == pytest.approx(64 * 2**20, rel=0.01)


def packet(target: str, body: bytes) -> bytes:
    """As a TUN device gives it: the kernel's header, an IPv4 header with little in it, a body."""
    return bytes(10) + bytes(16) + socket.inet_aton(target) + body


@contextmanager
def carrying(*links: str) -> Iterator[tuple[Forwarder, dict[tuple[int, int], socket.socket], list[bool]]]:
    """A forwarder that runs, the hosts' ends of its devices, and what devices were told of segments."""
    pairs = {
        (host, nic): socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for host in LAYOUT.hosts
        for nic in LAYOUT.nics
    }
    for _, keeper in pairs.values():
        keeper.setblocking(False)
    for host, _ in pairs.values():
        host.settimeout(PATIENCE)
    told: list[bool] = []
    devices = {place: keeper.fileno() for place, (_, keeper) in pairs.items()}
    forwarder = Forwarder(LAYOUT, devices, read_links(links, LAYOUT), lambda _, wanted: told.append(wanted))
    reading, writing = os.pipe()
    forwarder.watch(reading, forwarder.end)
    thread = threading.Thread(target=forwarder.run)
    thread.start()
    try:
        yield forwarder, {place: host for place, (host, _) in pairs.items()}, told
    finally:
        os.close(writing)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        forwarder.close()
        os.close(reading)
        for pair in pairs.values():
            for end in pair:
                end.close()


def test_every_host_reaches_every_other_on_each_network() -> None:
    with carrying() as (_, hosts, _):
        for source, target, nic in LAYOUT.ways():
            sent = packet(LAYOUT.address(target, nic), f"{source}>{target}".encode())
            hosts[source, nic].send(sent)
            assert hosts[target, nic].recv(2000) == sent


def test_a_packet_for_nobody_is_dropped() -> None:
    with carrying() as (forwarder, hosts, _):
        for address in ("192.0.2.1", LAYOUT.address(1, 1), LAYOUT.address(0, 0)):
            hosts[0, 0].send(packet(address, b"lost"))
        hosts[0, 0].send(packet(LAYOUT.address(1, 0), b"here"))
        assert hosts[1, 0].recv(2000).endswith(b"here")
        assert sum(each.num_packets for each in forwarder.queues.values()) == 1


def test_late_packets_arrive_in_order_and_not_before_their_time() -> None:
    with carrying("0:1=latency:50ms", "0:2=latency:20ms") as (_, hosts, _):
        start = time.monotonic()
        for number in range(40):
            hosts[0, 0].send(packet(LAYOUT.address(1, 0), str(number).encode()))
        hosts[0, 0].send(packet(LAYOUT.address(2, 0), b"sooner"))
        assert hosts[2, 0].recv(2000).endswith(b"sooner")
        assert time.monotonic() - start >= 0.020
        bodies = [hosts[1, 0].recv(2000)[30:] for _ in range(40)]
        assert time.monotonic() - start >= 0.050
        assert bodies == [str(number).encode() for number in range(40)]


def test_only_a_device_whose_packets_get_lost_gives_single_segments() -> None:
    with carrying("0:1@1=loss:1%") as (forwarder, _, told):
        assert told == [True, True]
        forwarder.change(NetworkWay(0, 1, 1), WayChange())
        assert told == [True, True, False]


def change_of(forwarder: Forwarder) -> Callable[[dict[str, object]], dict[str, object]]:
    def answer(request: dict[str, object]) -> dict[str, object]:
        if request["do"] == "fail":
            raise LabError("not now")
        forwarder.change(WAY, read_change(str(request["condition"])))
        return {"cut": forwarder.queues[WAY].cut}

    return answer


def test_a_lab_is_changed_while_it_carries_packets() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(PATIENCE)

    def ask(request: object) -> dict[str, object]:
        ours.send(json.dumps(request).encode())
        found: dict[str, object] = json.loads(ours.recv(MOST_BYTES))
        return found

    with ours, theirs, carrying() as (forwarder, hosts, _):
        serve(theirs, forwarder, change_of(forwarder))
        assert ask({"do": "link", "condition": "down"}) == {"cut": True}
        hosts[0, 0].send(packet(LAYOUT.address(1, 0), b"lost"))
        hosts[0, 0].send(packet(LAYOUT.address(2, 0), b"here"))
        assert hosts[2, 0].recv(2000).endswith(b"here")
        ask({"do": "link", "condition": "up"})
        hosts[0, 0].send(packet(LAYOUT.address(1, 0), b"again"))
        assert hosts[1, 0].recv(2000).endswith(b"again")
        refused = ask({"do": "link", "condition": "latency:-1ms"})
        assert "at least 0" in str(refused["error"])
        assert refused["exit_code"] == LabMisuse.exit_code
        assert ask({})["error"] == "a request that is none: KeyError: 'do'"
        assert ask({"do": "fail"}) == {"error": "not now", "exit_code": LabError.exit_code}


def test_a_lab_ends_when_its_owner_is_gone() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs, carrying() as (forwarder, _, _):
        serve(theirs, forwarder, change_of(forwarder))
        ours.close()
        wait_until(lambda: forwarder.is_ended, lambda: "it carries on")


def test_conditions_of_messages_are_refused_at_once() -> None:
    with pytest.raises(CostError, match="occupancy is of messages"):
        read_change("occupancy:5ms")


def test_the_keeper_runs_as_a_module_that_its_folder_does_not_import() -> None:
    """Python warned on stderr at the start of each lab, as `lab.py` had imported the keeper before it ran."""
    program = "import sys, penstock.lab; sys.exit('penstock.lab.keeper' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
