"""Labs as they are made: hosts that reach one another, late by what is set; links and interfaces that go and come;
and nothing left, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from documents import ROOT, blocks, run_python
from labs import left_of, needs_lab, reaches, round_trips, until
from penstock.cli import main
from penstock.lab import Lab, LabError
from penstock.lab.removal import is_kept

pytestmark = [pytest.mark.multiproc, pytest.mark.xdist_group("lab"), needs_lab]

MEGABYTE = 10**6
SILENCE = 1.0
"""Seconds after which a host that has not answered counts as out of reach."""


def sleeping(lab: Lab, host: int) -> None:
    """A program that would go on, in a session of its own, and is known as this lab's."""
    lab.start(host, ["setsid", "sleep", "600"], env={"PENSTOCK_TEST_OF": lab.name})
    assert until(lambda: any("process" in line for line in left_of(lab.name)))


def test_nothing_is_left_of_a_lab() -> None:
    with Lab(num_hosts=3) as lab:
        sleeping(lab, 2)
        assert len([line for line in left_of(lab.name) if line.startswith("penstock-")]) == 3
    assert left_of(lab.name) == []


def test_nothing_is_left_when_its_block_fails() -> None:
    with pytest.raises(LabError, match="hosts go from 0 to 1"), Lab() as lab:  # noqa: PT012
        sleeping(lab, 0)
        lab.address(7)
    assert left_of(lab.name) == []


OWNER = """
import time
from penstock.lab import Lab
with Lab(2) as lab:
    lab.start(1, ["setsid", "sleep", "600"], env={"PENSTOCK_TEST_OF": lab.name})
    print(lab.name, flush=True)
    time.sleep(600)
"""


