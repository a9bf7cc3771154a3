"""Reads the small part of Python that the engine's plain functions are written in, for translators.

Numbers, arrays, loops and functions have one meaning in JavaScript and in C too, and both write statements alike. So
what the two translators share is here: what a module holds, statements, and the simpler expressions. Anything else is
refused by its line.

This module and `to_c` are imported by `setup.py`, and so import nothing but the standard library.
"""

from __future__ import annotations

import ast
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path


class SubsetError(ValueError):
    """A source uses what has no translation; the message has the file, the line and the words."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class ParsedModule:
    """What a module holds.

    Attributes:
        imports: of each name taken from another module, that module and the name there.
        constants: the numbers among its names.
        functions: by name. classes: of each class, the names of its fields and their annotations.
    """

    def __init__(self, text: str, name: str) -> None:
        self.name = name
        self.imports: dict[str, tuple[str, str]] = {}
        self.constants: dict[str, int | float] = {}
        self.functions: dict[str, ast.FunctionDef] = {}
        self.classes: dict[str, dict[str, ast.expr]] = {}
        for node in ast.parse(text).body:
            match node:
                case ast.ImportFrom(module=str(module), names=names):
                    self.imports |= {each.asname or each.name: (module, each.name) for each in names}
                case ast.FunctionDef(name=name):
                    self.functions[name] = node
                case ast.ClassDef(name=name, body=body):
                    fields = [each for each in body if isinstance(each, ast.AnnAssign)]
                    self.classes[name] = {ast.unparse(each.target): each.annotation for each in fields}
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    self._keep(name, _number(value))
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Call(func=ast.Name(id="range"))):
                    for number, each in enumerate(names):
                        self._keep(ast.unparse(each), number)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                    for each, value in zip(names, values, strict=True):
                        self._keep(ast.unparse(each), _number(value))

    @classmethod
    def read(cls, path: Path) -> ParsedModule:
        """The source of a module, named after its file."""
        return cls(path.read_text(), path.stem)

    def _keep(self, name: str, number: int | float | None) -> None:
        if number is not None:
            self.constants[name] = number

    def refused(self, node: ast.AST, language: str, instead: str) -> SubsetError:
        line = getattr(node, "lineno", 0)
        return SubsetError(
            f"{self.name}.py, line {line}: {ast.unparse(node)[:80]!r} has no translation to {language}; write it "
            f"with numbers, arrays, loops and functions, or teach {instead}",
            line,
        )


def _number(value: ast.expr) -> int | float | None:
    if ast.unparse(value) == "math.inf":
        return math.inf
    try:
        found = ast.literal_eval(value)
    except ValueError:
        return None
    return found if isinstance(found, int | float) else None


class Writer(ABC):
    """Writes statements and expressions as C and JavaScript have them; heirs say what is different there."""

    LANGUAGE, HERE = "", ""
    COUNTER = ""
    """What declares a loop's own counter."""
    EQUAL, UNEQUAL = "==", "!="
    BINARY: Mapping[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*"}

    def __init__(self, source: ParsedModule) -> None:
        self.source = source
        self.lines: list[str] = []
        self.depth = 1
        self.num_counters = 0

    def refused(self, node: ast.AST) -> SubsetError:
        return self.source.refused(node, self.LANGUAGE, self.HERE)

    def write(self, line: str) -> None:
        self.lines.append("  " * self.depth + line)

    # ---- statements

    def body(self, statements: Sequence[ast.stmt]) -> None:
        self.depth += 1
        for statement in statements:
            self.statement(statement)
        self.depth -= 1

    def block(self, head: str, statements: Sequence[ast.stmt], tail: str = "}") -> None:
        self.write(head)
        self.body(statements)
        self.write(tail)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                return
            case ast.Expr(value=value):
                self.write(f"{self.expr(value)};")
            case ast.Return(value=value):
                self.returned(value)
            case ast.Break():
                self.write("break;")
            case ast.Continue():
                self.write("continue;")
            case ast.If(test=test, body=body, orelse=[]):
                self.block(f"if ({self.expr(test)}) {{", body)
            case ast.If(test=test, body=body, orelse=orelse):
                self.block(f"if ({self.expr(test)}) {{", body, "} else {")
                self.body(orelse)
                self.write("}")
            case ast.While(test=test, body=body, orelse=[]):
                self.block(f"while ({self.expr(test)}) {{", body)
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=args), orelse=[]):
                self.count(name, args, node.body)
            case ast.For(orelse=[]):
                self.loop(node)
            case ast.AugAssign(target=target, op=op, value=value):
                self.assign([target], ast.copy_location(ast.BinOp(target, op, value), node))
            case ast.Assign(targets=targets, value=value):
                self.assign(targets, value)
            case _:
                raise self.refused(node)

    def count(self, name: str, args: Sequence[ast.expr], body: Sequence[ast.stmt]) -> None:
        """Python looks at the bounds of a range once, and sets the variable anew each time round."""
        given = [*map(self.expr, args)]
        first, last, step = ["0", *given, "1"] if len(given) == 1 else [*given, "1"][:3]
        self.num_counters += 1
        at, end = f"at{self.num_counters}", f"end{self.num_counters}"
        sign = ">" if step.startswith("(-") else "<"
        self.write(f"for ({self.COUNTER} {at} = {first}, {end} = {last}; {at} {sign} {end}; {at} += {step}) {{")
        self.depth += 1
        self.write(f"{self.name(name)} = {at};")
        self.depth -= 1
        self.body(body)
        self.write("}")

    def assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        match targets[0], value:
            case ast.Subscript(value=array, slice=ast.Slice(lower=None, upper=None, step=None)), _:
                self.fill(array, value)
            case ast.Tuple(elts=names), ast.Tuple(elts=values):
                # One after the other where no value reads what was just written.
                if any(_reads(each, names[:place]) for place, each in enumerate(values)):
                    self.exchange(names, values)
                else:
                    for name, each in zip(names, values, strict=True):
                        self.assign([name], each)
            case ast.Tuple(), _:
                raise self.refused(value)
            case _:
                self.write(f"{' = '.join(self.expr(target) for target in targets)} = {self.expr(value)};")

    # ---- expressions

    def expr(self, node: ast.expr) -> str:
        match node:
            case ast.Name(id=name):
                return self.name(name)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in self.BINARY and not isinstance(
                left, ast.List
            ):
                return f"({self.expr(left)} {self.BINARY[type(op)]} {self.expr(right)})"
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return f"!({self.expr(operand)})"
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return f"(-{self.expr(operand)})"
            case ast.BoolOp(op=op, values=values):
                word = " && " if isinstance(op, ast.And) else " || "
                return "(" + word.join(self.expr(value) for value in values) + ")"
            case ast.Compare(left=left, ops=ops, comparators=rights):
                lefts = [left, *rights]
                parts = [self.compare(*each, node) for each in zip(lefts, ops, rights, strict=False)]
                return "(" + " && ".join(parts) + ")"
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return f"({self.expr(test)} ? {self.expr(body)} : {self.expr(orelse)})"
        return self.other(node)

    def compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr, node: ast.AST) -> str:
        words = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: self.EQUAL, ast.NotEq: self.UNEQUAL}
        match op, right:
            case ast.Is() | ast.IsNot(), ast.Constant(value=None):
                return f"{self.or_null(left)} {'==' if isinstance(op, ast.Is) else '!='} {self.NULL}"
            case ast.In(), ast.Tuple(elts=values):
                return "(" + " || ".join(f"{self.expr(left)} {self.EQUAL} {self.expr(each)}" for each in values) + ")"
        if type(op) not in words:
            raise self.refused(node)
        return f"{self.expr(left)} {words[type(op)]} {self.expr(right)}"

    # ---- what is different in each language

    NULL = ""

    @abstractmethod
    def name(self, name: str) -> str: ...

    def or_null(self, node: ast.expr) -> str:
        """What is compared with null where something may not be there."""
        return self.expr(node)

    @abstractmethod
    def other(self, node: ast.expr) -> str:
        """All other expressions."""

    def returned(self, value: ast.expr | None) -> None:
        self.write("return;" if value is None else f"return {self.expr(value)};")

    @abstractmethod
    def loop(self, node: ast.For) -> None:
        """A loop over anything but a range."""

    @abstractmethod
    def fill(self, array: ast.expr, value: ast.expr) -> None:
        """`array[:] = value`, a number or an array."""

    @abstractmethod
    def exchange(self, names: Sequence[ast.expr], values: Sequence[ast.expr]) -> None:
        """Assigns several values, some of which read what others write."""


def own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """The nodes of a function's body in their order, without those of functions and comprehensions inside it."""

    def walk(node: ast.AST) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(node):
            yield child
            if not isinstance(child, ast.FunctionDef | ast.Lambda | ast.ListComp | ast.GeneratorExp):
                yield from walk(child)

    for statement in function.body:
        yield statement
        if not isinstance(statement, ast.FunctionDef):
            yield from walk(statement)


def _reads(value: ast.expr, written: Sequence[ast.expr]) -> bool:
    """Whether an expression may read what was written before it in the same assignment."""
    names = {target.id for target in written if isinstance(target, ast.Name)}
    if len(names) < len(written) and any(isinstance(each, ast.Subscript | ast.Attribute) for each in ast.walk(value)):
        return True
    return any(isinstance(each, ast.Name) and each.id in names for each in ast.walk(value))
