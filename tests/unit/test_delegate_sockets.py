"""What delegates read from the kernel about a connection."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from penstock.runtime.transport.delegate.carrier import sockets


class Connection:
    """A socket with so many packets unacknowledged, the last acknowledgement so long ago, and such a round trip."""

    def __init__(self, unacked: int, last_ack_ms: int, rtt_us: int) -> None:
        info = bytearray(104)
        for offset, value in ((24, unacked), (56, last_ack_ms), (68, rtt_us)):
            info[offset : offset + 4] = value.to_bytes(4, "little")
        self._info = bytes(info)

    def getsockopt(self, *_: Any) -> bytes:
        return self._info


@pytest.mark.parametrize(
    ("unacked", "last_ack_ms", "rtt_us", "is_dead"),
    [
        (2905, 2200, 176_433, True),  # as it was seen, with none sent again
        (1, 501, 100, True),
        (1, 500, 100, False),
        (1, 2200, 600_000, False),  # a long way
        (0, 60_000, 100, False),  # its process stands still, or there is nothing to acknowledge
    ],
)
def test_a_network_that_acknowledges_nothing(unacked: int, last_ack_ms: int, rtt_us: int, is_dead: bool) -> None:
    made: Any = Connection(unacked, last_ack_ms, rtt_us)
    assert sockets.is_unacknowledged(made) == is_dead


def test_a_connection_that_stands_or_is_closed_is_not_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = socket.create_connection(listener.getsockname())
        assert not sockets.is_unacknowledged(made)
        made.close()
        assert not sockets.is_unacknowledged(made)
