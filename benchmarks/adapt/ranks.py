"""The three runs of one seed, in one process (emulated devices) or in one process per rank (real compute).

    python benchmarks/adapt/ranks.py FOLDER CELL SEED MODE,MODE,...

`run.py` starts it. The modes run in the order given, and each leaves a folder with steps.json and, where the run
adapts, the records of its agent. The mode "calibrate" measures what ops cost, for the oracle's simulations.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adapt.cells import (
    BETWEEN_MS,
    CALIBRATION,
    CELLS,
    CONTROL,
    STEPS,
    STRETCH,
    TEXT,
    Cell,
    Fault,
    StepTimes,
    best_answer,
    conditions_of,
    emulated_job,
    fault_of,
    is_due,
    late_link,
    simulated_ms,
)
from penstock.control import Configuration, Job
from penstock.control.log import read_header
from penstock.cost import Links
from penstock.runtime import EmulatedPipeline
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.launch import init_process, launch
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions
from penstock.train.inputs import build_pipeline, gather_inputs
from penstock.train.settings import Settings
from penstock.train.training import Training

NUM_CALIBRATED = 30
"""Steps of a run that measures costs; a step's time is the median of the last half."""
TIMEOUT = 60.0


class Given(NamedTuple):
    """What the runs of a seed have in common.

    Attributes:
        job: what runs, and its costs. answer: the oracle's.
        fault: None for none. healthy_ms: the time of a step without it.
    """

    cell: Cell
    seed: int
    job: Job | None
    answer: Configuration | None
    fault: Fault | None
    healthy_ms: float

    def is_due(self, now: float) -> bool:
        return self.fault is not None and is_due(self.fault, now, self.healthy_ms)


Row = tuple[float, float]
"""When a step began and ended, in ms of the conditions' time."""


def run_emulated(given: Given, mode: str, folder: Path) -> list[Row]:
    job = given.job
    assert job is not None
    with EmulatedPipeline(
        job.start.schedule,
        job.costs,
        links=Links.parse(conditions_of(given.cell, given.fault)),
        stretch=STRETCH,
        timeout=TIMEOUT,
        transport=TransportOptions("direct", None if mode == "without" else DelegateOptions()),
        adapt=AdaptOptions(folder) if mode == "with" else None,
    ) as pipe:
        now = clock(pipe._conditions.origin, STRETCH)

        def step() -> Row:
            """What lies between two steps is no part of the devices, and so short a run would make much of it."""
            ran = pipe.step()
            return ran.start, ran.start + ran.timeline.makespan

        return timed(given, mode, now, step, pipe.reconfigure, given.is_due)


def run_real(given: Given, mode: str, folder: Path) -> list[Row]:
    """Every rank calls it; only rank 0's rows count, and it says when the oracle's answer is due."""
    settings = settings_of(given, mode, folder.parents[2] / TEXT)
    inputs = gather_inputs(settings)
    adapt = None
    if mode in ("with", "calibrate"):
        adapt = AdaptOptions(folder, least_gain=1.0 if mode == "calibrate" else 0.02)
    with ExitStack() as stack:
        pipe = build_pipeline(inputs, adapt)
        stack.callback(pipe.close)
        training = Training(pipe, settings.passes, inputs.data.batches, settings.learning_rate, False, settings.dp)
        conditions = pipe._local.conditions
        assert conditions is not None
        now = clock(conditions.origin)
        first = os.environ["RANK"] == "0"
        pipe.sum_each_step(lambda: (float(first and given.is_due(now())),))

        def step() -> None:
            training.run_pass()

        def due(at: float) -> bool:
            return pipe.step_sums[0] > 0 if pipe.step_sums else given.fault is not None and given.fault.begin == 0

        return timed(given, mode, now, step, pipe.reconfigure, due)


def settings_of(given: Given, mode: str, text: Path) -> Settings:
    """Those of `penstock train` with the nano preset. A run that delegates by hand has delegates, too."""
    ring = given.cell.device == "ring"
    return Settings(
        schedule="zb",
        ranks=2 if ring else 4,
        dp=2 if ring else 1,
        microbatches=8,
        preset="nano",
        dispatch="frozen",
        transport="direct",
        adapt=mode != "without",
        link=" ".join(conditions_of(given.cell, given.fault)),
        steps=NUM_CALIBRATED if mode == "calibrate" else given.cell.num_steps,
        data=str(text),
        threads=1,
        evaluate_every=0,
        save_every=0,
        sample=0,
        seed=given.seed,
        timeout=TIMEOUT,
    )


