"""A pipeline's state as plain named tensors, under any schedule and number of ranks.

    model/layers.3.mlp.up.weight             parameters and persistent buffers, by their names in the whole model
    constants/layers.3.mlp.up.weight         in place of a parameter that never changes, a number of its values
    buffers/layers.3.mask                    other buffers
    extra/layers.3#json                      what a module's `get_extra_state` gave, see `checkpoint/codec.py`
    extra/layers.3@1.0.0#json                the same of one holder, where those of a stage differ
    optimizer/layers.3.mlp.up.weight/exp_avg
    gradients/layers.3.mlp.up.weight         where gradients wait for an update

A tied parameter is stored once, under the name it has in its lowest stage.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.checkpoint.codec import AS_JSON, names_by_base, pack
from penstock.runtime.checkpoint.optimizer import ATTRIBUTES, members_of, optimizer_tensors, stage_optimizer
from penstock.runtime.checkpoint.reader import Kind, TensorSource, load_packed
from penstock.runtime.checkpoint.user_state import StateToGive, StateTrial
from penstock.runtime.errors import CheckpointError
from penstock.runtime.parameters.loss_scaling import is_scaler_state
from penstock.runtime.parameters.optimizer import optimizers_in
from penstock.runtime.parameters.optimizer_state import OptimizerState
from penstock.runtime.parameters.scheduled_updates import GRADIENTS
from penstock.runtime.parameters.scheduled_updates import PREFIX as ASYNCHRONOUS
from penstock.runtime.tensors.dtensor import is_sharded, local, overwrite, own_shard, whole
from penstock.schedule.updates import OWNER

MODEL = "model/"
BUFFERS = "buffers/"
CONSTANTS = "constants/"
EXTRA = "extra/"
SCALER = "scaler"
FIRST = "0.0.0"
"""The holder of extra state that stands for one which a checkpoint does not know."""


class ExtraStateModule(NamedTuple):
    """A module that has extra state.

    Attributes:
        name: in the whole model. holder: its pipeline, replica and shard.
    """

    name: str
    holder: str
    module: nn.Module

    @property
    def own(self) -> str:
        """The base of its names where holders differ."""
        return f"{EXTRA}{self.name}@{self.holder}"


class CheckpointShare(NamedTuple):
    """What of a checkpoint a process has to do with.

    Attributes:
        writes: what it writes, by name; a tensor may be a shard, to be put together when its turn comes.
        helps: shards here of what others write.
        optimizer: the options of the optimizer, None without one.
    """

    writes: dict[str, Tensor]
    helps: dict[str, Tensor]
    optimizer: Any


class TrainingState:
    """What a pipeline saves: the stages and the optimizer of this process, under their stored names.

    Of several copies of a stage the owner's is saved, and all get what is loaded. So too gradients that wait for an
    update, and what a schedule with updates keeps besides.

    Args:
        trained: what training changes in this process.
    """

    def __init__(self, trained: OptimizerState) -> None:
        self._trained = trained
        model, updating, answers = trained.model, trained.updating, trained.answers
        self.optimizer, self._model, self._updating, self._steps = trained.optimizer, model, updating, trained.steps
        stages, ties = model.stages, model.ties
        self._tensors: list[tuple[str, Tensor]] = []
        """Stored name, with its prefix -> each parameter and buffer here that has it."""
        self._answers: set[str] = set()
        self._names: dict[Tensor, str] = {}
        self._constants: dict[str, Tensor] = {}
        """Of parameters that never change, by stored name, the number that stands for each."""
        for index, stage in stages.items():
            for name, parameter in stage.named_parameters():
                stored = ties.owned_name(name)
                if (number := stage.constants.get(name)) is not None:
                    self._constants[CONSTANTS + name] = torch.from_numpy(np.array(number, np.uint64).view(np.int64))
                    if answers(index, parameter):
                        self._answers.add(name)
                    continue
                self._tensors.append((MODEL + stored, parameter))
                self._names.setdefault(parameter, stored)
                if not ties.is_elsewhere(name) and answers(index, parameter):
                    self._answers.add(stored)
            for name, (buffer, is_kept) in _buffers(stage).items():
                self._tensors.append(((MODEL if is_kept else BUFFERS) + name, buffer))
                if answers(index, buffer):
                    self._answers.add(name)
        self._extras = [
            ExtraStateModule(name, f"{k}.{trained.holder(index)}", module)
            for (k, index), stage in sorted(model.copies.here.items())
            for name, module in (*stage.named_modules(), *stage.around.items())
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        for stage in model.copies.here.values():
            for name, parameter in stage.named_parameters():
                self._names.setdefault(parameter, ties.owned_name(name))
        if updating is not None:
            self._names |= updating.names()
        self._stored_as = ties.owned_name

    # Saving.

    def share(self) -> CheckpointShare:
        """What this process writes but for extra state, and what it helps with. Raises CheckpointError."""
        for extra in self._extras:
            if type(extra.module).set_extra_state is nn.Module.set_extra_state:
                raise CheckpointError(
                    f"{extra.name} ({type(extra.module).__name__}) has get_extra_state and no set_extra_state, so "
                    "what is saved could not be loaded: give it one"
                )
        self._require_all_known()
        tensors, meta = self._all()
        writes = {name: tensor for name, tensor in tensors.items() if self._writes(name)}
        helps = {name: t for name, t in tensors.items() if name not in writes and is_sharded(t)}
        for name, tensor in ({} if self._updating is None else self._updating.tensors()).items():
            if self._updating is not None and self._updating.is_first_shard:
                writes[name] = tensor
            elif is_sharded(tensor):
                helps[name] = tensor
        return CheckpointShare(writes, helps, meta)

    def extra(self) -> dict[str, dict[str, Tensor]]:
        """By its base `extra/NAME@HOLDER` the extra state of each module here. Raises CheckpointError."""
        return {
            extra.own: pack(extra.own, extra.module.get_extra_state(), f"the extra state of {extra.name}")
            for extra in self._extras
        }

    def held(self) -> tuple[dict[str, Tensor], Any]:
        """All that this process holds, whoever writes it, and the optimizer's meta.

        Whole tensors by their stored names: who holds a shard helps to put them together.
        """
        tensors, meta = self._all()
        found = {name: whole(tensor) for name, tensor in tensors.items()}
        if self._updating is not None:
            found |= {name: whole(tensor) for name, tensor in self._updating.tensors().items()}
        for packed in self.extra().values():
            found |= packed
        return found, meta

    def _all(self) -> tuple[dict[str, Tensor], Any]:
        tensors: dict[str, Tensor] = {}
        for name, tensor in self._tensors:
            tensors.setdefault(name, tensor.detach())
        tensors |= self._constants
        if self._updating is None:
            for stage in self._model.stages.values():
                for name, parameter in stage.named_parameters():
                    if parameter.grad is not None:
                        tensors.setdefault(GRADIENTS + self._stored_as(name), parameter.grad)
        if self.optimizer is None:
            return tensors, None
        state, meta = optimizer_tensors(self.optimizer, self._names, self._trained.constructed)
        return tensors | state, meta

    def _writes(self, name: str) -> bool:
        kind, _, rest = name.partition("/")
        owner = rest.rpartition("/")[0] if kind == "optimizer" else rest
        return owner in self._answers or (owner == ATTRIBUTES and self._trained.is_first)

    def _require_all_known(self) -> None:
        """Raises CheckpointError for what a module's state dict has and goes by no name here."""
        for stage in self._model.stages.values():
            own = {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())}
            names = {n for n, _ in (*stage.named_parameters(remove_duplicate=False), *stage.named_buffers())}
            for name, value in stage.state_dict(keep_vars=True).items():
                if id(value) not in own and name not in names and not name.endswith("_extra_state"):
                    raise CheckpointError(
                        f"the model's state dict has {name}, which is neither a parameter nor a buffer nor extra "
                        "state, so that it could not be loaded again: give its module get_extra_state and "
                        "set_extra_state"
                    )

    # What there is to load.

    def wanted(self, names: Iterable[str]) -> list[str]:
        """Of the names of all that is held anywhere those that `stage` reads here."""
        names = list(names)
        optimizer = {ATTRIBUTES, *(name for those in self.members().values() for each in those for name in each)}
        mine = {
            stage_name for stage in self._model.copies.here.values() for stage_name, _ in stage.named_parameters()
        }
        waiting = {self._stored_as(name) for name in mine}
        there = set(names)
        found = {name for name in self.expected() if name in there or name.startswith(MODEL)}
        found |= self._constants.keys() & there
        for name in names:
            kind, _, rest = name.partition("/")
            if (kind == "optimizer" and rest.rpartition("/")[0] in optimizer) or (
                (place := _place(name)) is not None and place.split("/", 3)[-1] in waiting
            ):
                found.add(name)
        bases = {_base_of(extra, there) for extra in self._extras}
        return sorted(found.union(name for name in there if name.rpartition("#")[0] in bases))

    def expected(self) -> dict[str, Kind]:
        """Stored name -> shape and type of the model's parameters and buffers in this process."""
        return {name: _kind(tensor) for name, tensor in self._tensors}

    def members(self) -> dict[str, list[list[str]]]:
        """By path of an optimizer here, the names of the parameters of each of its groups."""
        every = {} if self.optimizer is None else optimizers_in(self.optimizer)
        return {path: members_of(one, self._names) for path, one in every.items()}

    def aliases(self) -> dict[str, str]:
        """By each other name of a parameter here, the name that it is stored under."""
        found: dict[str, str] = {}
        for stage in self._model.stages.values():
            first: dict[Parameter, str] = {}
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                stored = self._stored_as(first.setdefault(parameter, name))
                found |= {name: stored} if name != stored else {}
        return found

    def extra_names(self) -> list[tuple[str, str]]:
        """Name and holder of each module here that has extra state."""
        return [(extra.name, extra.holder) for extra in self._extras]

    # Loading.

    def scaler(self) -> dict[str, Any]:
        """The numbers of loss scaling under their name in a checkpoint; nothing where losses are not scaled.

        Raises:
            CheckpointError: gradients have been divided by the scale, and wait for an update.
        """
        scaling = self._trained.scaling
        if scaling is None or scaling.scale is None:
            return {}
        if scaling.has_divided:
            raise CheckpointError(
                "gradients were clipped, and so divided by the loss scale, which a checkpoint does not say; call "
                "update() after clip(), or zero_grad()"
            )
        return {SCALER: scaling.state()}

    def stage(
        self,
        source: TensorSource,
        num_updates: int,
        counters: Mapping[str, Any],
        members: Sequence[Mapping[str, list[list[str]]]],
    ) -> StagedState:
        """Reads all that is loaded here and finds it right, and changes nothing.

        Args:
            counters: with the numbers of loss scaling, as `scaler` gives them.
            members: of every process.

        Raises:
            CheckpointError: something is damaged or does not fit.
        """
        names = source.names()
        there = set(names)
        values: list[tuple[Tensor, Tensor]] = []
        targets: dict[str, list[Tensor]] = {}
        for name, tensor in self._tensors:
            targets.setdefault(name, []).append(tensor)
        notices: list[str] = []
        for name in sorted(targets):
            value = source.load([name])[name] if name in there or name.startswith(MODEL) else None
            if name.startswith(BUFFERS) and (value is None or _kind(value) != _kind(targets[name][0])):
                found = "not there" if value is None else "another"
                notices.append(
                    f"{name.removeprefix(BUFFERS)}, a buffer that is not persistent, is {found} in {source.path}: it "
                    "stays as its module made it"
                )
                continue
            assert value is not None
            for target in targets[name]:
                here, own = local(target.detach()), local(own_shard(value, target))
                _require_takes(source, name, here, own)
                values.append((here, own))
        self._require_constants(source, there)
        optimizer = None
        if self.optimizer is not None:
            optimizer = stage_optimizer(self.optimizer, self._names, source, members)
        extras = self._stage_extras(source, there, notices)
        if self._updating is None:
            gradients, put = self._stage_gradients(source, names), None
        else:
            gradients, put = [], self._stage_updating(source, names, num_updates)
        scaler = self._stage_scaler(source, names, counters.get(SCALER))
        return StagedState(self._trained, values, optimizer, gradients, put, extras, notices, scaler)

    def _stage_scaler(self, source: TensorSource, names: Iterable[str], scaler: Any) -> dict[str, Any] | None:
        """The numbers with which loss scaling goes on; None where it begins, or there is none."""
        if scaler is not None and not is_scaler_state(scaler):
            raise CheckpointError(f"checkpoint {source.path}: {scaler!r:.60} are not the numbers of a loss scaler")
        scales = self._trained.scaling is not None and self._trained.scaling.scale is not None
        if scales != (scaler is not None) and any(name.startswith(GRADIENTS) for name in names):
            was, now = ("multiplied", "does not scale") if scaler is not None else ("not multiplied", "scales")
            raise CheckpointError(
                f"checkpoint {source.path} has gradients that wait for an update and are {was} by a loss scale, and "
                f"this pipeline {now} losses; give both PrecisionOptions(scaler=...), or save after an update"
            )
        return scaler if scales else None

    def _require_constants(self, source: TensorSource, there: set[str]) -> None:
        """Raises CheckpointError where parameters that never change have other values than when it was written."""
        known = [name for name in self._constants if name in there]
        for name, number in source.load(known).items() if known else ():
            if not torch.equal(number, self._constants[name]):
                raise CheckpointError(
                    f"checkpoint {source.path} holds adapters alone, and {name.removeprefix(CONSTANTS)} under them "
                    "is not what it was when they were trained: give the model that they were trained on"
                )

    def _stage_extras(
        self, source: TensorSource, there: set[str], notices: list[str]
    ) -> list[tuple[ExtraStateModule, Any]]:
        found: list[tuple[ExtraStateModule, Any]] = []
        by_base = names_by_base(there, EXTRA)
        for extra in self._extras:
            base = _base_of(extra, there)
            if base is None:
                raise CheckpointError(
                    f"checkpoint {source.path} has no extra state of {extra.name or 'the model'}, which its module "
                    "has here: build the model it was written with, or choose another checkpoint"
                )
            if base.endswith(f"@{FIRST}") and base != extra.own:
                notices.append(
                    f"the extra state of {extra.name} differed between the pipelines, replicas or shards that "
                    f"{source.path} comes from, and had none for {extra.holder}: it has that of the first"
                )
            found.append((extra, load_packed(source, base, by_base[base], self._model.device)))
        return found

    def _stage_gradients(self, source: TensorSource, names: Iterable[str]) -> list[tuple[Parameter, Tensor]]:
        """Gradients that wait for an update, whatever kind of schedule they come from."""
        parts: dict[str, list[str]] = {}
        for name in names:
            if name.startswith((GRADIENTS, ASYNCHRONOUS)):
                _, found, stored = name.partition(GRADIENTS)
                if found:
                    parts.setdefault(stored, []).append(name)
        waiting: list[tuple[Parameter, Tensor]] = []
        for stage in self._model.copies.here.values():
            for name, parameter in stage.named_parameters():
                those = parts.get(self._stored_as(name))
                if those and self._steps(parameter):
                    loaded = source.load(those)
                    for each in those:
                        _require_like(source, each, loaded[each], parameter)
                    total = reduce(add, (loaded[each] for each in those)).to(parameter.device)
                    waiting.append((parameter, own_shard(total, parameter)))
        return waiting

    def _stage_updating(self, source: TensorSource, names: Iterable[str], num_updates: int) -> Callable[[], None]:
        """What a schedule with updates keeps besides."""
        assert self._updating is not None
        updating = self._updating
        mine = {
            each: p
            for stage in self._model.copies.here.values()
            for name, p in stage.named_parameters()
            for each in {name, self._stored_as(name)}
        }
        found: dict[str, Tensor] = {}
        for name in names:
            place = _place(name) or ""
            own = place.split("/", 3)
            if len(own) == 4 and own[1].isdecimal() and own[3] in mine:
                found[place] = source.load([name])[name]
                _require_like(source, name, found[place], mine[own[3]])
        return lambda: updating.load(found, num_updates)


