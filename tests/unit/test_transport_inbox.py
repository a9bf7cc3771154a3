"""An inbox tells what happened, once, also by its descriptor."""

from __future__ import annotations

import select
import threading

import pytest

from penstock.runtime.errors import DeadlineExceeded, PeerLost
from penstock.runtime.tensors.message import Edge
from penstock.runtime.transport.inbox import Inbox
from penstock.schedule import Op
from waiting import PATIENCE

pytestmark = pytest.mark.unit

EDGE = Edge(Op("F", 0, 0), Op("F", 1, 0))


def is_ready(inbox: Inbox) -> bool:
    return bool(select.select([inbox.fileno()], [], [], 0)[0])


def test_room_that_brings_no_message_is_told_from_nothing() -> None:
    inbox = Inbox()
    assert inbox.poll() is None
    inbox.put(list)
    assert inbox.poll() == []
    inbox.put(lambda: [EDGE])
    inbox.put(list)
    assert inbox.poll() == [EDGE]
    with pytest.raises(DeadlineExceeded):
        inbox.wait(0.01, lambda: "")


def test_the_descriptor_is_ready_from_an_event_to_the_next_poll() -> None:
    inbox = Inbox()
    inbox.put(lambda: [EDGE])
    assert is_ready(inbox), "what came before anybody watched counts"
    assert inbox.poll() == [EDGE]
    assert not is_ready(inbox)
    threading.Thread(target=inbox.put, args=(list,)).start()
    assert select.select([inbox.fileno()], [], [], PATIENCE)[0]
    assert inbox.wait(PATIENCE, lambda: "") == []
    assert is_ready(inbox), "an event that was waited for leaves it ready: once too often is no harm"
    assert inbox.poll() is None
    inbox.close()
    inbox.close()


def test_an_error_is_raised_in_its_turn() -> None:
    inbox = Inbox()
    inbox.put(lambda: [EDGE])
    inbox.fail(PeerLost("rank 1 is gone"))
    assert inbox.wait(1.0, lambda: "") == [EDGE]
    with pytest.raises(PeerLost, match="rank 1 is gone"):
        inbox.poll()
