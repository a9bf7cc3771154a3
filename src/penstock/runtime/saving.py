"""A pipeline's state as plain named tensors, to a checkpoint and back, under any schedule and number of ranks.

    model/layers.3.mlp.up.weight             parameters and buffers, by their names in the whole model
    optimizer/layers.3.mlp.up.weight/exp_avg
    gradients/layers.3.mlp.up.weight         where gradients wait for an update

A tied parameter is stored once, under the name it has in its lowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.checkpoint import (
    CheckpointError,
    Reader,
    Source,
    export,
    latest,
    load_optimizer,
    match,
    optimizer_tensors,
    write,
)
from penstock.runtime.held_model import HeldModel
from penstock.runtime.peers import Peers
from penstock.runtime.shards import local, shard_like, whole
from penstock.runtime.updating import GRADIENTS, Updating
from penstock.runtime.updating import PREFIX as ASYNCHRONOUS
from penstock.schedule.updates import OWNER

MODEL = "model/"
COUNTERS = "pipeline"


class State:
    """What a pipeline saves: the stages and the optimizer of this process, under their stored names.

    Of several copies of a stage the owner's is saved, and all get what is loaded. So too gradients that wait for an
    update, and what a schedule with updates keeps besides.

    Args:
        answers: whether this process is the one that writes a tensor, and what the optimizer keeps of it.
        steps: whether it steps a parameter.
    """

    def __init__(
        self,
        model: HeldModel,
        optimizer: Optimizer | None,
        updating: Updating | None,
        answers: Callable[[int, Tensor], bool],
        steps: Callable[[Parameter], bool],
    ) -> None:
        self.optimizer, self._model, self._updating, self._steps = optimizer, model, updating, steps
        stages, ties = model.stages, model.ties
        stored_as = {name: tie.names[tie.owner] for tie in ties for name in tie.names.values()}
        self._twins = {name for name, stored in stored_as.items() if name != stored}
        self._tensors: list[tuple[str, Tensor]] = []
        self._answers: set[str] = set()
        self._names: dict[Tensor, str] = {}
        for index, stage in stages.items():
            for name, parameter in stage.named_parameters():
                self._tensors.append((name, parameter))
                self._names.setdefault(parameter, stored_as.get(name, name))
            kept = stage.state_dict(keep_vars=True)
            self._tensors += [(name, buffer) for name, buffer in stage.named_buffers() if name in kept]
            both = (*stage.named_parameters(), *stage.named_buffers())
            self._answers |= {name for name, t in both if name not in self._twins and answers(index, t)}
        for stage in model.copies.here.values():
            for name, parameter in stage.named_parameters():
                self._names.setdefault(parameter, stored_as.get(name, name))
        if updating is not None:
            self._names |= updating.names()
        self._stored_as = stored_as

    def to_tensors(self) -> tuple[dict[str, Tensor], Any]:
        """What this process writes, and the optimizer's meta."""
        tensors, meta = self.held()
        tensors = {name: t for name, t in tensors.items() if self._writes(name)}
        return tensors | (self._updating.tensors() if self._updating is not None else {}), meta

    def held(self) -> tuple[dict[str, Tensor], Any]:
        """All that this process holds, whoever writes it, and the optimizer's meta.

        Whole tensors by their stored names: who holds a shard helps to put them together. Not what a schedule with
        updates keeps besides.
        """
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._tensors:
            full = whole(tensor.detach())
            tensors.setdefault(MODEL + self._stored_as.get(name, name), full)
        if self._updating is None:
            for stage in self._model.stages.values():
                for name, parameter in stage.named_parameters():
                    if parameter.grad is not None:
                        full = whole(parameter.grad)
                        tensors.setdefault(GRADIENTS + self._stored_as.get(name, name), full)
        if self.optimizer is None:
            return tensors, None
        state, meta = optimizer_tensors(self.optimizer, self._names)
        return tensors | {name: whole(t) for name, t in state.items()}, meta

    def _writes(self, name: str) -> bool:
        kind, _, rest = name.partition("/")
        return (rest.rpartition("/")[0] if kind == "optimizer" else rest) in self._answers

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Of the names of all that is held anywhere those that `load` reads here."""
        stepped = [p for group in self.optimizer.param_groups for p in group["params"]] if self.optimizer else []
        optimizer = {self._names[p] for p in stepped}
        mine = {
            stage_name for stage in self._model.copies.here.values() for stage_name, _ in stage.named_parameters()
        }
        waiting = {self._stored_as.get(name, name) for name in mine}
        found = set(self.expected())
        for name in names:
            kind, _, rest = name.partition("/")
            if (kind == "optimizer" and rest.rpartition("/")[0] in optimizer) or (
                name.startswith(GRADIENTS) and name.removeprefix(GRADIENTS) in waiting
            ):
                found.add(name)
        return sorted(found)

    def expected(self) -> dict[str, tuple[int, ...]]:
        """Stored name -> shape of the model's tensors in this process."""
        return {MODEL + self._stored_as.get(name, name): tuple(t.shape) for name, t in self._tensors}

    def load(self, reader: Source, num_updates: int) -> None:
        """Fills the model and the optimizer. The names must match."""
        loaded = reader.load(sorted(self.expected()))
        with torch.no_grad():
            for name, tensor in self._tensors:
                value = loaded[MODEL + self._stored_as.get(name, name)]
                local(tensor.detach()).copy_(local(shard_like(value, tensor)))
        if self.optimizer is not None:
            load_optimizer(self.optimizer, self._names, reader)
        self._model.share_values()
        self._model.zero_grad()
        if self._updating is not None:
            mine = {name for stage in self._model.copies.here.values() for name, _ in stage.named_parameters()}
            places = {n: _place(n) for n in reader.names()}
            wanted = [n for n, place in places.items() if place is not None and place.rsplit("/", 1)[-1] in mine]
            self._updating.load({places[n] or n: t for n, t in reader.load(wanted).items()}, num_updates)
        else:
            self._load_gradients(reader)

    def _load_gradients(self, reader: Source) -> None:
        """Gradients that wait for an update, whatever kind of schedule they come from."""
        for stage in self._model.copies.here.values():
            for name, parameter in stage.named_parameters():
                stored = self._stored_as.get(name, name)
                found = [n for n in reader.names() if n.endswith(f"gradients/{stored}")]
                parts = list(reader.load(found).values())
                if parts and self._steps(parameter):
                    parameter.grad = shard_like(reduce(add, parts).to(parameter.device), parameter)


