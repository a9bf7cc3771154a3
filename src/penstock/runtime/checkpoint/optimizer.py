"""An optimizer's state as plain named tensors, and back, whatever the rank that will hold each parameter.

    optimizer/layers.3.qkv.weight/exp_avg      a state tensor
    optimizer/layers.3.qkv.weight/calls#json   any other plain data, see `codec.py`
    optimizer/layers.3.qkv.weight/calls#0      a tensor inside it

The options of the parameter groups are the same on all ranks and small: they are the meta.
"""

from __future__ import annotations

import inspect
import json
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.checkpoint.codec import pack
from penstock.runtime.checkpoint.format import JSON
from penstock.runtime.checkpoint.reader import TensorSource, load_packed
from penstock.runtime.errors import CheckpointError
from penstock.runtime.tensors.dtensor import local, own_shard

PREFIX = "optimizer/"
ON_HOST = ("step", "mu_product")  # 0-dim state that torch keeps in host memory unless capturable or fused
FACTORED = ("Adafactor", "LBFGS")  # those of torch.optim whose state has other shapes than the parameter
DATA = (Tensor, np.ndarray, np.generic, Mapping, Set, list, tuple, deque, bytes, bytearray, complex)
"""What an optimizer may count on finding among its options again."""


def optimizer_tensors(optimizer: Optimizer, names: Mapping[Tensor, str]) -> tuple[dict[str, Tensor], JSON]:
    """The state as tensors named `optimizer/<parameter>/<key>`, and the meta to store as `meta["optimizer"]`.

    The tensors are the optimizer's own, not copies. Functions and other objects among the options are left out.

    Raises `CheckpointError` for a parameter without a name, state of no parameter, state that is no plain data, and
    data that would be left out without a word: whole tensors and collections among the options, and what the
    optimizer's own `state_dict` has besides. So too for one tensor that changes and is state of several parameters.
    """
    tensors: dict[str, Tensor] = {}
    kind = type(optimizer).__name__
    if other := [key for key in optimizer.state if not isinstance(key, Tensor)]:
        raise CheckpointError(
            f"{kind} keeps state under {other[0]!r:.60}, which is no parameter, and a checkpoint goes by "
            "their names: keep it in the state of a parameter, or in a parameter group"
        )
    if others := sorted(map(str, optimizer.state_dict().keys() - {"state", "param_groups"})):
        raise CheckpointError(
            f"the state dict of {kind} has {', '.join(others)} besides the state of its parameters and its parameter "
            "groups, which a checkpoint would not bring back: keep it in the state of a parameter, or as a number in "
            "a parameter group"
        )
    holders: dict[int, str] = {}
    for parameter in (each for group in optimizer.param_groups for each in group["params"]):
        name = _name(names, parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            if not isinstance(key, str) or "/" in key or "#" in key:
                raise CheckpointError(f"{kind}'s state of {name} has the key {key!r}: keys are text without / and #")
            if isinstance(value, Tensor):
                _require_own_memory(value, f"the state {key!r} of {name}", holders)
                tensors[f"{PREFIX}{name}/{key}"] = value
            else:
                tensors |= pack(f"{PREFIX}{name}/{key}", value, f"{kind}'s state {key!r} of {name}")
    groups = [
        _options(group, f"{kind}'s parameter group {place}") for place, group in enumerate(optimizer.param_groups)
    ]
    return tensors, {"class": kind, "groups": groups}


def _require_own_memory(value: Tensor, what: str, holders: dict[int, str]) -> None:
    """Raises CheckpointError where other state begins in the same memory, as it would have its own after a load.

    What never changed, such as a table that all parameters use, may be there several times.
    """
    part = local(value.detach())
    if part.layout is not torch.strided or part.device.type == "meta" or not part.numel():
        return
    if part.is_inference() or not part._version:
        return
    first = holders.setdefault(part.data_ptr(), what)
    if first != what:
        raise CheckpointError(
            f"{what} is the same tensor as {first}, and a checkpoint would make two of it: give each parameter a "
            "tensor of its own, or keep it in a parameter group, as a number"
        )


def stage_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], reader: TensorSource) -> Callable[[], None]:
    """Reads the state that the optimizer's parameters had in the checkpoint, and its groups' options.

    A parameter without state in the checkpoint has none afterwards. State keeps its dtype and goes to the
    parameter's device. Groups are matched by their index.

    Returns:
        What puts all of it in place, and cannot fail.

    Raises:
        CheckpointError: a checkpoint without an optimizer or of another one, another number of groups, options of
            another kind, or state that does not fit a parameter; also damage. Nothing is changed then.
    """
    groups = _read_groups(optimizer, reader)
    keys: dict[str, list[str]] = defaultdict(list)
    for full in reader.names():
        if full.startswith(PREFIX):
            name, _, key = full[len(PREFIX) :].rpartition("/")
            keys[name].append(key)
    found: list[tuple[Tensor, dict[str, Any]]] = []
    for place, (group, options) in enumerate(zip(optimizer.param_groups, groups)):
        kept_on_host = not (options.get("capturable") or options.get("fused"))
        patterns: dict[torch.dtype, dict[str, Any] | None] = {}  # of a complex parameter, state is complex too
        for parameter in group["params"]:
            if parameter.dtype not in patterns:
                what = f"checkpoint {reader.path}: parameter group {place}"
                patterns[parameter.dtype] = _pattern(optimizer, group, options, parameter, what)
            pattern = patterns[parameter.dtype]
            # Tied parameters are stored once, and each updates a state of its own: each is read for itself.
            name = _name(names, parameter)
            state = _read_state(reader, name, keys, parameter, kept_on_host)
            if state and pattern is not None:
                _require_like(f"checkpoint {reader.path}: {PREFIX}{name}", state, pattern, parameter)
            found.append((parameter, state))

    def put() -> None:
        for group, options in zip(optimizer.param_groups, groups):
            _set_options(group, options)
        for parameter, state in found:
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state

    return put


