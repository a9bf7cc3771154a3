"""One rank of a training run: started by `penstock train`, or by torchrun on several hosts.

torchrun --nproc-per-node 4 -m penstock.train --schedule zb-v --steps 100
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(argv: list[str]) -> int:
    if argv[:1] == ["--order"]:
        from penstock.train.run_job import run_ordered

        run_ordered(Path(argv[1]))
    from penstock.train.command import run_command

    return run_command(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
