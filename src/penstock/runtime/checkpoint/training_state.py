"""A pipeline's state as plain named tensors, under any schedule and number of ranks.

    model/layers.3.mlp.up.weight             parameters and persistent buffers, by their names in the whole model
    constants/layers.3.mlp.up.weight         in place of a parameter that never changes, a number of its values
    buffers/layers.3.mask                    other buffers
    extra/layers.3#data                      what a module's `get_extra_state` gave, see `object_state`
    optimizer/layers.3.mlp.up.weight/exp_avg
    attribute/num_steps#data                 of the optimizer
    gradients/layers.3.mlp.up.weight         where gradients wait for an update

A tied parameter is stored once, under the name it has in its lowest stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from penstock.runtime.checkpoint.object_state import (
    ATTRIBUTE,
    DATA,
    LoadedStates,
    StatefulObject,
    module_with_extra_state,
    states_of,
    suffixes_in,
)
from penstock.runtime.checkpoint.optimizer import PREFIX as OPTIMIZER
from penstock.runtime.checkpoint.optimizer import (
    attribute_objects,
    members_of,
    optimizer_tensors,
    plain_attributes,
    stage_optimizer,
)
from penstock.runtime.checkpoint.reader import Kind, TensorSource
from penstock.runtime.checkpoint.together import together
from penstock.runtime.errors import CheckpointError
from penstock.runtime.mesh.peers import Peers
from penstock.runtime.mesh.process_mesh import ProcessMesh
from penstock.runtime.parameters.optimizer_state import OptimizerState
from penstock.runtime.parameters.updates import GRADIENTS
from penstock.runtime.parameters.updates import PREFIX as ASYNCHRONOUS
from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.dtensor import is_sharded, local, overwrite, own_shard, unexpanded, whole
from penstock.schedule.updates import OWNER

MODEL = "model/"
BUFFERS = "buffers/"
CONSTANTS = "constants/"
SCALER = "scaler"


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


class StagedState(NamedTuple):
    """What a load will put in place: read, and found right.

    Attributes:
        put: puts all in place, and cannot fail. Every process must call it.
        objects: the states of objects, which may not take them. notices: what a person should know.
    """

    put: Callable[[], None]
    objects: LoadedStates
    notices: list[str]

    def put_together(self, peers: Peers, what: str) -> None:
        """Puts all in place in every process, or nothing in any. Raises CheckpointError, with `what` failed."""
        try:
            together(peers, self.objects.give, what)
        except BaseException:
            self.objects.take_back()
            raise
        self.put()


class TrainingState:
    """What a pipeline saves: the stages and the optimizer of this process, under their stored names.

    Of several copies of a stage the owner's is saved, and all get what is loaded. So too gradients that wait for an
    update, and what a schedule with updates keeps besides.

    Attributes:
        modules: those here that have extra state.

    Args:
        trained: what training changes in this process.
    """

    def __init__(self, trained: OptimizerState, mesh: ProcessMesh) -> None:
        self._trained, self._model, self._updating = trained, trained.model, trained.updating
        self._optimizer, self._suffixes = trained.optimizer, suffixes_in(mesh)
        self._stored_as = trained.model.ties.owned_name
        self._tensors: list[tuple[str, Tensor]] = []
        """Stored name, with its prefix -> each parameter and buffer here that has it."""
        self._answers: set[str] = set()
        self._names: dict[Tensor, str] = {}
        self._constants: dict[str, Tensor] = {}
        """Of parameters that never change, by stored name, the number that stands for each."""
        for index, stage in self._model.stages.items():
            self._add_parameters(index, stage)
            for name, (buffer, is_kept) in _buffers(stage).items():
                self._tensors.append(((MODEL if is_kept else BUFFERS) + name, buffer))
                if trained.answers(index, buffer):
                    self._answers.add(name)
        self.modules = [
            module_with_extra_state(name, f"{k}.{trained.holder(index)}", module)
            for (k, index), stage in sorted(self._model.copies.here.items())
            for name, module in (*stage.named_modules(), *stage.around.items())
            if type(module).get_extra_state is not nn.Module.get_extra_state
        ]
        for name, parameter in self._parameters():
            self._names.setdefault(parameter, name)
        if self._updating is not None:
            self._names |= self._updating.names()

    def _parameters(self) -> list[tuple[str, Parameter]]:
        """Stored name and parameter of each copy of a stage here."""
        stages = self._model.copies.here.values()
        return [(self._stored_as(name), each) for stage in stages for name, each in stage.named_parameters()]

    def _add_parameters(self, index: int, stage: Any) -> None:
        for name, parameter in stage.named_parameters():
            stored, answers = self._stored_as(name), self._trained.answers(index, parameter)
            if (number := stage.constants.get(name)) is not None:
                self._constants[CONSTANTS + name] = torch.from_numpy(np.array(number, np.uint64).view(np.int64))
                self._answers |= {name} if answers else set()
                continue
            self._tensors.append((MODEL + stored, parameter))
            self._names.setdefault(parameter, stored)
            if answers and not self._model.ties.is_elsewhere(name):
                self._answers.add(stored)

    # Saving.

    def objects(self) -> list[StatefulObject]:
        """The modules with extra state and the attributes of the optimizer that are saved."""
        if self._optimizer is None:
            return self.modules
        attributes = plain_attributes(self._optimizer, self._names)
        return [*self.modules, *attribute_objects(self._optimizer, attributes, self._suffixes)]

    def share(self) -> CheckpointShare:
        """What this process writes but for objects, and what it helps with. Raises CheckpointError."""
        self._require_loadable()
        tensors, meta = self._all()
        writes = {name: tensor for name, tensor in tensors.items() if self._writes(name)}
        helps = {name: t for name, t in tensors.items() if name not in writes and is_sharded(t)}
        if self._updating is not None:
            kept = self._updating.tensors()
            if self._updating.is_first_shard:
                writes |= kept
            else:
                helps |= {name: tensor for name, tensor in kept.items() if is_sharded(tensor)}
        return CheckpointShare(writes, helps, meta)

    def held(self) -> tuple[dict[str, Tensor], Any]:
        """All that this process holds, whoever writes it, and the optimizer's meta.

        Whole tensors by their stored names: who holds a shard helps to put them together.
        """
        tensors, meta = self._all()
        if self._updating is not None:
            tensors |= self._updating.tensors()
        return {name: whole(tensor) for name, tensor in tensors.items()} | states_of(self.objects())[0], meta

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
        if self._optimizer is None:
            return tensors, None
        state, meta = optimizer_tensors(self._optimizer, self._names)
        return tensors | state, meta

    def _writes(self, name: str) -> bool:
        owner = _owner(name) if name.startswith(OPTIMIZER) else name.partition("/")[2]
        return owner in self._answers

    def _require_loadable(self) -> None:
        """Raises CheckpointError for what the model's state dict has and could not be loaded again."""
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
        there = set(names)
        stepped = {name for members in self.members() for name in members}
        found = {name for name in self.expected() if name in there or name.startswith(MODEL)}
        found |= self._constants.keys() & there
        found |= set(self._kept_by_updates(there).values())
        found |= {name for name in there if name.startswith(OPTIMIZER) and _owner(name) in stepped}
        found |= {name for each in self._objects_in(there) if (name := each.name_in(there)) is not None}
        return sorted(found)

    def expected(self) -> dict[str, Kind]:
        """Stored name -> shape and type of the model's parameters and buffers in this process."""
        return {name: _kind(tensor) for name, tensor in self._tensors}

    def members(self) -> list[list[str]]:
        """The names of the parameters of each group of the optimizer here."""
        return [] if self._optimizer is None else members_of(self._optimizer, self._names)

    def aliases(self) -> dict[str, str]:
        """By each other name of a parameter here, the name that it is stored under."""
        found: dict[str, str] = {}
        for stage in self._model.stages.values():
            first: dict[Parameter, str] = {}
            for name, parameter in stage.named_parameters(remove_duplicate=False):
                stored = self._stored_as(first.setdefault(parameter, name))
                found |= {name: stored} if name != stored else {}
        return found

    def _objects_in(self, there: Iterable[str]) -> list[StatefulObject]:
        """The objects here whose states are among these names, or have to be."""
        if self._optimizer is None:
            return self.modules
        attributes = {
            name.removeprefix(ATTRIBUTE).removesuffix(DATA).partition("@")[0]
            for name in there
            if name.startswith(ATTRIBUTE)
        }
        return [*self.modules, *attribute_objects(self._optimizer, sorted(attributes), self._suffixes)]

    def _kept_by_updates(self, there: Iterable[str]) -> dict[str, str]:
        """Of these names what a schedule with updates keeps of the parameters here.

        By the name under which such a schedule takes it over: gradients from other schedules are the owner's.
        """
        here = {name for stage in self._model.copies.here.values() for name, _ in stage.named_parameters()}
        here |= set(map(self._stored_as, here))
        found: dict[str, str] = {}
        for name in sorted(there):
            place = f"{ASYNCHRONOUS}{OWNER}/{name}" if name.startswith(GRADIENTS) else name
            if place.startswith(ASYNCHRONOUS) and place.split("/", 3)[-1] in here:
                found[place] = name
        return found

    # Loading.

    def stage(
        self,
        source: TensorSource,
        num_updates: int,
        counters: Mapping[str, Any],
        members: Sequence[list[list[str]]],
        objects: Sequence[StatefulObject] = (),
    ) -> StagedState:
        """Reads all that is loaded here and finds it right, and changes nothing.

        Args:
            counters: with the numbers of loss scaling, as `scaler` gives them.
            members: of every process. objects: of the caller.

        Raises:
            CheckpointError: something is damaged or does not fit.
        """
        there = set(source.names())
        values, notices = self._stage_values(source, there)
        self._require_constants(source, there)
        put_optimizer = None
        if self._optimizer is not None:
            put_optimizer = stage_optimizer(self._optimizer, self._names, source, members)
        states = LoadedStates([*self._objects_in(there), *objects], source, self._model.device)
        scaler = self._scaler_of(source, there, counters.get(SCALER))
        model, updating, scaling = self._model, self._updating, self._trained.scaling
        gradients = self._stage_gradients(source, there) if updating is None else []
        kept = {}
        if updating is not None:
            kept = {place: source.load([name])[name] for place, name in self._kept_by_updates(there).items()}

        def put() -> None:
            with torch.no_grad():
                for target, value in values:
                    overwrite(target, value)
            if put_optimizer is not None:
                put_optimizer()
            with nullcontext() if updating is None else model.as_whole():  # versions are of whole parameters
                model.share_values()
                model.zero_grad()
                if updating is not None:
                    updating.load(kept, num_updates)
            for parameter, gradient in gradients:
                parameter.grad = gradient
            if scaling is not None:
                scaling.begin_again(scaler)
            states.give_again()

        return StagedState(put, states, notices)

    def _stage_values(self, source: TensorSource, there: set[str]) -> tuple[list[tuple[Tensor, Tensor]], list[str]]:
        """Pairs of a parameter or buffer and its new value, and notices."""
        targets: dict[str, list[Tensor]] = {}
        for name, tensor in self._tensors:
            targets.setdefault(name, []).append(tensor)
        values: list[tuple[Tensor, Tensor]] = []
        notices: list[str] = []
        for name in sorted(targets):
            value = source.load([name])[name] if name in there or name.startswith(MODEL) else None
            if value is None or (name.startswith(BUFFERS) and _kind(value) != _kind(targets[name][0])):
                found = "not there" if value is None else "another"
                notices.append(
                    f"{name.removeprefix(BUFFERS)}, a buffer that is not persistent, is {found} in {source.path}: it "
                    "stays as its module made it"
                )
                continue
            here = [(local(target.detach()), local(own_shard(value, target))) for target in targets[name]]
            for target, mine in here:
                first = unexpanded(mine, target)
                if first.numel() < mine.numel() and hash_of(first.expand_as(mine)) != hash_of(mine):
                    reason = "is expanded here, and has other values for one place there: make it contiguous()"
                elif target.is_inference() and not torch.is_inference_mode_enabled():
                    reason = "was made in inference mode, and cannot be set outside of it: make it outside"
                else:
                    continue
                raise CheckpointError(f"checkpoint {source.path} does not fit: {name.partition('/')[2]} {reason}")
            values += here
        return values, notices

    def _require_constants(self, source: TensorSource, there: set[str]) -> None:
        """Raises CheckpointError where parameters that never change have other values than when it was written."""
        for name, number in source.load(sorted(self._constants.keys() & there)).items():
            if not torch.equal(number, self._constants[name]):
                raise CheckpointError(
                    f"checkpoint {source.path} holds adapters alone, and {name.removeprefix(CONSTANTS)} under them "
                    "is not what it was when they were trained: give the model that they were trained on"
                )

    def _scaler_of(self, source: TensorSource, there: Iterable[str], stored: Any) -> dict[str, Any] | None:
        """The numbers with which loss scaling goes on; None where it begins, or there is none."""
        scales = self._trained.scaling is not None and self._trained.scaling.scale is not None
        if scales != (stored is not None) and any(name.startswith(GRADIENTS) for name in there):
            was, now = ("multiplied", "does not scale") if stored is not None else ("not multiplied", "scales")
            raise CheckpointError(
                f"checkpoint {source.path} has gradients that wait for an update and are {was} by a loss scale, and "
                f"this pipeline {now} losses; give both PrecisionOptions(scaler=...), or save after an update"
            )
        return stored if scales else None

    def _stage_gradients(self, source: TensorSource, there: Iterable[str]) -> list[tuple[Parameter, Tensor]]:
        """Gradients that wait for an update, whatever kind of schedule they come from."""
        parts: dict[str, list[str]] = {}
        for name in sorted(there):
            if name.startswith((GRADIENTS, ASYNCHRONOUS)) and (stored := name.partition(GRADIENTS)[2]):
                parts.setdefault(stored, []).append(name)
        waiting: list[tuple[Parameter, Tensor]] = []
        for name, parameter in self._parameters():
            if (those := parts.get(name)) and self._trained.steps(parameter):
                loaded = source.load(those)
                total = reduce(add, (loaded[each] for each in those)).to(parameter.device)
                waiting.append((parameter, own_shard(total, parameter)))
        return waiting


def _buffers(stage: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """By name each buffer of a stage once, and whether state dicts have it: whatever name they give it."""
    kept = {id(value) for value in stage.state_dict(keep_vars=True).values()}
    return {name: (buffer, id(buffer) in kept) for name, buffer in stage.named_buffers()}


def _kind(tensor: Tensor) -> Kind:
    return tuple(tensor.shape), tensor.dtype


def _owner(name: str) -> str:
    """The parameter that a part of an optimizer's state belongs to."""
    return name.removeprefix(OPTIMIZER).rpartition("/")[0]