def _read_groups(optimizer: Optimizer, reader: TensorSource) -> list[dict[str, Any]]:
    """The options of each group as they are to be."""
    meta = reader.meta.get("optimizer") if isinstance(reader.meta, dict) else None
    kind = type(optimizer).__name__
    if not isinstance(meta, dict) or not isinstance(meta.get("groups"), list):
        raise CheckpointError(f"checkpoint {reader.path} holds no optimizer: load the model alone, or choose another")
    if meta.get("class") != kind or len(meta["groups"]) != len(optimizer.param_groups):
        raise CheckpointError(
            f"checkpoint {reader.path} holds {meta.get('class')} with {len(meta['groups'])} parameter groups, this "
            f"run has {kind} with {len(optimizer.param_groups)}: use the optimizer it was written with"
        )
    groups = []
    for place, (stored, group) in enumerate(zip(meta["groups"], optimizer.param_groups)):
        if not isinstance(stored, dict):
            raise CheckpointError(f"checkpoint {reader.path}: parameter group {place} holds no options")
        options = {}
        for key, value in stored.items():
            try:
                options[key] = _decode(value)
            except (TypeError, KeyError, ValueError, RecursionError):
                raise CheckpointError(
                    f"checkpoint {reader.path}: option {key!r} of parameter group {place} is {value!r:.60}, which no "
                    "optimizer wrote"
                ) from None
            if key in group and not _is_like(options[key], group[key]):
                raise CheckpointError(
                    f"checkpoint {reader.path}: option {key!r} of parameter group {place} is {options[key]!r:.60}, "
                    f"and {kind} has {group[key]!r:.60} here: use the optimizer it was written with"
                )
        groups.append(options)
    return groups


def _is_like(value: Any, current: Any) -> bool:
    """Whether an option may take the place of another: numbers stay numbers, and a tuple keeps its length."""
    if isinstance(value, float) and math.isnan(value):
        return False
    if isinstance(current, Tensor):
        return isinstance(value, (int, float)) and current.numel() == 1
    if isinstance(current, (int, float)) and not isinstance(current, bool):
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(current, (tuple, list)):
        return type(value) is type(current)
    return isinstance(value, str) == isinstance(current, str)


