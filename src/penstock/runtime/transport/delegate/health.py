"""The state of the links as the delegates report it: for errors that say why, for reports, and for control."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from penstock.control.events import LinkDown, LinkUp
from penstock.runtime.transport.delegate.carrier.descriptor import CloseReason, Descriptor, DescriptorKind, Lane


@dataclass
class Counters:
    """What a rank's delegates went through.

    Attributes:
        messages, num_bytes: that came in.
        failovers: connections that went on over another interface; failbacks: that went back to a better one;
            reconnects: over the same.
        resent: chunks of messages given to a connection for a second time; doubled: that came twice, and were
            dropped.
        starved: messages that waited for room in host memory.
    """

    messages: int = 0
    num_bytes: int = 0
    failovers: int = 0
    failbacks: int = 0
    reconnects: int = 0
    resent: int = 0
    doubled: int = 0
    starved: int = 0


@dataclass
class LaneState:
    """The last known state of a connection to another rank.

    Attributes:
        path: interfaces at its ends (ours, theirs) as long as it stands, and the last one before.
        stands: whether it does; why: not.
        refused: the other rank's process has ended; silent: the connection stands, the other process says nothing.
    """

    path: tuple[int, int] | None = None
    stands: bool = False
    why: CloseReason | None = None
    refused: bool = False
    silent: bool = False


class ConnectionHealth:
    """Which of a rank's lanes to others have a connection, and which links have lost theirs.

    Args:
        addresses: of a rank's interfaces.
    """

    def __init__(self, rank: int, addresses: Callable[[int], list[str]], counters: Counters) -> None:
        self._rank, self._addresses = rank, addresses
        self._counters = counters
        self._ways: dict[Lane, LaneState] = {}
        self._down: set[int] = set()
        self.events: list[LinkDown | LinkUp] = []
        self.notices: list[str] = []

    def learn(self, note: Descriptor) -> None:
        """Takes in a note about a connection."""
        what, lane = note.kind, note.lane
        if what is DescriptorKind.DOUBLED:
            self._counters.doubled += 1
            return
        way = self._ways.setdefault(lane, LaneState())
        if what is DescriptorKind.CONNECTED:
            path = note.tag, note.step
            self._compare(way, path)
            self._mark(lane.target, up=path == (0, 0))
            if path != (0, 0):
                self._tell(lane, path, way.why)
            for each in self._to(lane.target):
                each.refused = False
            way.path, way.stands, way.why, way.silent = path, True, None, False
        elif what is DescriptorKind.CUT:
            way.stands, way.why, way.silent = False, CloseReason(note.number), False
            self._counters.resent += note.offset
            if way.why in (CloseReason.INTERFACE_DOWN, CloseReason.TIMED_OUT, CloseReason.UNREACHABLE):
                self._mark(lane.target, up=False)
        elif what is DescriptorKind.REFUSED:
            way.stands, way.refused, way.why = False, True, CloseReason.REFUSED
        elif what is DescriptorKind.NO_WAY:
            way.stands, way.why = False, CloseReason(note.number)
            self._mark(lane.target, up=False)
        elif what in (DescriptorKind.SILENT, DescriptorKind.HEARD):
            way.silent = what is DescriptorKind.SILENT

    def _to(self, target: int) -> list[LaneState]:
        return [way for lane, way in self._ways.items() if lane.target == target]

    def _compare(self, way: LaneState, path: tuple[int, int]) -> None:
        if way.path is None:
            return
        if way.path == path:
            self._counters.reconnects += 1
        elif way.why is CloseReason.BETTER_PATH:
            self._counters.failbacks += 1
        else:
            self._counters.failovers += 1

    def _tell(self, lane: Lane, path: tuple[int, int], why: CloseReason | None) -> None:
        """For a person: which interfaces carry a link's messages, where that is not the first of each."""
        pairs = (path, (0, 0))
        now, first = (f"{self._addresses(lane.source)[a]} to {self._addresses(lane.target)[b]}" for a, b in pairs)
        notice = (
            f"messages of rank {lane.source} to rank {lane.target} go from {now}, as {first} did not carry them"
            f"{f' ({why})' if why is not None else ''}: nothing was lost"
        )
        if notice not in self.notices:
            self.notices.append(notice)

    def _mark(self, target: int, up: bool) -> None:
        """Notes whether the link's own interfaces carry it."""
        if up and target in self._down:
            self._down.remove(target)
            self.events.append(LinkUp((self._rank, target)))
        elif not up and target not in self._down:
            self._down.add(target)
            self.events.append(LinkDown((self._rank, target)))

    def gone(self) -> set[int]:
        """Ranks whose delegate, and so most likely whose process, has ended."""
        return {lane.target for lane, way in self._ways.items() if way.refused}

    def words(self) -> str:
        """What is wrong with connections, in words; nothing where nothing is known to be."""
        found = []
        for lane, way in sorted(self._ways.items()):
            if way.silent:
                found.append(
                    f"rank {lane.target}'s delegate is connected and says nothing: it, or its host, stands still"
                )
            elif not way.stands and way.why is not None:
                where = ""
                if way.path is not None:
                    ours, theirs = self._addresses(self._rank)[way.path[0]], self._addresses(lane.target)[way.path[1]]
                    where = f" (last over {ours} -> {theirs})"
                found.append(f"no connection {lane}{where}: {way.why}")
        return "; ".join(dict.fromkeys(found))
