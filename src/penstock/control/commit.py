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

Where a rank dies, `lost` drops what is open, and nothing more is proposed: its reason names the rank. A coordinator
that starts again is given what it had written down, `verdicts` and `highest`; then what has no verdict is dropped.
For that, both must be written down before messages go out. One that has nothing written down is `forgetful`: it
proposes nothing, and says `Unknown` to who asks. That rank begins nothing more, and `stuck` says why, for it cannot
know what the others run.

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
    """From a member: I cannot run `number`, of which I was sent the text with this digest."""

    number: int
    reason: str
    digest: str


@dataclass(frozen=True, slots=True)
class Ask:
    """From a member: what became of `number`, of which I hold the text with this digest?"""

    number: int
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """To a member: run `number` from iteration `boundary` on, or never (None). It does not change any more.

    Attributes:
        digest: of the text it is about.
        reason: why never, in words.
    """

    number: int
    boundary: int | None
    digest: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Unknown:
    """To a member: I know nothing of `number` with this digest. I have started again since it was proposed."""

    number: int
    digest: str


Message = Propose | Ack | Nack | Ask | Verdict | Unknown


@dataclass(frozen=True)
class Coordinator:
    """The side that proposes: one decision at a time.

    Attributes:
        num_ranks: the members, the coordinator's own rank among them.
        open: the proposal without a verdict, if any.
        acks: its promises by rank.
        verdicts: all so far, by number. highest: number proposed so far.
        dead: ranks that are known to be gone.
        forgetful: it has started again, and knows nothing of what was before.
    """

    num_ranks: int
    open: Propose | None = None
    acks: dict[int, Ack] = field(default_factory=dict)
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    dead: frozenset[int] = frozenset()
    highest: int = 0
    forgetful: bool = False

    def propose(self, number: int, text: str) -> tuple[Coordinator, Sent]:
        """Asks every member.

        Raises:
            ControlError: another proposal is open, numbers do not rise, a rank is dead, or the coordinator is
                forgetful.
        """
        if self.dead:
            ranks = ", ".join(map(str, sorted(self.dead)))
            raise ControlError(
                f"decision {number} needs all ranks, but rank {ranks} is dead: end the run and start it again from "
                f"its last checkpoint"
            )
        if self.forgetful:
            raise ControlError(
                f"decision {number}: the coordinator has started again and does not know what the ranks run: end the "
                f"run and start it again from its last checkpoint"
            )
        if self.open is not None:
            raise ControlError(
                f"decision {self.open.number} has no verdict yet: give it up before proposing {number}"
            )
        if number <= self.highest:
            raise ControlError(f"decision {number} after decision {self.highest}: numbers rise")
        message = Propose(number, text, digest_of(text))
        return replace(self, open=message, acks={}, highest=number), self._to_all(message)

    def receive(self, rank: int, message: Message) -> tuple[Coordinator, Sent]:
        """Takes a member's message."""
        if not isinstance(message, Ack | Nack | Ask):
            return self, ()
        known = self.verdicts.get(message.number)
        if known is not None and message.digest in ("", known.digest):
            return self, ((rank, known),)
        if self.open is None or (message.number, message.digest) != (self.open.number, self.open.digest):
            if self.forgetful:
                return self, ((rank, Unknown(message.number, message.digest)),)
            reason = "the coordinator started again before there was a verdict"
            return self, ((rank, Verdict(message.number, None, message.digest, reason)),)
        if isinstance(message, Ask):
            return self, ()
        if isinstance(message, Nack):
            return self.give_up(f"rank {rank} cannot run it: {message.reason}")
        acks = {**self.acks, rank: message}
        if len(acks) < self.num_ranks:
            return replace(self, acks=acks), ()
        boundary = 1 + max(ack.free_through for ack in acks.values())
        return replace(self, acks=acks)._settle(Verdict(message.number, boundary, message.digest))

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not answered the open proposal."""
        return () if self.open is None else tuple(rank for rank in range(self.num_ranks) if rank not in self.acks)

    def give_up(self, reason: str = "") -> tuple[Coordinator, Sent]:
        """Drops the open proposal: no rank runs it, and none will. Too late once there is a verdict.

        Args:
            reason: in words; by default which ranks have not answered.
        """
        if self.open is None:
            return self, ()
        reason = reason or "no answer from rank " + ", ".join(map(str, self.missing))
        return self._settle(Verdict(self.open.number, None, self.open.digest, reason))

    def lost(self, rank: int) -> tuple[Coordinator, Sent]:
        """A rank is dead. What is open is dropped, nothing more is proposed; a verdict given stays."""
        return replace(self, dead=self.dead | {rank}).give_up(f"rank {rank} is dead")

    def again(self) -> Sent:
        """What to send again after a while: to members that have not answered, or the last verdict to all."""
        if self.open is not None:
            return tuple((rank, self.open) for rank in self.missing)
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
        unknown: whether the coordinator has forgotten what this rank has promised.
        ahead: iterations that a promise leaves free beyond the last begun. With 0 the answers have the rest of the
            iteration to go round; more where iterations are shorter than that.
    """

    running: Running
    begun: int = -1
    promised: tuple[Propose, Ack] | None = None
    verdict: Verdict | None = None
    ahead: int = 0
    unknown: bool = False

    @property
    def stuck(self) -> str | None:
        """Why this rank can never begin its next iteration, in words; None where it can."""
        if not (self.waits and self.unknown and self.promised is not None):
            return None
        return (
            f"decision {self.promised[0].number} was promised up to iteration {self.promised[1].free_through}, and "
            f"the coordinator has started again and does not know whether other ranks run it: end the run and start "
            f"it again from its last checkpoint"
        )

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
            return self, None, (Ask(proposal.number, proposal.digest),)
        then = replace(self, begun=self.begun + 1)
        if self.verdict is not None and then.begun == self.verdict.boundary:
            now = Running(proposal.number, proposal.digest)
            then = replace(then, running=now, promised=None, verdict=None, unknown=False)
        return then, then.running, ()

    def receive(self, message: Message) -> tuple[Member, tuple[Message, ...]]:
        """Takes the coordinator's message; returns the answers."""
        if isinstance(message, Verdict):
            return self._learn(message), ()
        if isinstance(message, Unknown) and self.promised is not None and self.verdict is None:
            held = self.promised[0]
            return replace(self, unknown=(message.number, message.digest) == (held.number, held.digest)), ()
        if not isinstance(message, Propose) or message.number <= self.running.number:
            return self, ()
        if self.promised is not None:
            proposal, ack = self.promised
            if (message.number, message.digest) == (proposal.number, proposal.digest):
                return self, (ack,)
            return self, (Ask(proposal.number, proposal.digest),) if self.verdict is None else ()
        digest = digest_of(message.text)
        if digest != message.digest:
            reason = f"its digest is {digest}, {message.digest} was proposed"
            return self, (Nack(message.number, reason, message.digest),)
        ack = Ack(message.number, digest, self.begun + self.ahead)
        return replace(self, promised=(message, ack)), (ack,)

    def _learn(self, verdict: Verdict) -> Member:
        if self.promised is None or verdict.number != self.promised[0].number:
            return self
        if verdict.digest not in ("", self.promised[0].digest):
            return self
        if verdict.boundary is None:
            return replace(self, promised=None, verdict=None, unknown=False)
        return replace(self, verdict=verdict, unknown=False)
