"""The paper's machines, nodes of eight A800s, and how long its GPUs take to talk: links, rings, all assumed.

The paper says "64 NVIDIA A800 SXM4 80GB GPUs distributed across 8 nodes" and nothing of the network. GPUs of one
replica's rank lie side by side, as Megatron-LM lays them out: data parallelism inside a node as far as it goes, the
pipeline across nodes. Eight GPUs a node, pp = 4, dp = 8:

    node 0 | rank 0 of replicas 0 .. 7
    node 1 | rank 1 of replicas 0 .. 7
"""

from __future__ import annotations

from dataclasses import dataclass

import penstock as ps
from penstock.cost.presets import A800, Accelerator

NODE_GPUS = 8
NODE_GB = 100.0
"""GB a second that leave a node, and as many that come in: four adapters of 200 Gb/s, assumed."""
ADAPTER_GB = 25.0
HOP_MS = 0.01
"""Of a message, and of each step of a ring, before its first byte is there; assumed."""


@dataclass(frozen=True)
class Mesh:
    """`pp` ranks in each of `dp` replicas, both powers of two; `gpu(rank, replica) = rank * dp + replica`."""

    pp: int
    dp: int
    device: Accelerator = A800
    node_gb: float = NODE_GB

    @property
    def replicas_a_node(self) -> int:
        """Pipelines that have a GPU in one node, and so share what leaves it."""
        return min(self.dp, NODE_GPUS)

    @property
    def ranks_a_node(self) -> int:
        return min(self.pp, NODE_GPUS // self.replicas_a_node)

    def links(self, num_bytes: float) -> ps.Links:
        """How late a message of so many bytes is, between any two ranks of a pipeline."""
        near = HOP_MS + num_bytes / (self.device.link_gb * 1e6)
        far = HOP_MS + num_bytes / (min(ADAPTER_GB, self.node_gb / self.replicas_a_node) * 1e6)
        each = self.ranks_a_node
        pairs = ((a, b) for a in range(self.pp) for b in range(a + 1, self.pp))
        return ps.Links({(a, b): near for a, b in pairs if a // each == b // each}, default=far)

    def pipeline_ring_ms(self, num_bytes: float) -> float:
        """Milliseconds of an all-reduce over the ranks of a pipeline, while the other replicas run theirs."""
        inside = self.pp <= self.ranks_a_node
        return self._ring_ms(num_bytes, self.pp, None if inside else self.node_gb / self.replicas_a_node)

    def replica_ring_ms(self, num_bytes: float) -> float:
        """Milliseconds of an all-reduce over a rank's replicas."""
        return self._ring_ms(num_bytes, self.dp, None if self.dp <= NODE_GPUS else self.node_gb)

    def copies_ring_ms(self, num_bytes: float) -> float:
        """Milliseconds of an all-reduce over the replicas of two ranks, which host the same stages both ways."""
        inside = self.pp <= self.ranks_a_node
        each = self.node_gb / (1 if self.dp >= NODE_GPUS else self.ranks_a_node)
        return self._ring_ms(num_bytes, 2 * self.dp, None if inside else each)

    def _ring_ms(self, num_bytes: float, num_gpus: int, network_gb: float | None) -> float:
        gb = self.device.group_gb if network_gb is None else min(self.device.group_gb, network_gb)
        return 2 * (num_gpus - 1) * (HOP_MS + num_bytes / num_gpus / (gb * 1e6))
