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
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.adapt.cells import (
    BEGIN,
    CALIBRATION,
    CELLS,
    CONTROL,
    END,
    STEPS,
    STRETCH,
    TEXT,
    Cell,
    Fault,
    best_answer,
    conditions_of,
    emulated_job,
    fault_of,
)
from penstock.control import Configuration
from penstock.control.log import read_header
from penstock.cost import Links
from penstock.runtime import EmulatedPipeline
from penstock.runtime.adapt import AdaptOptions
from penstock.runtime.launch import init_process, launch
from penstock.runtime.transport.choose import DelegateOptions, TransportOptions
from penstock.runtime.transport.link_conditions import Conditions
from penstock.train.inputs import build_pipeline, gather_inputs
from penstock.train.settings import Settings
from penstock.train.training import Training

NUM_CALIBRATED = 10
"""Steps of a run that measures costs."""
TIMEOUT = 60.0


class Given(NamedTuple):
    """What the runs of a seed have in common.

    Attributes:
        start, answer: what runs at the start, and the oracle's answer; None where neither is known nor needed.
        fault: None for none.
    """

    cell: Cell
    seed: int
    start: Configuration | None = None
    answer: Configuration | None = None
    fault: Fault | None = None


Row = tuple[float, float]
"""When a step began and ended, in ms."""


class Driver(NamedTuple):
    """A pipeline to be driven step by step.

    Attributes:
        step: runs a step, and returns its time in ms. reconfigure: changes what runs.
        conditions: of its links now; nodes that move get others.
        stretch: seconds of the clock to one of the conditions' time.
    """

    step: Callable[[], float]
    reconfigure: Callable[[Configuration], None]
    conditions: Callable[[], Conditions]
    stretch: float = 1.0

    def run(self, given: Given, mode: str, num_steps: int) -> list[float]:
        """Runs all steps; returns how long each took, with what the oracle does before it."""
        fault, found = given.fault, []
        for number in range(num_steps):
            began = time.perf_counter_ns()
            late = fault is not None and number == fault.first
            over = fault is not None and number == fault.end
            if late or over:
                self.set_clock(BEGIN if late else END)
                if mode == "oracle" and given.answer is not None and given.start is not None:
                    self.reconfigure(given.answer if late else given.start)
            between = (time.perf_counter_ns() - began) / 1e6 / self.stretch
            found.append(round(between + self.step(), 3))
        return found

    def set_clock(self, seconds: float) -> None:
        """Sets the time of the links' conditions. Every process does it before the same step."""
        self.conditions().origin = time.perf_counter_ns() - round(seconds * self.stretch * 1e9)


def run_emulated(given: Given, mode: str, folder: Path) -> list[float]:
    job = emulated_job(given.cell)
    with EmulatedPipeline(
        job.start.schedule,
        job.costs,
        links=Links.parse(conditions_of(given.cell, given.fault)),
        stretch=STRETCH,
        timeout=TIMEOUT,
        transport=TransportOptions("direct", None if mode == "without" else DelegateOptions()),
        adapt=AdaptOptions(folder) if mode == "with" else None,
    ) as pipe:
        # What lies between two steps is no part of the devices, and a run so fast would make much of it.
        driver = Driver(lambda: pipe.step().timeline.makespan, pipe.reconfigure, lambda: pipe._conditions, STRETCH)
        return driver.run(given, mode, given.cell.num_steps)


def run_real(given: Given, mode: str, folder: Path) -> list[float]:
    """Every rank calls it; rank 0's times count."""
    settings = settings_of(given, mode, folder.parents[2] / TEXT)
    inputs = gather_inputs(settings)
    adapt = None
    if mode in ("with", "calibrate"):
        adapt = AdaptOptions(folder, least_gain=1.0 if mode == "calibrate" else 0.02)
    with build_pipeline(inputs, adapt) as pipe:
        how = settings.passes, inputs.data.batches, settings.learning_rate, False, inputs.task.loss, settings.dp
        training = Training(pipe, *how, has_samples=False)

        def step() -> float:
            return training.run_pass().seconds * 1e3

        def conditions() -> Conditions:
            found = pipe._local.conditions
            assert found is not None, "all runs have links with conditions"
            return found

        return Driver(step, pipe.reconfigure, conditions).run(given, mode, settings.steps)


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


def given_of(cell: Cell, seed: int, calibration: Path) -> Given:
    """Reads the job of a cell, and works out the oracle's answer."""
    fault = fault_of(cell, seed)
    if fault is None:
        return Given(cell, seed)
    job = emulated_job(cell)
    if cell.device != "emulated":
        job = read_header(json.loads(calibration.read_text(encoding="utf-8")))
    return Given(cell, seed, job.start, best_answer(job, fault.link, cell.fault), fault)


def in_words(given: Given) -> str:
    """The oracle's answer in a few words."""
    answer, start = given.answer, given.start
    if answer is None or start is None:
        return ""
    parts = [answer.dispatch.value]
    parts += ["re-planned"] if answer.schedule != start.schedule else []
    parts += [f"delegated {', '.join(f'{a}:{b}' for a, b in answer.delegated)}"] if answer.delegated else []
    parts += [f"nodes at {answer.nodes}"] if answer.nodes != start.nodes else []
    return ", ".join(parts)


def run_modes(folder: Path, cell: Cell, seed: int, modes: list[str], first: bool) -> None:
    """Runs the modes of a seed, one after another, so that they see the same machine."""
    calibration = folder.parents[1] / cell.device / CALIBRATION
    given = Given(cell, seed) if modes == ["calibrate"] else given_of(cell, seed, calibration)
    for mode in modes:
        place = folder / mode
        place.mkdir(parents=True, exist_ok=True)
        steps = run_emulated(given, mode, place) if cell.device == "emulated" else run_real(given, mode, place)
        if first and mode == "calibrate":
            log = (place / CONTROL).read_text(encoding="utf-8").splitlines()
            calibration.write_text(log[0] + "\n", encoding="utf-8")
        elif first:
            said = {"steps": steps, "fault": given.fault, "answer": in_words(given)}
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
