"""The kernel's word on interfaces: read from its messages, and turned into which of our addresses can be used."""

from __future__ import annotations

import socket
import struct

import pytest

from penstock.runtime.transport.delegate.carrier.monitor import (
    AddressState,
    InterfaceMonitor,
    InterfaceStates,
    LinkState,
    read,
)

pytestmark = pytest.mark.unit

UP, RUNNING = 0x1, 0x40


def link(index: int, flags: int, what: int = 16) -> bytes:
    body = struct.pack("=BxHiII", 0, 1, index, flags, 0)
    return struct.pack("=IHHII", 16 + len(body), what, 0, 0, 0) + body


def address(index: int, text: str, what: int = 20) -> bytes:
    family = socket.AF_INET6 if ":" in text else socket.AF_INET
    raw = socket.inet_pton(family, text)
    label = struct.pack("=HH", 7, 3) + b"lo\0" + b"\0"  # of another kind, and padded
    attributes = label + struct.pack("=HH", 4 + len(raw), 1) + raw
    body = struct.pack("=BBBBI", family, 24, 0, 0, index) + attributes
    return struct.pack("=IHHII", 16 + len(body), what, 0, 0, 0) + body


def test_messages_are_read() -> None:
    data = link(3, UP | RUNNING) + address(3, "10.0.0.1") + link(4, UP) + link(5, UP | RUNNING, what=17)
    assert list(read(data)) == [
        LinkState(3, True),
        AddressState(3, "10.0.0.1", True),
        LinkState(4, False),  # no carrier
        LinkState(5, False),  # removed
    ]
    assert list(read(address(2, "fe80::1", what=21))) == [AddressState(2, "fe80::1", False)]
    assert list(read(b"\x04\0\0\0" + bytes(12))) == []  # a length that cannot be
    assert list(read(data[:10])) == []


def test_an_address_can_be_used_while_it_is_there_and_its_interface_up() -> None:
    found = InterfaceStates(["10.0.0.1", "10.1.0.1", "127.0.0.2"])
    assert found.up == [True, True, True]
    for state in (AddressState(2, "10.0.0.1", True), AddressState(3, "10.1.0.1", True), LinkState(2, True)):
        assert found.learn(state) == []
    assert found.learn(LinkState(2, False)) == [(0, False)]
    assert found.learn(LinkState(2, False)) == []
    assert found.learn(AddressState(3, "10.1.0.1", False)) == [(1, False)]
    assert found.learn(LinkState(2, True)) == [(0, True)]
    assert found.learn(AddressState(3, "10.1.0.1", True)) == [(1, True)]
    assert found.up == [True, True, True]


def test_the_loopback_of_this_host_is_up() -> None:
    monitor = InterfaceMonitor(["127.0.0.1"])
    try:
        assert monitor.interfaces.up == [True]
        assert monitor.changes() == []
    finally:
        if monitor.socket is not None:
            monitor.socket.close()
