"""Tensor parallelism of the models here: a stage that was built in full becomes this rank's shard of it.

    Attention      heads          qkv by columns, out by rows
    MLP            width          up by columns, down by rows
    embeddings     vocabulary     rows of tokens; positions stay whole
    heads          vocabulary     output by columns, logits stay apart for the loss

What is not known stays whole on every rank, and right.
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.models.bert import BERTEmbedding, BERTHeads
from penstock.models.block import MLP, Attention
from penstock.models.clip import TowerEmbedding
from penstock.models.gpt import Embedding, Head
from penstock.runtime.sharded import Sharding

__all__ = ["ParallelError", "parallelize"]


class ParallelError(ValueError):
    """A model that does not divide into so many ranks."""


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a stage over the ranks of a mesh, in place; each has built it in full, with the same numbers.

    Parameters become DTensors or stay as they are. What goes into the stage and comes out of it is the same on all
    ranks, logits for the loss excepted, which are a DTensor. All ranks must run the same ops in the same order.

    Args:
        mesh: of one dimension. One of size 1 changes nothing.

    Raises:
        ParallelError: heads, a width or a vocabulary that does not divide into the mesh.
    """
    if mesh.ndim != 1:
        raise ParallelError(f"a mesh of {mesh.ndim} dimensions; tensor parallelism is over one, so give mesh['tp']")
    if mesh.size() == 1:
        return
    require_divisible(stage, mesh.size())
    sharding = Sharding(mesh)
    for module in list(stage.modules()):
        _shard(module, sharding)


def require_divisible(stage: nn.Module, num_ranks: int) -> None:
    """Raises ParallelError where a part of a stage does not divide into `num_ranks`."""
    for name, module in stage.named_modules():
        if isinstance(module, Attention) and module.num_heads % num_ranks:
            raise ParallelError(
                f"{name} has {module.num_heads} heads, which {num_ranks} tensor-parallel ranks cannot share alike; "
                "give a number of ranks that divides them"
            )
        if isinstance(module, Embedding | BERTEmbedding | TowerEmbedding):
            size = module.token.num_embeddings if hasattr(module, "token") else num_ranks
            if size < num_ranks:
                raise ParallelError(
                    f"{name} has a vocabulary of {size}, fewer than the {num_ranks} tensor-parallel ranks to share it"
                )


def _shard(module: nn.Module, sharding: Sharding) -> None:
    if isinstance(module, Attention):
        sharding.region(module, module.out if module.dropout else None)
        sharding.columns(module.qkv)
        sharding.rows(module.out)
    elif isinstance(module, MLP):
        sharding.region(module)
        sharding.columns(module.up)
        sharding.rows(module.down)
    elif isinstance(module, Embedding | BERTEmbedding | TowerEmbedding):
        if hasattr(module, "token"):  # a tower of vectors has none
            sharding.embedding(module.token)
    elif isinstance(module, Head | BERTHeads):
        sharding.head(module.output)
