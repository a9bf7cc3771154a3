"""Traces a model's forward: which layers it calls, one after another, and what it does between them.

Only the forwards of containers (`opened` modules) are traced. Their layers are called as they are, and what happens
inside a layer is not recorded. What tracing would freeze is refused, with its line: a branch that depends on data, a
draw of Python's random numbers, a new value of an attribute. With an example of the inputs more can be traced: a
branch that depends on shapes alone is taken as for the example, and every microbatch is checked against it.
"""

from __future__ import annotations

import builtins
import random
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.stage.module_state import Snapshot, put_back, snapshot_of
from penstock.runtime.stage.partitioning.proxies import A_TENSOR, IN_PLACE, TracedAttribute, TracedProxy
from penstock.runtime.stage.partitioning.source_line import (
    KeptValue,
    SourceLine,
    Untraceable,
    attribute_line,
    here,
    is_users,
    line_of_error,
)
from penstock.runtime.stage.stage import with_arguments
from penstock.runtime.tensors.pytree import Skeleton, unflatten

MODEL = "model"
"""The model's name in what is traced."""

_FACTORIES = (
    "arange", "empty", "eye", "full", "linspace", "logspace", "ones", "rand", "randint", "randn", "randperm",
    "tensor", "as_tensor", "tril_indices", "triu_indices", "zeros",
)  # fmt: skip
"""Functions that make a tensor of numbers, which may be traced values."""

_ABOUT_TENSORS = frozenset(
    {
        "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "dtype", "device", "is_cuda", "layout",
        "requires_grad", "is_floating_point", "is_complex", "is_contiguous", "stride", "itemsize", "element_size",
        "is_sparse", "is_leaf", "is_meta", "is_quantized", "storage_offset",
    }
)  # fmt: skip
"""What says how a tensor is, and nothing of its values."""

_KEEP_SIZE = frozenset(
    {"index_add", "index_copy", "index_fill", "index_put", "index_reduce", "scatter", "scatter_add", "scatter_reduce",
     "masked_scatter", "slice_scatter", "select_scatter", "zeros_like", "ones_like", "empty_like", "setitem"}
)  # fmt: skip
"""Functions whose output has the size of their first argument, whatever the others are."""

_AT_ONCE = frozenset({"__get__", "__hash__", "__repr__", "__format__", "__len__", "__reduce_ex__", "__deepcopy__"})
"""What is never recorded of tensors that are there."""

_DRAWS = ("random", "uniform", "randint", "randrange", "choice", "choices", "sample", "shuffle", "gauss",
          "normalvariate", "betavariate", "expovariate", "triangular", "getrandbits", "seed")  # fmt: skip

_NUMPY_DRAWS = (
    "rand", "randn", "random", "uniform", "normal", "randint", "choice", "permutation", "binomial",
)  # fmt: skip

_ABOUT_AUTOCAST = ("is_autocast_enabled", "is_autocast_cpu_enabled", "get_autocast_dtype", "get_autocast_cpu_dtype",
                   "get_autocast_gpu_dtype")  # fmt: skip

_GRADIENTS = (torch.autograd.grad, torch.autograd.backward, "backward")


class ExampleGuard:
    """Holds a value to what it was for the example; a branch of the forward depends on it."""

    __name__ = "same"

    def __init__(self, expected: Any, line: SourceLine | None) -> None:
        self.expected, self.line = expected, line

    def __call__(self, value: Any) -> None:
        if _number(value) != self.expected:
            raise Untraceable(
                f"a microbatch gives {_number(value)!r} where the example gave {self.expected!r}, and the forward "
                "may go another way; give an example like the microbatches, ps.split(model, ..., example=...), or "
                "move the line into one of the model's layers, which may do anything",
                self.line,
            )


class EntryModule(nn.Module):
    """Calls the model with values put in the places of its tensors."""

    def __init__(self, model: nn.Module, skeleton: Skeleton, num_leaves: int) -> None:
        super().__init__()
        self.model = model
        self.__dict__["_call"] = (skeleton, num_leaves)

    def forward(self, inputs: Any) -> Any:
        skeleton, num_leaves = self.__dict__["_call"]
        return with_arguments(self.model, unflatten([inputs[i] for i in range(num_leaves)], skeleton))


