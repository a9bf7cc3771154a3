"""The paper's GPTs (Table 3) on its machines, as costs: what is said there, and what is assumed besides.

- Sizes are those of Table 3, in which heads and hidden size stand in each other's rows: 12 * 64 * 2560^2 = 5.03e9,
  12 * 80 * 4096^2 = 16.1e9. A K of vocabulary is 1,000 words; embedding and head have weights of their own: only so
  do the sizes come out as printed (10.2B = 5.03B + 2 * 1e6 * 2560).
- Operations and activations are those of `penstock.cost.presets`, on the A800 as calibrated there with another
  paper's baseline. The share of the peak that a product reaches does not depend on its size.
- The loss goes over every logit several times, which takes memory's bandwidth. How many bytes that is, is the one
  number fitted here, with Megatron-LM's own profile: Figure 2's slowest stage, 5.63 times as slow as the fastest.
- State: 18 bytes a parameter, Megatron-LM's for bf16: weights 2, gradients 4, copy and moments 12; no optimizer state
  is shared. A GPU has 80e9 bytes for all this; what its libraries take is left out of that.
- Gradients are reduced over the replicas when a rank has done its last backward, then every rank steps (but see
  `Updates` for `ours`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Literal, NamedTuple

import penstock as ps
from experiments.flexpipe.cluster import NODE_GB, Mesh
from penstock.cost.model_shapes import GPTShape, LayerCosts
from penstock.cost.presets import A800

BATCH = 128
STATE_BYTES = 18
GRADIENT_BYTES = 4
STEP = {
    "norm of the gradients": 4,
    "clipped": 4 + 4,
    "Adam: gradient, parameter and two moments read; all but the gradient written": 16 + 12,
    "32-bit parameters to 16-bit ones": 4 + 2,
    "gradients zeroed": 4,
}
"""Bytes of a parameter that each kernel of an optimizer step reads and writes."""
STEP_BYTES = sum(STEP.values())

LOSS_BYTES = 35.3
"""Of a logit: what the loss moves forward and backward. Fitted: see the head of this file and `figure2.py`. Counted
kernel by kernel, as if none were fused, Megatron-LM's vocabulary-parallel loss moves 52."""
LOSS_FORWARD = 2 / 3
EMBEDDING_BYTES = 12
"""Of an embedding's parameter, each backward: torch makes the whole gradient in 16 bits, though few rows are not 0 (2
bytes written), and it is added to the one in 32 (2 and 4 read, 4 written)."""
KEPT_LOGIT_BYTES, WORK_LOGIT_BYTES = 6, 2
"""Of a logit: kept from F to B in 16 and in 32 bits; and its gradient's in 16 while the backward runs."""

Updates = Literal["all-reduce", "zero1"]
"""Gradients reduced after a rank's last backward, all state on every replica; or each stage's as soon as they are
whole, while the rank computes, each replica with a share of the optimizer's state (ZeRO-1), from which it sends
parameters."""
OPTIMIZER_BYTES, WEIGHT_BYTES = 12, 2
"""Of the state, what ZeRO-1 shares out; and of a parameter as it is sent."""

Recompute = Literal["none", "scores", "full"]
RECOMPUTE: tuple[Recompute, ...] = ("none", "scores", "full")
"""What a backward computes again: nothing; attention scores (Korthikanti et al. 2022); each block, from its input."""


@dataclass(frozen=True)
class Model:
    """A row of Table 3. `vocabularies` in thousands of words."""

    name: str
    num_blocks: int
    width: int
    num_heads: int
    sequence: int
    vocabularies: tuple[int, ...]

    def num_parameters(self, vocabulary: int) -> float:
        """As the table counts: 12 h^2 a block, embedding and head each V h."""
        return 12.0 * self.num_blocks * self.width**2 + 2e3 * vocabulary * self.width


GPT_5B = Model("5B", 64, 2560, 64, 512, (64, 128, 256, 512, 1000))
GPT_16B = Model("16.1B", 80, 4096, 32, 1024, (256, 512, 1000, 1100, 1200))
MODELS = {model.name: model for model in (GPT_5B, GPT_16B)}


class Layer(NamedTuple):
    """Of one microbatch: milliseconds, bytes kept from F on and from I to W, parameters."""

    f: float
    i: float
    w: float
    activation: float
    held: float
    parameters: float


