"""The optimizer that a user gave: over which parameters it is made, how it is stepped, and what it keeps.

    a class, or a function    called with the parameters of this process's stages
    an optimizer              as it is
    both                      optimizer_of --> its groups keep only those of their parameters that are stepped here

So a function makes the same groups on every replica, whichever parameters each of them steps (zero1).

A step may be made for a while, to see where it leads:

    with step_for_now(optimizer, parameters):
        optimizer.step()            steps the parameters, and works on copies of the state
    parameters and state are as before

Besides the state of parameters, a class of the user's may keep something in attributes, such as `self.num_steps`.
Checkpoints bring that back (`checkpoint/optimizer.py`).
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.parameters.gradients import Gradients
from penstock.runtime.tensors.dtensor import as_shard, is_sharded, memory

GivenOptimizer = Callable[[list[Parameter]], Optimizer] | Optimizer | None

_OF_TORCH = {*vars(Optimizer([Parameter(torch.zeros(0))], {})), "step", "zero_grad", "grad_scale", "found_inf"}
"""Attributes that torch gives every optimizer, or that its schedulers and scalers add."""
_STATELESS = (type, FunctionType, MethodType, BuiltinFunctionType, partial, ModuleType, Enum, logging.Logger)


def optimizer_of(
    given: GivenOptimizer,
    parameters: list[Parameter],
    stand_ins: Mapping[int, Sequence[Parameter]] | None = None,
    dealt: Sequence[Parameter] | None = None,
    ends: ExitStack | None = None,
) -> Optimizer | None:
    """Returns the optimizer over this process's parameters.

    Args:
        ends: when it closes, a given optimizer has all of its parameters again.
        dealt: the parameters that a function is called with. This process steps those of them that are in
            `parameters`. Default: `parameters`.
        stand_ins: by the id of a parameter of a given optimizer, the parameters that take its place.
    """
    if given is None:
        return None
    if isinstance(given, Optimizer):
        if given.state and stand_ins:
            raise RuntimeFailure("the optimizer has stepped already; give a new one, or a function that makes one")
        optimizer = given
        known = [each for group in given.param_groups for each in group["params"]]
    else:
        stand_ins = None
        known = list(parameters if dealt is None else dealt)
        if not any(p.requires_grad for p in known):
            # The user's learning-rate schedule still wants an optimizer, and torch refuses one without parameters.
            known.append(Parameter(torch.zeros(0)))
        made: Any = given(known)
        if not isinstance(made, Optimizer):
            raise RuntimeFailure(
                f"optimizer= made {type(made).__name__}, not a torch optimizer; give a class like torch.optim.AdamW, "
                "or a partial of it"
            )
        optimizer = made
    own = {id(p) for p in parameters}
    elsewhere = {id(p): p for p in known if id(p) not in own}
    shortened: set[int] = set()
    has_changed = False
    parts: list[list[Parameter]] = []
    if ends is not None and optimizer is given:
        ends.callback(_give_back, optimizer, [group["params"] for group in optimizer.param_groups], parts)
    for group in optimizer.param_groups:
        named = [each for p in group["params"] for each in (stand_ins or {}).get(id(p), (p,))]
        kept = [p for p in named if id(p) not in elsewhere]
        if len(kept) != len(group["params"]):
            shortened |= {len(known), len(group["params"])}
        has_changed = has_changed or list(map(id, kept)) != list(map(id, group["params"]))
        group["params"] = kept
        parts.append(kept)
        # Torch steps a group at once, as it does by default on a GPU, only if all of it are shards, or none.
        if "foreach" in group and group["foreach"] is None and len({is_sharded(p) for p in kept}) > 1:
            group["foreach"] = False
    if optimizer is not given:  # some make state for all parameters at once
        for p in elsewhere.values():
            optimizer.state.pop(p, None)
    _require_no_lists(optimizer, shortened - {1}, known)
    groups = [id(group) for group in optimizer.param_groups]
    for name, one in optimizers_in(optimizer).items():
        if has_changed and any(id(group) not in groups for group in one.param_groups):
            raise RuntimeFailure(
                f"{type(optimizer).__name__}.{name} is an optimizer with other parameters than this process steps; "
                "give one optimizer with a parameter group for each, such as ps.runtime.MuonAdamW"
            )
    return optimizer


def _give_back(optimizer: Optimizer, whole: Sequence[list[Parameter]], parts: Sequence[list[Parameter]]) -> None:
    """Gives the groups of an optimizer the parameters that they had before they had parts of these.

    They stay as they are if another pipeline has the optimizer by now, or if what took the place of parameters has
    state.
    """
    ids = {id(p) for those in whole for p in those}
    if all(id(key) in ids for key in optimizer.state if isinstance(key, Tensor)):
        for group, before, now in zip(optimizer.param_groups, whole, parts, strict=False):
            group["params"] = before if group["params"] is now else group["params"]


def _require_no_lists(optimizer: Optimizer, lengths: Collection[int], known: Sequence[Parameter]) -> None:
    """Raises RuntimeFailure if an optimizer keeps a list of tensors as long as a list of parameters that lost some:
    it would match the parameters that are left with the tensors of others.
    """
    ids = set(map(id, known))
    kept = [*attributes_of(optimizer).items()]
    kept += [("param_groups", value) for group in optimizer.param_groups for value in group.values()]
    for name, value in kept:
        is_list = isinstance(value, list | tuple) and all(isinstance(each, Tensor) for each in value)
        if is_list and len(value) in lengths and not ids.issuperset(map(id, value)):
            kind = type(optimizer).__name__
            raise RuntimeFailure(
                f"{kind}.{name} holds a list of {len(value)} tensors, as many as it was given parameters, and this "
                "process steps a part of these: it would match them with tensors of others. Give a function, "
                f"optimizer=lambda params: {kind}(params), which each process calls with its own parameters; or keep "
                "the tensors by parameter, self.state[p], which works under zero1 too"
            )


def facts_of(optimizer: Optimizer | None) -> dict[str, object]:
    """Returns by subject what all ranks' optimizers must share: the class, and defaults that are numbers or words."""
    if optimizer is None:
        return {"optimizer": None}
    plain = {f"{name} of the optimizer": value for name, value in optimizer.defaults.items() if is_plain(value)}
    return {"optimizer": type(optimizer).__qualname__, **plain}


