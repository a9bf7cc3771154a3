"""Tensor parallelism: modules that hold a shard of their weights and run as one on all ranks of a mesh.

    x [B, T, D] --entered--> columns --> rows --summed--> y [B, T, D]
    the same on            a part of the features,      the same on
    every rank             no word between ranks        every rank

What lies between `entered` and `summed` is a region: an attention with some of the heads, an MLP with some of its
width. Weights there are DTensors, of which each rank computes with its own part; what goes in and out are plain
tensors, equal on all ranks. (This cut is that of Shoeybi et al. 2019, arXiv 1909.08053, section 3: its f and g.)

modules      layers that hold a shard, and `entered`, `summed`, `largest` between ranks
sharding     which layers are cut, by name
"""

from penstock.runtime.tensor_parallel.modules import (
    ColumnLinear,
    RowLinear,
    ShardedModule,
    VocabularyEmbedding,
    VocabularyLinear,
    entered,
    largest,
    shard_of,
    span,
    summed,
)
from penstock.runtime.tensor_parallel.sharding import Shardable, Sharding

__all__ = [
    "ColumnLinear",
    "ShardedModule",
    "RowLinear",
    "Shardable",
    "Sharding",
    "VocabularyEmbedding",
    "VocabularyLinear",
    "entered",
    "largest",
    "shard_of",
    "span",
    "summed",
]
