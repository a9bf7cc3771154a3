"""Traces a model's forward with `torch.fx`: which layers it calls, in which order, and what it does between them.

Only the forwards of opened modules are traced. Their layers are called as they are, and what happens inside a layer
is not recorded. `torch.fx` records what is done to the inputs. In addition:

- Calls of torch without a traced value are recorded too, such as draws of random numbers.
- A change in place is recorded as one: `x += y` is not `x = x + y`, because other references to `x` see the change.
- With an example of the inputs, each step is also computed as it is recorded. Then a branch may depend on shapes. It
  is taken as for the example, and a guard in the trace holds every microbatch to that.
- A value that is None for the example is None in the forward, as a forward may ask `x is None`.
- A line whose result the trace would freeze is refused: a branch on the values of a tensor, a new attribute value.
"""

from __future__ import annotations

import builtins
import linecache
import operator
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partialmethod
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from penstock.cost.cut import PartitionError
from penstock.runtime.stage.module_state import Snapshot, put_back, snapshot_of
from penstock.runtime.stage.stage import with_arguments
from penstock.runtime.tensors.pytree import Skeleton, unflatten

MODEL = "model"
"""The model's name in what is traced."""

_FACTORIES = ("empty", "ones", "rand", "randn", "zeros")
"""Functions that take a size as several arguments. If one is a traced number, torch tells no mode of the call."""

_ABOUT_TENSORS = frozenset(
    {
        "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "is_cuda", "layout",
        "requires_grad", "is_floating_point", "is_complex", "is_contiguous", "stride", "itemsize", "element_size",
        "is_sparse", "is_leaf", "is_meta", "is_quantized", "storage_offset",
    }
)  # fmt: skip
"""Attributes and methods that describe a tensor and do not depend on its values."""

_NEVER_RECORDED = frozenset({"__get__", "__hash__", "__repr__", "__format__", "__len__", "__reduce_ex__"})
"""Methods of tensors that are there, which a trace does not need."""

_HOOKS = (
    "sets hooks for what its layers save (saved_tensors_hooks, as torch.utils.checkpoint does), which is the "
    "schedule's part: penstock.passes"
)
_REFUSED: tuple[tuple[Any, tuple[str, ...], str], ...] = (
    (random, ("random", "uniform", "randint", "choice", "sample", "shuffle"), "draws Python's random numbers"),
    (torch, ("manual_seed",), "seeds torch's random numbers"),
    (
        torch.autocast,
        ("__enter__",),
        "enters torch.autocast, which is the pipeline's part: ps.PrecisionOptions(autocast=)",
    ),
    (torch.enable_grad, ("__enter__",), "enters torch.enable_grad(), which an evaluation would not see"),
    (torch.autograd.graph.saved_tensors_hooks, ("__enter__",), _HOOKS),
    (
        torch.autograd.function.BackwardCFunction,  # which every `apply` makes, wherever it was looked up
        ("__init__",),
        "calls an autograd function by an `apply` that was looked up before (f = MyFunction.apply), so tracing would "
        "lose its backward; write MyFunction.apply(...) where it is called",
    ),
)
"""Calls that are refused: their owner, their names, and what a forward does that calls them."""
_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward")

