"""An optimizer's state as plain named tensors, and back, whatever the rank that will hold each parameter.

    optimizer/layers.3.qkv.weight/exp_avg       a state tensor
    optimizer/layers.3.qkv.weight/calls#data    any other value, see `object_state`
    optimizer/layers.3.qkv.weight/@average      an entry of an attribute, a dict whose keys are parameters
    optimizer/layers.3.qkv.weight/@@average     the same of a dict whose keys are their ids
    attribute/num_steps#data                    any other attribute

The options of the parameter groups are the meta, with the names of each group's parameters. So a load gives each
parameter the options that it had, whatever the order of the groups and the processes that hold them.
"""

from __future__ import annotations

import base64
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.checkpoint.folder import JSON
from penstock.runtime.checkpoint.object_state import ATTRIBUTE, DATA, StatefulObject, digest_of, pack, unpack
from penstock.runtime.errors import CheckpointError, listed
from penstock.runtime.parameters.optimizer import attributes_of, optimizers_in, set_attribute, tensors_in
from penstock.runtime.tensors.digest import bytes_of
from penstock.runtime.tensors.dtensor import own_shard

PREFIX = "optimizer/"
ON_HOST = ("step", "mu_product")  # 0-dim state that torch keeps in host memory unless capturable or fused
_OF_PROCESS = ("params", "param_names", "foreach", "fused", "capturable")
"""What of a group is not stored: its parameters, and how this process computes."""
_PLAIN = (int, float, complex, str, bytes, Tensor, np.ndarray, np.generic, Mapping, Set, list, tuple, deque)
"""Options of these types, and None, are stored. Functions, devices and other objects stay as they are here."""
Names = Mapping[Tensor, str]
"""By parameter its name in a checkpoint."""


