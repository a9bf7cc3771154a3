"""The lab's pure parts: layout, commands, links, events; what it says where it can't be made."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.cost import CostError, LinkCondition
from penstock.lab import LabError, LabMisuse, Layout, commands, kernel, process, removal
from penstock.lab.lab import find
from penstock.lab.layout import NetworkWay, lab_of
from penstock.lab.links import (
    WayChange,
    from_anywhere,
    read_change,
    read_events,
    read_interface,
    read_links,
    read_place,
    ways_of,
)

TWO = Layout("7", 2)


def test_addresses_and_names_tell_every_interface_apart() -> None:
    layout = Layout("4711", 16, 4)
    addresses = [layout.address(host, nic) for host in layout.hosts for nic in layout.nics]
    assert len(set(addresses)) == 64
    assert set(layout.packed_addresses().values()) == {(host, nic) for host in layout.hosts for nic in layout.nics}
    assert layout.packed_addresses()[bytes([10, 90, 3, 16])] == (15, 3)
    assert len({layout.namespace(host) for host in layout.hosts}) == 16
    assert len(list(layout.ways())) == len(set(layout.ways())) == 16 * 15 * 4


def test_labs_are_known_by_their_namespaces_and_the_process_of_their_keeper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(removal, "NAMESPACES", str(tmp_path))
    assert removal.names() == []
    for name in (*map(TWO.namespace, TWO.hosts), "penstock-4711-host0", "other"):
        (tmp_path / name).touch()
    assert removal.names() == ["7", "4711"]
    assert removal.namespaces_of("7") == ["penstock-7-host0", "penstock-7-host1"]
    assert not removal.is_kept(str(os.getpid())), "this process keeps no lab"
    with pytest.raises(LabError, match="no lab runs"):
        find(None)


def test_a_namespace_names_its_lab() -> None:
    assert lab_of(Layout("4711", 2).namespace(1)) == "4711"
    assert [lab_of(other) for other in ("penstock-probe-12", "penstock-12", "penstock-x-host0", "host0")] == [
        None
    ] * 4


def test_programs_are_told_where_they_are() -> None:
    told = Layout("7", 3).environment(2)
    assert told["PENSTOCK_INTERFACES"] == "10.90.1.3,10.90.0.3"
    assert (told["PET_NNODES"], told["PET_NODE_RANK"], told["PET_MASTER_ADDR"]) == ("3", "2", "10.90.0.1")
    assert "10.90.0.2 host1\n" in Layout("7", 3).hosts_file()


@pytest.mark.parametrize(("hosts", "nics"), [(0, 2), (17, 2), (2, 0), (2, 5)])
def test_labs_of_another_size_are_refused(hosts: int, nics: int) -> None:
    with pytest.raises(LabMisuse, match=r"1 to (16|4)"):
        Layout("7", hosts, nics)


def test_what_is_made_is_what_is_removed() -> None:
    making = commands.make(Layout("7", 3))
    added = [command.words[-1] for command in making if command.words[:3] == ("ip", "netns", "add")]
    removed = [command.words[-1] for command in commands.remove(added)]
    assert added == removed == ["penstock-7-host0", "penstock-7-host1", "penstock-7-host2"]


def test_an_interface_that_comes_up_gets_the_route_it_had() -> None:
    making = next(
        command for command in commands.make(TWO) if command.words[2] == "penstock-7-host1" and command.reads
    )
    (up,) = commands.interface_up(TWO, 1, 1)
    assert up.words == making.words
    routes = [line for line in making.reads.splitlines() if line.startswith("route replace 10.90.1.")]
    assert up.reads.splitlines() == ["link set eth1 up", *routes]


def test_links_hold_both_ways_unless_each_is_named() -> None:
    held = read_links(["0:1=10", "1:0=40", "0:2=latency:5ms"], Layout("7", 3, 1))
    assert {way: condition.latency.at(0, "") for way, condition in held.items()} == {
        NetworkWay(0, 1, 0): 10,
        NetworkWay(1, 0, 0): 40,
        NetworkWay(0, 2, 0): 5,
        NetworkWay(2, 0, 0): 5,
    }


def test_what_is_said_of_one_network_goes_before_what_is_said_of_all() -> None:
    held = read_links(["0:1@1=loss:1%", "0:1=30"], TWO)
    assert held == {
        NetworkWay(0, 1, 0): LinkCondition.parse("30"),
        NetworkWay(1, 0, 0): LinkCondition.parse("30"),
        NetworkWay(0, 1, 1): LinkCondition.parse("loss:1%"),
        NetworkWay(1, 0, 1): LinkCondition.parse("loss:1%"),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0-1=3", "HOST:HOST=CONDITION"),
        ("0:1@2=3", "network 2: networks go from 0 to 1"),
        ("0:4=3", "host 4: hosts go from 0 to 1"),
        ("0:0=3", "itself"),
        ("0:1=-3ms", "at least 0"),
        ("0:1=speed:3", "latency, occupancy, bandwidth, loss"),
        ("0:1=occupancy:3ms", "give a bandwidth instead"),
        ("0:1=loss:1%,20ms", "TCP itself sends again"),
        ("0:1=bandwidth:1Gbit/s+half-duplex", "leave half-duplex out"),
        ("0:1=latency:trace:nowhere.txt", "nowhere.txt"),
        ("0:1=latency:steps:0ms/1ms,5ms/nan", "gap"),
    ],
)
def test_links_that_make_no_sense(text: str, said: str) -> None:
    with pytest.raises((CostError, LabMisuse), match=said):
        read_links([text], TWO)


def test_changes_of_a_link() -> None:
    assert read_change("down") == WayChange(cut=True, keep=True)
    assert read_change("up") == WayChange(cut=False, keep=True)
    assert read_change("20") == WayChange(LinkCondition.parse("latency:20ms"))
    assert read_place("3:1@1") == (3, 1, 1)
    assert read_place("3:1") == (3, 1, None)
    assert read_interface("3:1") == (3, 1)
    assert ways_of(TWO, 0, 1, None, both=False) == [NetworkWay(0, 1, 0), NetworkWay(0, 1, 1)]
    assert ways_of(TWO, 0, 1, 1, both=True) == [NetworkWay(0, 1, 1), NetworkWay(1, 0, 1)]
    for reading in (read_place, read_interface):
        with pytest.raises(LabMisuse, match="like 0:1"):
            reading("eth0")


def test_a_trace_is_found_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wan.txt").write_text("0 10\n500 40\n")
    monkeypatch.chdir(tmp_path)
    condition = LinkCondition.parse("latency:trace:wan.txt")
    assert str(from_anywhere(condition)) == f"latency:trace:{tmp_path}/wan.txt"
    assert from_anywhere(condition) == condition


def test_events_come_in_the_order_of_their_times() -> None:
    events = read_events(["3s up 0:1", "500ms down 0:1", "4s link 0:1@1 latency:5ms+loss:1%"], TWO)
    assert [str(event) for event in events] == ["0.5s down 0:1", "3s up 0:1", "4s link 0:1@1 latency:5ms+loss:1%"]


@pytest.mark.parametrize(
    "text", ["", "5s", "5s down", "5s pull 0:1", "soon down 0:1", "5s down 0:7", "5s link 0:1 x"]
)
def test_events_that_can_not_be(text: str) -> None:
    with pytest.raises(LabMisuse):
        read_events([text], TWO)


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "_capabilities", lambda: 1 << 21)
    monkeypatch.setattr(kernel.shutil, "which", lambda program: None)
    monkeypatch.setattr(kernel.os, "access", lambda *_: False)
    with pytest.raises(
        LabError, match=r"CAP_NET_ADMIN, which root has; and .*iproute2.*; and /dev/net/tun\. Run it as"
    ):
        kernel.require()


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("lab run --hosts 99 -- true", 2, "1 to 16"),
        ("lab run --link 0:1=occupancy:1ms -- true", 2, "bandwidth"),
        ("lab run --at 5s -- true", 2, "write it like"),
        ("lab run --at 0s|down|0:1", 2, "--at is for a command"),
        ("lab exec", 2, "COMMAND"),
        ("lab exec --lab 999999999 -- true", 1, "no lab 999999999"),
    ],
)
def test_mistakes_are_told(words: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    verb, after = words.partition(" -- ")[::2]
    given = [*(word.replace("|", " ") for word in verb.split()), "--json", *(["--", after] if after else [])]
    assert main(given) == code
    error = json.loads(capsys.readouterr().out)["error"]
    assert said in error["message"]


def test_a_lab_where_none_can_be_made(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(kernel, "_capabilities", lambda: 0)
    assert main(["lab", "run", "--", "true"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "CAP_NET_ADMIN and CAP_SYS_ADMIN" in said.err
    assert "--device /dev/net/tun" in said.err


def test_a_command_on_the_same_host_twice_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran twice there, and the end of two hosts was waited for."""

    class Ended:
        def __init__(self, layout: Layout, host: int, *rest: Any, **options: Any) -> None:
            self.host = host

        def poll(self) -> int:
            return 0

        def stop(self) -> None:
            pass

    monkeypatch.setattr(process, "HostProcess", Ended)
    monkeypatch.setattr(process, "_relay", lambda *given: None)
    found = process.run_everywhere(Layout("example", 2), ["true"], hosts=[0, 0], timeout=60.0)
    assert [(each.host, each.exit_code) for each in found] == [(0, 0)]
