"""Whatever is lost, doubled or overtaken: no two ranks run different plans in the same iteration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock.control import Ack, ControlError, Coordinator, Member, Nack, Propose, Running, Verdict

pytestmark = pytest.mark.property


class Network(RuleBasedStateMachine):
    """A coordinator, its members, and messages under way that may be delivered in any order, again, or never."""

    @initialize(num_ranks=st.integers(1, 4), ahead=st.integers(0, 2))
    def begin(self, num_ranks: int, ahead: int) -> None:
        self.coordinator = Coordinator(num_ranks)
        self.members = [Member(Running(0, "start"), ahead=ahead) for _ in range(num_ranks)]
        self.to_member: list[tuple[int, object]] = []
        self.to_coordinator: list[tuple[int, object]] = []
        self.ran: dict[int, dict[int, Running]] = {}
        self.number = 0

    def _send(self, sent: tuple[tuple[int, object], ...]) -> None:
        self.to_member += sent

    @rule()
    def propose(self) -> None:
        if self.coordinator.open is None:
            self.number += 1
            self.coordinator, sent = self.coordinator.propose(self.number, f"plan {self.number}")
            self._send(sent)

    @rule()
    def give_up(self) -> None:
        self.coordinator, sent = self.coordinator.give_up()
        self._send(sent)

    @rule()
    def send_again(self) -> None:
        self._send(self.coordinator.again())

    @rule(data=st.data(), keep=st.booleans())
    def deliver_to_member(self, data: st.DataObject, keep: bool) -> None:
        if not self.to_member:
            return
        at = data.draw(st.integers(0, len(self.to_member) - 1))
        rank, message = self.to_member[at] if keep else self.to_member.pop(at)
        self.members[rank], answers = self.members[rank].receive(message)
        self.to_coordinator += [(rank, answer) for answer in answers]

    @rule(data=st.data(), keep=st.booleans())
    def deliver_to_coordinator(self, data: st.DataObject, keep: bool) -> None:
        if not self.to_coordinator:
            return
        at = data.draw(st.integers(0, len(self.to_coordinator) - 1))
        rank, message = self.to_coordinator[at] if keep else self.to_coordinator.pop(at)
        self.coordinator, sent = self.coordinator.receive(rank, message)
        self._send(sent)

    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        for bag in (self.to_member, self.to_coordinator):
            if bag:
                bag.pop(data.draw(st.integers(0, len(bag) - 1)))

    @rule(data=st.data(), times=st.integers(1, 3))
    def run(self, data: st.DataObject, times: int) -> None:
        rank = data.draw(st.integers(0, len(self.members) - 1))
        for _ in range(times):
            self.members[rank], running, questions = self.members[rank].begin()
            self.to_coordinator += [(rank, question) for question in questions]
            if running is not None:
                self.ran.setdefault(self.members[rank].begun, {})[rank] = running

    @invariant()
    def all_ranks_run_the_same_plan_in_an_iteration(self) -> None:
        for iteration, by_rank in getattr(self, "ran", {}).items():
            assert len(set(by_rank.values())) == 1, (iteration, by_rank)

    @invariant()
    def numbers_never_fall(self) -> None:
        if hasattr(self, "members"):
            for rank in range(len(self.members)):
                numbers = [self.ran[n][rank].number for n in sorted(self.ran) if rank in self.ran[n]]
                assert numbers == sorted(numbers)

    def teardown(self) -> None:
        """Once messages pass again, every rank gets on, and all come to run the same."""
        if not hasattr(self, "members"):
            return
        self.coordinator, sent = self.coordinator.give_up()
        self._send(sent)
        furthest = max(member.begun for member in self.members) + 10
        for _ in range(500):
            if all(member.begun >= furthest for member in self.members):
                break
            for rank in range(len(self.members)):
                if self.members[rank].begun < furthest:
                    self.run_one(rank)
            bags, self.to_member, self.to_coordinator = (self.to_member, self.to_coordinator), [], []
            for rank, message in bags[0]:
                self.members[rank], answers = self.members[rank].receive(message)
                self.to_coordinator += [(rank, answer) for answer in answers]
            for rank, message in bags[1]:
                self.coordinator, more = self.coordinator.receive(rank, message)
                self._send(more)
        assert all(member.begun >= furthest for member in self.members)
        self.all_ranks_run_the_same_plan_in_an_iteration()
        assert len({member.running for member in self.members}) == 1

    def run_one(self, rank: int) -> None:
        self.members[rank], running, questions = self.members[rank].begin()
        self.to_coordinator += [(rank, question) for question in questions]
        if running is not None:
            self.ran.setdefault(self.members[rank].begun, {})[rank] = running


Network.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestNetwork = Network.TestCase


@given(begun=st.lists(st.integers(0, 5), min_size=1, max_size=4), ahead=st.integers(0, 2))
def test_without_losses_all_switch_right_after_the_furthest_promise(begun: list[int], ahead: int) -> None:
    members = []
    for count in begun:
        member = Member(Running(0, "start"), ahead=ahead)
        for _ in range(count):
            member, _, _ = member.begin()
        members.append(member)
    coordinator, sent = Coordinator(len(begun)).propose(7, "plan")
    verdicts = []
    for rank, message in sent:
        members[rank], answers = members[rank].receive(message)
        for answer in answers:
            coordinator, more = coordinator.receive(rank, answer)
            verdicts += more
    boundary = max(begun) - 1 + ahead + 1
    assert verdicts == [(rank, Verdict(7, boundary)) for rank in range(len(begun))]
    for rank, verdict in verdicts:
        members[rank], _ = members[rank].receive(verdict)
        ran = {}
        for _ in range(10):
            members[rank], running, questions = members[rank].begin()
            assert running is not None
            assert questions == ()
            ran[members[rank].begun] = running.number
        assert all(number == (7 if iteration >= boundary else 0) for iteration, number in ran.items())


def test_a_member_that_holds_another_text_stops_the_switch() -> None:
    coordinator, sent = Coordinator(2).propose(1, "plan")
    (_, right), (_, proposed) = sent
    assert isinstance(proposed, Propose)
    _, (ack,) = Member(Running(0, "start")).receive(right)
    coordinator, _ = coordinator.receive(0, ack)
    member, (answer,) = Member(Running(0, "start")).receive(Propose(1, "plam", proposed.digest))
    assert isinstance(answer, Nack)
    assert member.promised is None
    coordinator, verdicts = coordinator.receive(1, answer)
    assert verdicts == ((0, Verdict(1, None)), (1, Verdict(1, None)))
    coordinator, _ = Coordinator(1).propose(1, "plan")
    _, verdicts = coordinator.receive(0, Ack(1, "another digest", 0))
    assert verdicts == ((0, Verdict(1, None)),)


def test_proposals_come_one_at_a_time_with_rising_numbers() -> None:
    coordinator, _ = Coordinator(1).propose(3, "plan")
    with pytest.raises(ControlError, match="no verdict yet"):
        coordinator.propose(4, "plan")
    coordinator, _ = coordinator.give_up()
    with pytest.raises(ControlError, match="numbers rise"):
        coordinator.propose(3, "plan")
