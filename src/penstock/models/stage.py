"""A pipeline stage of a GPT, built without building any other layer."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from penstock.models.gpt import GPTConfig, build_layers
from penstock.runtime import Stage

__all__ = ["gpt_stage"]


def gpt_stage(
    config: GPTConfig,
    indices: Iterable[int],
    seed: int = 0,
    wrap: Callable[[nn.Module], nn.Module] | None = None,
) -> Stage:
    """The stage that holds the layers at `indices`, under their names in the whole model ("layers.3").

    `wrap` may put something around each block, like activation checkpointing.
    """
    wanted = list(indices)
    layers = dict(zip(wanted, build_layers(config, wanted, seed), strict=True))
    if wrap is not None:
        layers |= {i: wrap(layer) for i, layer in layers.items() if 0 < i < config.num_layers - 1}
    return Stage({f"layers.{i}": layer for i, layer in layers.items()}, wanted)