def is_plain(value: object) -> bool:
    """Whether an option is made of numbers and words, so that processes can compare it."""
    return all(
        isinstance(one, int | float | str | None) for one in (value if isinstance(value, tuple | list) else (value,))
    )


def make_step(optimizer: Optimizer) -> None:
    """Runs an optimizer's step. Raises RuntimeFailure if it fails, and some of its parameters are shards."""
    try:
        optimizer.step()
    except Exception as error:
        if not any(is_sharded(parameter) for group in optimizer.param_groups for parameter in group["params"]):
            raise
        raise RuntimeFailure(
            f"{type(optimizer).__name__} can't step the parts of parameters that processes hold here ({error}); "
            "leave out fused= and foreach=, take AdamW, or give ParallelOptions(sharding='zero1') instead of 'fsdp', "
            "which deals out whole parameters"
        ) from error


def step_masters(
    optimizer: Optimizer, masters: Sequence[Parameter], gradients: Gradients, rate: float | None
) -> None:
    """Steps only these masters: an optimizer skips parameters without a gradient.

    Args:
        rate: learning rate of this step; that of the optimizer's groups where None.
    """
    for master, gradient in zip(masters, gradients, strict=True):
        master.grad = None if gradient is None else as_shard(gradient, master)
    try:
        if any(gradient is not None for gradient in gradients):
            with learning_rate(optimizer, rate):
                make_step(optimizer)
    finally:
        for master in masters:
            master.grad = None


