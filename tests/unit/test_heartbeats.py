"""The heartbeats between processes, call by call."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from penstock.runtime.mesh.interfaces import listen
from penstock.runtime.transport import heartbeats as module
from penstock.runtime.transport.delegate.carrier.frames import WRITE
from penstock.runtime.transport.heartbeats import Heartbeats


@pytest.fixture
def heartbeats() -> Iterator[Heartbeats]:
    """Those of process 0 of two, which have not begun."""
    listeners = [listen(0, "127.0.0.1") for _ in range(2)]
    ends = [[one.getsockname()[:2]] for one in listeners]
    made = Heartbeats(0, listeners[:1], ends, "key", lambda: None)
    yield made
    made.begin()
    made.close()
    listeners[1].close()


def test_the_larger_of_two_numbers_is_said_though_two_threads_say_one_at_once(heartbeats: Heartbeats) -> None:
    said = threading.Event()

    def say_more() -> None:
        heartbeats.say(3)
        said.set()

    other = threading.Thread(target=say_more)

    class Interrupted(int):
        """A number whose comparing gives another thread time to say a larger one, where it may."""

        def __gt__(self, than: object) -> bool:
            other.start()
            said.wait(0.2)
            return int(self) > int(str(than))

    heartbeats.say(Interrupted(2))
    other.join()
    assert heartbeats.number == 3


def test_a_call_that_ends_with_its_first_words_is_made_again(heartbeats: Heartbeats) -> None:
    (call,) = heartbeats._calls
    heartbeats._turn(call, 0)
    assert call.stream is not None
    heartbeats._ready(call, WRITE)
    assert call.stands
    call.stream.socket.shutdown(socket.SHUT_WR)
    heartbeats._turn(call, 0)
    assert call.stream is None
    assert call.due == 0


def test_a_link_whose_network_acknowledges_nothing_is_dead_though_its_kernel_keeps_it(
    heartbeats: Heartbeats, monkeypatch: pytest.MonkeyPatch
) -> None:
    (call,) = heartbeats._calls
    heartbeats._turn(call, 0)
    assert call.stream is not None
    heartbeats._ready(call, WRITE)
    stands = call.stream.socket
    monkeypatch.setattr(module, "is_unacknowledged", lambda made, least_ms: made is stands)
    heartbeats._turn(call, 0)
    assert call.stream is None
    assert heartbeats.down() == {0}
