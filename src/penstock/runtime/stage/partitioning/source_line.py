"""Where in the user's own code something happens: the line that an error names."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
from pathlib import Path
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from penstock.cost.cut import PartitionError

_NOT_THE_USERS = (
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
    str(Path(linecache.__file__).parent),
)
"""Folders of torch, of Penstock's runtime and of Python's own library, in which no line is the user's."""
_SITE = ("site-packages", "dist-packages")


_INSTEAD = "Move that into one of its layers, or give ps.Pipeline a list with one module for each stage"


class SourceLine(NamedTuple):
    """A line of source."""

    path: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.path, self.number).strip()
        return f"{self.path}:{self.number}" + (f": {text}" if text else "")


class Untraceable(PartitionError):
    """What stands in the way of cutting a forward, and the line where.

    Attributes:
        what: in words. line: of the user's code; None where it is no one line. instead: what to do.
    """

    def __init__(self, what: str, line: SourceLine | None, instead: str = _INSTEAD) -> None:
        super().__init__(what if line is None else f"{what}, at {line}")
        self.what, self.line, self.instead = what, line, instead


class KeptValue(Untraceable):
    """A value that stood for a tensor while a forward was traced is used after that: the forward has kept it."""

    def __init__(self, line: SourceLine | None) -> None:
        super().__init__(
            "the forward uses a value that it kept while it was traced, in a global or by functools.lru_cache. What "
            "a forward computes depends on its inputs, parameters and buffers alone (sentence 1 of the contract): "
            "register the value as a buffer, or make it inside a layer",
            line,
            "Or empty the cache and give an example, which fills it with tensors: ps.split(model, 2, example=inputs)",
        )


def is_users(path: str) -> bool:
    """Whether a file is neither torch's, nor Python's own, nor one of Penstock's runtime."""
    inside_python = path.startswith(_NOT_THE_USERS) and not any(f"/{site}/" in path for site in _SITE)
    return not (inside_python or path.startswith(_NOT_THE_USERS[:2]) or path.startswith("<frozen"))


def line_of(frame: FrameType | None) -> SourceLine | None:
    """The user's innermost line from a frame on outwards."""
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def here() -> SourceLine | None:
    """The user's innermost line that is being run."""
    return line_of(sys._getframe(1))


def line_of_error(error: BaseException) -> SourceLine | None:
    """The user's innermost line that an error came through."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if is_users(trace.tb_frame.f_code.co_filename):
            found = SourceLine(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
        trace = trace.tb_next
    return found


def attribute_line(module: nn.Module, name: str) -> SourceLine | None:
    """The first line of a module's methods, besides `__init__`, that mentions an attribute or a name."""
    for kind in type(module).__mro__:
        if kind is nn.Module:
            break
        try:
            path = inspect.getsourcefile(kind) or ""
            lines, first = inspect.getsourcelines(kind)
        except (OSError, TypeError):
            continue
        is_looked_at = False
        for number, text in enumerate(lines, start=max(first, 1)):
            if text.strip().startswith(("def ", "class ")):
                is_looked_at = text.strip().startswith("def ") and "__init__" not in text
            elif is_looked_at and re.search(rf"\b{re.escape(name)}\b", text):
                return SourceLine(path, number)
    return None
