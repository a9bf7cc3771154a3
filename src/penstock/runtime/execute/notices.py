"""What a person should know of a run, from all its ranks: every process has the same list, with each notice once.

What a rank notes by itself is told to the others at the end of the step, where the number of new notices rides along
with the losses; only where there is any do all ranks gather them.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.runtime.mesh.peers import Peers


class Notices:
    """The notices of a pipeline.

    Args:
        peers: the ranks that share them.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._all: list[str] = []
        self._new: list[str] = []

    def note(self, notices: Iterable[str]) -> None:
        """Takes down what this process has to say, as far as it is new."""
        self._new += [notice for notice in dict.fromkeys(notices) if notice not in [*self._all, *self._new]]

    def move_to(self, peers: Peers, known: Iterable[str]) -> None:
        """From now on others share them, who have `known` in common."""
        self._peers = peers
        self._all += [notice for notice in known if notice not in self._all]

    @property
    def num_new(self) -> int:
        """Notices of this process that the others do not have yet."""
        return len(self._new)

    def share(self) -> None:
        """Tells all ranks. Every rank must call it. Raises DeadlineExceeded, PeerLost."""
        for part in self._peers.gather(self._new):
            self._all += [notice for notice in part if notice not in self._all]
        self._new = []

    def known(self) -> list[str]:
        """Those of all ranks, and what this process alone has noted since."""
        return [*self._all, *self._new]
