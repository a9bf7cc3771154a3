"""Translates the engine's plain functions to C, which runs them some hundred times as fast.

Annotations say what arrays hold (see `arrays`), the types of local variables follow from what is assigned to them,
and the C gives what the Python gives, bit by bit:

    limit = cap[r] + EPSILON * cap[r]      limit = (cap.at[r] + (1e-09 * cap.at[r]));
    needs[op, 0]                           needs.at[op * needs.columns + 0]
    p.duration[q]                          p->duration.at[q]
    start[:] = trial                       for (...) start.at[k] = trial.at[k];

A named tuple is a struct of its fields, which may be named tuples too. No index is checked. A negative index counts
from the end only where it is written as a number.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from penstock.translate.subset import ParsedModule, Writer, own_nodes

ELEMENTS = {"Ints": "int", "Stop": "int", "Floats": "float", "Flags": "bool"}
ROWS = {"IntRows": "Ints", "FloatRows": "Floats"}
SCALARS = {"bool": "bool", "int": "int64_t", "float": "double"}
"""Types by rank: where two meet the later one is taken."""
FORMATS = {"int": '"lq", 8', "float": '"d", 8', "bool": '"?", 1'}
CODES = {"int": "L", "float": "d"}
FUNCTIONS = {
    "round": "rint",
    "math.exp": "exp",
    "np.random.random": "random_float",
    "np.random.uniform": "uniform",
    "np.random.seed": "seed",
}
NUMPY_TYPES = {"np.int64": "Ints", "np.bool_": "Flags"}
MAKERS = ("np.zeros", "np.empty")
KEYWORDS = {
    "auto", "case", "char", "const", "default", "do", "double", "float", "int", "long", "short", "signed", "switch",
}  # fmt: skip


class TranslationUnit:
    """The C of some functions and of all that they call.

    Args:
        root: the folder of the package.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self.sources: dict[str, ParsedModule] = {}
        self._functions: dict[tuple[str, str], FunctionWriter] = {}
        self._structs: dict[str, dict[str, str]] = {}
        self.parts = [(root / "translate" / "header.h").read_text()]

    def source(self, module: str) -> ParsedModule:
        if module not in self.sources:
            self.sources[module] = ParsedModule.read(self._root.joinpath(*module.split(".")[1:]).with_suffix(".py"))
        return self.sources[module]

    def constant(self, source: ParsedModule, name: str) -> int | float | None:
        """The number that a name stands for."""
        if name in source.imports and source.imports[name][0].startswith("penstock."):
            module, name = source.imports[name]
            return self.constant(self.source(module), name)
        return source.constants.get(name)

    def function(self, source: ParsedModule, name: str) -> FunctionWriter | None:
        """A function by its name in a module, written where that has not been done."""
        if name in source.imports and source.imports[name][0].startswith("penstock."):
            module, name = source.imports[name]
            return self.function(self.source(module), name)
        if name not in source.functions:
            return None
        key = source.name, name
        if key not in self._functions:
            writer = FunctionWriter(self, source, source.functions[name], f"{source.name}_{name}")
            self._functions[key] = writer
            self.parts.append(writer.text())
        return self._functions[key]

    def fields(self, struct: str) -> dict[str, str]:
        return self._structs[struct]

    def type_of(self, source: ParsedModule, node: ast.expr | None) -> str | None:
        """The type that an annotation says; None where it has none here."""
        match node:
            case None | ast.Constant(value=None):
                return "void"
            case ast.Name(id=name) if name in SCALARS or name in ELEMENTS or name in ROWS or name == "Heap":
                return name
            case ast.Name(id=name) if name in source.classes:
                return self._struct(source, name)
            case ast.Name(id=name) if name in source.imports:
                module, name = source.imports[name]
                return self.type_of(self.source(module), ast.Name(name))
            case ast.BinOp(left=ast.Subscript(value=ast.Name(id="Callable"))):
                return "nothing"
            case ast.BinOp(left=left, right=ast.Constant(value=None)):
                return self.type_of(source, left)
            case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
                return self._tuple([str(self.type_of(source, each)) for each in parts])
        return None

    def _struct(self, source: ParsedModule, name: str) -> str:
        if name not in self._structs:
            kinds = {each: self.type_of(source, said) for each, said in source.classes[name].items()}
            self._structs[name] = {each: kind for each, kind in kinds.items() if kind is not None}
            fields = self._structs[name]
            declared = "".join(f"  {spelled(kind)} {each};\n" for each, kind in fields.items())
            self.parts.append(f"typedef struct {{\n{declared}}} {name};\n")
        return name

    def _tuple(self, parts: Sequence[str]) -> str:
        name = "_".join(parts) + "_tuple"
        if name not in self._structs:
            self._structs[name] = {f"part{n}": kind for n, kind in enumerate(parts)}
            declared = " ".join(f"{spelled(kind)} part{n};" for n, kind in enumerate(parts))
            self.parts.append(f"typedef struct {{ {declared} }} {name};\n")
        return name

    def export(self, module: str, name: str) -> str:
        """Writes the function of Python that calls a function; returns its name in C."""
        made = self.function(self.source(module), name)
        assert made is not None, f"{module} has no function {name}"
        lines, given = [], []
        for place, (each, kind) in enumerate(made.parameters.items()):
            if kind != "nothing":
                lines += self._taken(f"{each}_", kind, f"PyTuple_GetItem(given, {place})", f"{made.c_name}: {each}")
                given.append(
                    f"{each}_given == &_Py_NoneStruct ? NULL : &{each}_" if kind in self._structs else f"{each}_"
                )
        call = f"{made.c_name}({', '.join(given)})"
        kept = "" if made.returns == "void" else f"{spelled(made.returns)} found = "
        entry = f"call_{module.rpartition('.')[2]}_{name}"
        self.parts.append(
            f"EXPORTED PyObject *{entry}(PyObject *given) {{\n  Call call;\n  call.count = 0;\n"
            + "\n".join(lines)
            + "\n  if (PyErr_Occurred()) {\n    release(&call);\n    return NULL;\n  }\n"
            f"  void *others = PyEval_SaveThread();\n  {kept}{call};\n  PyEval_RestoreThread(others);\n"
            f"  release(&call);\n  return {self._built(made.returns)};\n}}\n"
        )
        return entry

    def _taken(self, name: str, kind: str, given: str, why: str) -> list[str]:
        """Lines that declare an argument, or a field of one, and take it from Python."""
        if kind in SCALARS:
            return [f"  {SCALARS[kind]} {name} = take_{kind}({given});"]
        if kind in self._structs:
            lines = [f"  PyObject *{name}given = {given};"]
            for place, (each, part) in enumerate(self._structs[kind].items()):
                item = f"({name}given == &_Py_NoneStruct ? NULL : PyTuple_GetItem({name}given, {place}))"
                lines += self._taken(f"{name}{each}", part, item, f"{why}.{each}")
            return [*lines, f"  {kind} {name} = {{{', '.join(f'{name}{each}' for each in self._structs[kind])}}};"]
        of = FORMATS[ELEMENTS[ROWS.get(kind, kind)]]
        fields = ("at", "len", "columns") if kind in ROWS else ("at", "len")
        return [
            f'  View {name}view = take(&call, {given}, {of}, {len(fields) - 1}, "{why}");',
            f"  {spelled(kind)} {name} = {{{', '.join(f'{name}view.{each}' for each in fields)}}};",
        ]

    def _built(self, kind: str) -> str:
        if kind == "void":
            return 'Py_BuildValue("")'
        if kind == "bool":
            return "PyBool_FromLong(found)"
        if kind in CODES:
            return f'Py_BuildValue("{CODES[kind]}", {"(long long)" * (kind == "int")}found)'
        parts = self._structs[kind]
        codes = "".join(CODES[part] for part in parts.values())
        return f'Py_BuildValue("({codes})", {", ".join(f"found.{part}" for part in parts)})'


