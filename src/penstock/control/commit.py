"""How all ranks come to run a new plan at the same iteration boundary, or none does: two phases, as pure values.

    coordinator      propose 3      all acked: from iteration 12              give_up: 3 is dropped
        |               |                ^    |                                  |
        |  Propose(3, text, digest)      |    |  Verdict(3, 12)                  |  Verdict(3, None)
        v               v                |    v                                  v
    member        proves the digest,  Ack(3, digest, 11)   runs the old plan up to 11, the new one from 12
                  promises: "up to 11 I run the old plan; I begin nothing after that before I know"

A member that has promised and does not know asks, and waits; so a lost message costs time, never agreement. The
boundary lies after every promise, so nobody has begun an iteration that the new plan should run. Messages may be
lost, doubled and overtaken: every receiver can take each of them at any time.

States are immutable: each step returns the next state and the messages to send.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from penstock.control.configuration import digest_of
from penstock.control.errors import ControlError


@dataclass(frozen=True, slots=True)
class Propose:
    """To a member: decision `number`, as text (`Configuration.to_json`), with its digest."""

    number: int
    text: str
    digest: str


@dataclass(frozen=True, slots=True)
class Ack:
    """From a member: I hold `number`, its digest is this, and I begin nothing after iteration `free_through` before
    I know the verdict."""

    number: int
    digest: str
    free_through: int


@dataclass(frozen=True, slots=True)
class Nack:
    """From a member: I cannot run `number`."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """From a member: what became of `number`?"""

    number: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """To a member: run `number` from iteration `boundary` on, or never (None). It does not change any more."""

    number: int
    boundary: int | None


Message = Propose | Ack | Nack | Ask | Verdict


@dataclass(frozen=True)
class Coordinator:
    """The side that proposes: one decision at a time.

    Attributes:
        num_ranks: the members, the coordinator's own rank among them.
        open: the proposal without a verdict, if any.
        acks: its promises by rank.
        verdicts: all so far, by number.
    """

    num_ranks: int
    open: Propose | None = None
    acks: dict[int, Ack] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def propose(self, number: int, text: str) -> tuple[Coordinator, Sent]:
        """Asks every member.

        Raises:
            ControlError: another proposal is open, or numbers do not rise.
        """
        if self.open is not None:
            raise ControlError(
                f"decision {self.open.number} has no verdict yet: give it up before proposing {number}"
            )
        if self.verdicts and number <= max(self.verdicts):
            raise ControlError(f"decision {number} after decision {max(self.verdicts)}: numbers rise")
        message = Propose(number, text, digest_of(text))
        return replace(self, open=message, acks={}), self._to_all(message)

    def receive(self, rank: int, message: Message) -> tuple[Coordinator, Sent]:
        """Takes a member's message."""
        if not isinstance(message, Ack | Nack | Ask):
            return self, ()
        if message.number in self.verdicts:
            return self, ((rank, self.verdicts[message.number]),)
        if self.open is None or message.number != self.open.number or isinstance(message, Ask):
            return self, ()
        if isinstance(message, Nack) or message.digest != self.open.digest:
            return self.give_up()
        acks = {**self.acks, rank: message}
        if len(acks) < self.num_ranks:
            return replace(self, acks=acks), ()
        boundary = 1 + max(ack.free_through for ack in acks.values())
        return replace(self, acks=acks)._settle(Verdict(message.number, boundary))

    def give_up(self) -> tuple[Coordinator, Sent]:
        """Drops the open proposal: no rank runs it, and none will. Too late once there is a verdict."""
        if self.open is None:
            return self, ()
        return self._settle(Verdict(self.open.number, None))

    def again(self) -> Sent:
        """What to send again after a while: to members that have not answered, or the last verdict to all."""
        if self.open is not None:
            return tuple((rank, self.open) for rank in range(self.num_ranks) if rank not in self.acks)
        return self._to_all(self.verdicts[max(self.verdicts)]) if self.verdicts else ()

    def _settle(self, verdict: Verdict) -> tuple[Coordinator, Sent]:
        settled = replace(self, open=None, verdicts={**self.verdicts, verdict.number: verdict})
        return settled, self._to_all(verdict)

    def _to_all(self, message: Message) -> Sent:
        return tuple((rank, message) for rank in range(self.num_ranks))


Sent = tuple[tuple[int, Message], ...]
"""Messages with the ranks they go to."""


@dataclass(frozen=True)
class Running:
    """What a rank runs: a decision's number and digest; 0 is what the job started with."""

    number: int
    digest: str


@dataclass(frozen=True)
class Member:
    """One rank's side.

    Attributes:
        running: what it runs now; begun: the last iteration it began, -1 before the first.
        promised: the proposal it holds, with its promise; verdict: on that, once known.
        ahead: iterations that a promise leaves free beyond the last begun. With 0 the answers have the rest of the
            iteration to go round; more where iterations are shorter than that.
    """

    running: Running
    begun: int = -1
    promised: tuple[Propose, Ack] | None = None
    verdict: Verdict | None = None
    ahead: int = 0

    @property
    def waits(self) -> bool:
        """Whether the next iteration cannot begin before the verdict is known."""
        return self.promised is not None and self.verdict is None and self.begun >= self.promised[1].free_through

    def begin(self) -> tuple[Member, Running | None, tuple[Message, ...]]:
        """Begins the next iteration: what to run in it; or None, and the question to send (again and again)."""
        if self.promised is None:
            return replace(self, begun=self.begun + 1), self.running, ()
        proposal, _ = self.promised
        if self.waits:
            return self, None, (Ask(proposal.number),)
        then = replace(self, begun=self.begun + 1)
        if self.verdict is not None and then.begun == self.verdict.boundary:
            then = replace(then, running=Running(proposal.number, proposal.digest), promised=None, verdict=None)
        return then, then.running, ()

    def receive(self, message: Message) -> tuple[Member, tuple[Message, ...]]:
        """Takes the coordinator's message; returns the answers."""
        if isinstance(message, Verdict):
            return self._learn(message), ()
        if not isinstance(message, Propose) or message.number <= self.running.number:
            return self, ()
        if self.promised is not None:
            proposal, ack = self.promised
            if message.number == proposal.number:
                return self, (ack,)
            return self, (Ask(proposal.number),) if self.verdict is None else ()
        digest = digest_of(message.text)
        if digest != message.digest:
            return self, (Nack(message.number, f"the digest is {digest}, {message.digest} was proposed"),)
        ack = Ack(message.number, digest, self.begun + self.ahead)
        return replace(self, promised=(message, ack)), (ack,)

    def _learn(self, verdict: Verdict) -> Member:
        if self.promised is None or verdict.number != self.promised[0].number:
            return self
        if verdict.boundary is None:
            return replace(self, promised=None, verdict=None)
        return replace(self, verdict=verdict)