@dataclass(frozen=True)
class Setup:
    """A model with a vocabulary, spread over pp * dp GPUs.

    Attributes:
        vocabulary: thousands of words. microbatch: samples.
        batch: samples of all replicas together.
        node_gb: GB a second out of a node. loss_bytes: of a logit. embedding_bytes: of a parameter.
    """

    model: Model
    vocabulary: int
    pp: int
    dp: int
    microbatch: int
    recompute: Recompute = "none"
    batch: int = BATCH
    updates: Updates = "all-reduce"
    node_gb: float = NODE_GB
    loss_bytes: float = LOSS_BYTES
    embedding_bytes: float = EMBEDDING_BYTES

    @property
    def num_microbatches(self) -> int:
        """Of one replica; 0 where they do not divide the batch."""
        count, left = divmod(self.batch, self.dp * self.microbatch)
        return 0 if left else count

    @cached_property
    def mesh(self) -> Mesh:
        return Mesh(self.pp, self.dp, node_gb=self.node_gb)

    @property
    def num_gpus(self) -> int:
        return self.pp * self.dp

    @cached_property
    def links(self) -> ps.Links:
        return self.mesh.links(self._shape(1).message_bytes)

    def _shape(self, sharing: int) -> GPTShape:
        model = self.model
        return GPTShape(
            model.num_blocks,
            model.width,
            model.num_heads,
            ceil(1000 * self.vocabulary / sharing),
            model.sequence,
            model.sequence,
            self.microbatch,
        )

    @cached_property
    def block(self) -> Layer:
        """One block, with what its backward computes again."""
        shape = self._shape(1)
        cost = shape.layers()[1]
        s, h = shape.sequence, shape.width
        sbh = s * shape.microbatch_size * h
        again = {"none": 0.0, "scores": 4.0 * s * sbh, "full": cost.f}[self.recompute]
        kept = {"none": cost.activation, "scores": 34.0 * sbh, "full": 2.0 * sbh}[self.recompute]
        plain = self._timed(cost)
        return plain._replace(i=plain.i + A800.compute_ms("I", again), activation=kept, held=min(cost.held, kept))

    def embedding(self, sharing: int = 1) -> Layer:
        """The embedding, or one of `sharing` parts of it: with an all-reduce of what it looks up."""
        found = self._timed(self._shape(sharing).layers()[0])
        gradient = A800.move_ms(self.embedding_bytes * found.parameters)
        return found._replace(f=found.f + self._reduce_ms(sharing), w=found.w + gradient)

    def head(self, sharing: int = 1) -> Layer:
        """Head and loss, or one of `sharing` parts: statistics of each token go round in F, its gradient in I."""
        shape = self._shape(sharing)
        found = self._timed(shape.layers()[-1])
        tokens = shape.sequence * shape.microbatch_size
        logits = tokens * float(shape.vocab_size)
        loss = A800.move_ms(self.loss_bytes * logits)
        statistics = 3 * self.mesh.pipeline_ring_ms(4.0 * tokens) if sharing > 1 else 0.0
        return found._replace(
            f=found.f + LOSS_FORWARD * loss + statistics,
            i=found.i + (1 - LOSS_FORWARD) * loss + self._reduce_ms(sharing),
            activation=4.0 * tokens * shape.width + KEPT_LOGIT_BYTES * logits,
        )

    def _reduce_ms(self, sharing: int) -> float:
        return self.mesh.pipeline_ring_ms(self._shape(1).message_bytes) if sharing > 1 else 0.0

    def _timed(self, cost: LayerCosts) -> Layer:
        times = [A800.compute_ms(kind, flops) for kind, flops in (("F", cost.f), ("I", cost.i), ("W", cost.w))]
        return Layer(*times, cost.activation, cost.held, cost.parameters)

    def work_bytes(self, sharing: int) -> float:
        """What a rank needs for a moment: a block's activations computed again, and the gradient of its logits."""
        shape = self._shape(sharing)
        again = shape.layers()[1].activation if self.recompute == "full" else 0.0
        return again + WORK_LOGIT_BYTES * shape.sequence * shape.microbatch_size * float(shape.vocab_size)

    def costs(self, stages: Sequence[Sequence[Layer]]) -> ps.Costs:
        """Of stages, each made of these layers."""
        rows = [[sum(getattr(layer, name) for layer in stage) for stage in stages] for name in Layer._fields]
        f, i, w, activation, _, parameters = rows
        freed = 1 - self.block.held / self.block.activation
        return ps.Costs(
            f, i, w, activation=activation, freed_by_input=freed, weight_bytes=[2 * p for p in parameters]
        )

    def fits(self, num_stages: int) -> bool:
        """Whether so many stages get the same number of blocks."""
        return self.model.num_blocks % num_stages == 0

    def ends_on_ranks(self) -> ps.Costs:
        """A stage a rank, the embedding on top of the first, the head of the last (Megatron-LM)."""
        rows = [[self.block] * (self.model.num_blocks // self.pp) for _ in range(self.pp)]
        rows[0], rows[-1] = [self.embedding(), *rows[0]], [*rows[-1], self.head()]
        return self.costs(rows)

    def ends_shared(self, num_stages: int) -> ps.Costs:
        """So many stages between an embedding and a head that all ranks share."""
        each = self.model.num_blocks // num_stages
        inner = [[self.block] * each for _ in range(num_stages)]
        return self.costs([[self.embedding(self.pp)], *inner, [self.head(self.pp)]])

    def parameters(self, placement: ps.Placement, costs: ps.Costs) -> list[float]:
        """Of each rank: those of every copy of every stage that it hosts, a shared one once."""
        held = [0.0] * self.pp
        shared = {stage for stage, _ in placement.shared}
        for pipeline in range(placement.num_pipelines):
            for stage in range(placement.num_stages):
                if pipeline == 0 or stage not in shared:
                    for rank in placement.hosts(pipeline, stage):
                        held[rank] += costs.weight_bytes[stage] / 2
        return held

    def tail_ms(self, parameters: float, two_copies: bool = False) -> float:
        """Of so many parameters' gradients, the all-reduce; with ZeRO-1 the half of it that adds them up."""
        whole = self._ring(two_copies)(GRADIENT_BYTES * parameters)
        return whole if self.updates == "all-reduce" else whole / 2

    def _ring(self, two_copies: bool) -> Callable[[float], float]:
        return self.mesh.copies_ring_ms if two_copies else self.mesh.replica_ring_ms

    def state_bytes(self, parameters: float) -> float:
        shared = OPTIMIZER_BYTES * (1 - 1 / self.dp) if self.updates == "zero1" else 0.0
        return (STATE_BYTES - shared) * parameters

    def step_ms(self, parameters: float, two_copies: bool = False) -> float:
        """The step of so many parameters; with ZeRO-1 of a share of them, and the parameters' way to the others."""
        step = A800.move_ms(STEP_BYTES * parameters)
        if self.updates == "all-reduce":
            return step
        return step / self.dp + self._ring(two_copies)(WEIGHT_BYTES * parameters) / 2

    def with_recompute(self, recompute: Recompute) -> Setup:
        return replace(self, recompute=recompute)
