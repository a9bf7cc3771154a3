"""The commands that make, change and remove a lab, and how they are run.

Each interface is a TUN device. The forwarder reads what a host sends through it, and writes what the host receives.

TCP is set up so that a transfer is as slow as its link, and not slowed by TCP's own start: 16 MB over 30 ms take 230
ms with the kernel's defaults and 80 ms with these settings. As much may be under way as the buffers hold, both when a
connection begins and after it was idle. What the kernel learned on one connection is not used for the next.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from penstock.lab.layout import LabError, Layout

MTU = 1500
BUFFER_BYTES = 64 * 2**20
"""Bytes of the buffer of each connection in each direction: enough for 2 GB/s at 30 ms."""
FIRST_SEGMENTS = BUFFER_BYTES // (MTU - 52)
"""Segments that may be under way when a connection begins."""
TRANSMIT_QUEUE = 10_000
"""Packets that an interface keeps for the forwarder."""
DEADLINE = 20.0
"""Seconds that one command may take."""

_SETTINGS = {
    "ipv4/tcp_slow_start_after_idle": "0",
    "ipv4/tcp_no_metrics_save": "1",
    "ipv4/tcp_rmem": f"4096 {BUFFER_BYTES // 4} {BUFFER_BYTES}",
    "ipv4/tcp_wmem": f"4096 {BUFFER_BYTES // 4} {BUFFER_BYTES}",
}


class Command(NamedTuple):
    """A program with its arguments, and what it reads."""

    words: tuple[str, ...]
    reads: str = ""


def make(layout: Layout, congestion: str = "cubic") -> list[Command]:
    """Makes the namespaces and their interfaces, and sets up TCP. `congestion` is TCP's congestion control."""
    return [command for host in layout.hosts for command in _make_host(layout, host, congestion)]


def remove(namespaces: Iterable[str]) -> list[Command]:
    return [Command(("ip", "netns", "delete", name)) for name in namespaces]


def interface_down(layout: Layout, host: int, nic: int) -> list[Command]:
    """Takes an interface down as if it had failed. The kernel tells the host itself; the others only
    receive nothing more.
    """
    layout.check(host, nic)
    return [Command(("ip", "-n", layout.namespace(host), "link", "set", layout.interface(nic), "down"))]


def interface_up(layout: Layout, host: int, nic: int, congestion: str = "cubic") -> list[Command]:
    """Brings it up again, with the route that was removed when it went down."""
    layout.check(host, nic)
    lines = [f"link set {layout.interface(nic)} up", _route(layout, host, nic, congestion)]
    return [_batch(layout.namespace(host), lines)]


def _make_host(layout: Layout, host: int, congestion: str) -> list[Command]:
    namespace = layout.namespace(host)
    lines = ["link set lo up"]
    for nic in layout.nics:
        interface = layout.interface(nic)
        lines += [
            f"tuntap add dev {interface} mode tun vnet_hdr",
            f"link set {interface} mtu {MTU} txqueuelen {TRANSMIT_QUEUE}",
            f"addr add {layout.address(host, nic)}/24 dev {interface} noprefixroute",
            f"link set {interface} up",
            _route(layout, host, nic, congestion),
        ]
    settings = "; ".join(f"echo {value} >{name}" for name, value in _SETTINGS.items())
    no_ipv6 = "if [ -d ipv6 ]; then echo 1 >ipv6/conf/all/disable_ipv6; fi"
    script = f"set -e; cd /proc/sys/net; {settings}; {no_ipv6}"
    return [
        Command(("ip", "netns", "add", namespace)),
        Command(("ip", "netns", "exec", namespace, "sh", "-c", script)),
        _batch(namespace, lines),
    ]


def _route(layout: Layout, host: int, nic: int, congestion: str) -> str:
    return (
        f"route replace {layout.network(nic)} dev {layout.interface(nic)} src {layout.address(host, nic)} "
        f"initcwnd {FIRST_SEGMENTS} initrwnd {FIRST_SEGMENTS} congctl {congestion}"
    )


def _batch(namespace: str, lines: Iterable[str]) -> Command:
    return Command(("ip", "-n", namespace, "-batch", "-"), "".join(f"{line}\n" for line in lines))


def run(commands: Iterable[Command]) -> None:
    """Runs commands one after the other, until one fails. Raises LabError with its message."""
    for command in commands:
        try:
            done = subprocess.run(
                command.words, input=command.reads, capture_output=True, text=True, timeout=DEADLINE
            )
        except OSError as error:
            raise LabError(f"{command.words[0]} cannot be run: {error.strerror}; install iproute2") from None
        except subprocess.TimeoutExpired:
            raise LabError(f"`{' '.join(command.words)}` did not end within {DEADLINE:g} s") from None
        if done.returncode != 0:
            said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
            raise LabError(f"`{' '.join(command.words)}` failed: {said}")


def congestion_control() -> str:
    """TCP's congestion control: cubic if the kernel has it. BBR would set its pace by what it measures."""
    available = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    return "cubic" if "cubic" in available else "reno"