def _pattern(
    optimizer: Optimizer, group: Mapping[str, Any], options: Mapping[str, Any], parameter: Tensor, what: str
) -> dict[str, Any] | None:
    """The state that one of torch's own optimizers would have of four numbers of a parameter's type.

    It is that with these options; None for other optimizers, and where a state has other shapes than its parameter.
    Raises CheckpointError for options that the optimizer does not take.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind.__name__ in FACTORED:
        return None
    known = inspect.signature(kind).parameters.keys() - {"params"}
    like = local(parameter.detach())

    def state_with(values: Mapping[str, Any]) -> dict[str, Any]:
        one = Parameter(torch.zeros(2, 2, dtype=like.dtype, device=like.device))
        made: Any = kind
        optimizer = made([one], **{key: value for key, value in values.items() if key in known})
        one.grad = torch.zeros_like(one)
        optimizer.step()
        return dict(optimizer.state[one])

    try:
        state_with(group)
    except Exception:  # as it is here it takes no such step, so nothing can be said
        return None
    try:
        return state_with(options)
    except Exception as error:
        raise CheckpointError(
            f"{what} has options that {kind.__name__} does not take: {type(error).__name__}: {error}"
        ) from None


def _require_like(what: str, state: Mapping[str, Any], pattern: Mapping[str, Any], parameter: Tensor) -> None:
    if state.keys() != pattern.keys():
        raise CheckpointError(
            f"{what} has {', '.join(sorted(state)) or 'nothing'}, and the optimizer keeps "
            f"{', '.join(sorted(pattern)) or 'nothing'}: use the one it was written with"
        )
    for key, value in state.items():
        wanted = pattern[key]
        if type(value) is not type(wanted) and not isinstance(value, Tensor):
            raise CheckpointError(f"{what}/{key} is {value!r:.60}, and the optimizer keeps a {type(wanted).__name__}")
        if isinstance(value, Tensor) and isinstance(wanted, Tensor):
            shape = parameter.shape if wanted.dim() else wanted.shape
            if value.shape != shape or value.is_floating_point() != wanted.is_floating_point():
                raise CheckpointError(
                    f"{what}/{key} is {tuple(value.shape)} of {value.dtype}, and the optimizer keeps {tuple(shape)} "
                    f"of {wanted.dtype}: use the one it was written with"
                )


def _read_state(
    reader: TensorSource, name: str, keys: Mapping[str, list[str]], parameter: Tensor, kept_on_host: bool
) -> dict[str, Any]:
    """What a parameter had."""
    state: dict[str, Any] = {}
    for key in keys.get(name, ()):
        base, _, part = key.rpartition("#")
        if not base:
            full = f"{PREFIX}{name}/{key}"
            state[key] = _place(key, reader.load([full])[full], parameter, kept_on_host)
        elif part == "json":
            full = f"{PREFIX}{name}/{base}"
            inner = [f"{PREFIX}{name}/{each}" for each in keys[name] if each.rpartition("#")[0] == base]
            state[base] = load_packed(reader, full, inner, parameter.device)
    return state


def _name(names: Mapping[Tensor, str], parameter: Tensor) -> str:
    try:
        return names[parameter]
    except KeyError:
        raise CheckpointError(
            f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that has no name: "
            "give names for all of its parameters"
        ) from None


def _place(key: str, value: Tensor, parameter: Tensor, kept_on_host: bool) -> Tensor:
    if key in ON_HOST and value.dim() == 0 and kept_on_host:
        return value
    value = value.to(parameter.device)
    return own_shard(value, parameter) if value.shape == parameter.shape else value


def _options(group: Mapping[str, Any], what: str) -> JSON:
    """What JSON can say of a group. Raises CheckpointError for data that it cannot say."""
    options = {}
    for key, value in group.items():
        if key not in ("params", "param_names"):
            try:
                options[key] = json.loads(json.dumps(_encode(value)))
            except TypeError as error:
                if isinstance(value, DATA):
                    raise CheckpointError(
                        f"{what} has {error} in its option {key!r}, which a checkpoint would not bring back: keep "
                        "tensors and collections in the state of a parameter, and numbers in options of their own"
                    ) from None
    return options


def _set_options(group: dict[str, Any], options: Mapping[str, Any]) -> None:
    for key, value in options.items():
        group[key] = _as_current(value, group.get(key))


def _as_current(value: Any, current: Any) -> Any:
    """An option as it is to be. Tensors stay tensors, as an update with floats rounds otherwise."""
    if isinstance(current, Tensor) and isinstance(value, (int, float)):
        return current.fill_(value)
    if isinstance(current, (tuple, list)) and type(value) is type(current) and len(value) == len(current):
        return type(value)(map(_as_current, value, current))
    return value


def _encode(value: Any) -> JSON:
    """JSON that keeps tuples from lists. Numbers of torch and numpy are numbers. Raises TypeError for all else."""
    if isinstance(value, tuple):
        return {"tuple": [_encode(each) for each in value]}
    if isinstance(value, list):
        return [_encode(each) for each in value]
    if isinstance(value, np.generic) or (isinstance(value, (Tensor, np.ndarray)) and value.ndim == 0):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"a {type(value).__name__}")


def _decode(value: JSON) -> Any:
    if isinstance(value, dict):
        return tuple(_decode(each) for each in value["tuple"])
    return [_decode(each) for each in value] if isinstance(value, list) else value
