"""How links stand by what a delegate tells, and what a delegate process loads."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.transport.delegate import Counters
from penstock.runtime.transport.delegate import __file__ as package
from penstock.runtime.transport.delegate.boxes import LinkHealth
from penstock.runtime.transport.delegate.carrier.frames import Descriptor, DescriptorKind
from penstock.runtime.transport.delegate.carrier.lanes import CHUNK, OutStream

pytestmark = pytest.mark.unit


def health() -> tuple[LinkHealth, Counters]:
    counters = Counters()
    peers = [[(f"10.{network}.0.{host}", 5000) for network in (0, 1)] for host in (1, 2)]
    return LinkHealth(0, peers, counters), counters


def connected(lane: int = 0, path: int = 0) -> Descriptor:
    return Descriptor(DescriptorKind.CONNECTED, 0, 1, lane, 0, path)


def lost(error: int, lane: int = 0, path: int = 0, num_again: int = 0) -> Descriptor:
    return Descriptor(DescriptorKind.LOST, 0, 1, lane, error, path, offset=num_again)


def test_going_over_to_another_interface_and_back_is_counted_and_told_once_a_link() -> None:
    found, counters = health()
    for lane in (0, 1):
        found.learn(connected(lane))
    for lane in (0, 1):
        found.learn(lost(errno.ETIMEDOUT, lane, num_again=2))
        found.learn(connected(lane, path=1))
    assert found.events == [LinkDown((0, 1))]
    assert (counters.failovers, counters.failbacks, counters.resent) == (2, 0, 4)
    assert len(found.notices) == 1
    assert "go from 10.1.0.1 to 10.1.0.2" in found.notices[0]
    found.learn(lost(0, path=1))
    found.learn(connected())
    assert found.events == [LinkDown((0, 1)), LinkUp((0, 1))]
    assert (counters.failovers, counters.failbacks, counters.reconnects) == (2, 1, 0)


def test_a_connection_that_the_other_end_closed_is_no_dead_link() -> None:
    found, counters = health()
    found.learn(connected())
    found.learn(lost(errno.ECONNRESET, num_again=1))
    assert found.words() == " (no connection 0->1: Connection reset by peer)"
    found.learn(connected())
    assert (found.events, found.words()) == ([], "")
    assert (counters.reconnects, counters.failovers, counters.resent) == (1, 0, 1)


def test_who_is_gone() -> None:
    found, _ = health()
    found.learn(connected(path=1))
    assert found.gone == set()
    found.learn(lost(errno.ECONNREFUSED))
    assert found.gone == {1}
    found.learn(lost(errno.ETIMEDOUT))  # over another interface
    assert found.gone == {1}
    found.learn(connected(lane=1, path=1))
    assert found.gone == set()


def test_row_7_a_message_was_copied_whole_before_its_first_byte_was_sent() -> None:
    """Two lanes may write what a rank has copied in so far, while it copies on."""
    stream, message = OutStream(), Descriptor(DescriptorKind.SEND, number=1, payload_bytes=2 * CHUNK)
    stream.give(message._replace(filled=CHUNK + 4096))
    chunks = [stream.take(), stream.take()]
    assert [stream.filled(chunk) for chunk in chunks] == [CHUNK, 4096]
    stream.give(message._replace(filled=message.body_bytes))
    assert [stream.filled(chunk) for chunk in chunks] == [chunk.capacity for chunk in chunks]


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
