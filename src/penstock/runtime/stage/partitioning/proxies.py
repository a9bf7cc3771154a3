"""Proxies: they stand for values while a forward is traced, and record everything that is done to them.

In addition to what `torch.fx.Proxy` records, changes in place are recorded as such. `x += y` is not `x = x + y`,
because other references to `x` see the change.

Some tests ask what kind of thing a value is: `x is None`, `isinstance(x, Tensor)`. A proxy is neither None nor a
tensor, whatever the value would be, so tracing would answer them wrongly. So each line of the user's code is examined
before it runs: if such a test meets a traced value, its answer must be known.
"""

from __future__ import annotations

import ast
import builtins
import dis
import gc
import inspect
import operator
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import fx
from torch.utils.checkpoint import checkpoint

from penstock.runtime.stage.partitioning.source_line import SourceLine, is_users, line_of

if TYPE_CHECKING:
    from penstock.runtime.stage.partitioning.recorder import Recorder


class TracedProxy(fx.Proxy):
    """A value of a traced forward."""

    tracer: Recorder
    node: Any

    def __init__(self, node: fx.Node, tracer: Recorder) -> None:
        self.__dict__.update(node=node, tracer=tracer)

    def __getattr__(self, name: str) -> Any:
        if name == "grad":
            self.tracer.refuse("reads the gradient of a tensor, which a stage may not have yet")
        return TracedAttribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.tracer.refuse(f"sets {name!r} of a tensor")

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __len__(self) -> int:
        return int(self.tracer.fixed(self, len, "asks for the length of"))

    def __index__(self) -> int:
        return int(self.tracer.fixed(self, operator.index, "uses as a number"))

    def __int__(self) -> int:
        return int(self.tracer.fixed(self, int, "makes a number of"))

    def __float__(self) -> float:
        return float(self.tracer.fixed(self, float, "makes a number of"))

    def __contains__(self, item: Any) -> bool:
        self.tracer.refuse("looks for a value in")
        return False


class TracedAttribute(TracedProxy):
    """An attribute of a value, or its method, which is known once it is called."""

    def __init__(self, root: TracedProxy, attribute: str) -> None:
        self.__dict__.update(root=root, attribute=attribute, tracer=root.tracer, known=None)

    @property
    def node(self) -> Any:  # type: ignore[override]
        if self.__dict__["known"] is None:
            made = self.tracer.create_proxy("call_function", getattr, (self.root, self.attribute), {})
            self.__dict__["known"] = made.node
        return self.__dict__["known"]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attribute, (self.root, *args), kwargs)