@contextmanager
def learning_rate(optimizer: Optimizer, rate: float | None) -> Iterator[None]:
    """Gives all groups this learning rate within the `with` statement; None leaves them theirs."""
    if rate is None:
        yield
        return
    before = [group["lr"] for group in optimizer.param_groups]
    for group, own in zip(optimizer.param_groups, before, strict=True):
        group["lr"] = torch.full_like(own, rate) if isinstance(own, Tensor) else rate
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = own


@contextmanager
def step_for_now(optimizer: Optimizer, parameters: Sequence[Parameter]) -> Iterator[None]:
    """Within the `with` statement the optimizer may step these parameters, and no others.

    The state's tensors stay the same objects, as others may hold them as well.
    """
    weights = [memory(parameter).clone() for parameter in parameters]
    states: dict[Tensor, Any] = {p: optimizer.state[p] for p in parameters if p in optimizer.state}
    kept = {k: v for k, v in attributes_of(optimizer).items() if not isinstance(v, Optimizer)}
    attributes = copy.deepcopy(kept, {id(p): p for group in optimizer.param_groups for p in group["params"]})
    for parameter, state in states.items():
        optimizer.state[parameter] = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
    try:
        yield
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            memory(parameter).copy_(weight)
            optimizer.state.pop(parameter, None)
        optimizer.state.update(states)
        for name, value in attributes.items():
            set_attribute(optimizer, name, value)


def goes_on_as(before: Optimizer | None, after: Optimizer | None) -> Optimizer | None:
    """Gives the optimizer before the parameters, the state and the attributes of the one after, and returns it.

    Its options stay. So a learning-rate schedule that holds the optimizer goes on with it.
    """
    if before is None or after is None:
        return after
    for mine, theirs in zip(before.param_groups, after.param_groups, strict=True):
        mine["params"] = theirs["params"]
    before.state = after.state
    for name, value in attributes_of(after).items():
        if vars(before).get(name) is not value:
            set_attribute(before, name, value)
    return before


# What an optimizer keeps in attributes.


def attributes_of(optimizer: Optimizer) -> dict[str, Any]:
    """Returns by name the attributes that may be state: those that a class of the user's has.

    Optimizers of torch and of this package keep nothing that counts in attributes.
    """
    if type(optimizer).__module__.startswith(("torch.", "penstock.")):
        return {}
    own = {name: value for name, value in vars(optimizer).items() if name not in _OF_TORCH}
    return {name: value for name, value in own.items() if not isinstance(value, _STATELESS)}


def optimizers_in(optimizer: Optimizer) -> dict[str, Optimizer]:
    """Returns by name the optimizers that another one has in attributes, or in lists and dicts there."""
    found: dict[str, Optimizer] = {}
    for name, value in attributes_of(optimizer).items():
        values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else [value]
        for one in values:
            if isinstance(one, Optimizer):
                found[name] = one
    return found


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in data and modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from value.parameters()
    elif isinstance(value, Mapping):
        for each in (*value.keys(), *value.values()):
            yield from tensors_in(each)
    elif isinstance(value, Set | list | tuple | deque):
        for each in value:
            yield from tensors_in(each)


def held_by(optimizer: Optimizer) -> set[int]:
    """The ids of the tensors in its groups and attributes. One that steps copies has its parameters there alone."""
    grouped = (p for group in optimizer.param_groups for p in group["params"])
    return {id(p) for p in (*grouped, *tensors_in(attributes_of(optimizer)))}


def set_attribute(optimizer: Optimizer, name: str, value: Any) -> None:
    """Sets an attribute to a value, which is data. Tensors and collections stay the same objects, as others may hold
    them as well.
    """
    known = vars(optimizer).get(name)
    if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape == value.shape:
        known.detach().copy_(value)
    elif isinstance(known, dict) and isinstance(value, dict):
        known.clear()
        known.update(value)
    elif isinstance(known, list) and isinstance(value, list):
        known[:] = value
    else:
        vars(optimizer)[name] = value
