"""Links of a transport that fail, whichever it is: what is left of the step goes by delegates, what came in before is
not waited for again, and nothing goes by the base any more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.runtime.errors import DeadlineExceeded, PeerLost, RuntimeFailure
from penstock.runtime.mesh.collective import AllReduce, Reduce
from penstock.runtime.mesh.retried_group import RetriedGroup
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport import choose
from penstock.runtime.transport.base import StepMessages
from penstock.runtime.transport.channel import ChannelKey, ExpectedMessages, Tags
from penstock.runtime.transport.gloo import LeftMessages
from penstock.runtime.transport.inbox import Inbox
from penstock.runtime.transport.routed import RoutedTransport
from penstock.runtime.transport.wiring import wire
from penstock.schedule import Op

PEER = 1


def forward(m: int) -> Edge:
    return Edge(Op("F", 0, m), Op("F", 1, m), 0)


def backward(m: int) -> Edge:
    return Edge(Op("B", 1, m), Op("B", 0, m), 0)


def payload() -> Payload:
    return Payload([torch.ones(1)])


EXPECTED = [
    ExpectedMessages(ChannelKey.of(backward(0)), PEER, tuple((backward(m), 10 + m) for m in range(3))),
]


class FailingBase:
    """Carries until `fails` is set; then every call raises it."""

    rank = 0

    def __init__(self) -> None:
        self.inbox = Inbox()
        self.fails: Exception | None = None
        self.left = LeftMessages([], set(), [])
        self.sent: list[Edge] = []
        self.began = 0

    def _carry(self) -> None:
        if self.fails is not None:
            raise self.fails

    def begin(self, *_: Any) -> None:
        self._carry()
        self.began += 1

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        self._carry()
        self.sent.append(edge)
        return True

    def arrivals(self) -> list[Edge]:
        self._carry()
        return []

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        self._carry()
        return list(awaited)[:1]

    def take(self, edge: Edge) -> Payload:
        return payload()

    def end(self) -> None:
        self._carry()

    def leave(self) -> LeftMessages:
        return self.left

    def wake(self) -> None: ...

    def end_waits(self) -> None: ...


class CarryingDelegates:
    def __init__(self) -> None:
        self.steps = 0
        self.within: list[tuple[int, list[Edge]]] = []
        self.notices: list[str] = []
        self.sent: list[tuple[int, Edge]] = []
        self.is_full = False

    def also_watch(self, descriptor: int) -> None: ...

    def skip(self) -> None:
        self.steps += 1

    def begin(self, *_: Any) -> None:
        self.steps += 1

    def begin_within(self, step: StepMessages) -> None:
        self.within.append((self.steps, [edge for one in step.expected for edge, _ in one.messages]))

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        if self.is_full:
            return False
        self.sent.append((self.steps, edge))
        return True

    def arrivals(self) -> list[Edge]:
        return []

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str], until: int | None = None) -> list[Edge]:
        self.is_full = False
        return [backward(2)]

    def end(self) -> None: ...


class Guard:
    def __init__(self) -> None:
        self.number = 0
        self.hooks: list[Callable[[], None]] = []

    def lost(self, number: int, error: Exception) -> None:
        self.number = number + 1

    def at_change(self, hook: Callable[[], None], wake: Callable[[], None]) -> None:
        self.hooks.append(hook)


def make() -> tuple[RoutedTransport, FailingBase, CarryingDelegates, Guard]:
    base, delegates, guard = FailingBase(), CarryingDelegates(), Guard()
    made: Any = base, delegates
    return RoutedTransport(*made, guard=guard), base, delegates, guard


def begin(transport: RoutedTransport) -> None:
    transport.begin(StepMessages(EXPECTED, [""] * 3, threaded=False))


def test_what_is_left_of_a_step_goes_by_delegates() -> None:
    transport, base, delegates, _ = make()
    begin(transport)
    assert all(transport.send(forward(m), PEER, payload()) for m in range(2))
    base.fails = PeerLost("the network is gone")
    base.left = LeftMessages([backward(0)], {backward(0)}, [(forward(1), PEER, payload())])
    assert transport.send(forward(2), PEER, payload())
    assert base.sent == [forward(0), forward(1)]
    assert delegates.within == [(1, [backward(1), backward(2)])]
    assert delegates.sent == [(1, forward(1)), (1, forward(2))]
    assert transport.arrivals() == [backward(0)]  # it came in by the base, and was not reported before
    transport.end()
    begin(transport)
    assert (base.began, delegates.steps) == (1, 2)
    assert transport.send(forward(0), PEER, payload())
    assert delegates.sent[-1] == (2, forward(0))


def test_what_was_sent_in_a_step_that_ended_goes_once_more_where_ranks_go_another_way_before_the_next() -> None:
    transport, base, delegates, guard = make()
    begin(transport)
    transport.send(forward(0), PEER, payload())
    transport.end()
    base.left = LeftMessages([], {backward(m) for m in range(3)}, [(forward(0), PEER, payload())])
    for hook in guard.hooks:
        hook()
    assert delegates.within == [(1, [])]
    assert delegates.sent == [(1, forward(0))]
    begin(transport)
    assert base.began == 1


def test_while_delegates_have_no_room_for_what_is_sent_again_what_comes_in_is_kept() -> None:
    transport, base, delegates, _ = make()
    begin(transport)
    base.fails, delegates.is_full = PeerLost("the network is gone"), True
    base.left = LeftMessages([], set(), [(forward(0), PEER, payload())])
    assert transport.arrivals() == [backward(2)]
    assert delegates.sent == [(1, forward(0))]


def test_lines_between_gpus_are_guarded_by_what_changes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = SimpleNamespace(give_up=lambda: None, may_use=lambda address: True)
    monkeypatch.setattr(choose, "_lines", lambda *_: lines)
    monkeypatch.setattr(choose.TransportChoice, "_delegate", lambda *_, takes_over: CarryingDelegates())
    schedule, guard, guarded = ps.build("1f1b", 2, 4), Guard(), []
    peers = SimpleNamespace(group=Settled())
    failover = SimpleNamespace(
        group=lambda of: of.group,
        at_change=guard.at_change,
        guard_lines=lambda *given: guarded.append(given),
    )
    choice: Any = choose.TransportChoice(ps.TransportOptions("nccl"))
    made = choice.make(peers, Tags.of(schedule), 1.0, wire(schedule), torch.device("cpu"), None, failover)
    assert isinstance(made, RoutedTransport)
    assert guarded == [(lines.give_up, lines.may_use)]
    assert len(guard.hooks) == 1


def test_notices_of_delegates_of_single_links_were_told_to_nobody() -> None:
    transport, _, delegates, _ = make()
    delegates.notices = ["messages of rank 0 to rank 1 go from the second interface"]
    choice = choose.TransportChoice(ps.TransportOptions())
    made: Any = transport
    assert choice.notices(made) == delegates.notices
    assert choice.notices(None) == []


def test_a_deadline_that_passed_is_no_link_that_failed() -> None:
    transport, base, delegates, _ = make()
    begin(transport)
    base.fails = DeadlineExceeded("nothing came")
    with pytest.raises(DeadlineExceeded, match="nothing came"):
        transport.wait([backward(0)], str)
    assert delegates.within == []


class Settled:
    """A group of two whose other rank adds 10, or gives 5; it keeps what it was asked for."""

    def __init__(self, fails: bool = False) -> None:
        self.fails = fails
        self.asked: list[str] = []

    def rank(self) -> int:
        return 0

    def done(self, tensor: torch.Tensor, value: float | None) -> Any:
        group = self

        class Work:
            def wait(self, limit: timedelta) -> None:
                if group.fails:
                    tensor.fill_(float("nan"))  # what is left of an op that failed
                    raise RuntimeError("[third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
                if value is None:
                    tensor.add_(10)
                else:
                    tensor.fill_(value)

        return Work()


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_reduce(tensor: torch.Tensor, group: Settled, async_op: bool) -> Any:
        group.asked.append("sum")
        return group.done(tensor, None)

    def broadcast(tensor: torch.Tensor, group: Settled, group_src: int, async_op: bool) -> Any:
        group.asked.append(f"from {group_src}")
        return group.done(tensor, 5.0 if group_src else float(tensor[0]))

    def reduce(tensor: torch.Tensor, group: Settled, group_dst: int, async_op: bool) -> Any:
        group.asked.append(f"to {group_dst}")
        return group.done(tensor, None)

    for name, function in {"all_reduce": all_reduce, "broadcast": broadcast, "reduce": reduce}.items():
        monkeypatch.setattr(torch.distributed, name, function)


class Changing:
    """A service whose next group is given, with what the other rank says that it had done."""

    def __init__(self, other: dict[str, Any]) -> None:
        self.other, self.next = other, Settled()
        self.group: RetriedGroup = RetriedGroup(self, (0, 1), 0)

    def run_hooks(self) -> None: ...

    def lost(self, number: int, error: Exception) -> None:
        mine = self.group.freeze()
        self.group.adopt(number + 1, self.next, {0: mine, 1: {**mine, **self.other}})


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(
    ("done", "asked", "value"),
    [([], ["sum"], 11.0), ([0], ["from 1"], 5.0)],
    ids=["on no rank begins anew", "on another rank comes from there"],
)
def test_a_sum_that_failed_and_was_done(done: list[int], asked: list[str], value: float) -> None:
    service = Changing({"done": done})
    service.group.adopt(0, Settled(fails=True), {})
    op = AllReduce(lambda: torch.ones(1))
    service.group.start(op).wait(timedelta(seconds=1))
    assert service.next.asked == asked
    assert op.tensor.tolist() == [value]


@pytest.mark.usefixtures("settled")
def test_what_was_done_here_is_given_to_the_rank_that_does_not_have_it() -> None:
    service = Changing({"done": []})
    first = Settled()
    service.group.adopt(0, first, {})
    early, late = AllReduce(lambda: torch.ones(1)), AllReduce(lambda: torch.ones(1))
    service.group.start(early).wait(timedelta(seconds=1))
    first.fails = True
    service.group.start(late).wait(timedelta(seconds=1))
    assert service.next.asked == ["from 0", "sum"]
    assert (early.tensor.tolist(), late.tensor.tolist()) == ([11.0], [11.0])


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize(("done", "asked"), [([0], []), ([], ["to 1"])])
def test_a_sum_for_one_rank_is_done_when_that_one_has_it(done: list[int], asked: list[str]) -> None:
    service = Changing({"done": done})
    service.group.adopt(0, Settled(fails=True), {})
    service.group.start(Reduce(lambda: torch.ones(1), root=1)).wait(timedelta(seconds=1))
    assert service.next.asked == asked


@pytest.mark.usefixtures("settled")
def test_a_sum_that_is_done_everywhere_is_not_asked_for_again_though_one_rank_knows_that_alone() -> None:
    service = Changing({"done": [1], "before": 1})  # the other rank has forgotten op 0, and is done with op 1
    first = Settled()
    service.group.adopt(0, first, {})
    service.group.start(AllReduce(lambda: torch.ones(1))).wait(timedelta(seconds=1))
    first.fails = True
    late = AllReduce(lambda: torch.ones(1))
    service.group.start(late).wait(timedelta(seconds=1))
    assert service.next.asked == ["from 1"]
    assert late.tensor.tolist() == [5.0]


@pytest.mark.usefixtures("settled")
def test_a_sum_that_another_rank_has_forgotten_is_not_done_again_with_what_that_one_does_next() -> None:
    service = Changing({"done": [1], "before": 1})
    service.group.adopt(0, Settled(fails=True), {})
    with pytest.raises(
        RuntimeFailure, match=r"process 0 is not done with op 0 \(AllReduce\) .* process 1 has forgotten"
    ):
        service.group.start(AllReduce(lambda: torch.ones(1))).wait(timedelta(seconds=1))
    assert service.next.asked == []