def _in_place(function: Callable[..., Any]) -> Callable[[TracedProxy, Any], Any]:
    def change(self: TracedProxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return change


IN_PLACE = (
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.imatmul, operator.iand, operator.ior, operator.ixor, operator.ilshift,
    operator.irshift,
)  # fmt: skip
"""The operators that change their left side where it can be changed."""

for _each in IN_PLACE:
    setattr(TracedProxy, f"__{_each.__name__}__", _in_place(_each))


_QUESTIONS = {"isinstance", "type", "hasattr", "getattr", "callable", "is_tensor", "id"}
_MISSING = object()
_CHECKPOINT = inspect.unwrap(checkpoint).__code__
_IMPORT = ("<frozen importlib._bootstrap>", "_find_and_load")
"""Python's function that runs the code of a module for the first time."""


class KindTest(NamedTuple):
    """A test in the source: `kind` is "is" or the name of a function; `of` is what is tested, `against` the rest."""

    kind: str
    of: ast.expr | None
    against: ast.expr | None


@contextmanager
def watching(recorder: Recorder) -> Iterator[None]:
    """Looks at every line of the user's code that runs inside; no garbage is collected, as that runs other code."""
    before, collected = sys.gettrace(), gc.isenabled()
    known: dict[CodeType, dict[int, list[KindTest]]] = {}

    def on_line(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line" and not recorder.is_suspended:
            for test in known[frame.f_code].get(frame.f_lineno, ()):
                _look(test, frame, recorder)
        return on_line

    def on_import(frame: FrameType, event: str, _: Any) -> Any:
        if event == "return":
            recorder.resume()
        return on_import

    def on_call(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if recorder.is_suspended:
            return None
        if (code.co_filename, code.co_name) == _IMPORT:  # a module's own code is no part of the forward
            recorder.suspend()
            return on_import
        if code is _CHECKPOINT:  # by whatever name the user has imported it
            recorder.refuse_at(
                "recomputes activations (torch.utils.checkpoint), which is the schedule's part: penstock.passes",
                line_of(frame),
            )
        if not is_users(code.co_filename):
            return None
        if code not in known:
            known[code] = _tests_in(code)
        return on_line if known[code] else None

    gc.disable()
    sys.settrace(on_call)
    try:
        yield
    finally:
        sys.settrace(before)
        if collected:
            gc.enable()


def _look(test: KindTest, frame: FrameType, recorder: Recorder) -> None:
    line = SourceLine(frame.f_code.co_filename, frame.f_lineno)
    if test.kind == "global":
        recorder.refuse_at("sets a variable outside of it, which tracing would do once", line)
    if test.of is None:
        recorder.refuse_at("asks what kind of thing a value is, and there is no source to read of what", line)
        return
    with recorder.suspended():
        value = _value(test.of, frame)
        if test.kind == "is" and not isinstance(value, fx.Proxy) and test.against is not None:
            value, test = _value(test.against, frame), KindTest("is", test.against, test.of)
        if not isinstance(value, fx.Proxy):
            return
        examples = recorder.examples(value)
        against = _MISSING if test.against is None else _value(test.against, frame)
    if test.kind == "is" and against is None:
        if not examples or examples[0] is None:
            recorder.refuse_at("asks whether what a layer returned is None, which is not known while tracing", line)
        return
    if examples and against is not _MISSING:
        example = examples[0]
        if test.kind == "isinstance" and isinstance(example, against) == isinstance(value, against):  # type: ignore[arg-type]
            return
        if test.kind in ("getattr", "hasattr") and isinstance(against, str) and hasattr(example, against):
            return
    recorder.refuse_at("asks what kind of thing a value is, which tracing would answer wrongly", line)


def _tests_in(code: CodeType) -> dict[int, list[KindTest]]:
    """By line, the tests in a function's source, and where it sets a variable that is not its own."""
    try:
        lines, first = inspect.getsourcelines(code)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, SyntaxError, TypeError):
        found = _tests_in_bytes(code)
    else:
        ast.increment_lineno(tree, max(first, 1) - 1)
        found = {}
        for test, line in _found(tree):
            found.setdefault(line, []).append(test)
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        line = each.starts_line or line
        if each.opname == "STORE_GLOBAL" or (each.opname == "STORE_DEREF" and each.argval in code.co_freevars):
            found.setdefault(line, []).append(KindTest("global", None, None))
    return found


def _tests_in_bytes(code: CodeType) -> dict[int, list[KindTest]]:
    """The same where there is no source to read: of what, is not known."""
    found: dict[int, list[KindTest]] = {}
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        line = each.starts_line or line
        named = each.opname in ("LOAD_GLOBAL", "LOAD_NAME") and each.argval in _QUESTIONS
        if named or each.opname == "IS_OP" or each.opname.endswith("_NONE"):
            found.setdefault(line, []).append(KindTest("unread", None, None))
    return found


def _found(tree: ast.AST) -> Iterator[tuple[KindTest, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            left = node.left
            for op, right in zip(node.ops, node.comparators, strict=True):
                if isinstance(op, ast.Is | ast.IsNot):
                    yield KindTest("is", left, right), node.lineno
                left = right
        elif isinstance(node, ast.Call) and node.args:
            name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
            plain = isinstance(node.func, ast.Name) or name == "is_tensor"
            if plain and name in _QUESTIONS:
                yield KindTest(name, node.args[0], node.args[1] if len(node.args) > 1 else None), node.lineno


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """What an expression is worth before its line runs; a traced value for whatever is made of one."""
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, ast.Name):
        for scope in (frame.f_locals, frame.f_globals, vars(builtins)):
            if expression.id in scope:
                return scope[expression.id]
        return _MISSING
    if isinstance(expression, ast.Attribute):
        base = _value(expression.value, frame)
        if base is _MISSING or isinstance(base, fx.Proxy):
            return base
        try:
            return getattr(base, expression.attr)
        except Exception:
            return _MISSING
    if isinstance(expression, ast.Tuple):
        return tuple(_value(each, frame) for each in expression.elts)
    if isinstance(expression, ast.Subscript):
        base, key = _value(expression.value, frame), _value(expression.slice, frame)
        if isinstance(base, list | tuple | dict) and not isinstance(key, fx.Proxy):
            try:
                return base[key]
            except Exception:
                return _MISSING
    inside = [_value(node, frame) for node in ast.walk(expression) if isinstance(node, ast.Name)]
    return next((value for value in inside if isinstance(value, fx.Proxy)), _MISSING)


A_TENSOR = torch.empty(0)
"""Like any tensor, for tests of its kind."""
