"""Links that fail in a step: every wait in it ends, all processes vote, and all begin it anew or none does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import penstock as ps
from penstock.runtime.errors import DeadlineExceeded, LinkLost, PeerLost
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport import choose
from penstock.runtime.transport.channel import Tags
from penstock.runtime.transport.delegate import DelegateTransport
from penstock.runtime.transport.repeat import MOST_ATTEMPTS, Attempts, GuardedGroup, GuardedTransport
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Op

FORWARD = Edge(Op("F", 0, 0), Op("F", 1, 0), 0)
BROKEN = "[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"


class Told:
    """What two processes tell each other; the other one's part is told by the test, as `said`."""

    def __init__(self, said: Callable[[str], Any]) -> None:
        self._said, self._told = said, dict[str, Any]()

    def tell(self, key: str, value: Any, to: Sequence[int] | None = None) -> None:
        self._told[key] = value

    def known(self, key: str) -> Any:
        return self._told.get(key, self._said(key))

    def forget(self, beginning: str) -> None: ...


class Links:
    """Stands for what changes over: it has the next groups at once."""

    def __init__(self, said: Callable[[str], Any]) -> None:
        self.number = self.wanted = self.me = 0
        self.timeout = 5.0
        self.groups = {"pipeline": object()}
        self.looks: list[Callable[[], None]] = []
        self.changed = threading.Condition()
        self.beats = Told(said)

    def want(self, number: int, why: str) -> None:
        self.wanted = max(self.wanted, number)

    def await_newest(self) -> None:
        self.number = self.wanted

    def require_alive(self, missing: Sequence[int]) -> None: ...

    def wait_for(self, find: Callable[[], Any], check: Callable[[], object], end: float) -> Any:
        while (found := find()) is None and time.monotonic() <= end:
            check()
            time.sleep(0.01)
        return found


def agrees(key: str) -> Any:
    """What the other process tells: in every vote that its part is whole."""
    return b"\1".hex() if key.endswith(" 1") and "lost" not in key else None


def made(said: Callable[[str], Any] = agrees) -> Any:
    links = Links(said)
    attempts = Attempts(links)  # type: ignore[arg-type]
    return links, attempts, GuardedGroup(attempts, "pipeline", [0, 1])


class Work:
    def __init__(self, *errors: str) -> None:
        self._errors = list(errors)

    def wait(self, limit: timedelta) -> None:
        if self._errors:
            raise RuntimeError(self._errors.pop(0))


def test_an_op_whose_connection_ends_is_begun_anew_with_all_that_belongs_to_it() -> None:
    links, _, group = made()
    works = [Work(), Work(BROKEN), Work(), Work()]
    begun: list[int] = []

    def once() -> str:
        for _ in range(2):
            begun.append(links.number)
            group.start(lambda group: works.pop(0)).wait(timedelta(seconds=1))
        return "whole"

    assert group.repeated(once) == "whole"
    assert begun == [0, 0, 1, 1]
    assert works == []


def test_a_process_that_has_its_part_begins_anew_where_another_has_not() -> None:
    votes = iter([b"\0".hex(), b"\1".hex()])
    said = dict[str, str]()

    def heard(key: str) -> Any:
        if not key.endswith(" 1") or "lost" in key:
            return None
        if key not in said:
            said[key] = next(votes)
        return said[key]

    _, _, group = made(heard)
    times: list[int] = []
    group.repeated(lambda: times.append(1))
    assert len(times) == 2


def test_a_wait_ends_where_another_process_has_given_the_attempt_up() -> None:
    _, attempts, group = made(lambda key: 0 if key == "pipeline#1 lost 1" else None)

    def once() -> int:
        if attempts.num_repeats:
            return attempts.number
        with pytest.raises(LinkLost):
            group.begin_gather(b"")(1.0)
        raise LinkLost("as every process does")

    assert attempts.repeated(group, once) == 1


def test_links_that_come_and_go_all_the_time_end_the_training() -> None:
    _, attempts, group = made()
    times: list[int] = []

    def once() -> None:
        times.append(attempts.num_repeats)
        raise LinkLost("once more")

    with pytest.raises(PeerLost, match="once more") as caught:
        attempts.repeated(group, once)
    assert type(caught.value) is PeerLost
    assert times == list(range(MOST_ATTEMPTS))


