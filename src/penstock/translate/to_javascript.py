"""Translates the engine's plain functions to JavaScript, so that a browser decides by the same source.

What they are written in is read by `penstock.translate.subset`, for this and for C:

    limit = cap[rank] + EPSILON * cap[rank]        limit = (cap[rank] + (EPSILON * cap[rank]));
    for q in range(first, last):                   for (let at1 = first, end1 = last; at1 < end1; at1 += 1) {
    node //= 2                                     node = Math.floor(node / 2);
    low, high = late_first[k], late_first[k + 1]   low = late_first[k]; high = late_first[(k + 1)];

A module becomes an object of its functions and constants.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from penstock.translate.subset import ParsedModule, Writer, own_nodes

CALLS = {"max": "Math.max", "min": "Math.min", "abs": "Math.abs", "round": "roundEven"}
ATTRIBUTES = {
    "math.inf": "Infinity",
    "math.exp": "Math.exp",
    "heapq.heappush": "heapPush",
    "heapq.heappop": "heapPop",
    "np.random.uniform": "uniform",
    "np.random.randint": "randint",
    "np.random.random": "random",
    "np.random.seed": "seedRandom",
}


def bundle(modules: Sequence[ModuleType], constants_of: Sequence[ModuleType] = ()) -> str:
    """Modules as one script, each an object under its own name.

    Args:
        modules: each behind those that it imports from; what others it imports is left out, and must not be called.
        constants_of: those of which only the constants are wanted.

    Raises:
        SubsetError: a source uses what has no translation; the message has file, line and words.
    """
    known: list[str] = []
    parts = [Path(__file__).with_name("library.js").read_text("utf-8")]
    for module in (*constants_of, *modules):
        source = ParsedModule.read(Path(str(module.__file__)))
        parts.append(_Module(source).text(known, with_functions=module in modules))
        known.append(source.name)
    return "\n".join(parts)


class _Module(Writer):
    """Writes the JavaScript of one module."""

    LANGUAGE, HERE = "JavaScript", "penstock.translate.to_javascript"
    COUNTER, NULL, EQUAL, UNEQUAL = "let", "null", "===", "!=="
    BINARY = {**Writer.BINARY, ast.Div: "/", ast.Pow: "**"}  # noqa: RUF012

    def text(self, known: Sequence[str], with_functions: bool) -> str:
        """The module.

        Args:
            known: the modules ahead of it, of which it may take functions and constants.
        """
        source = self.source
        for name, (module, there) in source.imports.items():
            if module.rpartition(".")[2] in known and (there.islower() or there.isupper()):
                self.write(f"const {name} = {module.rpartition('.')[2]}.{there};")
        for name, number in source.constants.items():
            self.write(f"const {name} = {'Infinity' if number == math.inf else number};")
        functions = source.functions if with_functions else {}
        for function in functions.values():
            self.function(function)
        exports = ", ".join([*source.constants, *functions])
        inside = "\n".join(self.lines)
        return f"const {source.name} = (() => {{\n{inside}\n  return {{ {exports} }};\n}})();\n"

    # ---- statements

    def function(self, node: ast.FunctionDef) -> None:
        if node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.decorator_list:
            raise self.refused(node)
        names = [argument.arg for argument in node.args.args]
        defaults = [None] * (len(names) - len(node.args.defaults)) + [self.expr(d) for d in node.args.defaults]
        given = [name if value is None else f"{name} = {value}" for name, value in zip(names, defaults, strict=True)]
        self.write(f"function {node.name}({', '.join(given)}) {{")
        stored = (each for each in own_nodes(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
        if own := sorted({each.id for each in stored} - set(names)):
            self.write(f"  let {', '.join(own)};")
        self.body(node.body)
        self.write("}")

    def loop(self, node: ast.For) -> None:
        self.block(f"for ({self.expr(node.target)} of {self.expr(node.iter)}) {{", node.body)

    def fill(self, array: ast.expr, value: ast.expr) -> None:
        self.write(f"fillWith({self.expr(array)}, {self.expr(value)});")

    def exchange(self, names: Sequence[ast.expr], values: Sequence[ast.expr]) -> None:
        self.write(f"[{', '.join(map(self.expr, names))}] = [{', '.join(map(self.expr, values))}];")

    # ---- expressions

    def name(self, name: str) -> str:
        return name

    def other(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=None):
                return "null"
            case ast.Constant(value=bool() as value):
                return "true" if value else "false"
            case ast.Constant(value=int() | float() as value):
                return repr(value)
            case ast.Attribute(value=value, attr=attr):
                return self._attribute(node, value, attr)
            case ast.Subscript():
                return self._subscript(node)
            case ast.BinOp(left=ast.List(elts=[only]), op=ast.Mult(), right=count):
                return f"new Array({self.expr(count)}).fill({self.expr(only)})"
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return f"Math.floor({self.expr(left)} / {self.expr(right)})"
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                return f"floorMod({self.expr(left)}, {self.expr(right)})"
            case ast.Tuple(elts=values) | ast.List(elts=values):
                return f"[{', '.join(self.expr(value) for value in values)}]"
            case ast.Lambda(args=args, body=body):
                return f"(({', '.join(a.arg for a in args.args)}) => {self.expr(body)})"
            case ast.Call():
                return self._call(node)
        raise self.refused(node)

    def _attribute(self, node: ast.Attribute, value: ast.expr, attr: str) -> str:
        written = ast.unparse(node)
        if written in ATTRIBUTES:
            return ATTRIBUTES[written]
        if isinstance(value, ast.Name) and value.id in ("math", "heapq", "np"):
            raise self.refused(node)
        return f"{self.expr(value)}.{attr}"

    def _subscript(self, node: ast.Subscript) -> str:
        match node:
            case ast.Subscript(value=ast.Attribute(value=array, attr="shape"), slice=ast.Constant(value=1)):
                return f"columnsOf({self.expr(array)})"
            case ast.Subscript(value=array, slice=ast.Tuple(elts=[row, column])):
                return f"{self.expr(array)}[{self.expr(row)}][{self.expr(column)}]"
            case ast.Subscript(value=array, slice=place):
                return f"{self.expr(array)}[{self.expr(place)}]"

    def _call(self, node: ast.Call) -> str:
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[values]):
                return f"{self.expr(values)}.length"
            case ast.Call(func=ast.Name(id="sorted"), args=[values], keywords=[ast.keyword(arg="key", value=key)]):
                return f"sortedBy({self.expr(values)}, {self.expr(key)})"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="zeros"), args=[size, *_]):
                return f"new Float64Array({self.expr(size)})"
            case ast.Call(func=func, args=args, keywords=[]):
                name = self.expr(func)
                return f"{CALLS.get(name, name)}({', '.join(self.expr(a) for a in args)})"
        raise self.refused(node)