class StagedState:
    """What a load will put in place: read, and found right.

    Attributes:
        trial: whether modules take their extra state. notices: what a person should know of it.
    """

    def __init__(
        self,
        state: OptimizerState,
        values: list[tuple[Tensor, Tensor]],
        optimizer: Callable[[], None] | None,
        gradients: list[tuple[Parameter, Tensor]],
        updating: Callable[[], None] | None,
        extras: list[tuple[ExtraStateModule, Any]],
        notices: list[str],
        scaler: dict[str, Any] | None,
    ) -> None:
        self._model = state.model
        self._scaling, self._scaler = state.scaling, scaler
        self._values, self._optimizer, self._gradients = values, optimizer, gradients
        self._updating, self._extras, self.notices = updating, extras, notices
        self.trial = StateTrial(
            StateToGive(
                f"{name} ({type(module).__name__})",
                "extra state",
                copy.deepcopy(value),  # `put` gives it once more
                module.get_extra_state,
                module.set_extra_state,
            )
            for (name, _, module), value in extras
        )

    def put(self) -> None:
        """Puts all in place. Every process must call it."""
        with torch.no_grad():
            for target, value in self._values:
                overwrite(target, value)
        if self._optimizer is not None:
            self._optimizer()
        if self._updating is None:
            self._model.share_values()
            self._model.zero_grad()
        else:
            with self._model.as_whole():  # versions are of whole parameters
                self._model.share_values()
                self._model.zero_grad()
                self._updating()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        if self._scaling is not None:
            self._scaling.begin_again(self._scaler)
        for extra, value in self._extras:  # last, as torch does it
            extra.module.set_extra_state(value)


