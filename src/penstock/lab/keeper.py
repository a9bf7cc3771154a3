"""The process of a lab: it makes the hosts, carries their packets, and removes everything when it ends.

    python -m penstock.lab.keeper JSON

It ends when it is asked to, by SIGTERM, or when the process for which the lab was made is gone. It notices the latter
by a pipe whose other end that process holds. Then it kills whatever runs on the hosts and removes the namespaces.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from penstock.cost import CostError
from penstock.lab import commands, removal, shell
from penstock.lab.control import ControlServer
from penstock.lab.errors import LabError, LabMisuse
from penstock.lab.folder import LabFolder, LabRecord
from penstock.lab.forwarder import Forwarder
from penstock.lab.kernel import inside, open_tun
from penstock.lab.layout import Layout
from penstock.lab.links import read_change, read_links, ways_of
from penstock.lab.order import LabOrder
from penstock.lab.permitted import require

_NICENESS = -10
"""Priority of the keeper. Packets come before programs; otherwise delays would be those of a busy machine."""


def keep(order: LabOrder) -> None:
    """Makes the lab, keeps it until it is to end, and removes it. Raises LabError, CostError, OSError."""
    require()
    layout = Layout(str(os.getpid()), order.num_hosts, order.num_nics)
    conditions = read_links(order.links, layout)
    record = LabRecord(layout.name, layout.num_hosts, layout.num_nics, os.getpid(), order.owner, time.time())
    folder = LabFolder(layout.name)
    with contextlib.ExitStack() as stack:
        asked = stack.enter_context(_signals())
        lock = folder.make(record)
        stack.callback(os.close, lock)
        stack.callback(removal.remove, layout.name)
        shell.run(commands.make(layout, shell.congestion_control()))
        devices = stack.enter_context(_devices(layout))
        forwarder = Forwarder(layout, devices, conditions)
        stack.callback(forwarder.close)
        server = ControlServer(folder.control, forwarder, lambda request: _answer(request, layout, forwarder))
        stack.callback(server.close)
        if order.lifeline is not None:
            forwarder.watch(order.lifeline, forwarder.end)
        forwarder.watch(asked, forwarder.end)
        with contextlib.suppress(OSError):
            os.nice(_NICENESS)
        _say(order.ready, {"name": layout.name})
        gc.freeze()
        forwarder.run()


def _answer(request: dict[str, Any], layout: Layout, forwarder: Forwarder) -> dict[str, Any]:
    what = request["do"]
    if what == "link":
        change = read_change(request["condition"])
        for way in ways_of(layout, request["source"], request["target"], request["nic"], request["both"]):
            forwarder.change(way, change)
        return {}
    if what == "ways":
        return {"ways": [queue.to_json() for queue in forwarder.queues.values()]}
    if what == "end":
        forwarder.end()
        return {}
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


def _say(ready: int, message: dict[str, Any]) -> None:
    os.write(ready, json.dumps(message).encode())
    os.close(ready)


def main(argv: list[str]) -> int:
    order = LabOrder.from_json(argv[0])
    try:
        keep(order)
    except (LabError, CostError, OSError) as error:
        code = (
            LabMisuse.exit_code if isinstance(error, CostError) else getattr(error, "exit_code", LabError.exit_code)
        )
        message = {"error": str(error), "exit_code": code}
        try:
            _say(order.ready, message)
        except OSError:  # the lab was there already: nobody waits for word any more
            print(f"penstock: lab {os.getpid()}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
