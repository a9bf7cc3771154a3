"""Every rule on a linear model worked out in NumPy.

A stage multiplies by u and then by v, elementwise, so that its backward, too, reads weights, and every product and
sum is one rounding in NumPy and in torch. Where a kernel of torch fuses a product and a sum, the numbers are such
that the product is exact: learning rates of SGD are powers of two, and Adam's second moment has b2 = 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

Array = np.ndarray
RATES = [2.0**-k for k in (5, 6, 5, 7, 6, 5, 6, 7, 5, 6, 7, 5)]


class Scale(nn.Module):
    def __init__(self, u: Array, v: Array) -> None:
        super().__init__()
        self.u, self.v = nn.Parameter(torch.from_numpy(u.copy())), nn.Parameter(torch.from_numpy(v.copy()))

    def forward(self, x: Tensor) -> Tensor:
        return self.v * (self.u * x)


@dataclass
class Sgd:
    """W <- W - lr v with v = momentum v + g; v is g itself in the first update."""

    momentum: float = 0.0
    v: Array | None = None

    def step(self, w: Array, g: Array, lr: float) -> Array:
        self.v = g if self.v is None else self.v * self.momentum + g
        return w - lr * (self.v if self.momentum else g)

    def predicted(self, w: Array, s: int, lr: float) -> Array:
        return w if self.v is None else w + -(s * lr) * self.v


@dataclass
class Adam:
    b1: float = 0.75
    decay: float = 0.0
    eps: float = 1e-8
    t: int = 0
    m: Array = field(default_factory=lambda: np.zeros(2))
    root: Array = field(default_factory=lambda: np.zeros(2))
    """sqrt(v / (1 - b2^t)), b2 = 0."""

    def step(self, w: Array, g: Array, lr: float) -> Array:
        self.t += 1
        if self.decay:
            w = w * (1 - lr * self.decay)
        self.m = self.m + (1 - self.b1) * (g - self.m)
        self.root = np.sqrt(g * g)
        return self.predicted(w, 1, lr)

    def predicted(self, w: Array, s: int, lr: float) -> Array:
        if not self.t:
            return w
        return w + (-(s * (lr / (1 - self.b1**self.t))) * self.m) / (self.root + self.eps)


@dataclass
class NAdam:
    b1: float = 0.75
    psi: float = 0.004
    decay: float = 0.01
    eps: float = 1e-8
    t: int = 0
    product: np.float32 = field(default_factory=lambda: np.float32(1))
    m: Array = field(default_factory=lambda: np.zeros(2))

    def step(self, w: Array, g: Array, lr: float) -> Array:
        self.t += 1
        mu, mu_next = (self.b1 * (1 - 0.5 * 0.96 ** (t * self.psi)) for t in (self.t, self.t + 1))
        self.product = self.product * np.float32(mu)  # torch keeps it in single precision
        w = w * (1 - lr * self.decay)
        self.m = self.m + (1 - self.b1) * (g - self.m)
        divisor = np.sqrt(g * g) + self.eps
        w = w + (-lr * (1 - mu) / (1 - float(self.product)) * g) / divisor
        return w + (-lr * mu_next / (1 - float(self.product) * mu_next) * self.m) / divisor


@dataclass
class ByHand:
    """PipeDream's order over p stages with windows of n.

    Before F(m) of stage i came max(0, m - (p - 1 - i)) backwards of the pass, before B(m) m; after every n an update.
    """

    rule: str
    n: int
    weights: list[list[Array]]  # [stage][u or v]
    optimizers: list[list[Sgd | Adam | NAdam]]
    versions: dict[tuple[int, int], list[list[Array]]] = field(default_factory=dict)
    num_updates: int = 0

    def one_pass(self, x: list[Array], t: list[Array], rates: list[float]) -> None:
        p, n, first = len(self.weights), self.n, self.num_updates
        forward: dict[tuple[int, int], list[Array]] = {}
        # What F(m) reads is settled when its version is newest, so it is taken down then.
        self.note(forward, p, 0, len(x), rates)
        sums: list[list[Array | None]] = [[None, None] for _ in range(p)]
        for m in range(len(x)):
            h, saved = x[m], []
            for i in range(p):
                u, v = forward[i, m]
                saved.append((h, u * h))
                h = v * (u * h)
            g = (h - t[m]) / n
            for i in reversed(range(p)):
                u, v = self.backward(i, forward[i, m], rates[self.num_updates - first])
                gv, gu = g * saved[i][1], g * v * saved[i][0]
                g = g * v * u
                sums[i] = [gu, gv] if sums[i][0] is None else [sums[i][0] + gu, sums[i][1] + gv]
            if (m + 1) % n == 0:
                for i in range(p):
                    lr = rates[self.num_updates - first]
                    self.versions[self.num_updates, i] = self.weights[i]
                    steps = zip(self.optimizers[i], self.weights[i], sums[i])
                    self.weights[i] = [o.step(w, g, lr) for o, w, g in steps]
                sums = [[None, None] for _ in range(p)]
                self.num_updates += 1
                self.note(forward, p, self.num_updates - first, len(x), rates)

    def note(self, forward: dict, p: int, updates: int, num: int, rates: list[float]) -> None:
        """What the forwards read that have exactly so many updates of the pass before them."""
        for i in range(p):
            for m in range(num):
                if max(0, m - (p - 1 - i)) // self.n == updates:
                    forward[i, m] = self.forward(i, p, m // self.n, updates, rates)

    def forward(self, i: int, p: int, window: int, updates: int, rates: list[float]) -> list[Array]:
        newest, lr = self.weights[i], rates[min(updates, len(rates) - 1)]
        if self.rule == "pipedream-2bw":
            version = max(0, self.num_updates - updates + window - 1)
            return newest if version == self.num_updates else self.versions[version, i]
        s = {"spectrain": (i // 2 + p - i - 1) // self.n, "xpipe": window - updates}
        s = s.get(self.rule, 0)
        return [o.predicted(w, s, lr) for o, w in zip(self.optimizers[i], newest)] if s else newest

    def backward(self, i: int, forward: list[Array], lr: float) -> list[Array]:
        if self.rule in ("pipedream", "vnag", "pipedream-2bw"):
            return forward
        s = i // 2 // self.n if self.rule == "spectrain" else 0
        return [o.predicted(w, s, lr) for o, w in zip(self.optimizers[i], self.weights[i])] if s else self.weights[i]


Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Case:
    rule: str
    n: int
    by_hand: Callable[[], Sgd | Adam | NAdam]
    optimizer: Make
    rates: tuple[float, ...] = tuple(RATES)


def sgd(momentum: float) -> Make:
    return lambda ps: torch.optim.SGD(ps, lr=1.0, momentum=momentum)


ANY_RATES = (0.1, 0.03, 0.07, 0.02, 0.1, 0.01, 0.05, 0.03, 0.02, 0.07, 0.03, 0.1)
CASES = {
    "none": Case("none", 1, Sgd, sgd(0)),
    "none in windows": Case("none", 4, lambda: Sgd(0.75), sgd(0.75)),
    "pipedream": Case("pipedream", 1, Sgd, sgd(0)),
    "pipedream in windows": Case("pipedream", 2, lambda: Sgd(0.75), sgd(0.75)),
    "2bw": Case("pipedream-2bw", 4, Sgd, sgd(0)),
    "2bw with Adam": Case("pipedream-2bw", 4, Adam, lambda ps: torch.optim.Adam(ps, betas=(0.75, 0.0)), ANY_RATES),
    "spectrain": Case("spectrain", 1, lambda: Sgd(0.75), sgd(0.75)),
    "spectrain in windows": Case("spectrain", 2, lambda: Sgd(0.75), sgd(0.75)),
    "xpipe": Case("xpipe", 1, Adam, lambda ps: torch.optim.Adam(ps, betas=(0.75, 0.0)), ANY_RATES),
    "xpipe in windows, AdamW": Case(
        "xpipe",
        4,
        lambda: Adam(decay=0.1),
        lambda ps: torch.optim.AdamW(ps, betas=(0.75, 0.0), weight_decay=0.1),
        ANY_RATES,
    ),
    "vnag": Case(
        "vnag",
        1,
        NAdam,
        lambda ps: torch.optim.NAdam(
            ps, betas=(0.75, 0.0), momentum_decay=0.004, weight_decay=0.01, decoupled_weight_decay=True
        ),
        ANY_RATES,
    ),
}
