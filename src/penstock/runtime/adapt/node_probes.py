"""When the links between the nodes of a mesh are probed, while it trains.

    step 1 2 3 4 5 | probe | 6 .. 10 | probe | 11 .......... 40 | probe |      a late link makes probes take long

All processes count the time that all of them took, so that they come to the same step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from penstock.control.events import Link
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.probe import probe

LEAST_EVERY, MOST_EVERY = 5, 200
"""Steps between probes, by how long these take."""
SHARE = 0.05
"""Of the time that probes may take: each goes there and back over every link, the late one too."""


class NodeProbes:
    """Args:
    nodes: the processes of each node.
    everyone: all of them.
    timeout: seconds that any wait may last.
    injected: what is injected into links between nodes besides, in ms one way; None for nothing.
    """

    def __init__(
        self,
        nodes: Sequence[Sequence[int]],
        everyone: Peers,
        timeout: float,
        injected: Callable[[], Mapping[Link, float]] | None = None,
    ) -> None:
        self.everyone = everyone
        self._nodes, self._timeout, self._injected = nodes, timeout, injected
        self._steps, self._next, self._last = 0, LEAST_EVERY, 0
        self._since = time.perf_counter()

    def after_step(self) -> dict[Link, float] | None:
        """To be called by every process after each step; what links take (ms one way) where it was time to look.

        Raises:
            DeadlineExceeded, PeerLost: a process is late or gone.
        """
        self._steps += 1
        if self._steps < self._next:
            return None
        began = time.perf_counter()
        found = probe(self._nodes, self._timeout)
        for link, ms in (self._injected() if self._injected is not None else {}).items():
            found[link] += ms
        ended = time.perf_counter()
        taken = torch.tensor([ended - began, (began - self._since) / (self._steps - self._last)], dtype=torch.float64)
        probing, stepping = self.everyone.sum(taken).tolist()
        wait = math.ceil(probing / (SHARE * stepping)) if math.isfinite(SHARE) else 0
        self._next = self._steps + min(max(wait, LEAST_EVERY), MOST_EVERY)
        self._last, self._since = self._steps, time.perf_counter()
        return found
