"""The paper's pipelines as numbers: ranks, microbatches, costs of ops, late links.

What the paper does not give is assumed here, once:

- `CHAIN_4` and `CHAIN_8`: F, I and W take 10 ms each, as in the paper's own simulations (section 3.1), on 4 stages
  with 12 microbatches (as there) and 8 stages with 32.
- `MODELS`, the paper's Table 2: op times, activations and messages of `penstock.cost.presets`, which follow the
  authors' published profiles (9, 10 and 6 ms on 14B); 3 microbatches a stage.
- Every message takes `BASE` ms. A delay is latency on top of that: any number of messages may be under way on a
  delegated link, `DEPTH` on a direct one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import penstock as ps
from penstock.control.configuration import peaks, with_host_copies
from penstock.cost.presets import PRESETS

OP = 10.0
"""Milliseconds of an op of a chain."""

BASE = 0.1
"""Milliseconds that every message takes, simulated and measured: at exactly 0 an op's end and a message would fall on
one moment, and whether a rank sees the message first would be chance."""

DEPTH = 2
"""Messages that a direct link holds under way, each direction, before its sender stands still."""

DIRECT = f"blocking:{DEPTH}"
"""Direct links, as a job names what carries messages."""

HOST_LINK = 50e9
"""Bytes a second that a GPU's link to host memory carries each way, where activations are known in bytes: PCIe 5 with
16 lanes, as an H800 has. Of the chains, a copy takes as long as a forward (see `with_host_copies`)."""

Link = tuple[int, int]


@dataclass(frozen=True)
class Model:
    """A model on a pipeline with one stage a rank."""

    name: str
    costs: ps.Costs
    num_microbatches: int

    @property
    def num_ranks(self) -> int:
        return self.costs.num_stages

    @property
    def activation(self) -> float:
        """What a forward of the largest stage keeps, in the units of the costs."""
        return max(self.costs.activation)

    @cached_property
    def costs_with_copies(self) -> ps.Costs:
        """The costs, with the copies of activations to host memory and back."""
        return with_host_copies(self.costs, 1e3 / HOST_LINK if self.activation > 1024 else None)

    @cached_property
    def zb(self) -> ps.Schedule:
        """The paper's baseline: warm-ups 2(S-i)-1, then I before F before W."""
        return ps.build("zb", self.num_ranks, self.num_microbatches)

    @cached_property
    def caps(self) -> tuple[float, ...]:
        """The memory that frozen `zb` needs, by rank, in the units of the costs: the cap of all that is ours."""
        return tuple(peaks(self.zb, self.costs))

    @property
    def links(self) -> tuple[Link, ...]:
        """All links between neighbours."""
        return tuple((rank, rank + 1) for rank in range(self.num_ranks - 1))

    @property
    def first(self) -> Link:
        return (0, 1)

    @property
    def last(self) -> Link:
        return (self.num_ranks - 2, self.num_ranks - 1)


CHAIN_4 = Model("4 stages", ps.Costs.uniform(4, OP, OP, OP), 12)
CHAIN_8 = Model("8 stages", ps.Costs.uniform(8, OP, OP, OP), 32)

MODELS: Mapping[str, Model] = {
    name.removeprefix("gpt2-").upper(): Model(name, preset.costs(), preset.num_microbatches)
    for name, preset in PRESETS.items()
}
"""7B, 14B, 30B, 60B and 140B."""


def late(delays: Mapping[Link, float], base: float = BASE) -> ps.Links:
    """Links that stay late by so many ms of latency; every message takes `base` ms besides."""
    return ps.Links(delays, base=base)
