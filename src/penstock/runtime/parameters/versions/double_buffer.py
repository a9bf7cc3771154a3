"""PipeDream-2BW's double buffer: all microbatches of a window read the weights of one update before it.

    W(t+1) = W(t) - lr g(W(t-1))

Microbatches of window t read W(t-1), in forward and backward and on every stage, though W(t) may be there already;
those of windows 0 and 1 read W(0). Two versions are enough: after the update of window t - 1 the weights W(t) are for
window t + 1, and W(t-1) for what is left of window t.

A forward of window t finds its version if its copy has taken over update t - 2 by then. In PipeDream's order windows
of p - 1 microbatches see to that; `check` proves it for any order (rule: versions).

Reference: Narayanan et al., "Memory-efficient pipeline-parallel DNN training", ICML 2021: double-buffered weight
updates. Correction: the published code skips loss unscaling and clipping under stashing; here an update is the same
under every rule.
"""

from __future__ import annotations

from penstock.runtime.parameters.versions.rule import Read, Spot, VersionRule


class DoubleBuffer(VersionRule):
    """Forward and backward read the version one before the microbatch's window."""

    name = "pipedream-2bw"
    keeps = True

    def forward(self, spot: Spot) -> Read:
        # A copy that holds no older version has just begun: then the newest stands for the one before.
        return Read(max(spot.window - 1, spot.oldest))

    def backward(self, spot: Spot, forward: Read) -> Read:
        return forward

    def oldest(self, newest: int) -> int:
        return max(newest - 1, 0)
