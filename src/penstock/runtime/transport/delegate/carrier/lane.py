"""Exactly once, whatever connections do: the two ends of a lane as values, events in, what to do out.

    Sending                                            Receiving
      give 1, 2, 3                                       last 0
      connect ------------- HELLO epoch 1 ------------> welcome: last 0
      write 1, 2   -------- DATA 1, DATA 2 (half) ----> whole 1: deliver, answer 1
      cut                          X                     cut: the half of 2 is dropped
      connect ------------- HELLO epoch 2 ------------> an older connection is closed
      <-------------------- WELCOME last 1 ------------
      write 2, 3   -------- DATA 2, DATA 3 -----------> whole 2, whole 3

Messages of a lane are numbered from 1 without gaps. The sender keeps each until it is answered; answers count all
up to a number. A connection carries data only after its welcome, and a receiver listens only to its newest one
(epochs rise), so nothing that lingers in an old one can come between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


class LaneError(Exception):
    """The other end broke the rules above: its connection is to be closed."""


@dataclass(frozen=True, slots=True)
class SendingEnd:
    """The sending end.

    Attributes:
        given: the last message to send; answered: the last one known to be there, whole.
        written: the last one written wholly on this connection; furthest: on any.
        epoch: of the newest connection; live: whether it has been welcomed.
    """

    given: int = 0
    answered: int = 0
    written: int = 0
    furthest: int = 0
    epoch: int = 0
    live: bool = False

    def give(self, number: int) -> SendingEnd:
        """One more message, the next in line."""
        if number != self.given + 1:
            raise LaneError(f"message {number} given after message {self.given}")
        return replace(self, given=number)

    def connect(self) -> SendingEnd:
        """A new connection begins: greet with the epoch."""
        return replace(self, epoch=self.epoch + 1, live=False)

    def welcome(self, epoch: int, last: int) -> tuple[SendingEnd, int]:
        """The receiver has all up to `last`; returns how many messages will be sent for a second time."""
        if epoch != self.epoch or self.live:
            raise LaneError(f"a welcome to connection {epoch} in connection {self.epoch}")
        if not self.answered <= last <= self.given:
            raise LaneError(
                f"a receiver that has {last}, of {self.given} given and {self.answered} answered messages"
            )
        again = max(0, self.furthest - last)
        return replace(self, live=True, written=last, answered=last), again

    def next(self) -> int | None:
        """The message to write now; None where there is none."""
        return self.written + 1 if self.live and self.written < self.given else None

    def wrote(self) -> SendingEnd:
        """The next message has been handed to the connection, whole."""
        written = self.written + 1
        return replace(self, written=written, furthest=max(self.furthest, written))

    def answer(self, number: int) -> SendingEnd:
        """The receiver has all up to `number`."""
        if not self.live or number > self.written:
            raise LaneError(f"an answer to message {number}, of {self.written} written")
        return replace(self, answered=max(self.answered, number))

    def cut(self) -> SendingEnd:
        """The connection is gone."""
        return replace(self, live=False)

    @property
    def idle(self) -> bool:
        """Nothing is on its way."""
        return self.answered == self.given


@dataclass(frozen=True, slots=True)
class ReceivingEnd:
    """The receiving end.

    Attributes:
        last: the last message there, whole; epoch: of the connection that is listened to, 0 for none yet.
    """

    last: int = 0
    epoch: int = 0

    def hello(self, epoch: int) -> ReceivingEnd:
        """A connection greets; all older ones are then to be closed, and it is told `last`."""
        if epoch <= self.epoch:
            raise LaneError(f"a connection of epoch {epoch} after one of epoch {self.epoch}")
        return replace(self, epoch=epoch)

    def begins(self, epoch: int, number: int) -> bool:
        """Whether to take in the message that begins: not one that is there already."""
        if epoch != self.epoch:
            raise LaneError(f"data on connection {epoch}, the newest is {self.epoch}")
        if number > self.last + 1:
            raise LaneError(f"message {number} after message {self.last}")
        return number == self.last + 1

    def whole(self, epoch: int, number: int) -> ReceivingEnd:
        """The message is there: it is to be delivered, then answered."""
        if not self.begins(epoch, number):
            raise LaneError(f"message {number} is whole for a second time")
        return replace(self, last=number)
