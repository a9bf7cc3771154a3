"""The line of the user's own code that an error names."""

from __future__ import annotations

import linecache
from collections.abc import Iterator
from pathlib import Path
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import NamedTuple

import torch
from torch import nn

from penstock.cost.cut import PartitionError

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""Folders of torch and of Penstock's runtime, in which no line is the user's."""
_PYTHON = str(Path(linecache.__file__).parent)
_INSTEAD = "Move that into one of its layers, or give ps.Pipeline a list with one module for each stage"


class SourceLine(NamedTuple):
    """A line of source."""

    path: str
    number: int

    def __str__(self) -> str:
        text = linecache.getline(self.path, self.number).strip()
        return f"{self.path}:{self.number}" + (f": {text}" if text else "")


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

    def __init__(self, what: str, line: SourceLine | None, instead: str = _INSTEAD) -> None:
        super().__init__(what if line is None else f"{what}, at {line}")
        self.instead = instead


class KeptValue(Untraceable):
    """A value that stood for a tensor while a forward was traced is used after that: a cache has kept it."""


def is_users(path: str) -> bool:
    """Returns whether a file belongs neither to torch, nor to Python's own library, nor to Penstock's runtime."""
    if path.startswith(_PYTHON):  # which may have the folder of installed packages in it
        return ("/site-packages/" in path or "/dist-packages/" in path) and not path.startswith(_LIBRARIES)
    return not path.startswith((*_LIBRARIES, "<frozen"))


def here() -> SourceLine | None:
    """Returns the user's innermost line that is running."""
    return next(_users_lines(walk_stack(None)), None)


def line_of_error(error: BaseException) -> SourceLine | None:
    """Returns the user's innermost line that an error came through."""
    lines = list(_users_lines(walk_tb(error.__traceback__)))
    return lines[-1] if lines else None


def _users_lines(frames: Iterator[tuple[FrameType, int]]) -> Iterator[SourceLine]:
    return (SourceLine(path, number) for frame, number in frames if is_users(path := frame.f_code.co_filename))
