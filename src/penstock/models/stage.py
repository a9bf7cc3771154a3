"""A pipeline stage of a GPT or a BERT, built without building any other layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import nn

from penstock.models.bert import BERTConfig, bert_layers
from penstock.models.gpt import GPTConfig, build_layers
from penstock.runtime import Stage

__all__ = ["bert_stage", "gpt_stage"]

Wrap = Callable[[nn.Module], nn.Module]


def gpt_stage(config: GPTConfig, indices: Iterable[int], seed: int = 0, wrap: Wrap | None = None) -> Stage:
    """The stage that holds the layers at `indices`, under their names in the whole model ("layers.3").

    Args:
        config: the sizes of the model.
        indices: numbers of layers, from 0.
        seed: initial weights are drawn from it, layer by layer.
        wrap: puts something around each block, such as activation checkpointing; nothing where not given.

    Examples:
        >>> import penstock as ps
        >>> stage = ps.models.gpt_stage(ps.models.presets["nano"], range(2))
        >>> sorted({name.split(".")[1] for name, _ in stage.named_parameters()})
        ['0', '1']
    """
    wanted = list(indices)
    return _stage(wanted, build_layers(config, wanted, seed), config.num_layers, wrap)


def bert_stage(config: BERTConfig, indices: Iterable[int], seed: int = 0, wrap: Wrap | None = None) -> Stage:
    """The stage that holds a BERT's layers at `indices`, under their names in the whole model.

    Args:
        config: the sizes of the model.
        indices: numbers of layers, from 0.
        seed: initial weights are drawn from it, layer by layer.
        wrap: puts something around each block, such as activation checkpointing; nothing where not given.

    Examples:
        >>> import penstock as ps
        >>> stage = ps.models.bert_stage(ps.models.bert_presets["nano"], range(2))
        >>> next(name for name, _ in stage.named_parameters())
        'layers.0.token.weight'
    """
    wanted = list(indices)
    return _stage(wanted, bert_layers(config, wanted, seed), config.num_layers, wrap)


def _stage(indices: Sequence[int], layers: Sequence[nn.Module], num_layers: int, wrap: Wrap | None) -> Stage:
    named = dict(zip(indices, layers, strict=True))
    if wrap is not None:
        named |= {i: wrap(layer) for i, layer in named.items() if 0 < i < num_layers - 1}
    return Stage({f"layers.{i}": layer for i, layer in named.items()}, indices)
