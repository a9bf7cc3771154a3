"""Translates the engine's plain functions to JavaScript, so that a browser decides by the same source.

What the engine is written in is a small part of Python: numbers, arrays, loops, functions. That part has one meaning
in JavaScript too, and anything else is refused by its line:

    limit = cap[rank] + EPSILON * cap[rank]        limit = cap[rank] + EPSILON * cap[rank];
    for q in range(first, last):                   for (q = first; q < last; q++) {
    node //= 2                                     node = Math.floor(node / 2);
    low, high = late_first[k], late_first[k + 1]   [low, high] = [late_first[k], late_first[k + 1]];

A module becomes an object of its functions and constants, and of the names of each function's `parameters`. Views of
arrays (`times[:n]`) are `subarray`s, so arrays that a function slices are typed arrays.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Sequence
from types import ModuleType

from penstock.schedule import ScheduleError

LIBRARY = """\
const floorMod = (a, b) => a - b * Math.floor(a / b);
const roundEven = (x) => {
  const low = Math.floor(x), rest = x - low;
  return rest < 0.5 ? low : rest > 0.5 ? low + 1 : low % 2 === 0 ? low : low + 1;
};
const isBefore = (a, b) => a[0] < b[0] || (a[0] === b[0] && a[1] < b[1]);
const heapPush = (heap, entry) => {
  let at = heap.push(entry) - 1;
  while (at > 0) {
    const above = (at - 1) >> 1;
    if (!isBefore(entry, heap[above])) break;
    heap[at] = heap[above];
    at = above;
  }
  heap[at] = entry;
};
const heapPop = (heap) => {
  const least = heap[0], entry = heap.pop();
  if (heap.length === 0) return least;
  let at = 0;
  for (;;) {
    let below = 2 * at + 1;
    if (below >= heap.length) break;
    if (below + 1 < heap.length && isBefore(heap[below + 1], heap[below])) below += 1;
    if (!isBefore(heap[below], entry)) break;
    heap[at] = heap[below];
    at = below;
  }
  heap[at] = entry;
  return least;
};
const range = (...given) => {
  const [first, last] = given.length === 1 ? [0, given[0]] : given;
  return Array.from({ length: Math.max(0, last - first) }, (_, place) => first + place);
};
const sortedBy = (values, key) => [...values].sort((a, b) => key(a) - key(b));
const groupBy = (values, key) => {
  const groups = [];
  for (const value of values) {
    const label = key(value), last = groups[groups.length - 1];
    if (last !== undefined && last[0] === label) last[1].push(value);
    else groups.push([label, [value]]);
  }
  return groups;
};
const allOf = (values, key) => { const found = [...values]; return key === undefined ? found : found.map(key); };
let randomState = 1;
const seedRandom = (seed) => { randomState = (seed * 2654435761 + 88675123) >>> 0 || 1; };
const random = () => { // Marsaglia's xorshift of 32 bits, which a seed repeats in every browser
  randomState ^= randomState << 13;
  randomState ^= randomState >>> 17;
  randomState ^= randomState << 5;
  return (randomState >>> 0) / 4294967296;
};
const uniform = (low, high) => low + (high - low) * random();
const randint = (count) => Math.floor(random() * count);
const columnsOf = (rows) => (rows.length === 0 ? 0 : rows[0].length);
const sum = (values) => [...values].reduce((a, b) => a + b, 0);
"""
"""What the translated functions call, ahead of them."""

BINARY = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
COMPARE = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!=="}
CALLS = {"max": "Math.max", "min": "Math.min", "abs": "Math.abs", "round": "roundEven", "len": None, "list": "allOf"}
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
        ScheduleError (rule "play"): a source uses what has no translation; the message has file, line and words.
    """
    known: list[str] = []
    parts = [LIBRARY]
    for module in (*constants_of, *modules):
        translator = Translator(module, known, with_functions=module in modules)
        parts.append(translator.module())
        known.append(translator.name)
    return "\n".join(parts)


