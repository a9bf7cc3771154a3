"""Rank processes on this machine: all start, all end, and one message says why.

    launching process --order--> server, which has loaded torch --fork--> rank 0, rank 1, ...
         ^                         |  ^                                           |
         +-- exit code, message ---+  +------------ the exception of each --------+

`parent` is the launching process. `server` is the process that has loaded torch and what the ranks need; it forks the
ranks, watches them, and ends all when one has failed. `rank` is what a rank does before and after its program, and
`init_process` is how it joins the others (under `torchrun` too). `failures` finds the failure that caused the others.
"""

from penstock.runtime.launch.child import init_process, warm_up_malloc
from penstock.runtime.launch.failures import loss_of
from penstock.runtime.launch.parent import FIRST_OPTIMIZER, RankServer, launch

__all__ = [
    "FIRST_OPTIMIZER",
    "RankServer",
    "init_process",
    "launch",
    "loss_of",
    "warm_up_malloc",
]