_SIZED_BY_VALUES = frozenset({"nonzero", "argwhere", "masked_select", "unique", "unique_consecutive"})
"""Functions and methods whose output has a size that depends on values. An index by a mask is another one."""

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders of torch and of Penstock's runtime, in which no line is the user's."""
_PYTHON = str(Path(linecache.__file__).parent)
_INSTEAD = "Move that into one of its layers, or give ps.Pipeline a list with one module for each stage"


class Untraceable(PartitionError):
    """The forward does something that stands in the way of cutting it.

    Args:
        what: what it does, in words.
        line: the line of the user's code that does so; None if no single line does.
        instead: what the user can do instead.

    Attributes:
        module: the innermost module of those whose forwards are traced that has the line.
    """

    module: nn.Module | None = None

    def __init__(self, what: str, line: str | None, instead: str = _INSTEAD) -> None:
        super().__init__(what if line is None else f"{what}, at {line}")
        self.instead = instead


class KeptValue(Untraceable):
    """A value that stood for a tensor while a forward was traced is used after that: a cache has kept it."""


_UNKNOWN = object()
NOTHING, SHAPES, COUNTS, VALUES = range(4)
"""What a number follows from: nothing but the model, shapes of the inputs, a size that depends on values, such as how
many tokens an expert gets, or values themselves."""


class Known(NamedTuple):
    """What is known of a traced value.

    Attributes:
        number: if the value is a number, what it follows from.
        size: what the sizes of the tensors in the value follow from, at most `COUNTS`.
        value: the value for the example; `_UNKNOWN` without one.
    """

    number: int
    size: int
    value: Any = _UNKNOWN


class ExampleGuard:
    """A step that holds a value to the one of the example, because a branch of the forward depends on it."""

    __name__ = "same"

    def __init__(self, kind: Callable[[Any], Any], expected: Any, line: str | None) -> None:
        self.kind, self.expected, self.line = kind, expected, line

    def __call__(self, value: Any) -> None:
        if (found := self.kind(value)) != self.expected:
            raise Untraceable(
                f"a microbatch gives {found!r} where the example gave {self.expected!r}, and the forward may go "
                "another way; give an example like the microbatches, ps.split(model, ..., example=...), or move the "
                "line into one of the model's layers, which may do anything",
                self.line,
            )


class EntryModule(nn.Module):
    """Calls the model with traced values in the places of its tensors."""

    def __init__(self, model: nn.Module, skeleton: Skeleton, num_leaves: int) -> None:
        super().__init__()
        self.model = model
        self._form = skeleton, num_leaves

    def forward(self, inputs: Any) -> Any:
        skeleton, num_leaves = self._form
        return with_arguments(self.model, unflatten([inputs[i] for i in range(num_leaves)], skeleton))


class TracedValue(fx.Proxy):
    """Stands for a value while a forward is traced, and records what is done to it."""

    node: Any

    def __init__(self, node: fx.Node, tracer: ForwardTracer) -> None:
        self.__dict__.update(node=node, _recorder=tracer)

    @property
    def tracer(self) -> ForwardTracer:  # type: ignore[override]
        """The tracer that records it. Raises KeptValue after the trace."""
        recorder: ForwardTracer = self.__dict__["_recorder"]
        if recorder.is_done:
            raise KeptValue(
                "the forward uses a value that it kept while it was traced, in a global or by functools.lru_cache. "
                "What a forward computes depends on its inputs, parameters and buffers alone (sentence 1 of the "
                "contract): register the value as a buffer, or make it inside a layer",
                here(),
                "Or empty the cache and give an example, which fills it with tensors: ps.split(model, 2, "
                "example=inputs)",
            )
        return recorder

    def __getattr__(self, name: str) -> Any:
        example = self.tracer.value_of(self)
        if example is not _UNKNOWN:
            with self.tracer.suspended():
                found = getattr(example, name)  # raises AttributeError, which hasattr asks for
            if found is None and not isinstance(example, Tensor):
                return None
        return TracedAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.tracer.refuse(f"sets {name!r} of a tensor")

    def __setitem__(self, key: Any, value: Any) -> None:
        self._record(operator.setitem, key, value)

    def __len__(self) -> int:
        return int(self.tracer.fixed(self, len, "asks for the length of"))

    def __index__(self) -> int:
        return int(self.tracer.fixed(self, operator.index, "uses as a number"))

    def __int__(self) -> int:
        return int(self.tracer.fixed(self, int, "makes a number of"))

    def __float__(self) -> float:
        return float(self.tracer.fixed(self, float, "makes a number of"))

    def _record(self, function: Callable[..., Any], *args: Any) -> Any:
        """Records `function(self, *args)` and returns its value."""
        return self.tracer.create_proxy("call_function", function, (self, *args), {})


for _change in (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift, operator.irshift,
):  # fmt: skip
    setattr(TracedValue, f"__{_change.__name__}__", partialmethod(TracedValue._record, _change))


class TracedAttribute(TracedValue):
    """An attribute of a traced value. If the forward calls it, it was a method, and is recorded as such."""

    def __init__(self, owner: TracedValue, name: str) -> None:
        self.__dict__.update(_owner=owner, _attribute=name, _recorder=owner.tracer, _made=None)

    @property
    def node(self) -> Any:  # type: ignore[override]
        if self._made is None:
            self.__dict__["_made"] = self._owner._record(getattr, self._attribute).node
        return self._made

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self._attribute, (self._owner, *args), kwargs)


class ForwardTracer(fx.Tracer):
    """Traces a model's forward, with layers as single calls.

    Args:
        opened: modules whose forwards are traced; all others are layers.
        example: the tensors of the inputs, with which each step is computed as it is recorded. None: without.

    Attributes:
        failed_in: the innermost opened module with a line that stands in the way.
        is_done: whether the trace is over.
    """

    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[nn.Module], example: Sequence[Tensor] | None) -> None:
        super().__init__()
        self.failed_in: nn.Module | None = None
        self.is_done = False
        self._refused_first: Untraceable | None = None
        self._opened = set(opened)
        self._example = example
        self._num_suspensions = 0
        self._before: dict[nn.Module, Snapshot] = {}
        self._known: dict[fx.Node, Known] = {}
        self._depth = 0
        self._thread = threading.get_ident()

    def record(self, model: nn.Module, skeleton: Skeleton, num_leaves: int) -> tuple[fx.Graph, EntryModule]:
        """Returns the graph of the forward, and the module that the graph's names are relative to.

        Raises:
            Untraceable: a line of the forward stands in the way.
        """
        entry = EntryModule(model, skeleton, num_leaves)
        self._opened.add(entry)
        self._before = {module: snapshot_of(module) for module in model.modules()}
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for owner, name, replacement in self._replacements():
                    if name in vars(owner):
                        stack.callback(setattr, owner, name, vars(owner)[name])
                    else:
                        stack.callback(delattr, owner, name)
                    setattr(owner, name, replacement)
                stack.enter_context(_RecordingMode(self))
                graph = self.trace(entry)
        except Untraceable:
            raise
        except Exception as error:
            text = str(error).split("\n")[0]
            raise Untraceable(f"tracing stops with {type(error).__name__}: {text}", line_of_error(error)) from error
        finally:
            self.is_done = True
            changed = put_back(self._before)
        if changed is not None:
            module, name = changed
            self.failed_in = module if module in self._opened else None
            kind = type(module).__name__
            raise Untraceable(f"the forward changes {name!r} of a {kind}, which tracing would do once", None)
        if self._refused_first is not None:  # and an except clause of the forward went on
            raise self._refused_first
        return graph, entry

    # Methods that torch.fx calls.

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._opened

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_not_meant():
            return forward(*args, **kwargs)
        self._depth += m in self._opened
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if m in self._opened and self.failed_in is None:
                self.failed_in = m
            raise
        finally:
            self._depth -= m in self._opened

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._num_suspensions or not isinstance(attr_val, Tensor):
            return attr_val
        with self.suspended():
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> TracedValue:
        return TracedValue(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, TracedValue):
            _ = a.tracer  # raises an error if the trace that it belongs to is over
            return a.node
        try:
            return super().create_arg(a)
        except NotImplementedError:  # a constant of a class that fx does not know
            return a

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta.update(line=here(), no_grad=not torch.is_grad_enabled())
        if kind != "output":
            self._known[node] = self._learn(node)
        return node

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if target in _GRADIENTS and not self._num_suspensions:
            self.refuse("computes gradients itself, which may need more than the stage that it lies in")
        with self.suspended():
            proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        return None if self._known[proxy.node].value is None else proxy

    def to_bool(self, obj: Any) -> bool:
        return bool(self.fixed(obj, bool, "takes a branch that depends on"))

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[i] for i in range(len(obj))])

    # What is known of values.

    def value_of(self, traced: TracedValue) -> Any:
        """Returns the value for the example; `_UNKNOWN` without an example, or while nothing is recorded."""
        return _UNKNOWN if self._is_not_meant() else self._known[traced.node].value

    def fixed(self, traced: TracedValue, kind: Callable[[Any], Any], doing: str) -> Any:
        """Returns `kind` of a value for the example if it follows from shapes alone, and guards it.

        Raises:
            Untraceable: it follows from values of tensors, or there is no example.
        """
        number, size, value = self._known[traced.node]
        if kind is len:
            number = size if isinstance(value, Tensor) else min(size, SHAPES)
        # How many tokens an expert gets differs among microbatches, so a block that asks for it is kept whole. The
        # model itself can't be. Its microbatches are held to the example.
        if number == VALUES or (number == COUNTS and self._depth > 1):
            self.refuse(f"{doing} the values of a tensor, which tracing would freeze")
        if value is _UNKNOWN:
            self.refuse(
                f"{doing} the inputs or what is computed from them, and there is no example of the inputs; give a "
                "microbatch's, ps.split(model, ..., example=...)" + ", or write x.shape[0]" * (kind is len)
            )
        if number != NOTHING:
            with self.suspended():
                self.create_node("call_function", ExampleGuard(kind, kind(value), here()), (traced.node,), {})
        return kind(value)

    def refuse(self, doing: str) -> Any:
        """Raises Untraceable at the line that is running."""
        error = Untraceable(f"the forward {doing}", here())
        self._refused_first = self._refused_first or error
        raise error

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        self._num_suspensions += 1
        try:
            yield
        finally:
            self._num_suspensions -= 1

    def _learn(self, node: fx.Node) -> Known:
        """Says what is known of the value of a new node, which it computes for the example."""
        if node.op == "placeholder":
            return Known(VALUES, SHAPES, _UNKNOWN if self._example is None else list(self._example))
        if node.op == "get_attr":
            return Known(VALUES, NOTHING, attribute_of(self.root, str(node.target)))
        inputs = [self._known[each] for each in node.all_input_nodes]
        asked = node.target if node.op == "call_method" else node.args[1] if node.target is getattr else ""
        if asked in _ABOUT_TENSORS:
            number = max((known.size for known in inputs), default=NOTHING)
        elif node.op == "call_module":
            number = VALUES
        else:
            number = max((known.number for known in inputs), default=VALUES)
        value = _UNKNOWN
        is_of_model = bool(inputs) and number == NOTHING
        if all(known.value is not _UNKNOWN for known in inputs) and (self._example is not None or is_of_model):
            with self.suspended():
                value = self._run(node)
            number = VALUES if isinstance(value, Tensor) else number
        return Known(number, self._size_of(node, inputs, value), value)

    def _size_of(self, node: fx.Node, inputs: Sequence[Known], value: Any) -> int:
        """Says what the sizes of the tensors in a new node's value follow from."""
        name = getattr(node.target, "__name__", node.target)
        is_nonzero = name == "where" and len(node.args) + len(node.kwargs) == 1
        if name in _SIZED_BY_VALUES or is_nonzero or (name == "getitem" and any(map(_is_mask, inputs[1:]))):
            return COUNTS
        first = self._known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if first is not None and getattr(first.value, "shape", None) == getattr(value, "shape", ()):
            return first.size  # as of an assignment of some rows
        sizes = [min(known.number, COUNTS) if _is_number(known.value) else known.size for known in inputs]
        return max(sizes, default=NOTHING)

    def _run(self, node: fx.Node) -> Any:
        values = {each: self._known[each].value for each in node.all_input_nodes}
        if node.op != "call_module":
            return run_call(node, values)
        layer = self.root.get_submodule(str(node.target))
        value = layer(*fill(node.args, values), **fill(node.kwargs, values))
        self._before.update((part, snapshot_of(part)) for part in layer.modules())  # a layer may change itself
        return value

    # What is replaced while a forward is traced.

    def _replacements(self) -> Iterator[tuple[Any, str, Any]]:
        """Returns functions that are replaced: (owner, name, replacement)."""
        for owner, names, doing in _REFUSED:
            for name in names:
                yield owner, name, self._instead_of(getattr(owner, name), doing)
        for name in _FACTORIES:
            yield torch, name, self._instead_of(getattr(torch, name))
        apply = torch.autograd.Function.__dict__["apply"]  # a class method, of Python or, since torch 2.15, of C

        def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
            doing = _HOOKS if cls.__module__ == "torch.utils.checkpoint" else ""
            return self._instead_of(apply.__get__(None, cls), doing)(*args, **kwargs)

        yield torch.autograd.Function, "apply", classmethod(applied)
        yield builtins, "isinstance", self._is_instance
        yield torch, "is_tensor", self._is_instance

    def _is_not_meant(self) -> bool:
        """Returns whether a call of a replaced function is no part of the forward: a step is being computed, or
        another thread calls the function, such as a transport's that makes a tensor.
        """
        return self._num_suspensions > 0 or threading.get_ident() != self._thread

    def _instead_of(self, function: Callable[..., Any], doing: str = "") -> Callable[..., Any]:
        """Returns a function whose calls are recorded, or refused if `doing` says in words what they do."""

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._is_not_meant():
                return function(*args, **kwargs)
            if doing:
                self.refuse(doing)
            return self.create_proxy("call_function", function, args, kwargs)

        return called

    def _is_instance(self, value: Any, kinds: Any = Tensor) -> bool:
        """An `isinstance` that tells the user's code about the value that a traced one stands for."""
        is_traced = type(value) in (TracedValue, TracedAttribute) and not self._is_not_meant()
        if not is_traced or not is_users(sys._getframe(1).f_code.co_filename):
            return _isinstance(value, kinds)
        return issubclass(self._class_of(value.node), kinds)

    def _class_of(self, node: Any) -> type:
        """Returns the class of a value: that for the example, or a tensor's if a function of torch made it."""
        while self._known[node].value is _UNKNOWN and node.target is operator.getitem:
            if node.args[0].op == "placeholder":
                return Tensor
            node = node.args[0]
        if self._known[node].value is not _UNKNOWN:
            return type(self._known[node].value)
        if node.op == "call_module" or node.target is getattr or node.target in _ABOUT_TENSORS:
            self.refuse("asks what kind of thing a value is, which is not known without an example of the inputs")
        return Tensor


