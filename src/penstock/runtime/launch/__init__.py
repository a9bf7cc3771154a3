"""Rank processes on this machine: all start, all end, and one message says why.

    launching process --starts--> fork server, which has loaded torch --forks--> rank 0, rank 1, ...
         ^                                                                           |
         +------------------- how each ended, and its exception ---------------------+

`launcher` is the launching process: it starts the ranks, watches them, ends all once one has failed, and finds the
failure that caused the others. `rank` is what a rank does before and after its program, how it reports a failure, and
`init_process`, by which it joins the others (under `torchrun` too).
"""

from penstock.runtime.launch.launcher import launch
from penstock.runtime.launch.rank import init_process

__all__ = ["init_process", "launch"]
