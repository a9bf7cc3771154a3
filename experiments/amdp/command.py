"""What the commands of the throughput tables share: simulate trials, measure them, save and print.

results/table3.json     a row a trial: its keys, `simulated` and `measured` ktokens/s, makespans in ms
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from experiments.amdp import RESULTS
from experiments.amdp.measured import measure_all
from experiments.amdp.methods import Trial, simulate
from experiments.common.command import options
from experiments.common.results import Row, load, save

Trials = Iterable[tuple[Row, Trial]]
"""Keys by which a row is found again, and what is timed."""


def command(
    name: str,
    about: str | None,
    trials: Callable[[], Trials],
    lines: Callable[[Sequence[Row]], Iterator[str]],
    simulated_only: Callable[[], Trials] | None = None,
) -> None:
    """Runs a table from the command line.

    Args:
        trials: of the paper's table; simulated_only: others, which are not measured.
        lines: what to print of the rows.
    """
    parser = options(about, RESULTS, show=True)
    parser.add_argument("--measured", action="store_true", help="run the paper's table on emulated devices too")
    parser.add_argument("--stretch", type=float, default=1.0, help="seconds of the clock to one of an op")
    parser.add_argument("--jobs", type=int, default=5, help="measured trials at once")
    given = parser.parse_args()
    if not given.show:
        began = time.perf_counter()
        known = list(trials())
        rows = [simulated_row(keys, trial) for keys, trial in known]
        if given.measured:
            measured = measure_all([trial for _, trial in known], given.stretch, given.jobs)
            for row, found in zip(rows, measured, strict=True):
                row.update(found)
                said = " ".join(str(value) for value in row.values() if isinstance(value, str | int))
                print(f"{said}: {row['simulated']:.1f} simulated, {row['measured']:.1f} measured", flush=True)
        rows += [simulated_row(keys, trial) for keys, trial in (simulated_only or list)()]
        facts = {"stretch": given.stretch, "jobs": given.jobs} if given.measured else {}
        save(given.out, name, rows, seconds=time.perf_counter() - began, **facts)
    print("\n".join(lines(load(given.out, name))))


def simulated_row(keys: Row, trial: Trial) -> Row:
    timeline = simulate(trial)
    return {
        **keys,
        "schedule": trial.method,
        "microbatches": trial.schedule.num_microbatches,
        "simulated": trial.ktokens(timeline),
        "measured": None,
        "simulated_ms": timeline.makespan,
        "measured_ms": [],
        "bubble": timeline.bubble_ratio,
    }
