"""Whether something with processes, threads and patched layers may be used: it is open, broken, or closed, no other
call is in it, and torch is not set to compute something else.

made --> open --> closed          what was put in place while it was made is taken back, the last first;
  |        |                      where making it fails, what was there by then
  v        v
closed   broken --> closed        after an error in the middle of a step between processes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from penstock.runtime.errors import RuntimeFailure

P = ParamSpec("P")
R = TypeVar("R")


class Lifetime:
    """Whether something is open, broken or closed, and what is to be undone when it closes.

    Args:
        what: in messages: "this pipeline".
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._undo = ExitStack()
        self._ended: str | None = None
        self._lock = Lock()

    @contextmanager
    def making(self) -> Iterator[Callable[[Callable[[], object]], object]]:
        """Around what makes it. Gives a function that takes note of how to take something back."""
        try:
            yield self._undo.callback
        except BaseException as error:
            try:
                self.close()
            except Exception as another:
                error.add_note(f"what was in place by then could not all be taken back: {another!r}")
            raise

    @contextmanager
    def sharing(self, doing: str, rank: int) -> Iterator[None]:
        """Around what processes do together: an error in its middle leaves them at different places for good."""
        try:
            yield
        except BaseException as error:
            first = str(error).splitlines()[0] if str(error) else ""
            self._ended = (
                f"{self._what} is broken: {doing} ended on rank {rank} with {type(error).__name__}: {first}. What "
                "ranks had sent one another is lost. Start the processes again, make a new pipeline and load a "
                "checkpoint (pipe.load), on every rank"
            )
            raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a call in which no other one may begin. Raises RuntimeFailure if this one is in such a call."""
        if not self._lock.acquire(blocking=False):
            raise RuntimeFailure(
                f"{self._what} is in the middle of another call, which a stage, loss_fn or another thread made this "
                "one in; call it after that one has returned, from one thread at a time"
            )
        try:
            yield
        finally:
            self._lock.release()

    @property
    def is_broken(self) -> bool:
        """Whether processes are at different places for good."""
        return self._ended is not None and "is broken" in self._ended

    def require_open(self) -> None:
        """Raises RuntimeFailure where it is broken or closed, and says how to go on."""
        if self._ended is not None:
            raise RuntimeFailure(self._ended)

    def close(self) -> None:
        """Takes back what was put in place, once, all of it even where some of that fails."""
        if not self.is_broken:
            self._ended = f"{self._what} was closed; make a new one"
        self._undo.close()


def one_at_a_time(method: Callable[P, R]) -> Callable[P, R]:
    """Makes a method of what has a `_life` refuse to begin while another such method of it runs."""

    @wraps(method)
    def called(*args: P.args, **given: P.kwargs) -> R:
        owner: Any = args[0]
        if torch.compiler.is_compiling():  # the caller is compiled, and a step's own Python is no part of that
            return torch.compiler.disable(called)(*args, **given)
        with owner._life.alone():
            return method(*args, **given)

    return called


def require_plain_modes(device: torch.device, call: str, trains: bool = False) -> None:
    """Raises RuntimeFailure where torch computes something else than a plain call would.

    Args:
        device: on which the stages lie.
        call: the method of `Pipeline` that is called. trains: whether it needs gradients.
    """
    if trains and torch.is_inference_mode_enabled():
        raise RuntimeFailure(
            f"{call}() was called under torch.inference_mode(), where nothing trains; leave it first"
        )
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        dtype = torch.get_autocast_dtype(device.type)
        raise RuntimeFailure(
            f"{call}() was called under torch.autocast, which would go on computing with the casts that it made "
            f"before an update; leave it, and give ps.Pipeline(precision=ps.PrecisionOptions(autocast={dtype}))"
        )
    try:
        probe = torch.empty(0, device="cpu").requires_grad_()  # each transform of torch.func forbids this
    except RuntimeError as error:
        raise RuntimeFailure(
            f"{call}() was called within a transform of torch.func (grad, vmap, jvp), and runs backwards of its own "
            "and sends messages, which torch can't transform; call it outside, or transform what a stage computes"
        ) from error
    if type(probe) is not Tensor:
        raise RuntimeFailure(
            f"{call}() was called in a mode of torch in which tensors are made as {type(probe).__name__} and have no "
            "numbers; leave it first"
        )