@pytest.mark.usefixtures("interruptible")
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda each: each.name)
def test_nothing_is_left_when_its_owner_is_killed(number: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    with owner.stdout:
        name = owner.stdout.readline().strip()
        assert left_of(name) != []
        owner.send_signal(number)
        owner.wait(60)
    assert until(lambda: left_of(name) == [])


@pytest.mark.slow
def test_the_next_lab_removes_what_a_killed_keeper_left() -> None:
    with Lab() as lab, Lab() as other:
        sleeping(lab, 1)
        os.kill(int(lab.name), signal.SIGKILL)
        assert until(lambda: not is_kept(lab.name))
        with pytest.raises(LabError, match=f"lab {lab.name}|instead of answering"):
            lab.ways()
        assert left_of(lab.name) != []
        with Lab(num_hosts=1):
            assert left_of(lab.name) == []
        assert left_of(other.name) != []


@pytest.mark.slow
def test_hosts_reach_one_another_late_by_what_is_set(record_property: pytest.RecordProperty) -> None:
    with Lab(num_hosts=3, links="0:1=latency:30ms 0:1@1=latency:50ms") as lab:
        measured = {
            f"{pair} on {nic}": round_trips(lab, *pair, nic, count=3) for pair in ((0, 1), (2, 0)) for nic in (0, 1)
        }
        assert min(measured["(0, 1) on 0"]) >= 60
        assert min(measured["(0, 1) on 1"]) >= 100
        lab.link(0, 1, "latency:80ms", nic=0, both=False)
        measured["(0, 1) on 0, then"] = round_trips(lab, 0, 1, count=3)
        assert min(measured["(0, 1) on 0, then"]) >= 110
        record_property("milliseconds", measured)
        conditions = {(way["source"], way["target"], way["nic"]): way["condition"] for way in lab.ways()}
        assert conditions[0, 1, 0] == "latency:80ms"
        assert conditions[1, 0, 0] == "latency:30ms"
        assert conditions[2, 0, 0] is None


def test_a_limited_rate_and_lost_packets(record_property: pytest.RecordProperty) -> None:
    with Lab(links="0:1@0=bandwidth:400Mbit/s 0:1@1=loss:2%") as lab:
        slow = round_trips(lab, 0, 1, 0, size=4 * MEGABYTE, count=2)
        assert min(slow) >= 80
        lossy = round_trips(lab, 0, 1, 1, size=4 * MEGABYTE, count=2)
        record_property("milliseconds", {"400 Mbit/s": slow, "loss 2%": lossy})
        counts = {(way["source"], way["nic"]): way for way in lab.ways()}
        assert counts[0, 0]["num_lost"] == 0
        assert counts[0, 1]["num_lost"] > 20, "packets as on a wire, about 2% of 5,500"
        assert counts[0, 1]["num_packets"] > 5_000


@pytest.mark.slow
def test_links_and_interfaces_go_and_come() -> None:
    with Lab() as lab:
        lab.link(0, 1, "down", nic=1)
        assert reaches(lab, 0, 1, 0)
        assert not reaches(lab, 0, 1, 1, SILENCE)
        lab.link(0, 1, "up", nic=1)
        assert reaches(lab, 0, 1, 1)
        lab.interface_down(0, 1)
        assert not reaches(lab, 0, 1, 1, SILENCE)
        assert not reaches(lab, 1, 0, 1, SILENCE)
        assert reaches(lab, 1, 0, 0)
        lab.interface_up(0, 1)
        assert reaches(lab, 0, 1, 1)
        assert reaches(lab, 1, 0, 1)
        shown, _ = lab.start(0, ["ip", "route", "show", "dev", "eth1"], stdout=subprocess.PIPE).read(60)
        assert "initcwnd" in shown


def test_programs_that_are_not_there_or_take_too_long() -> None:
    with Lab(num_hosts=1) as lab:
        gone = lab.start(0, ["no-such-program"], stderr=subprocess.PIPE)
        assert gone.read(60)[1] == "penstock: host0: no-such-program: No such file or directory\n"
        assert gone.poll() == 127
        slow = lab.start(0, ["sleep", "600"])
        with pytest.raises(LabError, match=r"host 0: process \d+ did not end within 0.1 s"):
            slow.wait(0.1)


def test_a_command_on_every_host(capfd: pytest.CaptureFixture[str]) -> None:
    words = ["lab", "run", "--hosts", "3", "--at", "0s down 0:1", "--json", "--"]
    assert main([*words, "sh", "-c", 'echo "I am $PENSTOCK_HOST"; exit $((PENSTOCK_HOST / 2))']) == 1
    said = capfd.readouterr()
    result = json.loads(said.out)
    assert [each["exit_code"] for each in result["hosts"]] == [0, 0, 1]
    assert {"host0 | I am 0", "host1 | I am 1", "host2 | I am 2", "lab   | 0s down 0:1"} <= set(said.err.splitlines())
    assert "penstock: host 2: sh ended with exit code 1" in said.err
    assert left_of(result["name"]) == []


def test_a_command_that_takes_too_long_is_stopped(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["lab", "run", "--stop-after", "0.5", "--json", "--", "sleep", "600"]) == 1
    result = json.loads(capfd.readouterr().out)
    assert [each["exit_code"] for each in result["hosts"]] == [None, None]
    assert left_of(result["name"]) == []


def test_a_lab_is_kept_for_other_terminals_and_changed_by_lines(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; from penstock.cli import main; sys.exit(main())"
    kept = subprocess.Popen(
        [sys.executable, "-c", program, "lab", "run", "--hosts", "2", "--nics", "1", "--json"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert kept.stdout is not None
    shown = json.loads(kept.stdout.readline())
    name = shown["name"]
    try:
        assert shown["hosts"] == {"host0": ["10.90.0.1"], "host1": ["10.90.0.2"]}
        assert main(["lab", "exec", "--lab", name, "--host", "1", "--json", "--", "hostname"]) == 0
        said = capfd.readouterr()
        assert json.loads(said.out)["hosts"][0]["exit_code"] == 0
        assert said.err == "host1 | host1\n"
        assert kept.stdin is not None
        print("pull 0:0\ndown 0:0", file=kept.stdin, flush=True)
        look = ["lab", "exec", "--lab", name, "--host", "0", "--", "cat", "/sys/class/net/eth0/operstate"]

        def is_down() -> bool:
            assert main(look) == 0
            return "down" in capfd.readouterr().out

        assert until(is_down)
    finally:
        _, errors = kept.communicate(timeout=60)
    assert kept.returncode == 0
    assert "write it like" in errors
    assert left_of(name) == []


def test_the_example_of_the_page() -> None:
    (example,) = [block for block in blocks(ROOT / "docs" / "lab.md") if block.more == "lab"]
    run_python(example, {"__name__": "example"})