class Recorder(fx.Tracer):
    """Traces a model's forward, with layers as single calls.

    Args:
        opened: modules whose forwards are traced; all others are layers.
        example: the tensors of the inputs, with which everything is worked out as it is traced; None: without.

    Snapshot:
        failed_in: the innermost opened module in which something stands in the way.
    """

    proxy_buffer_attributes = True

    def __init__(self, opened: Collection[nn.Module], example: Sequence[Tensor] | None) -> None:
        super().__init__()
        self.failed_in: nn.Module | None = None
        self._refused_first: Untraceable | None = None
        self._is_done = False
        self._opened = set(opened)
        self._example = example
        self._concrete = 0
        self._before: dict[nn.Module, Snapshot] = {}
        self._inside: list[nn.Module] = []
        self._thread = threading.get_ident()

    def record(self, model: nn.Module, skeleton: Skeleton, num_leaves: int) -> tuple[fx.Graph, EntryModule]:
        """Returns the graph and the root that its names are relative to.

        Raises:
            Untraceable: what stands in the way.
        """
        entry = EntryModule(model, skeleton, num_leaves)
        self._opened.add(entry)
        self._before = {module: snapshot_of(module) for module in model.modules()}
        generators = random.getstate()
        if self._example is not None:
            with _SizesByValues():  # at the first op torch imports its compiler, whose ops are none of the forward
                torch.zeros(1)
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(_replaced(self._replacements()))
                stack.enter_context(_RecordingMode(self))
                graph = self.trace(entry)
        except Untraceable:
            raise
        except fx.proxy.TraceError as error:
            raise Untraceable(f"({error})", line_of_error(error)) from error
        except Exception as error:
            text = str(error).split("\n")[0]
            raise Untraceable(f"tracing stops with {type(error).__name__}: {text}", line_of_error(error)) from error
        finally:
            self._is_done = True
            changed = put_back(self._before)
        if changed is not None:
            module, name = changed
            if module in self._opened:
                self.failed_in = module
                words = f"the forward of {type(module).__name__} changes its attribute {name!r}"
                raise Untraceable(words, attribute_line(module, name))
            kind = type(module).__name__
            words = f"the forward changes {name!r} of a {kind}, one of its layers, which tracing would do once"
            raise Untraceable(words, attribute_line(model, name))
        if self._refused_first is not None:  # and the forward went on, by an except clause of its own
            raise self._refused_first
        if random.getstate() != generators:
            raise Untraceable("the forward draws Python's random numbers", None)
        return graph, entry

    # What fx asks.

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m not in self._opened

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._is_not_meant():
            return forward(*args, **kwargs)
        if m in self._opened:
            self._inside.append(m)
            try:
                return super().call_module(m, forward, args, kwargs)
            except Exception:
                if self.failed_in is None:
                    self.failed_in = m
                raise
            finally:
                self._inside.pop()
        try:
            self.path_of_module(m)
        except NameError:
            self.refuse(f"calls a {type(m).__name__} that is no part of the model")
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if self._concrete or not isinstance(attr_val, Tensor):
            return attr_val
        with self.suspended():
            return super().getattr(attr, attr_val, parameter_proxy_cache)

    def proxy(self, node: fx.Node) -> TracedProxy:
        return TracedProxy(node, self)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, TracedProxy):
            a.tracer.require_recording()
            return a.node
        try:
            return super().create_arg(a)
        except NameError:
            self.refuse("uses a parameter that is no part of the model")
        except NotImplementedError:
            if any(isinstance(value, fx.Proxy) for value in getattr(a, "__dict__", {}).values()):
                self.refuse(f"puts a tensor into a {type(a).__name__}")
            return a

    def create_node(
        self, kind: str, target: Any, args: Any, kwargs: Any, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        node = super().create_node(kind, target, args, kwargs, name, type_expr)
        node.meta["line"] = here()
        node.meta["no_grad"] = not torch.is_grad_enabled()
        if torch.is_inference_mode_enabled():
            self.refuse("enters torch.inference_mode(), whose tensors no later stage may use")
        self._work_out(node)
        return node

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **named: Any) -> Any:
        if target in _GRADIENTS and not self._concrete:
            self.refuse("computes gradients itself, which may need more than the stage that it lies in")
        with self.suspended():
            proxy = super().create_proxy(kind, target, args, kwargs, *rest, **named)
        return None if proxy.node.meta.get("value", A_TENSOR) is None else proxy

    def to_bool(self, obj: Any) -> bool:
        return bool(self.fixed(obj, bool, "takes a branch that depends on"))

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[i] for i in range(len(obj))])

    def keys(self, obj: Any) -> Any:
        self.refuse("takes the keys of a value")

    # What is known of values.

    def fixed(self, value: TracedProxy, kind: Callable[[Any], Any], doing: str) -> Any:
        """What a value is for the example, where it follows from shapes alone; microbatches are held to it."""
        node = value.node
        if "value" not in node.meta:
            if _of_data(node) and kind is not len:
                self.refuse(f"{doing} the values of a tensor, which tracing would freeze")
            self.refuse(
                f"{doing} the inputs or what is computed from them, and there is no example of the inputs; give a "
                "microbatch's, ps.split(model, ..., example=...)" + ", or write x.shape[0]" * (kind is len)
            )
        found = node.meta["value"]
        if node.meta["data"] and not (kind is len and isinstance(found, Tensor | tuple | list)):
            self.refuse(f"{doing} the values of a tensor, which tracing would freeze")
        # A size that follows from values, such as how many tokens an expert gets, differs among microbatches. A block
        # that asks for one is kept whole. The model itself can't be, so its microbatches are held to the example.
        about_dimensions = kind is len and not isinstance(found, Tensor)
        if node.meta["sized_by_values"] and not about_dimensions and len(self._inside) > 1:
            self.refuse(f"{doing} the values of a tensor, which tracing would freeze")
        if not node.meta["constant"]:
            with self.suspended():
                checked = super().create_node("call_function", len, (node,), {}) if kind is len else node
                checked.meta.setdefault("line", here())
                guard = super().create_node(
                    "call_function", ExampleGuard(_number(kind(found)), here()), (checked,), {}
                )
                guard.meta["line"] = here()
        return kind(found)

    def refuse(self, doing: str) -> Any:
        """Raises Untraceable at the line that is being run."""
        error = Untraceable(f"the forward {doing}", here())
        self._refused_first = self._refused_first or error
        raise error

    def require_recording(self) -> None:
        """Raises KeptValue if a value of this forward is used after it was traced."""
        if self._is_done:
            raise KeptValue(here())

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Nothing inside is recorded."""
        self._concrete += 1
        try:
            yield
        finally:
            self._concrete -= 1

    @property
    def is_suspended(self) -> bool:
        """Whether nothing is recorded now."""
        return self._concrete > 0

    def example(self, value: TracedProxy) -> Any:
        """What a traced value is for the example; None where there is none, or nothing is recorded now."""
        return None if self._is_not_meant() else value.node.meta.get("value")

    def _class_of(self, node: Any) -> type:
        """The class of what a node's value is: a tensor's where a function of torch made it."""
        while "value" not in node.meta and _is_getitem(node) and node.args[0].op != "placeholder":
            node = node.args[0]
        if "value" in node.meta:
            found: type = type(node.meta["value"])
            return found
        if node.op == "call_module" or node.target is getattr or node.target in _ABOUT_TENSORS:
            self.refuse("asks what kind of thing a value is, which is not known without an example of the inputs")
        return Tensor

    def _work_out(self, node: fx.Node) -> None:
        """Notes the value that a node has for the example, whether it is made of values of tensors or only of how
        they are, whether its size depends on such values, and whether it follows from no input at all."""
        inputs = node.all_input_nodes
        if node.op == "placeholder":
            if self._example is not None:
                node.meta.update(value=list(self._example), data=True, constant=False, sized_by_values=False)
            return
        if node.op == "output" or any("value" not in each.meta for each in inputs):
            return
        if not inputs and node.op != "get_attr" and self._example is None:
            return
        if self._example is None and (node.op == "call_module" or not _about(node)) and node.op != "get_attr":
            return
        sizes = _SizesByValues()
        with self.suspended():
            if node.op == "call_module":
                value = self._run(node)
            else:
                with sizes:
                    value = self._run(node)
        of_values = any(each.meta["data"] and not isinstance(each.meta["value"], Tensor) for each in inputs)
        of_values = of_values and not (_is_getitem(node) and isinstance(value, Tensor))
        about = _about(node)
        has_tensors = any(isinstance(each.meta["value"], Tensor) for each in inputs)
        data = isinstance(value, Tensor) or node.op == "call_module" or of_values or (has_tensors and not about)
        constant = node.op == "get_attr" or (bool(inputs) and about and all(i.meta["constant"] for i in inputs))
        numbers = any(each.meta["data"] and _is_numbers(each.meta["value"]) for each in inputs)
        sized_by_values = sizes.found or numbers or any(each.meta["sized_by_values"] for each in _that_size(node))
        node.meta.update(value=value, data=data, constant=constant, sized_by_values=sized_by_values)

    def _run(self, node: fx.Node) -> Any:
        args = fx.node.map_arg(node.args, _value_of)
        kwargs = fx.node.map_arg(node.kwargs, _value_of)
        if node.op == "get_attr":
            return attribute_of(self.root, str(node.target))
        if node.op != "call_module":
            return run_call(node.op, node.target, args, kwargs)
        layer = self.root.get_submodule(str(node.target))
        value = layer(*own_lists(args), **own_lists(kwargs))
        self._before.update((part, snapshot_of(part)) for part in layer.modules())  # as it has left them
        return value

    def _replacements(self) -> list[tuple[Any, str, Any]]:
        """What is replaced while tracing, by what: (owner, name, replacement)."""
        found: list[tuple[Any, str, Any]] = []
        for name in _FACTORIES:
            found.append((torch, name, self._recorded(getattr(torch, name))))
        for name in _DRAWS:
            found.append((random, name, self._refused(getattr(random, name), "draws Python's random numbers")))
        for name in ("manual_seed", "seed", "set_rng_state"):
            found.append((torch, name, self._refused(getattr(torch, name), "seeds torch's random numbers")))
        autocast = "enters torch.autocast, which is the pipeline's part: ps.PrecisionOptions(autocast=)"
        found.append((torch.autocast, "__enter__", self._refused(torch.autocast.__enter__, autocast)))
        enable = "enters torch.enable_grad(), which an evaluation would not see"
        found.append((torch.enable_grad, "__enter__", self._refused(torch.enable_grad.__enter__, enable)))
        gradients = "asks whether gradients are on, which differs in an evaluation; ask self.training"
        found.append((torch, "is_grad_enabled", self._asked(torch.is_grad_enabled, gradients)))
        for name in _ABOUT_AUTOCAST:
            asking = "asks for autocast, which is on when stages run, and not when they are cut"
            found.append((torch, name, self._asked(getattr(torch, name), asking)))
        hooks = torch.autograd.graph.saved_tensors_hooks
        hooking = (
            "sets hooks for what its layers save (saved_tensors_hooks, as torch.utils.checkpoint does), which is the "
            "schedule's part: penstock.passes"
        )
        found.append((hooks, "__enter__", self._refused(hooks.__enter__, hooking)))
        apply = torch.autograd.Function.__dict__["apply"]  # a class method, of Python or, since torch 2.15, of C

        def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
            given = apply.__get__(None, cls)
            if self._is_not_meant():
                return given(*args, **kwargs)
            if cls.__module__ == "torch.utils.checkpoint":
                self.refuse(hooking)
            return self.create_proxy("call_function", _NamedFunction(given, cls.__name__), args, kwargs)

        found.append((torch.autograd.Function, "apply", classmethod(applied)))
        found += [(builtins, "isinstance", tells := self._told_kinds(isinstance)), (torch, "is_tensor", tells)]
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            for name in _NUMPY_DRAWS:
                drawn = self._refused(getattr(numpy.random, name), "draws numpy's random numbers")
                found.append((numpy.random, name, drawn))
        return found

    def _is_not_meant(self) -> bool:
        """Whether a call of what was replaced is no part of the forward: something is worked out, or another thread
        calls it. What is replaced is so for the whole process, and a transport's threads make tensors meanwhile.
        """
        return self._concrete > 0 or threading.get_ident() != self._thread

    def _told_kinds(self, function: Callable[..., bool]) -> Callable[..., bool]:
        """An `isinstance` that tells the user's code of a traced value what that is, and not of its proxy."""

        def tell(value: Any, kinds: Any = Tensor) -> bool:
            traced = type(value) in (TracedProxy, TracedAttribute) and not self._is_not_meant()
            if traced and is_users(sys._getframe(1).f_code.co_filename):
                return issubclass(self._class_of(value.node), kinds)
            return function(value, kinds)

        return tell

    def _asked(self, function: Callable[..., Any], doing: str) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            if not self._is_not_meant() and is_users(sys._getframe(1).f_code.co_filename):  # torch asks, too
                self.refuse(doing)
            return function(*args, **kwargs)

        return ask

    def _recorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if self._is_not_meant():
                return function(*args, **kwargs)
            return self.create_proxy("call_function", function, args, kwargs)

        return record

    def _refused(self, function: Callable[..., Any], doing: str) -> Callable[..., Any]:
        def refuse(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self._is_not_meant() else self.refuse(doing)

        return refuse


class _NamedFunction:
    """A function with a name of its own."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function, self.__name__ = function, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _SizesByValues(TorchDispatchMode):
    """Notes whether an op of torch ran whose output has a size that depends on values, such as nonzero."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.dynamic_output_shape in func.tags:
            # An index by numbers has the size of the index; torch tags them all, for the sake of masks.
            masks = (torch.bool, torch.uint8)
            by_numbers = func is torch.ops.aten.index.Tensor and not any(
                isinstance(each, Tensor) and each.dtype in masks for each in args[1]
            )
            self.found = self.found or not by_numbers
        return func(*args, **(kwargs or {}))


class _RecordingMode(TorchFunctionMode):
    """Records calls of torch in which no traced value takes part: draws of random numbers, uses of other tensors."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if self._recorder.is_suspended or name in _AT_ONCE or name in _ABOUT_TENSORS or name.startswith("_"):
            return func(*args, **kwargs)
        if any(issubclass(kind, fx.Proxy) for kind in types):
            return func(*args, **kwargs)
        return self._recorder.create_proxy("call_function", func, args, kwargs)


@contextmanager
def _replaced(replacements: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, vars(owner)[name]) for owner, name, _ in replacements]
    try:
        for owner, name, other in replacements:
            setattr(owner, name, other)
        yield
    finally:
        for owner, name, own in before:
            setattr(owner, name, own)


def attribute_of(root: nn.Module, path: str) -> Any:
    *folders, last = path.split(".")
    return getattr(root.get_submodule(".".join(folders)), last)


def _value_of(node: fx.Node) -> Any:
    return node.meta["value"]


def _number(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str | type(None)) else str(value)


def _is_numbers(value: Any) -> bool:
    """Whether a value is a number of Python, or a list of them; a truth value counts as one."""
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_numbers, value))
    return isinstance(value, bool | int | float)


def _that_size(node: fx.Node) -> list[fx.Node]:
    """The inputs of a node that the size of its output may follow from."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    own_size = name.endswith("_") or name in _KEEP_SIZE or node.target in IN_PLACE
    return [first] if own_size and first is not None else node.all_input_nodes


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "getitem"


def _about(node: fx.Node) -> bool:
    """Whether a node says how a tensor is, or reckons with what says that."""
    if node.op == "call_method":
        return node.target in _ABOUT_TENSORS
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _ABOUT_TENSORS
    return not any(isinstance(each.meta.get("value"), Tensor) for each in node.all_input_nodes)


def _of_data(node: fx.Node) -> bool:
    """Whether, as far as one can tell without an example, a value is one of a tensor's and not of its shape."""
    if node.op in ("call_module", "placeholder", "get_attr"):
        return True
    if _is_getitem(node) or node.target is len:
        return _of_data(node.args[0]) if isinstance(node.args[0], fx.Node) else True
    if node.op == "call_method":
        return node.target not in _ABOUT_TENSORS
    if node.target is getattr:
        return node.args[1] not in _ABOUT_TENSORS
    return any(_of_data(each) for each in node.all_input_nodes)


def own_lists(value: Any) -> Any:
    """A value with plain lists and dicts of its own, in place of those of fx's graph, which can't be changed."""
    if type(value) in (list, fx.immutable_collections.immutable_list):
        return [own_lists(each) for each in value]
    if type(value) is tuple:
        return tuple(own_lists(each) for each in value)
    if type(value) in (dict, fx.immutable_collections.immutable_dict):
        return {key: own_lists(each) for key, each in value.items()}
    if type(value) is slice:
        return slice(own_lists(value.start), own_lists(value.stop), own_lists(value.step))
    return value


def run_call(op: str, target: Any, args: Any, kwargs: Any) -> Any:
    """What a recorded call of a method ("call_method") or function returns."""
    if op == "call_method":
        return getattr(args[0], str(target))(*args[1:], **kwargs)
    return target(*args, **kwargs)