class Translator:
    """Writes the JavaScript of one module."""

    def __init__(self, module: ModuleType, known: Sequence[str], with_functions: bool) -> None:
        self.name = module.__name__.rpartition(".")[2]
        self._known, self._with_functions = tuple(known), with_functions
        self._source = inspect.getsource(module)
        self._lines: list[str] = []
        self._depth = 1
        self._counter = 0
        self._exports: list[str] = []
        self._parameters: list[str] = []

    def module(self) -> str:
        for node in ast.parse(self._source).body:
            self._top(node)
        inside = "\n".join(self._lines)
        self._exports.append(f"parameters: {{ {', '.join(self._parameters)} }}")
        return f"const {self.name} = (() => {{\n{inside}\n  return {{ {', '.join(self._exports)} }};\n}})();\n"

    def _top(self, node: ast.stmt) -> None:
        match node:
            case ast.ImportFrom(module=str(package), names=names) if package.rpartition(".")[2] in self._known:
                taken = [f"{a.name}: {a.asname}" if a.asname else a.name for a in names if self._is_value(a.name)]
                if taken:
                    self._write(f"const {{ {', '.join(taken)} }} = {package.rpartition('.')[2]};")
            case ast.FunctionDef() if self._with_functions:
                self._exports.append(node.name)
                given = ", ".join(f'"{argument.arg}"' for argument in node.args.args)
                self._parameters.append(f"{node.name}: [{given}]")
                self._function(node)
            case ast.Assign(targets=[ast.Name() as target], value=value) if self._is_number(value):
                self._constants([target], [self.expr(value)])
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call(func=ast.Name(id="range")) as call):
                self._constants(names, [str(number) for number in range(ast.literal_eval(call.args[0]))])
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                self._constants(names, [self.expr(value) for value in values])
            # What only Python needs: other imports, types, what the compiler is told, docstrings.
            case (
                ast.FunctionDef()
                | ast.Import()
                | ast.ImportFrom()
                | ast.ClassDef()
                | ast.Expr()
                | ast.Assign()
                | ast.If()
            ):
                pass
            case _:
                raise self._refused(node)

    @staticmethod
    def _is_value(name: str) -> bool:
        """Whether a name that is imported is a function or a constant, and no type."""
        return name.islower() or name.isupper()

    @staticmethod
    def _is_number(value: ast.expr) -> bool:
        if isinstance(value, ast.UnaryOp):
            value = value.operand
        number = isinstance(value, ast.Constant) and isinstance(value.value, int | float)
        return number or (isinstance(value, ast.Attribute) and ast.unparse(value) in ATTRIBUTES)

    def _constants(self, names: Sequence[ast.expr], values: Sequence[str]) -> None:
        for name, value in zip(names, values, strict=True):
            assert isinstance(name, ast.Name)
            self._exports.append(name.id)
            self._write(f"const {name.id} = {value};")

    def _function(self, node: ast.FunctionDef) -> None:
        if node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.decorator_list:
            raise self._refused(node)
        names = [argument.arg for argument in node.args.args]
        defaults = [None] * (len(names) - len(node.args.defaults)) + [self.expr(d) for d in node.args.defaults]
        given = [name if value is None else f"{name} = {value}" for name, value in zip(names, defaults, strict=True)]
        self._write(f"function {node.name}({', '.join(given)}) {{")
        self._depth += 1
        if own := sorted(_assigned(node) - set(names)):
            self._write(f"let {', '.join(own)};")
        self._body(node.body)
        self._depth -= 1
        self._write("}")

    # ---- statements

    def _body(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _block(self, head: str, statements: Sequence[ast.stmt], tail: str = "}") -> None:
        self._write(head)
        self._depth += 1
        self._body(statements)
        self._depth -= 1
        self._write(tail)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                return
            case ast.Expr(value=value):
                self._write(f"{self.expr(value)};")
            case ast.Return(value=value):
                self._write("return;" if value is None else f"return {self.expr(value)};")
            case ast.Break():
                self._write("break;")
            case ast.Continue():
                self._write("continue;")
            case ast.FunctionDef():
                self._function(node)
            case ast.If():
                self._if(node)
            case ast.While(test=test, body=body, orelse=[]):
                self._block(f"while ({self.expr(test)}) {{", body)
            case ast.For(orelse=[]):
                self._for(node)
            case ast.AugAssign():
                self._augmented(node)
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case _:
                raise self._refused(node)

    def _if(self, node: ast.If) -> None:
        self._block(f"if ({self.expr(node.test)}) {{", node.body, "} else {" if node.orelse else "}")
        if node.orelse:
            self._depth += 1
            self._body(node.orelse)
            self._depth -= 1
            self._write("}")

    def _for(self, node: ast.For) -> None:
        match node.iter:
            case ast.Call(func=ast.Name(id="range"), args=args) if isinstance(node.target, ast.Name):
                name = node.target.id
                first, last, step = ["0", self.expr(args[0]), "1"] if len(args) == 1 else [
                    *map(self.expr, args), *["1"] * (3 - len(args))
                ]  # fmt: skip
                # Python looks at the bounds once, and sets the variable anew each time round.
                self._counter += 1
                at, end = f"at{self._counter}", f"end{self._counter}"
                down = step.startswith("-")
                head = (
                    f"for (let {at} = {first}, {end} = {last}; {at} {'>' if down else '<'} {end}; {at} += {step}) {{"
                )
                self._write(head)
                self._depth += 1
                self._write(f"{name} = {at};")
                self._body(node.body)
                self._depth -= 1
                self._write("}")
            case (
                ast.Call(func=ast.Name(id="groupby"), args=[values, key])
                | ast.Call(func=ast.Name(id="groupby"), args=[values], keywords=[ast.keyword(arg="key", value=key)])
            ):
                self._block(
                    f"for ({self._target(node.target)} of groupBy({self.expr(values)}, {self.expr(key)})) {{",
                    node.body,
                )
            case _:
                self._block(f"for ({self._target(node.target)} of {self.expr(node.iter)}) {{", node.body)

    def _augmented(self, node: ast.AugAssign) -> None:
        target = self.expr(node.target)
        if isinstance(node.op, ast.FloorDiv):
            self._write(f"{target} = Math.floor({target} / {self.expr(node.value)});")
        elif type(node.op) in BINARY:
            self._write(f"{target} {BINARY[type(node.op)]}= {self.expr(node.value)};")
        else:
            raise self._refused(node)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        match targets[0], value:
            case ast.Subscript(value=array, slice=ast.Slice(lower=None, upper=None, step=None)), _:
                self._write(f"{self.expr(array)}.fill({self.expr(value)});")
            case ast.Tuple(elts=names), ast.Tuple(elts=values):
                parts = [self.expr(each) for each in values]
                written = [self.expr(name) for name in names]
                # One after the other where no value reads what was just written.
                if not any(_reads(each, names[:place]) for place, each in enumerate(values)):
                    for name, part in zip(written, parts, strict=True):
                        self._write(f"{name} = {part};")
                else:
                    self._write(f"[{', '.join(written)}] = [{', '.join(parts)}];")
            case ast.Tuple(elts=names), _:  # a NamedTuple is an object here, taken apart by its names
                fields = ", ".join(self.expr(name) for name in names)
                self._write(f"({{ {fields} }} = {self.expr(value)});")
            case _:
                self._write(f"{' = '.join(self.expr(t) for t in targets)} = {self.expr(value)};")

    def _target(self, node: ast.expr) -> str:
        if isinstance(node, ast.Tuple):
            return f"[{', '.join(self._target(each) for each in node.elts)}]"
        return self.expr(node)

    # ---- expressions

    def expr(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return name
            case ast.Constant(value=value):
                return self._constant(value, node)
            case ast.Attribute():
                return self._attribute(node)
            case ast.Subscript(value=ast.Attribute(value=array, attr="shape"), slice=ast.Constant(value=1)):
                return f"columnsOf({self.expr(array)})"
            case ast.Subscript(value=array, slice=ast.Slice(lower=low, upper=high, step=None)):
                first = "0" if low is None else self.expr(low)
                last = "" if high is None else f", {self.expr(high)}"
                return f"{self.expr(array)}.subarray({first}{last})"
            case ast.Subscript(value=array, slice=ast.Tuple(elts=[row, column])):
                return f"{self.expr(array)}[{self.expr(row)}][{self.expr(column)}]"
            case ast.Subscript(value=array, slice=place):
                return f"{self.expr(array)}[{self.expr(place)}]"
            case ast.BinOp(left=ast.List(elts=[only]), op=ast.Mult(), right=count):
                return f"new Array({self.expr(count)}).fill({self.expr(only)})"
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return f"Math.floor({self.expr(left)} / {self.expr(right)})"
            case ast.BinOp(left=left, op=ast.Mod(), right=right):
                return f"floorMod({self.expr(left)}, {self.expr(right)})"
            case ast.BinOp(left=left, op=op, right=right) if type(op) in BINARY:
                return f"({self.expr(left)} {BINARY[type(op)]} {self.expr(right)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"!({self.expr(operand)})"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"-{self.expr(operand)}"
            case ast.BoolOp(op=op, values=values):
                word = " && " if isinstance(op, ast.And) else " || "
                return "(" + word.join(self.expr(value) for value in values) + ")"
            case ast.Compare():
                return self._compare(node)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self.expr(test)} ? {self.expr(body)} : {self.expr(orelse)})"
            case ast.Tuple(elts=values) | ast.List(elts=values):
                return f"[{', '.join(self.expr(value) for value in values)}]"
            case ast.Lambda(args=args, body=body):
                return f"(({', '.join(a.arg for a in args.args)}) => {self.expr(body)})"
            case ast.ListComp(elt=made, generators=[one]) | ast.GeneratorExp(elt=made, generators=[one]):
                kept = "".join(f".filter(({self._target(one.target)}) => {self.expr(test)})" for test in one.ifs)
                return f"allOf({self.expr(one.iter)}){kept}.map(({self._target(one.target)}) => {self.expr(made)})"
            case ast.Call():
                return self._call(node)
        raise self._refused(node)

    def _attribute(self, node: ast.Attribute) -> str:
        written = ast.unparse(node)
        if written in ATTRIBUTES:
            return ATTRIBUTES[written]
        if isinstance(node.value, ast.Name) and node.value.id in ("math", "heapq", "np"):
            raise self._refused(node)
        return f"{self.expr(node.value)}.{node.attr}"

    def _compare(self, node: ast.Compare) -> str:
        parts, left = [], node.left
        for op, right in zip(node.ops, node.comparators, strict=True):
            is_none = isinstance(right, ast.Constant) and right.value is None
            if isinstance(op, ast.Is | ast.IsNot) and is_none:
                parts.append(f"{self.expr(left)} {'==' if isinstance(op, ast.Is) else '!='} null")
            elif type(op) in COMPARE:
                parts.append(f"{self.expr(left)} {COMPARE[type(op)]} {self.expr(right)}")
            else:
                raise self._refused(node)
            left = right
        return parts[0] if len(parts) == 1 else "(" + " && ".join(parts) + ")"

    def _call(self, node: ast.Call) -> str:
        match node:
            case ast.Call(func=ast.Name(id="len"), args=[values]):
                return f"{self.expr(values)}.length"
            case ast.Call(func=ast.Name(id="max" | "min" as which), args=[ast.GeneratorExp() as values], keywords=[]):
                return f"Math.{which}(...{self.expr(values)})"
            case ast.Call(func=ast.Name(id="sorted"), args=[values], keywords=[ast.keyword(arg="key", value=key)]):
                return f"sortedBy({self.expr(values)}, {self.expr(key)})"
            case ast.Call(func=ast.Attribute(value=ast.Name(id="np"), attr="zeros"), args=[size, *_]):
                return f"new Float64Array({self.expr(size)})"
            case ast.Call(func=ast.Name(id="range")):
                return f"range({', '.join(self.expr(a) for a in node.args)})"
            case ast.Call(func=func, args=args, keywords=[]):
                name = self.expr(func)
                return f"{CALLS.get(name) or name}({', '.join(self.expr(a) for a in args)})"
        raise self._refused(node)

    def _constant(self, value: object, node: ast.AST) -> str:
        if value is None:
            return "null"
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, int | float):
            return repr(value)
        raise self._refused(node)

    def _write(self, line: str) -> None:
        self._lines.append("  " * self._depth + line)

    def _refused(self, node: ast.AST) -> ScheduleError:
        line = getattr(node, "lineno", 0)
        return ScheduleError(
            f"{self.name}.py, line {line}: {ast.unparse(node)[:80]!r} has no translation to JavaScript; write it "
            "with numbers, arrays, loops and functions, or teach penstock.play.to_javascript",
            rule="play",
            line=line,
        )


def _assigned(function: ast.FunctionDef) -> set[str]:
    """The local variables of a function, those of functions and comprehensions inside it left out."""
    found: set[str] = set()

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.Lambda | ast.ListComp | ast.GeneratorExp):
                continue
            if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
                found.add(child.id)
            walk(child)

    walk(function)
    return found


def _reads(value: ast.expr, written: Sequence[ast.expr]) -> bool:
    """Whether an expression may read what was written before it in the same assignment."""
    if not written:
        return False
    if any(not isinstance(target, ast.Name) for target in written):
        return True
    names = {target.id for target in written if isinstance(target, ast.Name)}
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(value))
