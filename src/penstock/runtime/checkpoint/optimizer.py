"""An optimizer's state as plain named tensors, and back, whatever the rank that will hold each parameter.

    optimizer/layers.3.qkv.weight/exp_avg      a state tensor
    optimizer/layers.3.qkv.weight/calls#json   any other plain data, see `codec`
    optimizer/layers.3.qkv.weight/calls#0      a tensor inside it
    optimizer/layers.3.qkv.weight/muon:step    state in an optimizer that lies in an attribute of this one

The options of the parameter groups are small: they are the meta, with the names of each group's parameters. So a load
gives each parameter the options that it had, whatever the order of the groups and the processes that hold them.
"""

from __future__ import annotations

import copy
from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.runtime.checkpoint.codec import UnstorableValue, digests_of, from_json, pack, to_json, unpack
from penstock.runtime.checkpoint.reader import JSON, TensorSource
from penstock.runtime.errors import CheckpointError, listed
from penstock.runtime.parameters.optimizer import (
    attributes_of,
    mark_of,
    optimizers_in,
    plain_attributes,
    set_attribute,
    tensors_in,
)
from penstock.runtime.tensors.dtensor import own_shard

PREFIX = "optimizer/"
ON_HOST = ("step", "mu_product")  # 0-dim state that torch keeps in host memory unless capturable or fused
ATTRIBUTES = "@"
"""In place of a parameter's name, in the names of attributes."""
OWN = "own"
"""In place of the digest of an attribute that each process keeps as its own constructor made it."""
_STATEFUL = "save it by itself, with pipe.save(..., stateful=...)"
_KERNELS = ("foreach", "fused", "capturable")
"""Options that change no update, and may differ between processes."""
DATA = (Tensor, np.ndarray, np.generic, Mapping, Set, list, tuple, deque)
"""What an optimizer may count on finding among its options again."""
StateNames = Mapping[tuple[str, str], Mapping[str, list[str]]]
"""By parameter and mark, and then by key, the names of the tensors of a part of the state."""


def optimizer_tensors(
    optimizer: Optimizer, names: Mapping[Tensor, str], constructed: Mapping[str, str] | None = None
) -> tuple[dict[str, Tensor], JSON]:
    """The state as tensors named `optimizer/<parameter>/<key>`, and the meta to store as `meta["optimizer"]`.

    The tensors are the optimizer's own, not copies. Functions and other objects among the options are left out.

    Raises `CheckpointError` for a parameter without a name, state of no parameter, state that is no plain data, and
    data that would be left out without a word: tensors among the options, what the optimizer's own `state_dict` has
    besides, and attributes that are no plain data.

    Args:
        constructed: `plain_attributes` when the optimizer was new. An attribute that is still the same may differ
            between processes, such as a rank. Then it is not stored.
    """
    tensors, digests = _attributes(optimizer, names)
    every, taken = optimizers_in(optimizer), set[int]()
    if len(every) == 1:  # else it has what they have, in a form of its own
        _require_stored(optimizer, digests)
    metas: dict[str, Any] = {}
    for path, one in reversed(every.items()):  # one may show the state of those within it as its own
        found, metas[path] = _tensors_of(one, names, mark_of(path), taken)
        tensors |= found
    now = plain_attributes(optimizer).items() & (constructed or {}).items()
    return tensors, {**metas.pop(""), "inside": metas, "attributes": digests, "unchanged": sorted(dict(now))}


def merged_meta(metas: Iterable[JSON]) -> JSON:
    """The meta of all processes' optimizers as one; None without any.

    Raises:
        CheckpointError: an attribute differs between processes.
    """
    first, *others = [meta for meta in metas if meta is not None] or [None]
    for meta in others:
        for path, digest in meta["attributes"].items():
            if first["attributes"].setdefault(path, digest) == digest:
                continue
            if path not in first["unchanged"] or path not in meta["unchanged"]:
                raise CheckpointError(
                    f"attribute {path} of {first['class']} differs between processes, and a checkpoint has one: keep "
                    f"it in the state of each parameter, in a dict with parameters as keys, or {_STATEFUL}"
                )
            first["attributes"][path] = OWN
        for path, each in {"": meta, **meta["inside"]}.items():
            known = first["inside"].setdefault(path, each) if path else first
            for group, members in zip(each["groups"], each["members"], strict=True):
                if (group, members) not in zip(known["groups"], known["members"], strict=True):
                    known["groups"].append(group)
                    known["members"].append(members)
    return first


