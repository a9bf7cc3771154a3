"""Whatever is lost, doubled or overtaken: no two ranks run different plans in the same iteration."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

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
        self.dead: set[int] = set()

    def _send(self, sent: tuple[tuple[int, object], ...]) -> None:
        self.to_member += sent

    @rule()
    def propose(self) -> None:
        if self.coordinator.dead or self.coordinator.forgetful:
            with pytest.raises(ControlError, match="last checkpoint"):
                self.coordinator.propose(self.number + 1, "plan")
        elif self.coordinator.open is None:
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
        if rank in self.dead:
            return
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

    @rule()
    def the_coordinator_starts_again_with_its_records(self) -> None:
        now = self.coordinator
        self.coordinator = Coordinator(
            now.num_ranks, verdicts=now.verdicts, dead=now.dead, highest=now.highest, forgetful=now.forgetful
        )

    @precondition(lambda self: self.number >= 2)
    @rule()
    def the_coordinator_starts_again_without_records(self) -> None:
        self.coordinator = Coordinator(self.coordinator.num_ranks, forgetful=True)

    @precondition(lambda self: self.number >= 2)
    @rule(data=st.data())
    def a_rank_dies(self, data: st.DataObject) -> None:
        rank = data.draw(st.integers(0, len(self.members) - 1))
        self.dead.add(rank)
        open_ = self.coordinator.open
        self.coordinator, sent = self.coordinator.lost(rank)
        if open_ is not None:
            assert {message.boundary for _, message in sent} == {None}
            assert all(f"rank {rank} is dead" in message.reason for _, message in sent)
        self._send(sent)

    @rule(data=st.data(), times=st.integers(1, 3))
    def run(self, data: st.DataObject, times: int) -> None:
        rank = data.draw(st.integers(0, len(self.members) - 1))
        for _ in range(times if rank not in self.dead else 0):
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
        """Once messages pass again, every rank that lives gets on, or says why it cannot."""
        if not hasattr(self, "members"):
            return
        self.coordinator, sent = self.coordinator.give_up()
        self._send(sent)
        living = [rank for rank in range(len(self.members)) if rank not in self.dead]
        furthest = max(member.begun for member in self.members) + 10
        for _ in range(500):
            going = [r for r in living if self.members[r].begun < furthest and self.members[r].stuck is None]
            if not going:
                break
            for rank in going:
                self.run_one(rank)
            bags, self.to_member, self.to_coordinator = (self.to_member, self.to_coordinator), [], []
            for rank, message in bags[0]:
                if rank in living:
                    self.members[rank], answers = self.members[rank].receive(message)
                    self.to_coordinator += [(rank, answer) for answer in answers]
            for rank, message in bags[1]:
                self.coordinator, more = self.coordinator.receive(rank, message)
                self._send(more)
        stuck = [rank for rank in living if self.members[rank].stuck is not None]
        assert all(self.members[rank].begun >= furthest for rank in living if rank not in stuck)
        self.all_ranks_run_the_same_plan_in_an_iteration()
        if stuck:
            assert self.coordinator.forgetful
            assert all("started again" in str(self.members[rank].stuck) for rank in stuck)
        else:
            assert len({self.members[rank].running for rank in living}) <= 1

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
    assert verdicts == [(rank, Verdict(7, boundary, sent[0][1].digest)) for rank in range(len(begun))]
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
    assert [(rank, verdict.number, verdict.boundary) for rank, verdict in verdicts] == [(0, 1, None), (1, 1, None)]
    assert verdicts[0][1].reason.startswith("rank 1 cannot run it: its digest is ")
    coordinator, _ = Coordinator(1).propose(1, "plan")
    coordinator, verdicts = coordinator.receive(0, Ack(1, "another digest", 0))
    assert (verdicts[0][1].boundary, verdicts[0][1].digest) == (None, "another digest")
    assert coordinator.acks == {}


def test_proposals_come_one_at_a_time_with_rising_numbers() -> None:
    coordinator, _ = Coordinator(1).propose(3, "plan")
    with pytest.raises(ControlError, match="no verdict yet"):
        coordinator.propose(4, "plan")
    coordinator, _ = coordinator.give_up()
    with pytest.raises(ControlError, match="numbers rise"):
        coordinator.propose(3, "plan")


def test_who_did_not_answer_is_named() -> None:
    coordinator, sent = Coordinator(3).propose(1, "plan")
    _, (ack,) = Member(Running(0, "start")).receive(sent[1][1])
    coordinator, _ = coordinator.receive(1, ack)
    assert coordinator.missing == (0, 2)
    _, verdicts = coordinator.give_up()
    assert {verdict.reason for _, verdict in verdicts} == {"no answer from rank 0, 2"}


def test_a_dead_rank_ends_all_switching() -> None:
    coordinator, _ = Coordinator(2).propose(1, "plan")
    coordinator, verdicts = coordinator.lost(1)
    assert {(verdict.boundary, verdict.reason) for _, verdict in verdicts} == {(None, "rank 1 is dead")}
    with pytest.raises(ControlError, match="rank 1 is dead"):
        coordinator.propose(2, "plan")


def test_a_verdict_stands_though_a_rank_dies() -> None:
    coordinator, sent = Coordinator(1).propose(1, "plan")
    _, (ack,) = Member(Running(0, "start")).receive(sent[0][1])
    coordinator, (verdict,) = coordinator.receive(0, ack)
    coordinator, nothing = coordinator.lost(0)
    assert nothing == ()
    assert coordinator.verdicts == {1: verdict[1]}


def test_a_rank_that_a_forgetful_coordinator_leaves_waiting_says_so() -> None:
    _, sent = Coordinator(2).propose(5, "plan")
    member, (ack,) = Member(Running(0, "start"), begun=3).receive(sent[0][1])
    member, running, (question,) = member.begin()
    assert running is None
    _, answers = Coordinator(2, highest=5).receive(0, question)
    assert answers[0][1].boundary is None
    assert member.receive(answers[0][1])[0].begin()[1] == Running(0, "start")
    forgetful, answers = Coordinator(2, forgetful=True).receive(0, question)
    member, _ = member.receive(answers[0][1])
    assert "decision 5 was promised up to iteration 3" in str(member.stuck)
    with pytest.raises(ControlError, match="does not know what the ranks run"):
        forgetful.propose(6, "plan")
    # The verdict of old may still arrive.
    member, _ = member.receive(Verdict(5, 4, ack.digest))
    assert member.stuck is None
    assert member.begin()[1] == Running(5, ack.digest)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), num_ranks=st.integers(2, 4), forgetful=st.booleans())
def test_no_two_plans_run_where_the_coordinator_starts_again_in_the_middle(
    data: st.DataObject, num_ranks: int, forgetful: bool
) -> None:
    members = [
        Member(Running(0, "start"), begun=data.draw(st.integers(0, 4)), ahead=data.draw(st.integers(0, 1)))
        for _ in range(num_ranks)
    ]
    ran: dict[int, set[Running]] = {}

    def run(rank: int, times: int) -> list[object]:
        asked: list[object] = []
        for _ in range(times):
            members[rank], running, questions = members[rank].begin()
            asked += questions
            if running is not None:
                ran.setdefault(members[rank].begun, set()).add(running)
        return asked

    verdicts: tuple[tuple[int, object], ...] = ()
    coordinator, sent = Coordinator(num_ranks).propose(3, "plan")
    for rank, proposal in sent:
        members[rank], (ack,) = members[rank].receive(proposal)
        if data.draw(st.integers(0, 9)) != 5:  # else it is lost, and there is no verdict
            coordinator, verdicts = coordinator.receive(rank, ack)
    for rank, verdict in verdicts:
        if data.draw(st.booleans()):
            members[rank], _ = members[rank].receive(verdict)
            run(rank, data.draw(st.integers(0, 6)))
    coordinator = (
        Coordinator(num_ranks, forgetful=True)
        if forgetful
        else Coordinator(num_ranks, verdicts=coordinator.verdicts, highest=coordinator.highest)
    )
    for _ in range(3):
        for rank in data.draw(st.permutations(range(num_ranks))):
            for question in run(rank, 4):
                coordinator, answers = coordinator.receive(rank, question)
                for to, answer in answers:
                    members[to], _ = members[to].receive(answer)
    assert all(len(running) == 1 for running in ran.values())
    assert forgetful or all(member.stuck is None and member.begun > 6 for member in members)
