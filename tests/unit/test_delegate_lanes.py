"""How links stand by what a delegate tells, and what a delegate process loads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.transport.delegate import Counters
from penstock.runtime.transport.delegate import __file__ as package
from penstock.runtime.transport.delegate.carrier.descriptor import CloseReason, Descriptor, DescriptorKind, Lane
from penstock.runtime.transport.delegate.health import ConnectionHealth

pytestmark = pytest.mark.unit


def health() -> tuple[ConnectionHealth, Counters]:
    counters = Counters()
    addresses = {0: ["10.0.0.1", "10.1.0.1"], 1: ["10.0.0.2", "10.1.0.2"]}
    return ConnectionHealth(0, addresses.__getitem__, counters), counters


OUT = Lane(0, 1)


def test_going_over_to_another_interface_and_back_is_counted_and_told_once_a_link() -> None:
    found, counters = health()
    for lane in (OUT, OUT._replace(place=1)):
        found.learn(Descriptor(DescriptorKind.CONNECTED, lane, 0, 0, 0))
    for lane in (OUT, OUT._replace(place=1)):
        found.learn(Descriptor(DescriptorKind.CUT, lane, CloseReason.INTERFACE_DOWN, 0, 0, offset=2))
        found.learn(Descriptor(DescriptorKind.CONNECTED, lane, 0, 1, 1))
    assert found.events == [LinkDown((0, 1))]
    assert (counters.failovers, counters.failbacks, counters.resent) == (2, 0, 4)
    found.learn(Descriptor(DescriptorKind.CUT, OUT, CloseReason.BETTER_PATH, 1, 1))
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 0, 0, 0))
    assert found.events == [LinkDown((0, 1)), LinkUp((0, 1))]
    assert (counters.failovers, counters.failbacks, counters.reconnects) == (2, 1, 0)


def test_a_connection_that_the_other_end_closed_is_no_dead_link() -> None:
    found, counters = health()
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 0, 0, 0))
    found.learn(Descriptor(DescriptorKind.CUT, OUT, CloseReason.CLOSED, 0, 0, offset=1))
    assert "no connection 0->1 (last over 10.0.0.1 -> 10.0.0.2): the other end closed it" in found.words()
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 0, 0, 0))
    assert (found.events, found.words()) == ([], "")
    assert (counters.reconnects, counters.failovers, counters.resent) == (1, 0, 1)


def test_who_is_gone_and_who_stands_still() -> None:
    found, _ = health()
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT, 0, 1, 1))
    found.learn(Descriptor(DescriptorKind.SILENT, OUT))
    assert "rank 1's delegate is connected and says nothing" in found.words()
    found.learn(Descriptor(DescriptorKind.HEARD, OUT))
    assert found.words() == ""
    assert found.gone() == set()
    found.learn(Descriptor(DescriptorKind.REFUSED, OUT, CloseReason.REFUSED))
    assert found.gone() == {1}
    found.learn(Descriptor(DescriptorKind.CONNECTED, OUT._replace(place=1), 0, 1, 1))
    assert found.gone() == set()


def test_a_delegate_loads_neither_torch_nor_numpy_nor_penstock() -> None:
    folder = str(Path(package).parent)
    code = (
        f"import sys; sys.path.insert(0, {folder!r}); import carrier.process; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "carrier" in loaded
    assert loaded - {"carrier", "__main__"} <= set(sys.stdlib_module_names) | {"__mp_main__"}
    assert not loaded & {"torch", "numpy", "penstock", "asyncio", "ctypes"}
