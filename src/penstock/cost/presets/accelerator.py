"""An accelerator as cost presets assume it: how fast it computes, what it holds, how fast its neighbours talk.

These are a handful of plain numbers, to be changed by whoever has another device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from penstock.cost.errors import CostError


@dataclass(frozen=True)
class Accelerator:
    """One device.

    Attributes:
        tflops: peak of dense 16-bit matrix products, 1e12 operations a second.
        share_f, share_i, share_w: of that peak, what a forward, an input-gradient and a weight-gradient half reach.
        memory: bytes.
        group_gb: GB (1e9 bytes) a second that an all-reduce moves within a tensor-parallel group, by bus bandwidth.
        hbm_gb: GB a second that the device's own memory moves, reading and writing.
        link_gb: GB a second of a link to another device of the pipeline, each way.

    Raises:
        CostError: a number that is not above 0, a share above 1.
    """

    tflops: float
    share_f: float
    share_i: float
    share_w: float
    memory: float
    group_gb: float
    hbm_gb: float
    link_gb: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not (math.isfinite(value) and value > 0):
                raise CostError(f"a device with {each.name} {value:g}: give a number above 0")
            if each.name.startswith("share") and value > 1:
                raise CostError(f"a device with {each.name} {value:g}: it is a share of the peak, at most 1")

    def compute_ms(self, kind: str, flops: float) -> float:
        """Milliseconds of so many operations in an op of kind F, I or W."""
        share = {"F": self.share_f, "I": self.share_i, "W": self.share_w}[kind]
        return flops / (self.tflops * share * 1e9)

    def all_reduce_ms(self, num_bytes: float, num_devices: int) -> float:
        """Milliseconds of an all-reduce: each device sends 2 (n - 1) / n of the bytes (a ring)."""
        return 2 * (num_devices - 1) / num_devices * num_bytes / (self.group_gb * 1e6)

    def move_ms(self, num_bytes: float) -> float:
        """Milliseconds of reading or writing so many bytes of the device's memory, where nothing else takes time."""
        return num_bytes / (self.hbm_gb * 1e6)


H800 = Accelerator(
    tflops=989, share_f=0.45, share_i=0.42, share_w=0.65, memory=80e9, group_gb=165, hbm_gb=2700, link_gb=200
)
"""The paper's device. The peak and the memory are the maker's. Shares and group_gb are such that stages take about
the whole milliseconds which the authors' profiler found (PipeMorph, artifact, experiments/single): F, I and W 9, 10
and 6 ms for 14B, and 11, 13 and 6 for 60B with 4 devices per stage."""

A100 = Accelerator(
    tflops=312, share_f=0.6, share_i=0.56, share_w=0.7, memory=80e9, group_gb=230, hbm_gb=1600, link_gb=300
)
"""A guess for comparison: the maker's peak and memory, shares that are usual for large matrices."""

A800 = Accelerator(
    tflops=312, share_f=0.39, share_i=0.39, share_w=0.39, memory=80e9, group_gb=150, hbm_gb=1600, link_gb=200
)
"""AMDP's device: an A100 whose NVLink has 400 GB/s, 200 each way. The share is the one number that fits the paper's
throughput of DAPPLE (1F1B) with the GPT-style model, in all four rows of its table 3 within 1.5%."""

A800_HEADS_OF_50 = replace(A800, share_f=0.265, share_i=0.265, share_w=0.265)
"""The same with the BERT-style model, within 1%. Its heads are 50 wide, no multiple of the 8 that matrix
units want."""

DEVICES = {"h800": H800, "a100": A100, "a800": A800}
