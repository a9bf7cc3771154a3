"""The model that is tuned, in the layers in which `penstock train` cuts it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.library import build
from penstock.models import bert_presets, presets, tower_costs
from penstock.runtime import PartitionError, split
from penstock.runtime.tensors.pytree import flatten
from penstock.train.inputs import device_of, optimizer_class
from penstock.train.kinds import BERT, CLIP, CONTRAST, GPT, is_path
from penstock.train.own_file import is_own, own_name, sources_of
from penstock.train.settings import Settings, SettingsError
from penstock.train.tasks.clip import clip_config
from penstock.train.tasks.layers import words_of_sizes
from penstock.train.tasks.open import open_layers, open_task
from penstock.train.tasks.own import OwnTask


@dataclass(frozen=True)
class TunedModel:
    """A model in layers.

    Attributes:
        name: of it. layers: their names, first to last. costs: of each, by which a run cuts them unless told how.
        num_tokens: of a sample; None where a sample is no row of tokens.
        structure: what its times and bytes depend on, as plain data.
        blocks: layers of it that are all alike.
        part: of a model of several towers the tower that these are the layers of, or the contrast.
    """

    name: str
    layers: tuple[str, ...]
    costs: tuple[float, ...]
    num_tokens: int | None
    structure: Mapping[str, Any]
    blocks: range = field(default=range(0))
    part: str | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def digest(self) -> str:
        """A hash of its structure."""
        return hashlib.sha256(json.dumps(self.structure, sort_keys=True).encode()).hexdigest()[:32]


def tuned_model(settings: Settings) -> TunedModel:
    """The model that the settings ask for, checked with its optimizer and its device.

    Raises:
        SettingsError, DataError, PartitionError: what the run itself would raise.
    """
    device_of(settings)
    optimizer_class(settings)
    if is_own(settings.model):
        return _own(settings)
    if settings.model == CLIP:
        return _clip(settings)
    return _listed(settings)


def why_no_shared_ends(settings: Settings, num_ranks: int) -> str:
    """Why ranks can't share the embedding and the head of the model that the settings ask for: the error of `penstock
    train` for a schedule in which they do. Empty if they can.
    """
    if settings.model == CLIP:
        return f"--model {CLIP} has an embedding for each tower, and no head"
    try:
        open_task(replace(settings, ranks=num_ranks, microbatches=1), build("mllm", num_ranks, 1))
    except (SettingsError, PartitionError) as error:
        return str(error).partition(";")[0]
    return ""


def _clip(settings: Settings) -> TunedModel:
    """A CLIP: the layers of its towers, tower by tower, and the contrast."""
    config, parts = clip_config(settings), parts_of(settings)
    return TunedModel(
        name=f"clip {words_of_sizes(settings)}",
        layers=(*(f"{name} {layer}" for name in config.towers for layer in parts[name].layers), CONTRAST),
        costs=tuple(cost for part in parts.values() for cost in part.costs),
        num_tokens=sum(tower.context for tower in config.towers.values()),
        structure={name: part.structure for name, part in parts.items()},
    )


def parts_of(settings: Settings) -> dict[str, TunedModel]:
    """The towers of a CLIP and its contrast, each measured by itself. Raises SettingsError."""
    config = clip_config(settings)
    found = {}
    for name, tower in config.towers.items():
        found[name] = TunedModel(
            name=f"the {name} tower of clip {settings.preset}",
            layers=("embedding", *(f"block {number}" for number in range(tower.depth)), "summary"),
            costs=tuple(tower_costs(config, name)),
            num_tokens=tower.context,
            structure={"tower": dataclasses.asdict(tower), "shared_width": config.shared_width},
            blocks=range(1, tower.num_layers - 1),
            part=name,
        )
    found[CONTRAST] = TunedModel(
        name=f"the contrast of clip {settings.preset}",
        layers=(CONTRAST,),
        costs=(0.0,),
        num_tokens=None,
        structure={"contrast": len(config.towers), "shared_width": config.shared_width},
        part=CONTRAST,
    )
    return found


def _listed(settings: Settings) -> TunedModel:
    """A GPT, a BERT or a model of Hugging Face's. In the latter, blocks may differ from one another."""
    task, own_data = open_layers(settings), is_own(settings.data)
    num_layers, path = len(task.layer_costs), settings.model if is_path(settings.model) else None
    known: Mapping[str, Mapping[str, object]] = {GPT: presets, BERT: bert_presets}
    sizes = words_of_sizes(settings, known.get(settings.model, {}).get(settings.preset))
    return TunedModel(
        name=Path(path).resolve().stem if path else sizes if settings.model == GPT else f"{settings.model} {sizes}",
        layers=("embedding", *(f"block {number}" for number in range(num_layers - 2)), "head"),
        costs=tuple(task.layer_costs),
        num_tokens=task.num_tokens,
        structure={
            "model": settings.model if path is None else "transformers",
            **task.sizes,
            "dropout": getattr(task.config, "dropout", None),
            **({"batch": _form(task.read(None).batches[0])} if own_data else {}),
        },
        blocks=range(1, num_layers - 1) if path is None else range(0),
    )


def _own(settings: Settings) -> TunedModel:
    """A model of the user's own, built and tried once, on a whole batch."""
    task = OwnTask(settings, build("gpipe", 1, 1))
    tried = task.tried()
    cut = split(tried.model, example=tried.inputs)
    own = own_name(settings.model)
    files = sources_of(own.path)
    if is_own(settings.data):
        files |= sources_of(own_name(settings.data or "").path)
    return TunedModel(
        name=own.name,
        layers=tuple(path for paths in cut.layers for path in paths),
        costs=tuple(cut.costs),
        num_tokens=task.num_tokens,
        structure={
            "name": own.name,
            "options": dict(settings.model_options),
            "files": sorted(hashlib.sha256(path.read_bytes()).hexdigest() for path in files),
            "batch": _form((tried.inputs, tried.targets)),
            "parameters": [(name, list(p.shape)) for name, p in tried.model.named_parameters()],
        },
    )


def _form(batch: Any) -> list[Any]:
    """Types and shapes of a batch's tensors, without the number of samples."""
    return [(str(leaf.dtype), list(leaf.shape[1:])) for leaf in flatten(batch)[0]]
