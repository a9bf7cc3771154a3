"""Rank processes on this machine: all start, all end, and one message says why.

    parent --> fork server --orders, descriptors--> rank 0, rank 1, ...     child: init_process, a lifeline (a rank
       ^                                               |                          ends with its parent)
       +------ report: the uncaught exception of each, of which `failures` picks the first

Ranks are forked from one process (`fork_server`), which has loaded torch and what they need of Penstock once;
`penstock train`, which has loaded that too, forks that process itself (`WaitingServer`).
`launch` is the parent's side, `init_process` the child's (under `torchrun` too). A child records its uncaught
exception in a file and prints nothing; the parent, which sees every end, prints the cause once.
"""

from penstock.runtime.launch.child import init_process, warm_up_malloc, watch
from penstock.runtime.launch.failures import LossKind, loss_of
from penstock.runtime.launch.fork_server import RankOrder, WaitingServer
from penstock.runtime.launch.parent import FIRST_OPTIMIZER, launch

__all__ = [
    "FIRST_OPTIMIZER",
    "LossKind",
    "RankOrder",
    "WaitingServer",
    "init_process",
    "launch",
    "loss_of",
    "warm_up_malloc",
    "watch",
]