def clock(origin: int, stretch: float = 1.0) -> Callable[[], float]:
    """A clock in ms of the conditions' time."""
    return lambda: (time.perf_counter_ns() - origin) / 1e6 / stretch


def timed(
    given: Given,
    mode: str,
    now: Callable[[], float],
    step: Callable[[], Row | None],
    reconfigure: Callable[[Configuration], None],
    due: Callable[[float], bool],
) -> list[Row]:
    """Runs all steps, and times those that do not say when they ran, with what the oracle does before them."""
    rows: list[Row] = []
    answers = False
    for _ in range(NUM_CALIBRATED if mode == "calibrate" else given.cell.num_steps):
        began = now()
        if mode == "oracle" and given.job is not None and given.answer is not None and due(began) is not answers:
            answers = not answers
            reconfigure(given.answer if answers else given.job.start)
        began, ended = step() or (began, now())
        rows.append((round(began, 3), round(ended, 3)))
    return rows


def given_of(cell: Cell, seed: int, calibration: Path) -> Given:
    """Reads the job of a cell, and works out the oracle's answer."""
    if cell.device == "emulated":
        job = emulated_job(cell)
        healthy = simulated_ms(job, job.start, Links()) + BETWEEN_MS / STRETCH
    else:
        value = json.loads(calibration.read_text(encoding="utf-8"))
        job, healthy = read_header(value["log"])[0], value["step_ms"]
    if not cell.fault:
        return Given(cell, seed, job, None, None, healthy)
    link = late_link(cell, seed)
    slower = simulated_ms(job, job.start, Links({link: cell.fault})) / simulated_ms(job, job.start, Links())
    fault = fault_of(cell, seed, StepTimes(healthy, healthy * slower))
    return Given(cell, seed, job, best_answer(job, link, cell.fault), fault, healthy)


def in_words(given: Given) -> str:
    """The oracle's answer in a few words."""
    answer, job = given.answer, given.job
    if answer is None or job is None:
        return ""
    parts = [answer.dispatch.value]
    parts += ["re-planned"] if answer.schedule != job.start.schedule else []
    parts += [f"delegated {', '.join(f'{a}:{b}' for a, b in answer.delegated)}"] if answer.delegated else []
    parts += [f"nodes at {answer.nodes}"] if answer.nodes != job.start.nodes else []
    return ", ".join(parts)


def run_modes(folder: Path, cell: Cell, seed: int, modes: list[str], first: bool) -> None:
    """Runs the modes of a seed, one after another, so that they see the same machine."""
    calibration = folder.parents[1] / cell.device / CALIBRATION
    given = Given(cell, seed, None, None, None, 0.0)
    if modes != ["calibrate"]:
        given = given_of(cell, seed, calibration)
    for mode in modes:
        place = folder / mode
        place.mkdir(parents=True, exist_ok=True)
        rows = run_emulated(given, mode, place) if cell.device == "emulated" else run_real(given, mode, place)
        if not first:
            continue
        if mode == "calibrate":
            steps = [end - began for began, end in rows[len(rows) // 2 :]]
            log = (place / CONTROL).read_text(encoding="utf-8").splitlines()[0]
            value = {"step_ms": median(steps), "log": json.loads(log)}
            calibration.parent.mkdir(parents=True, exist_ok=True)
            calibration.write_text(json.dumps(value) + "\n", encoding="utf-8")
            continue
        fault = None if given.fault is None else [list(given.fault.link), given.fault.begin, given.fault.end]
        said = {"steps": rows, "fault": fault, "healthy_ms": given.healthy_ms, "answer": in_words(given)}
        (place / STEPS).write_text(json.dumps(said) + "\n", encoding="utf-8")


def main(words: list[str]) -> int:
    folder, cell, seed, modes = Path(words[0]), CELLS[words[1]], int(words[2]), words[3].split(",")
    if cell.device == "emulated":
        run_modes(folder, cell, seed, modes, True)
        return 0
    if "RANK" not in os.environ:
        return launch([__file__, *words], 4, env={"OMP_NUM_THREADS": "1"})
    rank, _ = init_process(TIMEOUT)
    run_modes(folder, cell, seed, modes, rank == 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
