"""What a traced forward reads besides its inputs, as it was when traced: where that changes, a new trace is due.

    self.scale, self.config.scale    attributes of opened modules, and what lies inside of these
    self.block.factor                attributes of other modules that the code names
    SCALE, settings.SCALE            globals, and what the code names of the user's own Python modules
    Model.scale, function.scale      attributes of classes and functions that the code names
    scale                            variables of a function around

What lies inside is followed through dicts, lists, sets, tuples, context variables and objects, of the user's own
classes and of others that hold data, such as a learning-rate schedule. It is looked at before every forward of a
stage, so looking takes little: objects are compared by identity, whole dicts at a time, and values only where an
object is another one. Of numbers that Python does not hold one by one (numpy's arrays, those of ctypes) the bytes are
compared.

A generator of random numbers is another one after every draw, so a forward that draws from one is refused.
"""

from __future__ import annotations

import dis
import gc
import hashlib
import logging
import os
import pickle
import random
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from enum import Enum
from functools import partial
from operator import is_
from types import CellType, CodeType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, fx, nn

from penstock.runtime.stage.module_state import OF_EVERY_MODULE

_MISSING = object()
_OF_LAYERS = frozenset({"_modules", "children", "named_children", "modules", "named_modules"})
_OF_ENVIRONMENT = frozenset({"environ", "getenv"})
_MOST = 20_000
"""Objects that are followed from one place."""
_OF_ITERATORS = ("builtins", "itertools")
_LARGEST = 1 << 16
"""Bytes that are kept of an array, or the like; of a larger one a hash."""
_LEAVES = (str, bytes, int, float, complex, bool, type(None), Tensor, nn.Module, logging.Logger, Enum)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


class _Root(NamedTuple):
    """Where something was reached: in words, and by which attribute of a module, where it was by one."""

    where: str
    module: nn.Module | None = None
    name: str = ""


class InsideChange(NamedTuple):
    """A change that the forward made inside something that it reached.

    Attributes:
        root: where it was reached. now: what it holds. put_back: sets it back.
    """

    root: _Root
    now: list[Any]
    put_back: Callable[[], None]

    @property
    def has_proxy(self) -> bool:
        """Whether a traced value has got in."""
        return _has_proxy(self.now)


