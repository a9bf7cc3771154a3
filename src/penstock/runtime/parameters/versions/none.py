"""No rule: ops read the newest weights there are on their copy of the stage.

    W(t+1) = W(t) - lr g(W_F(t), W_B(t))

W_F is what was newest at a microbatch's forward, W_B at its backward; where updates fall between, they differ and
the gradient is that of neither. AMDP trains so (paper, section 3.3): its schedule lets at most one update fall there,
for the first d microbatches of a window (section 3.1, Lemma 1), and holds one version. With more updates between,
this is naive asynchronous training.

Reference: "AMDP: asynchronous multi-directional pipeline parallelism for large-scale models training", section 3.
"""

from __future__ import annotations

from penstock.runtime.parameters.versions.rule import Read, Spot, VersionRule


class Newest(VersionRule):
    """Forward and backward read the newest weights."""

    name = "none"

    def forward(self, spot: Spot) -> Read:
        return Read(spot.newest)

    def backward(self, spot: Spot, forward: Read) -> Read:
        return Read(spot.newest)
