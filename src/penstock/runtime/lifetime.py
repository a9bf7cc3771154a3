"""Whether a pipeline may be used: it is open, broken or closed.

open --> closed
  |
  +----> broken          an error in the middle of what processes do together, which leaves them at different places
  +----> to be loaded    a step broke off when some of its updates may have been made; a checkpoint opens it again
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch

from penstock.runtime.errors import LinkLost, RuntimeFailure

P = ParamSpec("P")
R = TypeVar("R")


class Lifetime:
    """The state of a pipeline.

    Attributes:
        is_broken: whether processes are at different places for good.
        is_closed: whether it was closed.
    """

    def __init__(self) -> None:
        self.is_broken = self.is_closed = False
        self._ended: str | None = None
        """Why no call may begin."""
        self._lost: str | None = None
        """Why only a load may begin."""

    @contextmanager
    def sharing(self, doing: str, rank: int) -> Iterator[None]:
        """Around what processes do together: an error in the middle breaks the pipeline."""
        try:
            yield
        except LinkLost:  # all begin it anew
            raise
        except BaseException as error:
            self.is_broken = True
            self._ended = (
                f"this pipeline is broken: {doing} ended on rank {rank} with {type(error).__name__}: "
                f"{_first_line(error)}. What ranks had sent one another is lost. Start the processes again, make a "
                "new pipeline and load a checkpoint (pipe.load), on every rank"
            )
            raise

    def lose_updates(self, error: BaseException) -> None:
        """A step broke off when some of its updates may have been made."""
        self._lost = (
            f"an earlier step broke off ({_first_line(error) or type(error).__name__}) when some of its updates may "
            "have been made; go on from a checkpoint with load(...)"
        )

    def load(self) -> None:
        """A checkpoint, or the state of another pipeline, has been loaded."""
        self._lost = None

    def require_open(self) -> None:
        """Raises RuntimeFailure where it is broken or closed, and says how to go on."""
        if self._ended is not None:
            raise RuntimeFailure(self._ended)

    def require_whole(self) -> None:
        """Raises RuntimeFailure where updates were lost and no checkpoint has been loaded since."""
        if self._lost is not None:
            raise RuntimeFailure(self._lost)

    def close(self) -> None:
        """No call may begin any more."""
        self.is_closed = True
        if not self.is_broken:
            self._ended = "this pipeline was closed; make a new one"


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else ""


def while_open(method: Callable[P, R]) -> Callable[P, R]:
    """Makes a method of an object that has a `_life` refuse to begin where that life is not open."""

    @wraps(method)
    def called(*args: P.args, **given: P.kwargs) -> R:
        if torch.compiler.is_compiling():  # the caller is compiled, and a step's own Python is no part of that
            return torch.compiler.disable(called)(*args, **given)
        owner: Any = args[0]
        owner._life.require_open()
        return method(*args, **given)

    return called
