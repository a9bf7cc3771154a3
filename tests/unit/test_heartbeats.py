"""The heartbeats between two processes of which each knows one interface."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from penstock.runtime.mesh.interfaces import listen
from penstock.runtime.transport import heartbeats
from penstock.runtime.transport.heartbeats import Heartbeats
from waiting import wait_until


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    made = [listen(0, "127.0.0.1") for _ in range(2)]
    yield made
    for one in made:
        one.close()


@pytest.fixture
def pair(listeners: list[socket.socket]) -> Iterator[list[Heartbeats]]:
    """Those of both processes, which have begun."""
    ends = [[one.getsockname()[:2]] for one in listeners]
    made = [Heartbeats(me, [one], ends, "key", lambda: None) for me, one in enumerate(listeners)]
    for each in made:
        each.begin()
    yield made
    for each in made:
        if each._thread.is_alive():
            each.close()


def test_what_is_told_is_known_there_and_here(pair: list[Heartbeats]) -> None:
    pair[0].tell("number", 3)
    pair[0].tell("for itself", 4, [0])
    pair[0].tell("after", 5)
    wait_until(lambda: pair[1].known("after") == 5, lambda: "nothing was heard")
    assert (pair[0].known("number"), pair[1].known("number")) == (3, 3)
    assert (pair[0].known("for itself"), pair[1].known("for itself")) == (4, None)
    pair[1].forget("num")
    assert (pair[1].known("number"), pair[1].known("after")) == (None, 5)


def test_what_is_told_just_before_the_end_is_heard(pair: list[Heartbeats]) -> None:
    pair[0].tell("here", True)
    wait_until(lambda: pair[1].known("here"), lambda: "nothing was heard")
    for number in range(20):
        pair[0].tell(f"last {number}", "word" * (1 << 18))
    pair[0].close()
    wait_until(lambda: pair[1].known("last 19") == "word" * (1 << 18), lambda: "the last was not heard")
    wait_until(lambda: pair[1].gone() == {0}, lambda: "a process that has ended is taken for one that lives")
    assert pair[1].down() == set()


def test_a_link_whose_network_acknowledges_nothing_is_dead_though_its_kernel_keeps_it(
    pair: list[Heartbeats], monkeypatch: pytest.MonkeyPatch
) -> None:
    pair[0].tell("here", True)
    wait_until(lambda: pair[1].known("here"), lambda: "nothing was heard")
    with monkeypatch.context() as silent:
        silent.setattr(heartbeats, "is_unacknowledged", lambda made, least_ms: True)
        wait_until(lambda: pair[0].down() == {0}, lambda: "a dead link is taken for one that lives")
    wait_until(lambda: pair[0].down() == set(), lambda: "a link that came back is taken for dead")
    assert pair[0].gone() == set()


def test_bug_a_process_whose_one_interface_refuses_connections_was_told_as_ended(
    listeners: list[socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other interface reached it all the time."""
    monkeypatch.setattr(heartbeats, "BEAT", 0.02)
    with listen(0, "127.0.0.1") as second, listen(0, "127.0.0.1") as unused:
        ours, more, theirs, refusing = (one.getsockname()[:2] for one in (listeners[0], second, listeners[1], unused))
        unused.close()
        calls: list[None] = []
        ends = [[ours, more], [refusing, theirs]]
        here = Heartbeats(0, [listeners[0], second], ends, "key", lambda: calls.append(None))
        there = Heartbeats(1, [listeners[1]], [[ours], [theirs]], "key", lambda: None)
        here.begin()
        there.begin()
        here.tell("number", 3)
        wait_until(lambda: there.known("number") == 3, lambda: "the interface that works was not used")
        count = len(calls)
        wait_until(lambda: len(calls) >= count + 5, lambda: "the interface that refuses was not called again")
        assert here.gone() == set()
        there.close()
        wait_until(lambda: here.gone() == {1}, lambda: "a process that has ended is taken for one that lives")
        here.close()


def test_a_process_without_the_key_is_not_heard(pair: list[Heartbeats], listeners: list[socket.socket]) -> None:
    with socket.create_connection(listeners[0].getsockname()) as made:
        made.sendall(b'another\n["number", 9]\n')
        assert made.recv(1) == b""
    assert pair[0].known("number") is None


def test_an_end_while_others_call_printed_tracebacks_of_asyncio(
    pair: list[Heartbeats], caplog: pytest.LogCaptureFixture
) -> None:
    pair[0].tell("here", True)
    pair[1].tell("there", True)
    wait_until(lambda: pair[1].known("here") and pair[0].known("there"), lambda: "nothing was heard")
    for each in pair:
        each.close()
    assert caplog.text == ""
