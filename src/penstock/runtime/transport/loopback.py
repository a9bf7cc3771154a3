"""Messages between ranks of one process: handed over, no copy, through channels of bounded depth."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.tensors.message import Edge, Payload
from penstock.runtime.transport.channel import ExpectedMessages
from penstock.runtime.transport.transfer_record import TransferRecord


def nothing_comes() -> bool:
    """What is sent is there at once, so there is nothing to wait for."""
    return False


class Switchboard:
    """What the ranks of one process share: messages under way, and how full each channel is.

    A channel is one directed pair of ranks and one direction of the model; it holds up to `depth`
    messages (None: any number), each from its sending until it is taken.
    """

    def __init__(self, num_ranks: int, depth: int | None) -> None:
        self.depth = depth
        self.payloads: dict[tuple[Edge, int], tuple[tuple[int, int, bool], Payload]] = {}
        self.held: dict[tuple[int, int, bool], int] = {}
        self.arrived: list[list[Edge]] = [[] for _ in range(num_ranks)]


class LoopbackTransport:
    """One rank's end of the switchboard."""

    def __init__(self, board: Switchboard, rank: int) -> None:
        self._board, self._rank = board, rank

    def begin(
        self,
        expected: Sequence[ExpectedMessages] = (),
        signatures: Sequence[str] = (),
        digest: int = 0,
        threaded: bool = True,
        window: Mapping[int, int] | None = None,
    ) -> None:
        """A switchboard is of one step."""

    def end(self) -> None:
        """What was sent has been handed over."""

    def close(self) -> None:
        """Nothing is left behind."""

    def wait(self, awaited: Sequence[Edge], who: Callable[[], str]) -> list[Edge]:
        """Raises RuntimeFailure: ranks that share a thread take turns, and what drives them waits."""
        raise RuntimeFailure(f"{who()}, and ranks that share a thread cannot wait for one another")

    def wake(self) -> None:
        """Nobody waits here."""

    def send(self, edge: Edge, target: int, payload: Payload) -> bool:
        board = self._board
        channel = (self._rank, target, edge.producer.kind == "F")
        held = board.held.get(channel, 0)
        # Tied gradients ride along with the message of the chain, tokens hold nothing: both take no room.
        if edge.slot == 0:
            if board.depth is not None and held >= board.depth:
                return False
            board.held[channel] = held + 1
        board.payloads[edge, target] = channel, payload
        board.arrived[target].append(edge)
        return True

    def arrivals(self) -> list[Edge]:
        new = self._board.arrived[self._rank]
        self._board.arrived[self._rank] = []
        return new

    def take(self, edge: Edge) -> Payload:
        channel, payload = self._board.payloads.pop((edge, self._rank))
        if edge.slot == 0:
            self._board.held[channel] -= 1
        return payload

    def crossings(self) -> list[TransferRecord]:
        """None: what is handed over crosses no link."""
        return []
