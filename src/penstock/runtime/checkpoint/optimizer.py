"""An optimizer's state as plain named tensors, and back, whatever the rank that will hold each parameter.

    optimizer/layers.3.qkv.weight/exp_avg      a state tensor
    optimizer/layers.3.qkv.weight/calls#json   anything else JSON can say, as the bytes of its text

The options of the parameter groups are the same on all ranks and small: they are the meta.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from penstock.runtime.checkpoint.errors import CheckpointError
from penstock.runtime.checkpoint.index import JSON
from penstock.runtime.checkpoint.reader import Source
from penstock.runtime.shards import shard_like

__all__ = ["load_optimizer", "optimizer_tensors"]

PREFIX = "optimizer/"
AS_JSON = "#json"
ON_HOST = ("step", "mu_product")  # 0-dim state that torch keeps in host memory unless capturable or fused


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], JSON]:
    """The state as tensors named `optimizer/<parameter>/<key>`, and the meta to store as `meta["optimizer"]`.

    The tensors are the optimizer's own, not copies. Options that JSON cannot say are left out. Raises
    `CheckpointError` for a parameter without a name, or state that is neither tensors nor JSON.
    """
    tensors: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = _name(names, parameter)
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    tensors[f"{PREFIX}{name}/{key}"] = value
                else:
                    tensors[f"{PREFIX}{name}/{key}{AS_JSON}"] = _pack(optimizer, name, key, value)
    groups = [_options(group) for group in optimizer.param_groups]
    return tensors, {"class": type(optimizer).__name__, "groups": groups}


def load_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], reader: Source) -> None:
    """Gives the optimizer's parameters the state they had in the checkpoint, and its groups their options.

    A parameter without state in the checkpoint has none afterwards. State keeps its dtype and goes to the
    parameter's device. Groups are matched by their index. Raises `CheckpointError`, before anything is changed, for
    a checkpoint without an optimizer or of another one, or another number of groups; also for damage.
    """
    meta = reader.meta.get("optimizer") if isinstance(reader.meta, dict) else None
    kind = type(optimizer).__name__
    if not isinstance(meta, dict) or not isinstance(meta.get("groups"), list):
        raise CheckpointError(f"checkpoint {reader.path} holds no optimizer: load the model alone, or choose another")
    if meta.get("class") != kind or len(meta["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"checkpoint {reader.path} holds {meta.get('class')} with {len(meta['groups'])} parameter groups, this "
            f"run has {kind} with {len(optimizer.param_groups)}: use the optimizer it was written with"
        )
    keys: dict[str, list[str]] = defaultdict(list)
    for full in reader.names():
        if full.startswith(PREFIX):
            name, _, key = full[len(PREFIX) :].rpartition("/")
            keys[name].append(key)
    wanted = [
        f"{PREFIX}{name}/{key}"
        for group in optimizer.param_groups
        for name in (_name(names, parameter) for parameter in group["params"])
        for key in keys[name]
    ]
    loaded = reader.load(wanted)
    taken: set[str] = set()
    for group, options in zip(optimizer.param_groups, meta["groups"]):
        _set_options(group, options)
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            name = _name(names, parameter)
            if keys[name]:
                optimizer.state[parameter] = {
                    key.removesuffix(AS_JSON): _place(key, loaded[f"{PREFIX}{name}/{key}"], parameter, group)
                    for key in keys[name]
                }
                if name in taken:  # tied parameters are stored once, and each updates a state of its own
                    _separate(optimizer.state[parameter])
                taken.add(name)


def _separate(state: dict[str, Any]) -> None:
    for key, value in state.items():
        if isinstance(value, Tensor):
            state[key] = value.clone()


def _name(names: Mapping[Tensor, str], parameter: Tensor) -> str:
    try:
        return names[parameter]
    except KeyError:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that has no name: "
            "give names for all of its parameters"
        ) from None


def _place(key: str, value: Tensor, parameter: Tensor, group: Mapping[str, Any]) -> Any:
    if key.endswith(AS_JSON):
        return _decode(json.loads(bytes(value.tolist())))
    if key in ON_HOST and not (group.get("capturable") or group.get("fused")):
        return value
    value = value.to(parameter.device)
    return shard_like(value, parameter) if value.shape == parameter.shape else value


def _pack(optimizer: Optimizer, name: str, key: str, value: Any) -> Tensor:
    try:
        text = json.dumps(_encode(value))
    except TypeError as error:
        raise CheckpointError(
            f"{type(optimizer).__name__}'s state {key!r} of {name} cannot be stored: {error}. "
            "State must be tensors, numbers, text, or lists and tuples of numbers and text"
        ) from None
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def _options(group: Mapping[str, Any]) -> JSON:
    options = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            try:
                options[key] = json.loads(json.dumps(_encode(value)))
            except TypeError:
                continue
    return options


def _set_options(group: dict[str, Any], options: Mapping[str, JSON]) -> None:
    for key, stored in options.items():
        value, current = _decode(stored), group.get(key)
        if isinstance(current, Tensor) and isinstance(value, (int, float)):
            current.fill_(value)
        else:
            group[key] = value


def _encode(value: Any) -> JSON:
    """JSON that keeps apart what JSON merges: tuples, and 0-dim tensors among the options."""
    if isinstance(value, tuple):
        return {"tuple": [_encode(each) for each in value]}
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, Tensor) and value.dim() == 0:
        return value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__}")


def _decode(value: JSON) -> Any:
    if isinstance(value, dict):
        return tuple(_decode(each) for each in value["tuple"])
    return [_decode(each) for each in value] if isinstance(value, list) else value
