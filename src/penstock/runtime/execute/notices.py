"""Notices: messages for the user about a run, from all ranks. Every process has the same list, with each notice once.

At the end of a step, ranks tell each other the notices that they found by themselves. The number of new notices
travels with the losses. Ranks gather notices only if there are any.
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
