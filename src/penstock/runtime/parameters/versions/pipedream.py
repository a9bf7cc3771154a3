"""PipeDream's weight stashing: a backward reads the weights its forward read.

    W(t+1) = W(t) - lr g(W_1(t-p+1), ..., W_p(t))

Stage k of p (k from 1) reads what was newest at a microbatch's forward, keeps it until the microbatch's backward and
computes its gradient with it; the step applies to the newest weights. With one microbatch a window p - k updates fall
between, so that stage k holds p - k + 1 versions: the first stage p, the last one.

Reference: Narayanan et al., "PipeDream: generalized pipeline parallelism for DNN training", SOSP 2019: weight
stashing, without its optional vertical sync, so stages may read versions of different ages.
"""

from __future__ import annotations

from penstock.runtime.parameters.versions.rule import Read, Spot, VersionRule


class Stashing(VersionRule):
    """The forward reads the newest weights, the backward the same again."""

    name = "pipedream"
    keeps = True

    def forward(self, spot: Spot) -> Read:
        return Read(spot.newest)

    def backward(self, spot: Spot, forward: Read) -> Read:
        return forward
