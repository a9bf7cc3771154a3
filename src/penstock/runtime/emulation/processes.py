"""Emulated devices with one process per rank, started from here: messages then pass through gloo.

`emulate_processes` is the parent's side; `python -m penstock.runtime.emulation.processes FOLDER` a rank's.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

from penstock.cost import Costs
from penstock.runtime.emulation.emulated_run import Emulation, emulate
from penstock.runtime.errors import RuntimeFailure
from penstock.runtime.launch import init_process, launch
from penstock.schedule import Schedule

ORDER, RESULT = "order", "result"


def emulate_processes(schedule: Schedule, costs: Costs, *, timeout: float = 60.0, **options: Any) -> Emulation:
    """As `emulate`, with one process per rank, which end with it.

    Raises:
        RuntimeFailure: a rank failed; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-emulate-") as name:
        folder = Path(name)
        (folder / ORDER).write_bytes(pickle.dumps((schedule, costs, timeout, options)))
        code = launch(["-m", "penstock.runtime.emulation.processes", name], schedule.num_ranks)
        if code != 0:
            raise RuntimeFailure(f"the emulated ranks ended with exit code {code}; the messages above say why")
        found: Emulation = pickle.loads((folder / RESULT).read_bytes())
        return found


def main(folder: Path) -> None:
    """One rank. The folder is one that `emulate_processes` made and filled."""
    schedule, costs, timeout, options = pickle.loads((folder / ORDER).read_bytes())
    rank, _ = init_process(timeout)
    found = emulate(schedule, costs, timeout=timeout, **options)
    if rank == 0:
        (folder / RESULT).write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