class ForwardReads:
    """Made before a forward is traced, and told meanwhile of each function of the user's that runs.

    Args:
        opened: the modules whose forwards are traced.
        training: whether in training. In evaluation no module is in training mode, whatever it is outside of it.
    """

    def __init__(self, opened: Collection[nn.Module], training: bool) -> None:
        self._opened, self._training = list(opened), training
        self._codes: dict[CodeType, None] = {}
        self._inner: set[CodeType] = set()  # of functions that these make themselves
        self._names = {"forward"}
        self._classes: dict[type, None] = dict.fromkeys(map(type, opened))
        self._python: dict[ModuleType, None] = {}
        self._known: dict[int, Any] = {}  # held, so that no other object gets its id
        self._dicts: list[tuple[dict[Any, Any], list[Any], list[Any], _Root]] = []
        self._lists: list[tuple[list[Any] | deque[Any], list[Any], _Root]] = []
        self._sets: list[tuple[set[Any], set[Any], _Root]] = []
        self._named: list[tuple[Mapping[str, Any], str, Any]] = []
        self._slots: list[tuple[Any, str, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._of_layers: dict[tuple[nn.Module, str], Any] = {}
        self._arrays: list[tuple[Any, bytes, _Root]] = []
        self._generators: list[tuple[Any, Any, _Root]] = []
        self._context: list[tuple[ContextVar[Any], Any]] = []
        self._too_large: set[_Root] = set()
        self._values: list[tuple[Tensor, int]] = []
        self._facts: list[tuple[Tensor, tuple[Any, ...]]] = []
        self._buffers = [(module._buffers, [*module._buffers.values()]) for module in opened]
        self.refused: tuple[str, _Root] | None = None
        """What the forward does that no trace can stand for, in words, and with what."""
        for module in self._opened:
            own = vars(module)
            self._dicts.append((own, [*own], [*own.values()], _Root(type(module).__name__)))
            for name, value in own.items():
                if isinstance(value, dict | list | set | deque) and name not in OF_EVERY_MODULE:
                    self._follow(value, _root_of(module, name))

    # While the forward is traced.

    def enter(self, frame: FrameType) -> None:
        """A function of the user's begins."""
        code = frame.f_code
        if code in self._codes or not _is_own_name(
            str(frame.f_globals.get("__name__"))
        ):  # as of named tuples of torch's
            return
        self._codes[code] = None
        self._names |= (new := {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))})
        for module in self._opened:
            own = vars(module)
            for name in new & (own.keys() - OF_EVERY_MODULE):
                self._read(own[name], _root_of(module, name))
            if new & _OF_LAYERS:
                self._read(own["_modules"], _root_of(module, "_modules"))
        if new & _OF_ENVIRONMENT:
            self._read(vars(os.environ).get("_data"), _Root("environment variables"))
        for each in dis.get_instructions(code):
            if each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in frame.f_globals:
                self._name(frame.f_globals, each.argval)
        self._inner.update(_inner(code))
        for name in () if code in self._inner else code.co_freevars:
            if name != "__class__":
                self._read(frame.f_locals.get(name), _Root(f"variable {name}"))

    def read(self, module: nn.Module, name: str, code: CodeType) -> None:
        """Code reads an attribute of a module that is not opened."""
        if code in self._codes and name in vars(module) and (name not in OF_EVERY_MODULE or name == "training"):
            if name != "training" or self._training:
                self._of_layers[module, name] = vars(module)[name]
                self._read(vars(module)[name], _root_of(module, name))
        elif code in self._codes:
            self._classes[type(module)] = None

    def value_of(self, tensor: Tensor) -> None:
        """The forward asks a tensor that is there for its numbers."""
        self._values.append((tensor, tensor._version))

    def facts_of(self, tensor: Tensor) -> None:
        """The forward goes by how a tensor is that is there."""
        self._facts.append((tensor, _facts(tensor)))

    def leave(self) -> None:
        """The forward has been traced."""
        around = [code for code in self._codes if {*code.co_freevars} - {"__class__"} and code not in self._inner]
        for function in gc.get_referrers(*around) if around else ():
            if isinstance(function, FunctionType) and function.__code__ in around:
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                self._cells += [(cell, _content(cell)) for name, cell in cells if name != "__class__"]
        seen: set[type | ModuleType] = set()
        while more := [each for each in self._owners() if each not in seen]:
            seen.update(more)
            for each in more:
                places = (
                    [vars(kind) for kind in each.__mro__ if is_own(kind)] if isinstance(each, type) else [vars(each)]
                )
                for name in sorted(self._names):
                    at = next((place for place, held in enumerate(places) if name in held), -1)
                    for held in places[: at + 1]:  # one class earlier in the order would hide that of a later one
                        self._name(held, name)

    def _owners(self) -> list[type | ModuleType]:
        return [*self._python, *self._classes]

    # Afterwards.

    def are_same(self) -> bool:
        """Whether all is as it was."""
        for mapping, keys, values, _ in self._dicts:
            same = len(mapping) == len(keys) and all(map(is_, mapping.values(), values)) and [*mapping] == keys
            if not same and not _equal_dict(mapping, keys, values):
                return False
        for entries, values, _ in self._lists:
            same = len(entries) == len(values) and all(map(is_, entries, values))
            if not same and not _equal_list(entries, values):
                return False
        for found, before, _ in self._sets:
            if found != before:
                return False
        for place, name, value in self._named:
            if (now := place.get(name, _MISSING)) is not value and not _is_same(now, value):
                return False
        for owner, name, value in self._slots:
            if (now := getattr(owner, name, _MISSING)) is not value and not _is_same(now, value):
                return False
        for cell, value in self._cells:
            if (now := _content(cell)) is not value and not _is_same(now, value):
                return False
        for tensor, version in self._values:
            if tensor._version != version:
                return False
        for tensor, facts in self._facts:
            if _facts(tensor) != facts:
                return False
        for array, numbers, _ in self._arrays:
            if _numbers_of(array) != numbers:
                return False
        for variable, value in self._context:
            if (now := variable.get(_MISSING)) is not value and not _is_same(now, value):
                return False
        for held, buffers in self._buffers:
            if len(held) != len(buffers) or not all(map(is_, held.values(), buffers)):
                return False
        return self.of_layers_changed() is None

    def of_layers_changed(self) -> tuple[nn.Module, str] | None:
        """An attribute of a layer that the forward reads and that is another one now."""
        for (module, name), value in self._of_layers.items():
            if (now := vars(module).get(name, _MISSING)) is not value and not _is_same(now, value):
                return module, name
        return None

    def changed_inside(self) -> list[InsideChange]:
        """What has changed inside of what the forward reads; not its modules' own attributes."""
        found: list[InsideChange] = []
        for mapping, keys, values, root in self._dicts[len(self._opened) :]:
            if not _equal_dict(mapping, keys, values):
                before = dict(zip(keys, values, strict=True))
                found.append(InsideChange(root, [*mapping.values()], partial(_refill, mapping, before)))
        for entries, copied, root in self._lists:
            if not _equal_list(entries, copied):
                found.append(InsideChange(root, [*entries], partial(_refill, entries, copied)))
        for each, held, root in self._sets:
            if each != held:
                found.append(InsideChange(root, [*each], partial(_refill, each, held)))
        for array, numbers, root in self._arrays:
            if _numbers_of(array) != numbers:
                found.append(InsideChange(root, [], partial(_put_numbers, array, numbers)))
        for generator, state, root in self._generators:
            if _state_of(generator) != state:
                found.append(InsideChange(root, [], partial(_put_state, generator, state)))
        for variable, value in self._context:
            if not _is_same(now := variable.get(_MISSING), value):
                found.append(InsideChange(_Root(f"context variable {variable.name!r}"), [now], _leave))
        for owner, name, value in self._slots:
            if not _is_same(now := getattr(owner, name, _MISSING), value):
                put = partial(delattr, owner, name) if value is _MISSING else partial(setattr, owner, name, value)
                found.append(InsideChange(_Root(f"{type(owner).__name__}.{name}"), [now], put))
        return found

    def _name(self, place: Mapping[str, Any], name: str) -> None:
        value = place.get(name, _MISSING)
        if not isinstance(value, ModuleType) or is_own(value):
            self._named.append((place, name, value))
            self._read(value, _Root(name))

    def _read(self, value: Any, root: _Root) -> None:
        """The forward reads a value."""
        self._follow(value, root)
        if root in self._too_large:
            self.refused = (
                f"reads {{}}, where more than {_MOST:,} objects lie, more than are watched for changes",
                root,
            )

    def _follow(self, value: Any, root: _Root) -> None:
        waiting, num = [value], 0
        while waiting:
            each = waiting.pop()
            if isinstance(each, _LEAVES) or id(each) in self._known:
                continue
            if (num := num + 1) > _MOST:
                self._too_large.add(root)
                return
            self._known[id(each)] = each
            if isinstance(each, dict):
                self._dicts.append((each, [*each], [*each.values()], root))
                waiting.extend(each.values())
            elif isinstance(each, list | deque):
                self._lists.append((each, [*each], root))
                waiting.extend(each)
            elif isinstance(each, set):
                self._sets.append((each, {*each}, root))
            elif isinstance(each, tuple | frozenset):
                waiting.extend(each)
            elif isinstance(each, MethodType):
                waiting.append(each.__self__)
            elif isinstance(each, FunctionType):
                if is_own(each):
                    waiting.extend((each.__defaults__, each.__kwdefaults__, vars(each) or None))
                    self._slots.append((each, "__defaults__", each.__defaults__))
            elif type(each).__module__ in _OF_ITERATORS and hasattr(type(each), "__next__"):
                self.refused = "uses the iterator in {}, of which tracing takes the next one once", root
            elif isinstance(each, random.SystemRandom):
                self.refused = "may draw random numbers from {}, which tracing would do once", root
            elif isinstance(each, _GENERATORS):
                self._generators.append((each, _state_of(each), root))
            elif isinstance(each, ContextVar):
                self._context.append((each, held := each.get(_MISSING)))
                waiting.append(held)
            elif type(each).__module__ == "numpy" and hasattr(each, "tobytes"):
                if not each.dtype.hasobject:
                    self._arrays.append((each, _numbers_of(each), root))
            elif _has_bytes(each):
                self._arrays.append((each, _numbers_of(each), root))
            elif isinstance(each, partial):
                waiting.extend((each.func, each.args, each.keywords))
            elif isinstance(each, ModuleType):
                if is_own(each):
                    self._python[each] = None
            elif isinstance(each, type):
                self._classes[each] = None
            elif not is_own(type(each)):
                if not callable(each):  # functions, and what torch makes of some, keep caches
                    waiting.append(getattr(each, "__dict__", None))
            else:
                self._classes[type(each)] = None
                waiting.append(getattr(each, "__dict__", None))
                for name in _slots_of(type(each)):
                    self._slots.append((each, name, held := getattr(each, name, _MISSING)))
                    waiting.append(held)


