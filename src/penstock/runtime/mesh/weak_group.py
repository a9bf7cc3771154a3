"""A process group that is used, but not kept alive.

A group's own threads end when its last reference goes, which is to be in `dist.destroy_process_group()`. Where
something keeps the group, they run on while Python shuts down; one that lets go of a tensor just then ends the
process with "terminate called without an active exception". So a pipeline keeps none, and what torch keeps is let go
at exit.
"""

from __future__ import annotations

import atexit
import sys
import weakref
from types import FunctionType

import torch.distributed as dist

from penstock.runtime.errors import RuntimeFailure


class WeakGroup:
    """A group that torch.distributed holds until it is destroyed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = weakref.ref(group)

    @property
    def is_alive(self) -> bool:
        return self._group() is not None

    def __call__(self) -> dist.ProcessGroup:
        """The group. Raises RuntimeFailure where it has been destroyed."""
        group = self._group()
        if group is None:
            raise RuntimeFailure(
                "the process group that this pipeline ran over is gone; call dist.destroy_process_group() last"
            )
        return group


@atexit.register
def let_go_of_defaults() -> None:
    """Drops the groups that are default arguments of torch.distributed.nn's functions.

    An optimizer imports that module. Where that happens once a group is there, its functions keep it for good: their
    `group=group.WORLD` is worked out then. Nothing calls them any more when Python ends.
    """
    module = sys.modules.get("torch.distributed.nn.functional")
    for function in list(vars(module).values()) if module is not None else ():
        if isinstance(function, FunctionType) and function.__defaults__:
            kept = (None if isinstance(value, dist.ProcessGroup) else value for value in function.__defaults__)
            function.__defaults__ = tuple(kept)
