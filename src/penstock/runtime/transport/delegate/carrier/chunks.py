"""Messages from one rank to another, in chunks that any connection may carry: each message arrives exactly once.

    OutStream                                            InStream
      give 1              chunks 1a 1b 1c                  all are new
      lane 0 takes 1a  -- CHUNK 1a -->                     begins 1a, has it: answer
      lane 1 takes 1b  -- CHUNK 1b (half)  X  cut          what came of 1b is dropped
      1b is due again     chunks 1b 1c
      lane 0 takes 1b  -- CHUNK 1b, attempt 1 -->          begins 1b, has it: answer
      lane 0 takes 1c  -- CHUNK 1c -->                     message 1 is whole: deliver

The sender keeps a message until all of its chunks are answered, and gives a chunk to another connection only after it
gave up the one before. The receiver may not know that yet. It takes a chunk from the latest attempt alone, since an
older connection might still write into the message's memory when that has been given to another message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

from .descriptor import Descriptor

CHUNK = 2 << 20
"""Bytes of a message that one connection carries in a row."""
LAST_ATTEMPT = (1 << 16) - 1
Owner = TypeVar("Owner")


class OutStream:
    """The messages to one rank that are not answered: the chunks that are due, and how many each message lacks."""

    def __init__(self) -> None:
        self._due: deque[Descriptor] = deque()
        self._lacks: dict[int, int] = {}

    def give(self, message: Descriptor) -> None:
        """One more message."""
        size = message.body_bytes
        starts = range(0, size, CHUNK)
        self._lacks[message.number] = len(starts)
        for at in starts:
            self._due.append(message._replace(offset=at, capacity=min(CHUNK, size - at), start=message.offset))

    @property
    def next(self) -> Descriptor | None:
        """The chunk that is due next. `start` is where its message lies in the sender's memory."""
        return self._due[0] if self._due else None

    def take(self) -> Descriptor:
        """A connection writes the next chunk, and keeps it until it is answered."""
        return self._due.popleft()

    def answered(self, chunk: Descriptor) -> bool:
        """A chunk is there; returns whether its message is, whole."""
        self._lacks[chunk.number] -= 1
        if self._lacks[chunk.number]:
            return False
        del self._lacks[chunk.number]
        return True

    def again(self, chunks: Iterable[Descriptor]) -> None:
        """Chunks of a connection that went are due once more, before all others."""
        for chunk in reversed(list(chunks)):
            self._due.appendleft(chunk._replace(attempt=min(chunk.attempt + 1, LAST_ATTEMPT)))


class Arriving(NamedTuple, Generic[Owner]):
    """A chunk whose bytes come in: by which attempt, and by which connection."""

    attempt: int
    owner: Owner


class InStream(Generic[Owner]):
    """The chunks of messages from one rank."""

    def __init__(self) -> None:
        self._whole_up_to = 0
        self._whole: set[int] = set()  # of later messages
        self._here: dict[int, set[int]] = {}  # of messages that are not whole: where the chunks begin that are there
        self._lacks: dict[int, int] = {}  # bytes
        self._arriving: dict[tuple[int, int], Arriving[Owner]] = {}

    def begins(self, chunk: Descriptor, owner: Owner) -> tuple[bool, Owner | None]:
        """A chunk's bytes follow. Returns whether to take them in, and which connection is to be closed before, since
        its sender has given it up.
        """
        number, at = chunk.number, chunk.offset
        if self.has(number) or at in self._here.get(number, ()):
            return False, None
        before = self._arriving.get((number, at))
        if before is not None and before.attempt >= chunk.attempt:
            return False, None
        self._arriving[number, at] = Arriving(chunk.attempt, owner)
        self._lacks.setdefault(number, chunk.body_bytes)
        return True, None if before is None else before.owner

    def has(self, number: int) -> bool:
        """Whether a message is there, whole."""
        return number <= self._whole_up_to or number in self._whole

    def ended(self, chunk: Descriptor) -> bool:
        """A chunk that was taken in is there; returns whether its message is, whole."""
        number = chunk.number
        del self._arriving[number, chunk.offset]
        self._here.setdefault(number, set()).add(chunk.offset)
        self._lacks[number] -= chunk.capacity
        if self._lacks[number]:
            return False
        del self._lacks[number], self._here[number]
        self._whole.add(number)
        while self._whole_up_to + 1 in self._whole:
            self._whole_up_to += 1
            self._whole.discard(self._whole_up_to)
        return True

    def dropped(self, chunk: Descriptor, owner: Owner) -> None:
        """The connection of a chunk that was coming in is gone."""
        arriving = self._arriving.get((chunk.number, chunk.offset))
        if arriving is not None and arriving.owner is owner:
            del self._arriving[chunk.number, chunk.offset]
