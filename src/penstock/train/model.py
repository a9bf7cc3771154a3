"""The GPT of a run, cut for its schedule: functions that build each stage where it runs."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock.models import GPTConfig, gpt_costs, gpt_stage, presets
from penstock.runtime import partition
from penstock.train.settings import Settings, SettingsError


def model_config(settings: Settings, vocab_size: int) -> GPTConfig:
    """The preset with what the settings change in it. Raises SettingsError."""
    if settings.preset not in presets:
        near = difflib.get_close_matches(settings.preset, presets, n=3, cutoff=0.3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(presets)}"
        raise SettingsError(f"no preset named {settings.preset!r}; {hint}")
    changes: dict[str, Any] = {"vocab_size": vocab_size}
    names = {"depth": "depth", "width": "width", "heads": "num_heads", "context": "context", "dropout": "dropout"}
    for name, field in {**names, "tied": "tied"}.items():
        if getattr(settings, name) is not None:
            changes[field] = getattr(settings, name)
    try:
        return dataclasses.replace(presets[settings.preset], **changes)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def recomputed(layer: nn.Module) -> nn.Module:
    """Makes a layer keep only its input and run again in the backward (activation checkpointing)."""
    plain = layer.forward

    def forward(x: Tensor) -> Any:
        return checkpoint(plain, x, use_reentrant=False) if layer.training else plain(x)

    layer.forward = forward
    return layer


def stage_builders(
    config: GPTConfig, num_stages: int, seed: int, recompute: bool, cut: Sequence[int] | None = None
) -> list[Callable[[], nn.Module]]:
    """For each stage a function that builds it, so that a rank holds just its own layers.

    `cut` says how many layers each stage holds. Without it they are cut by their estimated cost, embedding and
    head included. Raises PartitionError, and SettingsError for a cut that does not fit.
    """
    return [_builder(config, list(part), seed, recompute) for part in stage_layers(config, num_stages, cut)]


def stage_layers(config: GPTConfig, num_stages: int, cut: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage. Raises as `stage_builders`."""
    return partition(gpt_costs(config), num_stages) if cut is None else _parts(config, num_stages, cut)


def _parts(config: GPTConfig, num_stages: int, cut: Sequence[int]) -> list[range]:
    if len(cut) != num_stages or min(cut) < 1 or sum(cut) != config.num_layers:
        raise SettingsError(
            f"cut {','.join(map(str, cut))} is for {len(cut)} stages and {sum(cut)} layers; give each of the "
            f"{num_stages} stages at least one of the {config.num_layers} layers (embedding and head are two)"
        )
    ends = list(accumulate(cut))
    return [range(end - count, end) for end, count in zip(ends, cut)]


def _builder(config: GPTConfig, indices: Sequence[int], seed: int, recompute: bool) -> Callable[[], nn.Module]:
    return lambda: gpt_stage(config, indices, seed, wrap=recomputed if recompute else None)