def extra_to_write(
    extra: Mapping[str, Mapping[str, Tensor]], digests: Sequence[Mapping[str, str]], me: int
) -> dict[str, Tensor]:
    """What this process writes of extra state: one for all holders of a module where they agree, else each its own.

    Args:
        digests: every process's. me: which of them this one is.
    """
    by_module: dict[str, dict[str, tuple[str, int]]] = {}
    for process, found in enumerate(digests):
        for base, digest in found.items():
            by_module.setdefault(base.rpartition("@")[0], {}).setdefault(base, (digest, process))
    tensors: dict[str, Tensor] = {}
    for module, holders in by_module.items():
        if len({digest for digest, _ in holders.values()}) == 1:
            first = min(holders, key=lambda base: holders[base][1])
            if holders[first][1] == me:
                tensors |= {module + name.removeprefix(first): t for name, t in extra[first].items()}
            continue
        for base, (_, process) in holders.items():
            if process == me:
                tensors |= extra[base]
    return tensors


def _buffers(stage: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """By name each buffer of a stage once, and whether state dicts have it: whatever name they give it."""
    kept = {id(value) for value in stage.state_dict(keep_vars=True).values()}
    return {name: (buffer, id(buffer) in kept) for name, buffer in stage.named_buffers()}


def _kind(tensor: Tensor) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def _base_of(extra: ExtraStateModule, there: set[str]) -> str | None:
    """Under which of its names a module's extra state is there: one for all, its own, or the first holder's."""
    bases = (EXTRA + extra.name, extra.own, f"{EXTRA}{extra.name}@{FIRST}")
    return next((base for base in bases if base + AS_JSON in there), None)


def _require_like(source: TensorSource, name: str, tensor: Tensor, parameter: Tensor) -> None:
    if tensor.shape != parameter.shape:
        raise CheckpointError(
            f"checkpoint {source.path}: {name} has shape {tuple(tensor.shape)}, and its parameter "
            f"{tuple(parameter.shape)}: build the model it was written with"
        )


def _require_takes(source: TensorSource, name: str, target: Tensor, value: Tensor) -> None:
    """Raises CheckpointError where a tensor here can't be given the numbers."""
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise CheckpointError(
            f"checkpoint {source.path}: {name} was made here under torch.inference_mode(), and can't be changed "
            "outside of it: make the model outside of it, or load there too"
        )
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1 and not torch.equal(value, value.narrow(dim, 0, 1).expand_as(value)):
            raise CheckpointError(
                f"checkpoint {source.path}: {name} has different numbers along dimension {dim}, where it is one "
                "number here that was expanded: register it as a tensor of its own (clone())"
            )


def _place(name: str) -> str | None:
    """Under which name a schedule with updates takes a tensor over: gradients from others are the owner's."""
    if name.startswith(GRADIENTS):
        return f"{ASYNCHRONOUS}{OWNER}/{name}"
    return name if name.startswith(ASYNCHRONOUS) else None