def test_a_wait_for_an_op_ends_at_its_deadline() -> None:
    _, attempts, group = made()
    with pytest.raises(RuntimeError, match="timed out"):
        group.start(lambda group: Work(*["timed out"] * 9)).wait(timedelta(seconds=0.1))
    assert attempts.failover.wanted == 0


class Carrying:
    """A transport that raises what it is given."""

    rank = 0

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.num_wakes = 0
        self.take = self.crossings = list

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        if self._errors:
            raise self._errors.pop(0)
        return True

    def wake(self) -> None:
        self.num_wakes += 1


def sends(*errors: Exception, by_group: bool = True) -> tuple[Any, Callable[[], bool], Carrying]:
    """Sends once in an attempt, by a transport that raises these."""
    _, attempts, group = made()
    inner: Any = Carrying(*errors)
    transport = GuardedTransport(inner, attempts, by_group)

    def once() -> bool:
        return bool(attempts.num_repeats) or transport.send(FORWARD, 1, Payload([]))

    return attempts, lambda: attempts.repeated(group, once), inner


def test_a_message_whose_connection_ends_gives_the_attempt_up() -> None:
    attempts, send, _ = sends(PeerLost("the network is gone"))
    assert send()
    assert attempts.failover.wanted == 1
    assert attempts.failover.beats.known("pipeline#1 lost 0")


@pytest.mark.parametrize(
    ("error", "by_group"),
    [(DeadlineExceeded("nothing came"), True), (PeerLost("the delegates say so"), False)],
    ids=["a deadline that passed", "delegates, who have tried every interface"],
)
def test_what_is_no_link_that_failed(error: Exception, by_group: bool) -> None:
    attempts, send, _ = sends(error, by_group=by_group)
    with pytest.raises(type(error)):
        send()
    assert attempts.failover.wanted == 0


def test_a_rank_that_waits_is_woken_where_groups_are_left() -> None:
    links, attempts, group = made()
    inner: Any = Carrying()
    transport = GuardedTransport(inner, attempts, by_group=True)

    def once() -> None:
        if not attempts.num_repeats:
            links.want(1, "another rank said so")
            for look in links.looks:
                look()
            transport.send(FORWARD, 1, Payload([]))

    attempts.repeated(group, once)
    assert inner.num_wakes == 1
    assert transport.is_stale


def test_lines_between_gpus_are_guarded_by_what_changes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = SimpleNamespace(give_up=lambda: None)
    monkeypatch.setattr(choose, "_lines", lambda *_: lines)
    monkeypatch.setattr(choose, "GlooTransport", lambda *_, **__: Carrying())
    links, attempts, group = made()
    guarded: list[Any] = []
    links.guard_lines = guarded.append
    schedule = ps.build("1f1b", 2, 4)
    alone = {"gather": lambda value: [value], "repeated": lambda once: once()}
    peers = cast("Any", SimpleNamespace(group=None, guard=group, here=(0,), num_ranks=1, **alone))
    choice = choose.TransportChoice(ps.TransportOptions("nccl"))
    transport = choice.make(peers, Tags(schedule), 1.0, wire(schedule), torch.device("cpu"), None, attempts)
    assert isinstance(transport, GuardedTransport)
    assert isinstance(transport.inner, Carrying)
    assert guarded == [lines.give_up]


def test_notices_of_delegates_of_single_links_were_told_to_nobody() -> None:
    said = ["messages of rank 0 to rank 1 go from the second interface"]
    delegates = DelegateTransport.__new__(DelegateTransport)
    delegates.notices = said
    base: Any = SimpleNamespace(rank=0)
    choice = choose.TransportChoice(ps.TransportOptions())
    assert choice.notices(choose.RoutedTransport(base, delegates)) == delegates.notices
    assert choice.notices(None) == []


def test_a_vote_that_nobody_answered_ended_with_an_error_of_torch_s() -> None:
    links, _, group = made(lambda key: None)
    links.timeout = 0.05
    with pytest.raises(DeadlineExceeded, match=r"rank 0 waited 0\.05 s for what all ranks vote from the other ranks"):
        group.repeated(lambda: None)