def optimizer_tensors(optimizer: Optimizer, names: Names) -> tuple[dict[str, Tensor], JSON]:
    """The state of parameters as named tensors, and the meta to store as `meta["optimizer"]`.

    The tensors are the optimizer's own, not copies.

    Raises `CheckpointError` for a parameter without a name, state of no parameter, state that can't be stored, and
    other optimizers within the optimizer.
    """
    kind = type(optimizer).__name__
    if inside := [path for path in optimizers_in(optimizer) if path]:
        raise CheckpointError(
            f"{kind} holds another optimizer ({inside[0]}), whose state a checkpoint would not bring back: give one "
            "optimizer with a group for each, such as ps.runtime.MuonAdamW"
        )
    if other := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise CheckpointError(
            f"{kind} keeps state under {other[0]!r:.60}, which is no parameter: keep it in an attribute, or in the "
            "state of a parameter"
        )
    tensors: dict[str, Tensor] = {}

    def add(parameter: str, key: str, value: Any) -> None:
        if {"/", "#"} & set(key):
            raise CheckpointError(f"{kind}'s state of {parameter} has the key {key!r}: give one without / and #")
        name = f"{PREFIX}{parameter}/{key}"
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors[name + DATA] = pack(value, f"{kind}'s state {key!r} of {parameter}")

    groups = []
    for number, (group, members) in enumerate(zip(optimizer.param_groups, members_of(optimizer, names), strict=True)):
        for parameter in group["params"]:
            name = names[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                add(name, key, value)
        packed = pack(_options(group, names), f"{kind}'s parameter group {number}")
        groups.append({"members": members, "options": base64.b64encode(bytes_of(packed)).decode()})
    by_id = {id(parameter): name for parameter, name in names.items()}
    for attribute, held in attributes_by_parameter(optimizer, names).items():
        for key, value in held.items():
            is_id = isinstance(key, int)
            add(by_id[key] if is_id else names[key], ("@@" if is_id else "@") + attribute, value)
    return tensors, {"class": kind, "groups": groups}


def merged_meta(metas: Iterable[JSON]) -> JSON:
    """The meta of all processes' optimizers as one; None without any."""
    first, *others = [meta for meta in metas if meta is not None] or [None]
    for meta in others:
        first["groups"] += [group for group in meta["groups"] if group not in first["groups"]]
    return first


def plain_attributes(optimizer: Optimizer, names: Names) -> list[str]:
    """The attributes that are state and do not go by parameter.

    Parameters alone, and what torch has of processes and devices, are no state. Raises `CheckpointError` for an
    attribute that holds other tensors beside parameters.
    """
    found, by_parameter = [], attributes_by_parameter(optimizer, names)
    for name, value in attributes_of(optimizer).items():
        tensors = list(tensors_in(value))
        num_parameters = sum(tensor in names for tensor in tensors)
        if 0 < num_parameters < len(tensors) and name not in by_parameter:
            raise CheckpointError(
                f"attribute {name} of {type(optimizer).__name__} holds tensors beside parameters, which a checkpoint "
                "would not bring back: keep them in the state of a parameter, or in a dict with parameters as keys"
            )
        of_torch = type(value).__module__.startswith("torch") and not isinstance(value, torch.Generator)
        is_state = len(tensors) > num_parameters if tensors else not of_torch
        if is_state and name not in by_parameter:
            found.append(name)
    return found


def attribute_objects(
    optimizer: Optimizer, attributes: Iterable[str], suffixes: tuple[str, ...]
) -> list[StatefulObject]:
    """The attributes of these names, as objects with state."""
    kind = type(optimizer).__name__

    def made(name: str) -> StatefulObject:
        get, put = (lambda: attributes_of(optimizer).get(name)), partial(set_attribute, optimizer, name)
        return StatefulObject(ATTRIBUTE + name, suffixes, f"attribute {name} of {kind}", get, put)

    return [made(name) for name in attributes]


def members_of(optimizer: Optimizer, names: Names) -> list[list[str]]:
    """The names of the parameters of each group here."""
    return [sorted({names[p] for p in group["params"] if p in names}) for group in optimizer.param_groups]


def stage_optimizer(
    optimizer: Optimizer,
    names: Names,
    tensors: Mapping[str, Tensor],
    meta: JSON,
    what: str = "checkpoint",
    others: Sequence[list[list[str]]] = (),
) -> Callable[[], None]:
    """Reads the state that the optimizer's parameters had in the checkpoint, and its groups' options.

    A parameter without state in the checkpoint has none afterwards. State keeps its dtype and goes to the
    parameter's device. A group gets the options that its parameters had, see `_options_here`.

    Args:
        meta: of the optimizer. what: what has all this, in errors.
        others: of each process, the names of the parameters of each group there.

    Returns:
        What puts all of it in place, and cannot fail.

    Raises:
        CheckpointError: a checkpoint without an optimizer or of another one, parameters in other groups, or options
            of another kind; also damage. Nothing is changed then.
    """
    kind = type(optimizer).__name__
    if meta is None or meta["class"] != kind:
        there = "no optimizer" if meta is None else meta["class"]
        raise CheckpointError(f"{what} holds {there}, this run has {kind}: use the optimizer it was written with")
    chosen = _options_here(meta["groups"], optimizer, names, others, what)
    parts: dict[str, list[str]] = defaultdict(list)
    for full in tensors:
        if full.startswith(PREFIX):
            parts[full.removeprefix(PREFIX).rpartition("/")[0]].append(full)
    states: list[tuple[Tensor, dict[str, Any]]] = []
    attributes: dict[str, dict[Any, Any]] = {name: {} for name in attributes_by_parameter(optimizer, names)}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Tied parameters are stored once, and each updates a state of its own: each is read for itself.
            state: dict[str, Any] = {}
            for full in sorted(parts[names[parameter]]):
                key, value = _read(full, tensors[full], parameter, group)
                if key.startswith("@"):
                    of_parameter = id(parameter) if key.startswith("@@") else parameter
                    attributes.setdefault(key.lstrip("@"), {})[of_parameter] = value
                else:
                    state[key] = value
            states.append((parameter, state))

    def put() -> None:
        for group, options in zip(optimizer.param_groups, chosen, strict=True):
            group.update(options)
        for parameter, state in states:
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        for name, value in attributes.items():
            set_attribute(optimizer, name, value)

    return put


def _read(full: str, tensor: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> tuple[str, Any]:
    """The key and the value of a part of a parameter's state."""
    key = full.rpartition("/")[2]
    if key.endswith(DATA):
        return key.removesuffix(DATA), unpack(tensor, parameter.device)
    if key in ON_HOST and not tensor.dim() and not (group.get("capturable") or group.get("fused")):
        return key, tensor
    tensor = tensor.to(parameter.device)
    return key, own_shard(tensor, parameter) if tensor.shape == parameter.shape else tensor


def _options_here(
    stored: Sequence[Mapping[str, Any]],
    optimizer: Optimizer,
    names: Names,
    others: Sequence[list[list[str]]],
    what: str,
) -> list[dict[str, Any]]:
    """The options of each group as they are to be: those that its parameters had, in whatever group that was.

        stored    0 a.weight b.weight, decay 0.1    1 a.bias b.bias, decay 0
        here      0 a.bias                          1 a.weight                  gets 1 and 0
                  0 a.weight a.bias                                             refused, as a.bias has moved

    A group that is empty here has those of another process with as many groups.
    """
    device = next((p.device for group in optimizer.param_groups for p in group["params"]), None)
    options = [_unpacked(group, device) for group in stored]
    home = {name: number for number, group in reversed([*enumerate(stored)]) for name in group["members"]}
    mine = members_of(optimizer, names)
    chosen: list[dict[str, Any]] = []
    for number, own in enumerate(mine):
        known = own or next((each[number] for each in others if len(each) == len(mine) and each[number]), [])
        stays = [name for name in known if name in home]
        first = home[stays[0]] if stays else 0
        moved = next(
            (name for name in stays if home[name] != first and _differing(options[home[name]], options[first])), None
        )
        reason = None
        if known and not stays:
            reason = f"no parameter group there has {listed(known)}"
        elif moved is not None:
            changed = listed(_differing(options[home[moved]], options[first]))
            reason = f"{moved} is beside {stays[0]} here, and had another {changed}"
        if reason is not None:
            raise CheckpointError(
                f"{what} does not fit parameter group {number} here: {reason}: use the groups it was written with"
            )
        is_known = stays or not any(_differing(each, options[0]) for each in options)
        chosen.append(_unpacked(stored[first], device) if is_known else {})
    return chosen


def _options(group: Mapping[str, Any], names: Names) -> dict[str, Any]:
    """What is stored of a group. Parameters among the options are those of this process."""
    return {
        key: value
        for key, value in group.items()
        if key not in _OF_PROCESS
        and (value is None or isinstance(value, _PLAIN))
        and not any(tensor in names for tensor in tensors_in(value))
    }


def _unpacked(group: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """The options of a group in a checkpoint."""
    packed = bytearray(base64.b64decode(group["options"]))
    options: dict[str, Any] = unpack(torch.frombuffer(packed, dtype=torch.uint8), device)
    return options


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of options that are not alike."""
    return sorted(key for key in {**one, **other} if digest_of(one.get(key)) != digest_of(other.get(key)))


def attributes_by_parameter(optimizer: Optimizer, names: Names) -> dict[str, dict[Any, Any]]:
    """By name the attributes that are dicts whose keys are parameters, or ids of them; no empty ones."""
    ids = set(map(id, names))

    def is_parameter(key: Any) -> bool:
        return key in ids if isinstance(key, int) else isinstance(key, Tensor) and key in names

    dicts = {name: value for name, value in attributes_of(optimizer).items() if isinstance(value, dict)}
    return {name: value for name, value in dicts.items() if value and all(map(is_parameter, value))}
