"""The sizes of a model, a preset with the changes of the options; and how its layers are divided into stages.

They are divided by cost, by a given cut, or alone if several ranks share the stage. Also what stages send.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.models import ParallelError, require_parallel
from penstock.models.listed import cut_by_counts
from penstock.models.parallel import require_vocabulary
from penstock.runtime import PartitionError, partition
from penstock.runtime.stage.branches import is_plain, loss_stages
from penstock.runtime.stage.recompute import BufferHistory, Buffers
from penstock.schedule import Schedule, StageGraph
from penstock.train.checks import SettingsError
from penstock.train.kinds import is_path
from penstock.train.settings import Settings
from penstock.train.tasks.task import BYTES
from penstock.unknown_names import did_you_mean

Config = TypeVar("Config")

OPTIONS = ("depth", "width", "heads", "context", "dropout", "tied")


def preset_of(settings: Settings, presets: Mapping[str, Config]) -> Config:
    """The preset by name. Raises SettingsError."""
    if settings.preset not in presets:
        hint = did_you_mean(settings.preset, presets, f"there are {', '.join(presets)}", cutoff=0.3)
        of = "" if settings.model == "gpt" else f" of {settings.model}"
        raise SettingsError(f"no preset{of} named {settings.preset!r}; {hint}")
    return presets[settings.preset]


def changed(config: Any, settings: Settings, **more: Any) -> Any:
    """A config in which the sizes that the options name are replaced. Raises SettingsError."""
    given = {name: getattr(settings, name) for name in OPTIONS if getattr(settings, name) is not None}
    if "heads" in given:
        given["num_heads"] = given.pop("heads")
    try:
        return dataclasses.replace(config, **given, **more)
    except ValueError as error:
        raise SettingsError(str(error)) from None


def words_of_sizes(settings: Settings, preset: object = None) -> str:
    """`tiny`, or `tiny with depth 3, width 32` if options change its sizes.

    Args:
        preset: the config of that name, whose own sizes are no changes; None if it has several.
    """
    given = {name: getattr(settings, name) for name in OPTIONS if getattr(settings, name) is not None}
    own = {name: getattr(preset, "num_heads" if name == "heads" else name, None) for name in given}
    changes = [
        {True: "tied weights", False: "weights not tied"}[value] if name == "tied" else f"{name} {value}"
        for name, value in given.items()
        if value != own[name]
    ]
    return f"{settings.preset} with {', '.join(changes)}" if changes else settings.preset


def kept_sizes(config: Any) -> dict[str, Any]:
    """The sizes in a config that a resumed run must share: all except dropout."""
    return {name: value for name, value in dataclasses.asdict(config).items() if name != "dropout"}


def require_shards(settings: Settings, schedule: Schedule, config: Any, vocab_size: int | None = None) -> None:
    """Raises SettingsError for a model that processes cannot share. Each needs whole heads, and at least one word.

    Args:
        vocab_size: of the stages that several ranks of the schedule share.
    """
    try:
        require_parallel(config, settings.tp)
    except ParallelError as error:
        other = ", or other --heads" if "heads" in str(error) and not is_path(settings.model) else ""
        raise SettingsError(f"--tp {settings.tp}: {error}{other}") from None
    for _, ranks in schedule.placement.shared if vocab_size is not None else ():
        try:
            require_vocabulary(f"{schedule.name} with {settings.model}", vocab_size or 0, len(ranks))
        except ParallelError as error:
            raise SettingsError(str(error)) from None


def recomputed(layer: nn.Module) -> nn.Module:
    """Makes a layer keep only its input and run again in the backward (activation checkpointing).

    The second run finds the layer's buffers as the first one did, and what it changes in them is thrown away. A layer
    with hooks before its forward stays as it is: they do not run again, and may have replaced what the forward reads,
    as those of `torch.nn.utils.spectral_norm` do with a weight.
    """
    if layer._forward_pre_hooks:
        return layer
    plain, history = layer.forward, BufferHistory(layer)

    def forward(*args: Any, **kwargs: Any) -> Any:
        found: Buffers | None = None

        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal found
            if found is not None:
                with history.as_found(found):
                    return plain(*args, **kwargs)
            with history.noted() as found:
                return plain(*args, **kwargs)

        return checkpoint(run, *args, use_reentrant=False, **kwargs) if layer.training else plain(*args, **kwargs)

    layer.forward = forward
    return layer


def stage_layers(costs: Sequence[float], schedule: Schedule, cut: Sequence[int] | None = None) -> list[range]:
    """The layers of each stage of a chain.

    Without a cut, stages are of about equal cost, embedding and head included. But a stage that several ranks share
    holds only the embedding or the head, since these can be divided among them.

    Args:
        cut: how many layers each stage holds.

    Raises:
        PartitionError: more stages than layers, a cut that does not fit. SettingsError: stages that are no chain.
    """
    num = schedule.num_stages
    require_chain(schedule)
    if cut is not None:
        return cut_by_counts(len(costs), num, cut)
    shared = {stage for stage, _ in schedule.placement.shared}
    if shared and shared != {0, num - 1}:
        raise SettingsError(
            f"{schedule.name} shares stages {_listed(shared)}; ranks share the first stage, the embedding, and the "
            "last one, the head"
        )
    if shared and num > len(costs):
        raise PartitionError(f"{num} stages asked of a model of {len(costs)} layers; use a deeper model")
    return cut_layers(costs, num, shared_ends=bool(shared))


def of_first(value: Any, settings: Settings) -> Any:
    """The first process's value, in every process. Replicas with data of their own may weigh layers differently.

    All processes must call it.
    """
    if settings.dp == 1 or not dist.is_initialized():
        return value
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def cut_layers(costs: Sequence[float], num_stages: int, shared_ends: bool) -> list[range]:
    """The layers of each stage, of about equal cost.

    Args:
        shared_ends: whether the first stage is only the first layer, and the last stage only the last.

    Raises:
        PartitionError: more stages than layers.
    """
    if not shared_ends:
        return partition(costs, num_stages)
    inner = partition(costs[1:-1], num_stages - 2)
    return [range(1), *(range(part.start + 1, part.stop + 1) for part in inner), range(len(costs) - 1, len(costs))]


def chain_bytes(settings: Settings, num_stages: int, numbers: int) -> list[float]:
    """Bytes of a message of each stage of a chain. The last one sends nothing.

    Args:
        numbers: how many numbers of a sample pass between any two layers.
    """
    size = float(BYTES * numbers * math.ceil(settings.batch / (settings.dp * settings.microbatches)))
    return [size] * (num_stages - 1) + [0.0]


def require_chain(schedule: Schedule) -> None:
    """Raises SettingsError unless every stage feeds only the next one, microbatch by microbatch."""
    require_one_end(schedule.graph, schedule.name)
    if not is_plain(schedule):
        raise SettingsError(
            f"the stages of {schedule.name} branch, and this model is a chain of layers; give a schedule whose "
            "stages are one, or --model clip"
        )


def refuse_shared(schedule: Schedule, why: str) -> None:
    """Raises SettingsError if several ranks share a stage; `why` says what in the model can't be shared."""
    if schedule.placement.shared:
        raise SettingsError(
            f"{schedule.name} has stages that several ranks share, which must be the embedding of words and the head "
            f"of a known model, and {why}; give another schedule"
        )


def require_one_end(graph: StageGraph, name: str) -> None:
    """Raises SettingsError for a branch that does not lead to the loss."""
    ends = loss_stages(graph)
    if len(ends) > 1:
        raise SettingsError(
            f"{name}: stages {_listed(ends)} feed no other stage, and the loss is one stage's; lead every branch to "
            "the stage with the loss"
        )


def _listed(values: set[int] | list[int]) -> str:
    return ", ".join(map(str, sorted(values)))