def _attributes(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """What an optimizer and those within it keep in attributes, as tensors. And by attribute a digest of what all
    processes must have alike; empty for what goes by parameter.

        optimizer/@/num_steps#json           data
        optimizer/layers.3.bias/@average     an entry of a dict whose keys are parameters, or (@@) their ids
    """
    by_id = {id(p): name for p, name in names.items()}
    tensors: dict[str, Tensor] = {}
    digests: dict[str, str] = {}
    for path, value in _stateful(optimizer, by_id).items():
        what = f"attribute {path} of {type(optimizer).__name__}"
        if _is_keyed(value, by_id):
            digests[path] = ""
            for key, each in value.items():
                mark = "@@" if isinstance(key, int) else "@"
                base = f"{PREFIX}{by_id[_id_of(key)]}/{mark}{path}"
                tensors |= {base: each} if isinstance(each, Tensor) else pack(base, each, what)
            continue
        if any(id(tensor) in by_id for tensor in tensors_in(value)):
            raise CheckpointError(
                f"{what} holds tensors beside parameters, which a checkpoint would not bring back: keep them in the "
                f"state of a parameter, or in a dict with parameters as keys, or {_STATEFUL}"
            )
        packed = pack(f"{PREFIX}{ATTRIBUTES}/{path}", value, what)
        digests |= digests_of({path: packed})
        tensors |= packed
    return tensors, digests


def _stateful(optimizer: Optimizer, by_id: Container[int]) -> dict[str, Any]:
    """By path the attributes that are state, of an optimizer and those within it: neither parameters alone, nor what
    torch has of processes and devices.
    """
    every = optimizers_in(optimizer)
    found: dict[str, Any] = {}
    for path, one in every.items():
        for name, value in attributes_of(one).items():
            tensors = list(tensors_in(value))
            is_whole = tensors and all(id(tensor) in by_id for tensor in tensors)
            is_told = isinstance(value, Tensor | nn.Module | torch.Generator)  # stored, or refused
            of_torch = type(value).__module__.startswith("torch") and not is_told
            is_state = any(value is each.state for each in every.values())
            of_model = isinstance(value, nn.Module) and not tensors
            if _is_keyed(value, by_id) or not (is_whole or of_torch or of_model):
                found |= {} if is_state else {mark_of(path) + name: value}
    return found


def _is_keyed(value: Any, by_id: Container[int]) -> bool:
    """Whether a value is a dict whose keys are parameters, or ids of them; so is an empty one."""
    return isinstance(value, dict) and all(_id_of(key) in by_id for key in value)


def _id_of(key: Any) -> int:
    return key if isinstance(key, int) else id(key)


def _tensors_of(
    optimizer: Optimizer, names: Mapping[Tensor, str], mark: str, taken: set[int]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The state and meta of one optimizer.

    Args:
        taken: the ids of tensors of the state of others within it.
    """
    kind = type(optimizer).__name__
    if other := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise CheckpointError(
            f"{kind} keeps state under {other[0]!r:.60}, which is no parameter, and a checkpoint goes by "
            "their names: keep it in the state of a parameter, or in a parameter group"
        )
    tensors: dict[str, Tensor] = {}
    of_others = set(taken)
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        if mark and parameter not in names and not optimizer.state.get(parameter):
            continue  # one of its own, as torch's optimizers want one to begin with
        name = _name(names, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(key, str) or "/" in key or "#" in key:
                raise CheckpointError(f"{kind}'s state of {name} has the key {key!r}: keys are text without / and #")
            if isinstance(value, Tensor):
                if id(value) in of_others:
                    continue
                tensors[f"{PREFIX}{name}/{mark}{key}"] = value
                taken.add(id(value))
            else:
                tensors |= pack(f"{PREFIX}{name}/{mark}{key}", value, f"{kind}'s state {key!r} of {name}")
    groups = [
        _options(group, f"{kind}'s parameter group {place}") for place, group in enumerate(optimizer.param_groups)
    ]
    return tensors, {"class": kind, "groups": groups, "members": members_of(optimizer, names)}


def _require_stored(optimizer: Optimizer, attributes: Mapping[str, str]) -> None:
    """Raises CheckpointError for what its state dict has that is no attribute, such as by a hook."""
    others = sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"} - attributes.keys()))
    if others:
        raise CheckpointError(
            f"the state dict of {type(optimizer).__name__} has {', '.join(others)} besides the state of its "
            "parameters and its parameter groups, which a checkpoint would not bring back: keep it in an attribute, "
            "in the state of a parameter, or as a number in a parameter group"
        )


def _options(group: Mapping[str, Any], what: str) -> JSON:
    """What JSON can say of a group. Raises CheckpointError for data that it cannot say."""
    options = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            try:
                options[key] = to_json(value)
            except UnstorableValue as error:
                if isinstance(value, DATA):
                    raise CheckpointError(
                        f"{what} has a value in its option {key!r} that a checkpoint would not bring back ({error}): "
                        "keep tensors in the state of a parameter, and plain data in options"
                    ) from None
    return options


def members_of(optimizer: Optimizer, names: Mapping[Tensor, str]) -> list[list[str]]:
    """The names of the parameters of each group here."""
    return [sorted({names[p] for p in group["params"] if p in names}) for group in optimizer.param_groups]


def stage_optimizer(
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    source: TensorSource,
    others: Sequence[Mapping[str, list[list[str]]]] = (),
) -> Callable[[], None]:
    """Reads the state that the optimizer's parameters had in the checkpoint, and its groups' options.

    A parameter without state in the checkpoint has none afterwards. State keeps its dtype and goes to the
    parameter's device. A group gets the options that its parameters had, see `_matched`.

    Args:
        others: by path in the optimizer of each process, the names of the parameters of each group there.

    Returns:
        What puts all of it in place, and cannot fail.

    Raises:
        CheckpointError: a checkpoint without an optimizer or of another one, parameters in other groups, or options
            of another kind; also damage. Nothing is changed then.
    """
    every, what = optimizers_in(optimizer), f"checkpoint {source.path}"
    metas = _read_metas(optimizer, every, source)
    stored = _state_names(source, [mark_of(path) for path in every if path])
    options: list[tuple[dict[str, Any], dict[str, Any]]] = []
    found: list[tuple[Optimizer, Tensor, dict[str, Any]]] = []
    values = _read_attributes(every, names, source, metas[""]["attributes"], stored)
    for path, one in every.items():
        members = [each[path] for each in others if path in each]
        groups = _matched(metas[path], one, names, members, what)
        options += zip(one.param_groups, groups, strict=True)
        for group, chosen in zip(one.param_groups, groups, strict=True):
            kept_on_host = not (chosen.get("capturable") or chosen.get("fused"))
            for parameter in group["params"]:
                if path and parameter not in names:
                    continue
                # Tied parameters are stored once, and each updates a state of its own: each is read for itself.
                parts = stored.get((_name(names, parameter), mark_of(path)), {})
                found.append((one, parameter, _read_state(source, parts, parameter, kept_on_host)))

    def put() -> None:
        filled: dict[int, tuple[Any, Any]] = {}
        for group, chosen in options:
            for key, value in chosen.items():
                current = group.get(key)
                if isinstance(current, DATA) and filled.setdefault(id(current), (current, value))[1] != value:
                    current = copy.deepcopy(current)  # groups share it here, and had different values
                group[key] = _as_current(value, current)
        for one, parameter, state in found:
            one.state.pop(parameter, None)
            if state:
                one.state[parameter] = state
        for one, name, value in values:
            set_attribute(one, name, value)

    return put


def _state_names(source: TensorSource, marks: Iterable[str]) -> StateNames:
    """The names of all parts of the state in a checkpoint."""
    longest_first = (*sorted(marks, key=len, reverse=True), ATTRIBUTES)
    stored: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for full in source.names():
        if full.startswith(PREFIX):
            name, _, key = full.removeprefix(PREFIX).rpartition("/")
            mark = next((mark for mark in longest_first if key.startswith(mark)), "")
            stored[name, mark][key.removeprefix(mark).partition("#")[0]].append(full)
    return stored


def _read_state(
    source: TensorSource, parts: Mapping[str, list[str]], parameter: Tensor, kept_on_host: bool
) -> dict[str, Any]:
    """The state of a parameter, by key. `parts` has the names of the tensors of each part."""
    state: dict[str, Any] = {}
    for key, fulls in parts.items():
        base, is_packed, _ = fulls[0].partition("#")
        if is_packed:
            state[key] = unpack(base, source.load(fulls), parameter.device)
            continue
        value = source.load(fulls)[base]
        if key not in ON_HOST or value.dim() or not kept_on_host:
            value = value.to(parameter.device)
            value = own_shard(value, parameter) if value.shape == parameter.shape else value
        state[key] = value
    return state


def _read_attributes(
    every: Mapping[str, Optimizer],
    names: Mapping[Tensor, str],
    source: TensorSource,
    digests: Mapping[str, str],
    stored: StateNames,
) -> list[tuple[Optimizer, str, Any]]:
    """Of each attribute the optimizer, its name there, and the value that it is to have."""
    values: dict[str, Any] = {path: {} for path, digest in digests.items() if digest != OWN}
    stepped = {p for one in every.values() for group in one.param_groups for p in group["params"] if p in names}
    device = next((p.device for p in stepped), None)
    for parts in (parts for (name, _), parts in stored.items() if name == ATTRIBUTES):
        for fulls in parts.values():
            base = fulls[0].partition("#")[0]
            if (path := base.removeprefix(f"{PREFIX}{ATTRIBUTES}/")) in values:
                values[path] = unpack(base, source.load(fulls), device)
    for parameter in stepped:
        parts = stored.get((names[parameter], ATTRIBUTES), {})
        for key, value in _read_state(source, parts, parameter, False).items():
            values.setdefault(key.lstrip("@"), {})[id(parameter) if key.startswith("@") else parameter] = value
    return [(every[path.rpartition(":")[0]], path.rpartition(":")[2], value) for path, value in values.items()]


def _read_metas(
    optimizer: Optimizer, every: Mapping[str, Optimizer], source: TensorSource
) -> dict[str, dict[str, Any]]:
    """By path the meta of an optimizer and those within it."""
    meta = source.meta.get("optimizer")
    if meta is None:
        raise CheckpointError(f"checkpoint {source.path} holds no optimizer: load the model alone, or choose another")
    metas = {"": meta, **meta["inside"]}
    for path in sorted(metas.keys() | every.keys()):
        here = type(every[path]).__name__ if path in every else "none"
        there = metas[path]["class"] if path in metas else "no optimizer"
        if there != here:
            where = f" at {path} of {type(optimizer).__name__}" if path else ""
            raise CheckpointError(
                f"checkpoint {source.path} holds {there}{where}, this run has {here}: use the optimizer it was "
                "written with, which makes all optimizers within it at once"
            )
    return metas


def _matched(
    meta: Mapping[str, Any],
    optimizer: Optimizer,
    names: Mapping[Tensor, str],
    others: Sequence[list[list[str]]],
    what: str,
) -> list[dict[str, Any]]:
    """The options of each group as they are to be: those that its parameters had, in whatever group that was.

        stored    0 a.weight b.weight, decay 0.1    1 a.bias b.bias, decay 0
        here      0 a.bias                          1 a.weight                  gets 1 and 0
                  0 a.weight a.bias                                             refused, as a.bias has moved

    Args:
        others: of each process the names of its groups' parameters. A group that is empty here has those of another
            process with as many groups.
    """
    stored, mine = meta["groups"], members_of(optimizer, names)
    home: dict[str, int] = {}
    for place, those in enumerate(meta["members"]):
        home = dict.fromkeys(those, place) | home
    chosen: list[dict[str, Any]] = []
    users: dict[int, int] = {}
    for number, own in enumerate(mine):
        known = own or next((each[number] for each in others if len(each) == len(mine) and each[number]), [])
        stays = [name for name in known if name in home]
        reason = ""
        if known and not stays:
            reason = f"no parameter group there has {listed(known)}, which are parameter group {number} here"
        first = home[stays[0]] if stays else 0
        if moved := [name for name in stays if _differing(stored[home[name]], stored[first])]:
            options = _differing(stored[first], stored[home[moved[0]]])
            reason = (
                f"parameter group {number} has {listed(moved)} beside {stays[0]} here, which had another "
                f"{listed(options)}"
            )
        elif stays and own:
            before = users.setdefault(first, number)
            now = [_options(optimizer.param_groups[k], what) for k in (before, number)]
            if options := _differing(*now):
                reason = (
                    f"{mine[before][0]} and {own[0]} were in one parameter group, and are in two groups with another "
                    f"{listed(options)} here"
                )
        if reason:
            raise CheckpointError(f"{what}: {reason}: use the groups it was written with")
        alike = stays or not any(_differing(each, stored[0]) for each in stored)
        chosen.append({key: from_json(value) for key, value in stored[first].items()} if alike else {})
    return chosen


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names of options that are not alike, of those that decide about updates."""
    return sorted(key for key in {**one, **other} if key not in _KERNELS and one.get(key) != other.get(key))


def _name(names: Mapping[Tensor, str], parameter: Tensor) -> str:
    if parameter not in names:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that has no name: "
            "give names for all of its parameters"
        )
    return names[parameter]


def _as_current(value: Any, current: Any) -> Any:
    """An option as it is to be. Tensors stay tensors, as an update with floats rounds otherwise; dicts, sets, lists
    stay the same objects, as groups may share them.
    """
    if isinstance(current, Tensor) and isinstance(value, (int, float)):
        return current.fill_(value)
    if isinstance(value, (int, float, str)) and isinstance(current, type(value)) and current == value:
        return current  # such as a member of an IntEnum
    if type(value) is tuple and hasattr(current, "_make"):
        return current._make(map(_as_current, value, current))
    if type(value) is not type(current):
        return value
    if isinstance(value, dict):
        value = {key: _as_current(each, current.get(key)) for key, each in value.items()}
    elif isinstance(value, (tuple, list)):
        value = type(value)(map(_as_current, value, (*current, *[None] * len(value))))
    if isinstance(current, (dict, set, list)):
        current.clear()
        (current.extend if isinstance(current, list) else current.update)(value)
        return current
    return value
