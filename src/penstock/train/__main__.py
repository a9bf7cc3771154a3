"""One rank of a training run: started by `penstock train`, or by torchrun on several hosts.

torchrun --nproc-per-node 4 -m penstock.train --schedule zb-v --steps 100
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

from penstock.host_process import open_standard_streams


def main(argv: list[str]) -> int:
    if argv[:1] == ["--job"]:
        from penstock.train.start import run_rank

        run_rank(Path(argv[1]))
    from penstock.train.command import run_command

    return run_command(argv)


def _leave(codes: list[int]) -> None:
    """Ends the process, after everything else that runs at its end.

    A thread inside gloo may wait for a connection that has broken. If it wakes while Python shuts down, it ends the
    process by SIGABRT. torchrun would then report as failed a run that is done and written.
    """
    if codes:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(codes[0])


if __name__ == "__main__":
    open_standard_streams()
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first that is registered runs last
    codes.append(main(sys.argv[1:]))
    sys.exit(codes[0])