def spelled(kind: str) -> str:
    """A type as C writes it; structs of arrays are handed over by their address, and fields are never written."""
    if kind in SCALARS:
        return SCALARS[kind]
    return "Heap *" if kind == "Heap" else kind


class FunctionWriter(Writer):
    """Writes one function.

    Attributes:
        c_name: in C. parameters: their names and types. defaults: of the last of them. returns: its type.
        types: of all its variables.
    """

    LANGUAGE, HERE = "C", "penstock.translate.to_c"
    COUNTER, NULL = "int64_t", "NULL"

    def __init__(self, program: TranslationUnit, source: ParsedModule, node: ast.FunctionDef, name: str) -> None:
        super().__init__(source)
        self._program, self._node = program, node
        if node.args.vararg or node.args.kwarg or node.args.kwonlyargs or node.decorator_list:
            raise self.refused(node)
        parameters = {each.arg: program.type_of(source, each.annotation) for each in node.args.args}
        for each in node.args.args:
            if parameters[each.arg] is None:
                raise self.refused(each)
        self.types: dict[str, str] = {each: str(kind) for each, kind in parameters.items()}
        returns = program.type_of(source, node.returns)
        if returns is None:
            raise self.refused(node)
        self.c_name, self.parameters = name, dict(self.types)
        self.returns: str = returns
        self.defaults = node.args.defaults
        self._infer()

    def text(self) -> str:
        """The function."""
        parameters = [self._declared(each, kind) for each, kind in self.parameters.items() if kind != "nothing"]
        self.body(self._node.body)
        own = []
        for each, kind in self.types.items():
            if each not in self.parameters:
                own += [f"  OWN Heap own_{each} = {{0}};"] if kind == "Heap" else []
                own.append(f"  {self._declared(each, kind)} = {f'&own_{each}' if kind == 'Heap' else '{0}'};")
        head = f"static inline {spelled(self.returns)} {self.c_name}({', '.join(parameters) or 'void'}) {{"
        return "\n".join([head, *own, *self.lines, "}\n"])

    def _declared(self, name: str, kind: str) -> str:
        pointer = "const " if kind in self._program._structs else ""
        star = "*" if pointer else ""
        return f"{pointer}{spelled(kind)} {star}{self.name(name)}"

    # ---- types

    def _infer(self) -> None:
        """Finds the types of local variables, from assignment to assignment, until nothing changes."""
        while True:
            before = dict(self.types)
            for node in own_nodes(self._node):
                match node:
                    case ast.Assign(targets=targets, value=value):
                        for target in targets:
                            self._note(target, value)
                    case ast.AugAssign(target=target, op=op, value=value):
                        self._note(target, ast.BinOp(target, op, value))
                    case ast.For(target=target, iter=ast.Call(func=ast.Name(id="range"))):
                        self._note(target, ast.Constant(0))
                    case ast.For(target=target, iter=ast.Tuple(elts=values)):
                        for value in values:
                            self._note(target, value)
            if self.types == before:
                return

    def _note(self, target: ast.expr, value: ast.expr) -> None:
        match target, value:
            case ast.Name(id=name), _:
                kind, known = self.type_of(value), self.types.get(name)
                if kind is not None:
                    if name in self.parameters and known != joined([known, kind]):
                        raise self.refused(value)
                    self.types[name] = str(joined([known, kind]))
            case ast.Tuple(elts=names), ast.Tuple(elts=values):
                for each, given in zip(names, values, strict=True):
                    self._note(each, given)

    def type_of(self, node: ast.expr) -> str | None:
        """The type of an expression; None while it is not known."""
        match node:
            case ast.Constant(value=bool() | int() | float() as value):
                return type(value).__name__
            case ast.Name(id=name) if name in self.types:
                return self.types[name]
            case ast.Name(id=name):
                number = self._program.constant(self.source, name)
                return None if number is None else type(number).__name__
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                return "bool"
            case ast.UnaryOp(operand=operand):
                return self.type_of(operand)
            case ast.IfExp(body=body, orelse=orelse):
                return joined([self.type_of(body), self.type_of(orelse)])
            case ast.BinOp(op=ast.Div() | ast.Pow()):
                return "float"
            case ast.BinOp(left=left, right=right):
                return joined([self.type_of(left), self.type_of(right), "int"])
            case ast.List():
                return "Heap"
            case ast.Attribute(value=value, attr=attr):
                of = self.type_of(value) or ""
                return self._program.fields(of).get(attr) if of in self._program._structs else None
            case ast.Subscript(value=value, slice=ast.Slice()):
                return self.type_of(value)
            case ast.Subscript(value=ast.Attribute(attr="shape")):
                return "int"
            case ast.Subscript(value=ast.Call(func=ast.Attribute(attr="heappop"))):
                return "int"
            case ast.Subscript(value=ast.Subscript(value=heap), slice=place) if self.type_of(heap) == "Heap":
                return "float" if ast.unparse(place) == "0" else "int"
            case ast.Subscript(value=value, slice=place):
                kind = self.type_of(value) or ""
                if kind in ROWS:
                    return ELEMENTS[ROWS[kind]] if isinstance(place, ast.Tuple) else ROWS[kind]
                return ELEMENTS.get(kind)
            case ast.Call():
                return self._type_of_call(node)
        return None

    def _type_of_call(self, node: ast.Call) -> str | None:
        match ast.unparse(node.func), node.args:
            case "max" | "min", args:
                return joined([self.type_of(each) for each in args])
            case "len" | "np.random.randint", _:
                return "int"
            case name, args if name in MAKERS:
                return NUMPY_TYPES[ast.unparse(args[1])] if len(args) > 1 else "Floats"
            case name, _ if name in FUNCTIONS:
                return "float"
        match node.func:
            case ast.Name(id=name) if (function := self._program.function(self.source, name)) is not None:
                return function.returns
            case ast.Attribute(value=array, attr="max"):
                return ELEMENTS.get(self.type_of(array) or "")
        return None

    # ---- statements

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.If(test=ast.Compare(left=ast.Name(id=name)), orelse=orelse) if self.types.get(name) == "nothing":
                self.depth -= 1  # it is never there in C: the other branch stands alone
                self.body(orelse)
                self.depth += 1
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr="pop"))):
                self.write(f"heap_pop({name});")
            case _:
                super().statement(node)

    def assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        match targets[0], value:
            case ast.Name(id=name), ast.List(elts=[ast.Tuple(elts=[time, code])]):
                self.write(f"heap_push({name}, {self.expr(time)}, {self.expr(code)});")
            case ast.Name(id=name), ast.Call(func=func, args=[count, *_]) if ast.unparse(func) in MAKERS:
                self._make(name, count, self.type_of(value))
            case _:
                super().assign(targets, value)

    def _make(self, name: str, count: ast.expr, kind: str | None) -> None:
        """Makes an array, which goes with the function; so it may be made once, and not in a loop."""
        if self.depth != 2:
            raise self.refused(count)
        self.num_counters += 1
        array = f"made{self.num_counters}"
        self.write(f"OWN void *{array} = calloc({self.expr(count)} + 1, 8);")
        self.write(f"{self.name(name)} = ({kind}){{{array}, {self.expr(count)}}};")

    def returned(self, value: ast.expr | None) -> None:
        if isinstance(value, ast.Tuple):
            self.write(f"return ({self.returns}){{{', '.join(map(self.expr, value.elts))}}};")
        else:
            super().returned(value)

    def loop(self, node: ast.For) -> None:
        match node:
            case ast.For(target=ast.Name(id=name), iter=ast.Tuple(elts=values)):
                self.num_counters += 1
                at, each = f"at{self.num_counters}", f"each{self.num_counters}"
                self.write(f"{SCALARS[self.types[name]]} {each}[] = {{{', '.join(map(self.expr, values))}}};")
                self.write(f"for (int {at} = 0; {at} < {len(values)}; {at}++) {{")
                self.write(f"  {self.name(name)} = {each}[{at}];")
                self.body(node.body)
                self.write("}")
            case _:
                raise self.refused(node)

    def fill(self, array: ast.expr, value: ast.expr) -> None:
        self.num_counters += 1
        at, into, kind = f"at{self.num_counters}", self.expr(array), self.type_of(array) or ""
        source = f"({self.expr(value)}).at[{at}]" if self.type_of(value) == kind else self.expr(value)
        columns = f" * {into}.columns" if kind in ROWS else ""
        self.write(
            f"for (int64_t {at} = 0, end = {into}.len{columns}; {at} < end; {at}++) {into}.at[{at}] = {source};"
        )

    def exchange(self, names: Sequence[ast.expr], values: Sequence[ast.expr]) -> None:
        self.num_counters += 1
        kept = [f"kept{self.num_counters}_{n}" for n in range(len(values))]
        for each, value in zip(kept, values, strict=True):
            self.write(f"{spelled(str(self.type_of(value)))} {each} = {self.expr(value)};")
        for target, each in zip(names, kept, strict=True):
            self.write(f"{self.expr(target)} = {each};")

    # ---- expressions

    def name(self, name: str) -> str:
        if name in self.types:
            return f"{name}_" if name in KEYWORDS else name
        number = self._program.constant(self.source, name)
        if number is None:
            raise self.refused(ast.Name(name))
        return "INFINITY" if number == math.inf else f"({number})" if number < 0 else str(number)

    def or_null(self, node: ast.expr) -> str:
        written = self.expr(node)
        return written if self.type_of(node) in self._program._structs else f"{written}.at"

    def other(self, node: ast.expr) -> str:
        match node:
            case ast.Constant(value=bool() as value):
                return "true" if value else "false"
            case ast.Constant(value=int() | float() as value):
                return repr(value)
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self.expr(left), self.expr(right)
                both = joined([self.type_of(left), self.type_of(right)])
                match op:
                    case ast.Div():
                        return f"((double){a} / (double){b})"
                    case ast.Pow():
                        return f"pow({a}, {b})"
                    case ast.FloorDiv() | ast.Mod() if both == "int":
                        return f"floor_{'div' if isinstance(op, ast.FloorDiv) else 'mod'}({a}, {b})"
            case ast.Attribute(value=value, attr=attr) if self.type_of(node) is not None:
                return f"{self.expr(value)}{'->' if isinstance(value, ast.Name) else '.'}{attr}"
            case ast.Subscript():
                return self._subscript(node)
            case ast.Call(func=func, args=args, keywords=[]):
                return self._call(ast.unparse(func), func, args, node)
        raise self.refused(node)

    def _subscript(self, node: ast.Subscript) -> str:
        match node:
            case ast.Subscript(value=ast.Attribute(value=rows, attr="shape"), slice=ast.Constant(value=1)):
                return f"{self.expr(rows)}.columns"
            case ast.Subscript(value=ast.Call(args=[heap]) as call, slice=ast.Constant(value=1)) if (
                ast.unparse(call.func) == "heapq.heappop"
            ):
                return f"heap_pop({self.expr(heap)}).code"
            case ast.Subscript(value=ast.Subscript(value=heap), slice=place) if self.type_of(heap) == "Heap":
                return f"{self.expr(heap)}->at[0].{'time' if ast.unparse(place) == '0' else 'code'}"
        array, kind = self.expr(node.value), self.type_of(node.value) or ""
        match node.slice:
            case ast.Slice(lower=low, upper=high, step=None):
                first = "0" if low is None else self._place(array, low)
                last = f"{array}.len" if high is None else self._place(array, high)
                if kind in ROWS:
                    return f"({kind}){{{array}.at + {first} * {array}.columns, {last} - {first}, {array}.columns}}"
                return f"({kind}){{{array}.at + {first}, {last} - {first}}}"
            case ast.Tuple(elts=[row, column]) if kind in ROWS:
                return f"{array}.at[{self.expr(row)} * {array}.columns + {self.expr(column)}]"
            case place if kind in ROWS:
                return f"({ROWS[kind]}){{{array}.at + {self.expr(place)} * {array}.columns, {array}.columns}}"
            case place if kind in ELEMENTS:
                return f"{array}.at[{self._place(array, place)}]"
        raise self.refused(node)

    def _place(self, array: str, place: ast.expr) -> str:
        """A place in an array: one that is written as negative counts from its end."""
        if isinstance(place, ast.UnaryOp) and isinstance(place.op, ast.USub):
            return f"({array}.len - {self.expr(place.operand)})"
        return self.expr(place)

    def _call(self, name: str, func: ast.expr, args: Sequence[ast.expr], node: ast.Call) -> str:
        if name == "heapq.heappush" and isinstance(args[1], ast.Tuple):
            heap, (time, code) = args[0], args[1].elts
            return f"heap_push({self.expr(heap)}, {self.expr(time)}, {self.expr(code)})"
        given = [self.expr(each) for each in args if self.type_of(each) != "nothing"]
        if name in FUNCTIONS:
            return f"{FUNCTIONS[name]}({', '.join(given)})"
        match func, args:
            case ast.Name(id="len"), [_]:
                return f"{given[0]}{'->' if self.type_of(args[0]) == 'Heap' else '.'}len"
            case ast.Name(id="max" | "min"), [_, *_]:
                kind = "float" if self.type_of(node) == "float" else "int"
                found = given[0]
                for each in given[1:]:
                    found = f"{name}_{kind}({found}, {each})"
                return found
            case ast.Attribute(attr="randint"), _:
                return f"randint({', '.join(['0', *given][-2:])})"
            case ast.Attribute(value=array, attr="max"), [] if self.type_of(array) == "Ints":
                return f"max_ints({self.expr(array)})"
            case ast.Attribute(value=array, attr="sort"), [] if self.type_of(array) == "Floats":
                return f"sort_floats({self.expr(array)})"
            case ast.Name(id=each), _:
                function = self._program.function(self.source, each)
                if function is not None:
                    return self._called(function, args, given, node)
        raise self.refused(node)

    def _called(self, function: FunctionWriter, args: Sequence[ast.expr], given: list[str], node: ast.Call) -> str:
        wanted = list(function.parameters.values())
        missing = len(wanted) - len(args)
        defaults = (
            [self.expr(each) for each in function.defaults[len(function.defaults) - missing :]] if missing else []
        )
        for kind, each in zip(wanted, args, strict=False):
            if self.type_of(each) != kind and not (kind in SCALARS and self.type_of(each) in SCALARS):
                raise self.refused(node)
        return f"{function.c_name}({', '.join([*given, *defaults])})"


def joined(kinds: Sequence[str | None]) -> str | None:
    """The type of what may be of several; those not yet known count as any."""
    known = [kind for kind in kinds if kind is not None]
    order = list(SCALARS)
    if known and all(kind in SCALARS for kind in known):
        return max(known, key=order.index)
    return known[0] if known else None


def translated(root: Path, kernels: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The C of the functions of some modules that are called from Python, part by part.

    Args:
        root: the folder of the package. kernels: of each module, the names of its functions.

    Raises:
        SubsetError: a function has something that has no translation.
    """
    program = TranslationUnit(root)
    for module, names in kernels.items():
        for name in names:
            program.export(module, name)
    yield from program.parts
