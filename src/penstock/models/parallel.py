"""Tensor parallelism of the models here: a stage that was built in full becomes this rank's shard of it.

    attention      heads          qkv by columns, out by rows
    MLP            width          up by columns, down by rows
    embeddings     vocabulary     rows of tokens; positions stay whole
    heads          vocabulary     output by columns; logits stay apart for the loss

Every rank holds the modules that Penstock does not know whole, so their results stay right.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.models.bert import BERTEmbedding, BERTHeads
from penstock.models.block import MLP, Attention
from penstock.models.clip import CLIPConfig, TowerConfig, TowerEmbedding
from penstock.models.gpt import Embedding, Head
from penstock.models.listed import ListedConfig
from penstock.runtime.tensor_parallel import Shardable, Sharding

__all__ = ["ParallelError", "parallelize", "require_heads", "require_parallel", "require_vocabulary", "require_width"]


class ParallelError(ValueError):
    """A model that does not divide into so many tensor-parallel ranks.

    Examples:
        >>> import penstock as ps
        >>> from penstock.models import ParallelError, presets, require_parallel
        >>> try:
        ...     require_parallel(presets["gpt2-1.5b"], 7)
        ... except ParallelError as error:
        ...     print(type(error).__name__)
        ParallelError
    """


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a stage over the ranks of a mesh, in place; each has built it in full, with the same numbers.

    Its parameters become DTensors or stay as they are. What goes into the stage and comes out are plain tensors, the
        same on all ranks. Only logits over a vocabulary are a DTensor, which `CrossEntropy`, `BERTLoss` and
        `NextTokenLoss` take. Gradients of parameters that stay whole are the same on all ranks. All ranks must run
        the same ops in the same order.

    Args:
        stage: of one of the models here, or of transformers.
        mesh: of one dimension. One of size 1 changes nothing.

    Raises:
        ParallelError: heads, a width or a vocabulary that the ranks cannot share.

    Examples:
        >>> import penstock as ps
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        >>> ps.models.parallelize(ps.models.gpt_stage(ps.models.presets["nano"], range(2)), mesh)
        >>> dist.destroy_process_group()
    """
    if mesh.ndim != 1:
        raise ParallelError(f"a mesh of {mesh.ndim} dimensions; a stage is sharded over one, so give mesh['tp']")
    if mesh.size() == 1:
        return
    sharding = Sharding(mesh)
    for name, module in list(stage.named_modules()):
        if isinstance(module, Shardable):
            module.shard_over(sharding)
        elif sharding.takes(module):
            _shard(name or type(module).__name__, module, sharding)
    sharding.require_complete(stage)


def require_parallel(config: Any, num_ranks: int) -> None:
    """Checks, before anything is built, that tensor-parallel ranks can share a model.

    Args:
        config: of a GPT, a BERT, a CLIP or one of its towers, or of transformers.
        num_ranks: ranks that share each stage.

    Raises:
        ParallelError: heads, a width or a vocabulary that the ranks cannot share.

    Examples:
        >>> import penstock as ps
        >>> try:
        ...     ps.models.require_parallel(ps.models.presets["gpt2-1.5b"], 7)
        ... except ps.models.ParallelError as error:
        ...     print(str(error).split(";")[0])
        a GPT of width 1600 has 25 heads, which 7 tensor-parallel ranks cannot share out whole
    """
    match config:
        case ListedConfig():
            what = f"a {config.kind} of width {config.width}"
            require_heads(what, config.num_heads, num_ranks)
            require_vocabulary(what, config.vocab_size, num_ranks)
        case TowerConfig():
            require_heads(f"a tower of width {config.width}", config.num_heads, num_ranks)
            if config.vocab_size is not None:
                require_vocabulary(f"a tower of width {config.width}", config.vocab_size, num_ranks)
        case CLIPConfig():
            for tower in config.towers.values():
                require_parallel(tower, num_ranks)
        case _:
            _require_decoder(config, num_ranks)


def _require_decoder(config: Any, num_ranks: int) -> None:
    """Raises ParallelError if ranks cannot share the heads or the vocabulary of a config of transformers."""
    if num_ranks == 1:
        return
    config = config.get_text_config(decoder=True)
    what = f"a {config.model_type}"
    if (heads := getattr(config, "num_attention_heads", None)) is not None:  # Mamba's blocks stay whole
        require_heads(what, heads, num_ranks)
    keys = getattr(config, "num_key_value_heads", None)
    if keys is not None:
        require_heads(what, keys, num_ranks, "key and value heads")
    require_vocabulary(what, config.vocab_size, num_ranks)


def require_heads(what: str, num_heads: int, num_ranks: int, kind: str = "heads") -> None:
    """Raises ParallelError if ranks cannot have the same number of whole heads each."""
    if num_heads % num_ranks:
        fits = ", ".join(str(n) for n in range(1, num_heads + 1) if num_heads % n == 0)
        raise ParallelError(
            f"{what} has {num_heads} {kind}, which {num_ranks} tensor-parallel ranks cannot share out whole; give a "
            f"number of ranks that divides them ({fits})"
        )


def require_width(what: str, width: int, num_ranks: int) -> None:
    """Raises ParallelError if ranks cannot have the same number of features each."""
    if width % num_ranks:
        raise ParallelError(
            f"{what} is {width} wide, which {num_ranks} tensor-parallel ranks cannot divide evenly; give a number "
            "of ranks that divides it"
        )


def require_vocabulary(what: str, vocab_size: int, num_ranks: int) -> None:
    """Raises ParallelError if there are fewer tokens than ranks. The number of ranks need not divide them."""
    if vocab_size < num_ranks:
        raise ParallelError(
            f"{what} has a vocabulary of {vocab_size}, smaller than the {num_ranks} ranks that are to share it; give "
            "fewer ranks"
        )


def _shard(name: str, module: nn.Module, sharding: Sharding) -> None:
    num_ranks = sharding.mesh.size()
    match module:
        case Attention():
            require_heads(name, module.num_heads, num_ranks)
            sharding.region(module, module.out if module.dropout else None)
            sharding.columns(module.qkv)
            sharding.rows(module.out)
        case MLP():
            require_width(name, module.up.out_features, num_ranks)
            sharding.region(module)
            sharding.columns(module.up)
            sharding.rows(module.down)
        case Embedding() | BERTEmbedding() | TowerEmbedding():
            if hasattr(module, "token"):  # a tower of vectors has none
                require_vocabulary(name, module.token.num_embeddings, num_ranks)
                sharding.embedding(module.token)
        case Head() | BERTHeads():
            require_vocabulary(name, module.output.out_features, num_ranks)
            sharding.head(module.output)