def _inner(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from _inner(each)


def is_own(what: type | FunctionType | ModuleType) -> bool:
    """Whether a class, function or Python module is neither torch's, numpy's nor Python's own."""
    name = what.__name__ if isinstance(what, ModuleType) else str(what.__module__)
    return _is_own_name(name)


def _is_own_name(name: str) -> bool:
    first = name.partition(".")[0]
    return first not in ("builtins", "torch", "numpy") and first not in sys.stdlib_module_names


def _root_of(module: nn.Module, name: str) -> _Root:
    return _Root(f"its attribute {name!r}", module, name)


def _facts(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.requires_grad, tensor.dtype, tensor.device, tensor.shape


def _has_bytes(value: Any) -> bool:
    """Whether what a value holds can be read as bytes: numbers of ctypes, as multiprocessing shares them, arrays."""
    try:
        memoryview(value)
    except TypeError:
        return False
    return True


def _numbers_of(array: Any) -> bytes:
    """The bytes of an array; of a large one a hash of them."""
    numbers: bytes = array.tobytes() if isinstance(array, np.ndarray) else memoryview(array).tobytes()
    return numbers if len(numbers) <= _LARGEST else hashlib.blake2b(numbers).digest()


def _put_numbers(array: Any, numbers: bytes) -> None:
    if isinstance(array, np.ndarray):
        if array.nbytes <= _LARGEST:
            array[...] = np.frombuffer(numbers, array.dtype).reshape(array.shape)
    elif (memory := memoryview(array)).nbytes <= _LARGEST and not memory.readonly:
        memory.cast("B")[:] = numbers


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return pickle.dumps(
        generator.bit_generator.state if hasattr(generator, "bit_generator") else generator.get_state()
    )


def _put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = pickle.loads(state)
    else:
        generator.set_state(pickle.loads(state))


def _leave() -> None:
    """What changed, changed in a context of its own."""


def _slots_of(kind: type) -> list[str]:
    found: list[str] = []
    for each in kind.__mro__:
        names = vars(each).get("__slots__", ())
        found += [names] if isinstance(names, str) else names
    return [name for name in found if name not in ("__dict__", "__weakref__")]


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return _MISSING


def _is_same(now: Any, before: Any) -> bool:
    """Whether a value is the same object, or an equal number, text or tuple of the same type."""
    if now is before:
        return True
    if type(now) is not type(before):
        return False
    if isinstance(now, float | complex):
        return repr(now) == repr(before)  # 0.0 is not -0.0
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_is_same, now, before))
    return isinstance(now, int | str | bytes | MethodType) and bool(now == before)


def _equal_dict(now: Mapping[Any, Any], keys: Sequence[Any], values: list[Any]) -> bool:
    """Whether entries are equal; those are then what is compared with. A module's mode may be another one."""
    if [*now] != keys:
        return False
    for place, (key, value) in enumerate(now.items()):
        if not _is_same(value, values[place]) and not (key == "training" and "_modules" in now):
            return False
    values[:] = now.values()
    return True


def _equal_list(now: Collection[Any], values: list[Any]) -> bool:
    if len(now) != len(values) or not all(map(_is_same, now, values)):
        return False
    values[:] = now
    return True


def _refill(holder: Any, before: Any) -> None:
    holder.clear()
    holder.extend(before) if isinstance(holder, list | deque) else holder.update(before)


def _has_proxy(value: Any) -> bool:
    if isinstance(value, fx.Proxy):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, list | tuple | set):
        return False
    return any(map(_has_proxy, value))
