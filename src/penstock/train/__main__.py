"""One rank of a training run: started by `penstock train`, or by torchrun on several hosts.

torchrun --nproc-per-node 4 -m penstock.train --schedule zb-v --steps 100
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    if argv[:1] == ["--order"]:
        from penstock.train.run_job import run_ordered

        run_ordered(Path(argv[1]))
    from penstock.train.command import run_command

    return run_command(argv)


def _leave(codes: list[int]) -> None:
    """Ends the process once all else that runs at its end has run.

    A thread that waits inside gloo for a connection that broke ends the process by SIGABRT if it comes back while
    Python shuts down, and torchrun takes a run that is done and written for one that failed.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first that is registered runs last
    codes.append(main(sys.argv[1:]))
    sys.exit(codes[0])
