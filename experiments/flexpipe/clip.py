"""The paper's CLIPs (Table 4) on 40 GPUs, as costs: what is said there, and what is assumed besides.

- Towers are those of Table 4: 240 layers of 1024 and 240 of 768 are its 3B and 1.7B, 440 of 1024 its 5.5B. The first
  two add up to its 4.7B. No towers of the table add up to 8.2B or 9.7B; here they are audio and text with as many
  layers of video as are missing, 280 and 400.
- A layer is a block; what stands before and behind the blocks is left out. Operations, activations, state and step
  are those of `setups.py`. Blocks are narrow and a GPU must be told each kernel: F, I and W of a block each take at
  least `LAUNCH_MS`, about 25 kernels of 10 us.
- A tower has `pp` ranks in each of `dp` replicas, at most 40 GPUs in all. How many each has, and of how many samples
  its microbatches are, the paper does not say: here both methods take what is best for them.
- Every replica's last rank takes part in a gather. It moves little: what it takes is the hops of a ring.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product

import penstock as ps
from experiments.flexpipe.cluster import HOP_MS, Mesh
from experiments.flexpipe.setups import GRADIENT_BYTES, STATE_BYTES, STEP_BYTES
from penstock.cost.model_shapes import GPTShape
from penstock.cost.presets import A800

NUM_GPUS = 40
BATCH = 128
LAUNCH_MS = 0.25
NUM_HEADS = 16
COLLECTIVES = 3
"""Of a gather: the outputs, forward; their gradients, backward; the loss."""
MOST_RANKS = 20
"""Of a tower's pipeline."""


@dataclass(frozen=True)
class Tower:
    """Columns of Table 4: `sequence` tokens or vectors a sample."""

    name: str
    num_blocks: int
    width: int
    sequence: int

    @property
    def num_parameters(self) -> float:
        return 12.0 * self.num_blocks * self.width**2


AUDIO = Tower("audio", 240, 1024, 264)
TEXT = Tower("text", 240, 768, 77)
VIDEO = Tower("video", 440, 1024, 264)
CLIPS: dict[str, tuple[Tower, ...]] = {
    "4.7B": (AUDIO, TEXT),
    "8.2B": (AUDIO, TEXT, replace(VIDEO, num_blocks=280)),
    "9.7B": (AUDIO, TEXT, replace(VIDEO, num_blocks=400)),
}


@dataclass(frozen=True)
class Share:
    """A tower's part of the machine: pp * dp GPUs, and `num_microbatches` of each replica."""

    tower: Tower
    pp: int
    dp: int
    num_microbatches: int
    launch_ms: float = LAUNCH_MS

    @property
    def num_gpus(self) -> int:
        return self.pp * self.dp

    @property
    def microbatch(self) -> int:
        """Samples."""
        return BATCH // (self.dp * self.num_microbatches)

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(self.pp, self.dp)

    @cached_property
    def shape(self) -> GPTShape:
        tower = self.tower
        s = tower.sequence
        return GPTShape(1, tower.width, NUM_HEADS, 1, s, s, self.microbatch)

    @cached_property
    def block_ms(self) -> tuple[float, float, float]:
        """Of F, I and W of one block."""
        cost = self.shape.layers()[1]
        f, i, w = (A800.compute_ms(kind, flops) for kind, flops in (("F", cost.f), ("I", cost.i), ("W", cost.w)))
        return max(f, self.launch_ms), max(i, self.launch_ms), max(w, self.launch_ms)

    @property
    def parameters(self) -> float:
        """Of a rank."""
        return self.tower.num_parameters / self.pp

    @property
    def work_ms(self) -> float:
        """What each rank has to do in an iteration, its gradients' reduction and step included."""
        return self.num_microbatches * sum(self.block_ms) * self.tower.num_blocks / self.pp + self.tail_ms

    @property
    def tail_ms(self) -> float:
        step = A800.move_ms(STEP_BYTES * self.parameters)
        return self.mesh.replica_ring_ms(GRADIENT_BYTES * self.parameters) + step

    @property
    def state_bytes(self) -> float:
        return STATE_BYTES * self.parameters


Layout = tuple[Share, ...]
"""Of every tower."""


def layouts(towers: tuple[Tower, ...], launch_ms: float = LAUNCH_MS) -> Iterator[Layout]:
    """All ways to spread the towers over all GPUs, with every number of microbatches that leaves one sample each."""
    for gpus in product(range(2, NUM_GPUS, 2), repeat=len(towers) - 1):
        rest = NUM_GPUS - sum(gpus)
        if rest >= 2:
            counts = zip(towers, (*gpus, rest), strict=True)
            yield from product(*(list(shares(tower, n, launch_ms)) for tower, n in counts))


def shares(tower: Tower, num_gpus: int, launch_ms: float = LAUNCH_MS) -> Iterator[Share]:
    """All ways to lay a tower over so many GPUs."""
    for pp in range(2, MOST_RANKS + 1):
        dp = num_gpus // pp
        if pp * dp != num_gpus or tower.num_blocks % pp or BATCH % dp:
            continue
        count = 1
        while dp * count <= BATCH:
            yield Share(tower, pp, dp, count, launch_ms)
            count *= 2


def costs(layout: Layout, stages_a_rank: tuple[int, ...]) -> ps.Costs:
    """Of one replica of every tower, stages numbered tower by tower."""
    f, i, w, activation, weights, messages = ([] for _ in range(6))
    for share, v in zip(layout, stages_a_rank, strict=True):
        num = v * share.pp
        blocks = share.tower.num_blocks // num
        cost = share.shape.layers()[1]
        for row, each in zip((f, i, w), share.block_ms, strict=True):
            row += [each * blocks] * num
        activation += [cost.activation * blocks] * num
        weights += [2.0 * share.tower.num_parameters / num] * num
        messages += [share.shape.message_bytes] * num
    return ps.Costs(f, i, w, activation=activation, weight_bytes=weights, message_bytes=messages)


def links(layout: Layout) -> ps.Links:
    """Between the ranks of one replica of every tower, numbered tower by tower."""
    delays, first = {}, 0
    for share in layout:
        own = share.mesh.links(share.shape.message_bytes)
        pairs = ((a, b) for a in range(share.pp) for b in range(a + 1, share.pp))
        delays |= {(first + a, first + b): own.delay(a, b) for a, b in pairs}
        first += share.pp
    return ps.Links(delays)


def gather_ms(layout: Layout) -> float:
    """Over the last ranks of all replicas of all towers."""
    return COLLECTIVES * 2 * (sum(share.dp for share in layout) - 1) * HOP_MS