def _place(name: str) -> str | None:
    """Under which name a schedule with updates takes a tensor over: gradients from others are the owner's."""
    if name.startswith(GRADIENTS):
        return f"{ASYNCHRONOUS}{OWNER}/{name}"
    return name if name.startswith(ASYNCHRONOUS) else None


def save(
    directory: str | Path,
    state: State,
    peers: Peers,
    counters: Mapping[str, int],
    meta: Mapping[str, Any],
    keep: int,
    number: int | None = None,
) -> Path:
    """Writes a checkpoint; every process must call it. Raises CheckpointError."""
    tensors, optimizer_meta = state.to_tensors()
    metas = [m for m in peers.gather(optimizer_meta) if m is not None]
    content = {**meta, COUNTERS: dict(counters)}
    if metas:
        content["optimizer"] = metas[0]
    return write(
        Path(directory),
        counters["num_steps"] if number is None else number,
        tensors,
        content,
        rank=peers.here[0],
        num_ranks=peers.num_ranks if len(peers.here) == 1 else 1,
        barrier=peers.barrier,
        keep=keep,
    )


def load(directory: str | Path, state: State, peers: Peers) -> tuple[dict[str, int], dict[str, Any]]:
    """Loads the newest checkpoint of a directory, or the one given; returns the counters and the meta.

    Raises:
        CheckpointError: none there, damaged, or of another model.
    """
    path = find(directory)
    reader = Reader(path)
    expected: dict[str, tuple[int, ...]] = {}
    for part in peers.gather(state.expected()):
        expected.update(part)
    match(reader, expected, prefix=MODEL)
    meta = dict(reader.meta) if isinstance(reader.meta, dict) else {}
    counters = meta.pop(COUNTERS, None)
    if not isinstance(counters, dict):
        raise CheckpointError(f"checkpoint {path} was not written by a pipeline: it has no counters")
    meta.pop("optimizer", None)
    state.load(reader, counters["num_updates"])
    return counters, meta


def find(directory: str | Path) -> Path:
    """The checkpoint meant by a path: itself, or the newest complete one inside."""
    path = Path(directory)
    if (path / "index.json").exists():
        return path
    newest = latest(path) if path.is_dir() else None
    if newest is None:
        raise CheckpointError(f"{path}: no checkpoint there; give a checkpoint or a folder of them")
    return newest


def export_model(path: str | Path, checkpoint: str | Path) -> Path:
    """Writes a checkpoint's model as one safetensors file with plain parameter names. Raises CheckpointError."""
    reader = Reader(find(checkpoint))
    names = [name for name in reader.names() if name.startswith(MODEL)]
    return export(path, _renamed(reader, names))


def _renamed(reader: Reader, names: Iterable[str]) -> dict[str, Tensor]:
    return {name.removeprefix(MODEL): tensor for name, tensor in reader.load(names).items()}
