"""The process of a lab: it makes the hosts, carries their packets, and removes everything when it ends.

    python -m penstock.lab.keeper SOCKET LAB

SOCKET is a descriptor. The process that owns the lab holds its other end. The keeper first writes that the lab
exists, or what went wrong. Then it answers requests: one JSON object in, and one back. LAB is a JSON object with the
number of hosts, the number of networks and the links.

The keeper ends by SIGTERM, or when the other end of the socket is closed. In whatever way the owner ends, the kernel
closes it. Then the keeper kills whatever runs on the hosts and removes the namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import Any

from penstock.cost import CostError
from penstock.lab import commands, removal
from penstock.lab.forwarder import Forwarder
from penstock.lab.kernel import inside, open_tun, require
from penstock.lab.layout import LabError, LabMisuse, Layout
from penstock.lab.links import read_change, read_links, ways_of

_NICENESS = -10
"""Priority of the keeper. Packets come before programs; otherwise delays would be those of a busy machine."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def keep(owner: socket.socket, num_hosts: int, num_nics: int, links: list[str]) -> None:
    """Makes the lab, keeps it until it is to end, and removes it. Raises LabError, CostError, OSError."""
    require()
    layout = Layout(str(os.getpid()), num_hosts, num_nics)
    conditions = read_links(links, layout)
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(_signals())
        removal.remove_leftovers()
        removal.remove(layout.name)  # of a keeper that had this number and is gone
        stack.callback(removal.remove, layout.name)
        commands.run(commands.make(layout, commands.congestion_control()))
        devices = stack.enter_context(_devices(layout))
        forwarder = Forwarder(layout, devices, conditions)
        stack.callback(forwarder.close)
        serve(owner, forwarder, lambda request: _answer(request, layout, forwarder))
        forwarder.watch(asked, forwarder.end)
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        removal.hosts_file(layout.name).write_text(layout.hosts_file(), encoding="utf-8")
        _say(owner, {"name": layout.name})
        gc.freeze()
        forwarder.run()


def serve(owner: socket.socket, forwarder: Forwarder, answer: Answer) -> None:
    """Answers the owner's requests between two rounds of the forwarder, and ends it when the owner is gone.

    Args:
        answer: makes the answer to a request; its LabError and CostError are sent back as such.
    """

    def read() -> None:
        try:
            request = owner.recv(removal.MOST_BYTES)
        except OSError:
            request = b""
        if not request:
            forwarder.end()
            return
        try:
            reply = answer(json.loads(request))
        except (LabError, CostError) as error:
            reply = _failure(error)
        except (ValueError, KeyError, TypeError) as error:
            reply = _failure(LabMisuse(f"a request that is none: {type(error).__name__}: {error}"))
        _say(owner, reply)

    owner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, removal.MOST_BYTES)
    forwarder.watch(owner.fileno(), read)


def _answer(request: dict[str, Any], layout: Layout, forwarder: Forwarder) -> dict[str, Any]:
    what = request["do"]
    if what == "link":
        change = read_change(request["condition"])
        for way in ways_of(layout, request["source"], request["target"], request["nic"], request["both"]):
            forwarder.change(way, change)
        return {}
    if what == "ways":
        return {"ways": [queue.to_json() for queue in forwarder.queues.values()]}
    raise LabMisuse(f"{what!r} is not a request that a lab knows; is it of another version?")


@contextlib.contextmanager
def _devices(layout: Layout) -> Iterator[dict[tuple[int, int], int]]:
    """The keeper's ends of all interfaces, (host, nic) -> descriptor."""
    devices: dict[tuple[int, int], int] = {}
    try:
        for host in layout.hosts:
            with inside(layout.namespace(host)):
                for nic in layout.nics:
                    devices[host, nic] = open_tun(layout.interface(nic))
        yield devices
    finally:
        for device in devices.values():
            os.close(device)


@contextlib.contextmanager
def _signals() -> Iterator[int]:
    """A descriptor that becomes readable on SIGTERM, SIGINT or SIGHUP. These signals then no longer end the process.

    So a lab that is asked to end while it is being made is made, and then removed.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(writing)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reading)
        os.close(writing)


def _say(owner: socket.socket, message: dict[str, Any]) -> None:
    """Writes to the owner. If the owner is gone, the closed socket tells the forwarder, too."""
    with contextlib.suppress(OSError):
        owner.send(json.dumps(message).encode())


def _failure(error: Exception) -> dict[str, Any]:
    usual = LabMisuse.exit_code if isinstance(error, CostError) else LabError.exit_code
    return {"error": str(error), "exit_code": getattr(error, "exit_code", usual)}


def main(argv: list[str]) -> int:
    with socket.socket(fileno=int(argv[0])) as owner:
        try:
            keep(owner, **json.loads(argv[1]))
        except (LabError, CostError, OSError) as error:
            _say(owner, _failure(error))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
