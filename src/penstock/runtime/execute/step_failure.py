"""How all ranks learn that one of them can't do its part of a step, without anyone waiting in vain.

    rank 0    F0 F1 F2 F3      B0 ...        B0 is told by what comes in: rank 0 computes nothing from here on
                             .'
    rank 1       F0 F1 !  B0'                F1 fails: rank 1 computes nothing from here on, and sends that it failed
    the end                                  the sum of the losses counts who failed: rank 1 raises its error, and
                                             rank 0 PeerFailed, which has that error's words

All messages of the step have been sent and taken then, so the pipeline can run another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from penstock.runtime.errors import DeadlineExceeded, PeerFailed, PeerLost
from penstock.runtime.mesh.peers import MeshPeers, Peers, raise_together
from penstock.runtime.tensors.message import Payload

FAILED = Payload([], ["failed"])
"""What an op sends that has computed nothing."""


class StepFailure:
    """Whether this process can go on to compute in a step, and what kept it from that.

    Args:
        is_shared: whether the step goes on for the sake of the others; where not, an error ends it here at once.
    """

    def __init__(self, is_shared: bool) -> None:
        self._is_shared = is_shared
        self.error: Exception | None = None
        self.has_failed = False

    def keeps(self, error: Exception) -> bool:
        """Takes note of an error, the first one of a step; whether the step goes on."""
        if not self._is_shared or isinstance(error, DeadlineExceeded | PeerLost):
            return False
        if not self.has_failed:
            self.error, self.has_failed = error, True
        return True

    def note(self, error: Exception) -> None:
        """Takes note of an error at the end of a step, where every process is about to hear who failed."""
        if self.error is None:
            self.error, self.has_failed = error, True

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Around something in whose middle no other process waits for this one: an error ends that alone."""
        try:
            yield
        except Exception as error:
            if not self.keeps(error):
                raise

    def has_come(self, inputs: Sequence[Payload]) -> bool:
        """Whether ops are not to compute from here on: this rank has failed, or one whose results came in has."""
        if self.has_failed:
            return True
        for one in inputs:
            if type(one.skeleton) is list and one.skeleton == FAILED.skeleton:
                self.has_failed = True
        return self.has_failed

    def conclude(self, everyone: Peers) -> None:
        """At the end of a step in which a process failed. Every process must call it. Where none has an error of its
        own, holders of a parameter did not begin the step alike.

        Raises:
            PeerFailed: on those that have no error of their own; the others raise theirs.
        """
        who = "process" if isinstance(everyone, MeshPeers) else "rank"
        raise_together(
            everyone, self.error, lambda n, said: PeerFailed(f"{who} {n} could not do its part of the step: {said}")
        )
