"""The command line: one file per verb, `penstock VERB --help` for each.

Exit codes: 0 done, 1 the schedule or the run is invalid, 2 misuse. Every verb takes `--json`: then one JSON
object is all that goes to stdout, for failures too.

Only `train`, `split`, `links` and `tune` import torch, and only when they run, so that `--help`
is there at once.
A new verb is a file with a function registered on `app`, named in `run.VERBS`.
"""

from __future__ import annotations

from penstock.cli.run import main

__all__ = ["main"]