_isinstance = isinstance


class _RecordingMode(TorchFunctionMode):
    """Records calls of torch in which no traced value takes part: draws of random numbers, uses of other tensors."""

    def __init__(self, tracer: ForwardTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_left = name in _NEVER_RECORDED or name in _ABOUT_TENSORS or name.startswith("_")
        if self._tracer._num_suspensions or is_left or any(issubclass(kind, fx.Proxy) for kind in types):
            return func(*args, **kwargs)
        return self._tracer.create_proxy("call_function", func, args, kwargs)


def attribute_of(root: nn.Module, path: str) -> Any:
    """Returns the parameter, buffer or constant at a path."""
    *folders, last = path.split(".")
    return getattr(root.get_submodule(".".join(folders)), last)


def _is_mask(known: Known) -> bool:
    parts = known.value if isinstance(known.value, list | tuple) else [known.value]
    return any(isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) for part in parts)


def _is_number(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_number, value))
    return isinstance(value, bool | int | float)


def fill(template: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Returns arguments of a recorded call with values in the places of nodes. Its lists and dicts are new ones."""
    if isinstance(template, fx.Node):
        return values[template]
    if type(template) is tuple:
        return tuple([fill(each, values) for each in template])
    if isinstance(template, list):
        return [fill(each, values) for each in template]
    if isinstance(template, dict):
        return {key: fill(each, values) for key, each in template.items()}
    if type(template) is slice:
        return slice(fill(template.start, values), fill(template.stop, values), fill(template.step, values))
    return template


def run_call(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Runs a recorded call of a method or a function."""
    args, kwargs, target = fill(node.args, values), fill(node.kwargs, values), node.target
    if isinstance(target, str):
        return getattr(args[0], target)(*args[1:], **kwargs)
    return target(*args, **kwargs)


def is_users(path: str) -> bool:
    """Returns whether a file belongs neither to torch, nor to Python's own library, nor to Penstock's runtime."""
    if path.startswith(_PYTHON):  # which may have the folder of installed packages in it
        return ("/site-packages/" in path or "/dist-packages/" in path) and not path.startswith(_LIBRARIES)
    return not path.startswith((*_LIBRARIES, "<frozen"))


def here() -> str | None:
    """Returns the user's innermost line that is running."""
    return _first_line(walk_stack(None))


def line_of_error(error: BaseException) -> str | None:
    """Returns the user's innermost line that an error came through."""
    return _first_line(reversed(list(walk_tb(error.__traceback__))))


def _first_line(frames: Iterable[tuple[FrameType, int]]) -> str | None:
    """Returns the first of these lines that is the user's."""
    for frame, number in frames:
        if is_users(path := frame.f_code.co_filename):
            return f"{path}:{number}: {linecache.getline(path, number).strip()}".removesuffix(": ")
    return None
