"""Runs between processes: many in one start, each over groups of its own, so that one that breaks ends alone.

outcomes = between_processes(4, cases)                     of tests/fuzz_cases.py
outcomes = between_processes(4, cells, run_cell)           of another kind: what runs one in each process
"""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fuzz_cases import Case, Outcome, Shape, run, run_in_double
from processes import run_ranks

SHAPES: dict[int, tuple[Shape, ...]] = {
    2: ((2, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)),
    3: ((3, 1, 1),),
    4: ((4, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 1), (2, 1, 2), (1, 2, 2)),
}
"""Meshes by the number of processes; what stands twice is drawn twice as often."""

SECONDS = 120.0
"""That a case may take, before its processes are ended."""
BROKEN = ("raw", "late")
"""How a case ends after which processes are started anew."""


def run_case(case: Case) -> Outcome:
    """A random run, over groups of its own; once more in float64 where rounding may be what differs."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    assert case.shape is not None
    pp, dp, tp = case.shape
    if dp * tp == 1:
        place: Any = dist.new_group(list(range(pp)))
    else:
        place = init_device_mesh(case.device, case.shape, mesh_dim_names=("pp", "dp", "tp"))
    outcome = run(case, place)
    if not case.exact and not case.autocast:
        kinds: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(kinds, outcome.kind)
        if "different" in kinds and set(kinds) <= {"same", "different"}:
            again = run_in_double(case, place)
            outcome = Outcome(again.kind, f"in float64: {again.detail}; in float32: {outcome.detail}")
    return outcome


def between_processes(
    num_processes: int, cases: Sequence[Any], run_one: Callable[[Any], Outcome] = run_case
) -> list[Outcome]:
    """What became of each case; processes are started anew after one that took them down.

    Args:
        run_one: runs a case in each of the processes; a function of a module.
    """
    done: list[Outcome] = []
    while len(done) < len(cases):
        left = cases[len(done) :]
        with tempfile.TemporaryDirectory() as folder:
            ended = run_ranks(
                num_processes,
                run_each,
                folder,
                pickle.dumps((run_one, left)),
                deadline=30 + SECONDS * len(left),
                shares_gpu=left[0].device == "cuda",
            )
            told = [_read(Path(folder) / f"{rank}.outcomes") for rank in range(num_processes)]
        complete = min(map(len, told))
        done += [_together([each[k] for each in told]) for k in range(complete)]
        if complete < len(left) and not (complete and done[-1].kind in BROKEN):
            words = "; ".join(_how_it_ended(o, each[complete:]) for o, each in zip(ended, told, strict=True))
            done.append(Outcome("raw", f"the processes did not go on: {words}"))
    return done


def _how_it_ended(rank: Any, found: Sequence[Outcome]) -> str:
    """Of one process, in words: what it found of a case that not all of them told of, or the error that ended it."""
    what = f"{found[0].kind}, {found[0].detail}" if found else _error_in(rank)
    return f"rank {rank.rank} ended with {rank.code}: {what}"


def _error_in(rank: Any) -> str:
    """The first line of the last error that a process printed, and the last line of all where there is none. Behind
    the first line come notes, or what every error of CUDA says.
    """
    _, traced, behind = rank.text.rpartition("Traceback (most recent call last):\n")
    lines = [line for line in behind.splitlines() if line and not line.startswith(" ")]
    named = lines[:1] if traced else [line for line in lines if "Error" in line][-1:]
    return (named or [rank.last_line])[0]


def run_each(rank: int, folder: str, given: bytes) -> None:
    """Each case in turn; every outcome is written down at once. After one that went wrong nothing more is run here:
    what it left of the groups of all processes is of no more use.
    """
    import faulthandler

    import torch.distributed as dist

    run_one, cases = pickle.loads(given)
    for number, case in enumerate(cases, start=1):
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        outcome = run_one(case)
        with open(f"{folder}/{rank}.outcomes", "ab") as file:
            pickle.dump(outcome, file)
        if any(kind in BROKEN for kind in _kinds(folder, dist.get_world_size(), number)):
            os._exit(0)
        faulthandler.cancel_dump_traceback_later()


def _kinds(folder: str, num_processes: int, number: int) -> list[str]:
    """How that case ended in each process, once it has in all."""
    while True:
        told = [_read(Path(folder) / f"{rank}.outcomes") for rank in range(num_processes)]
        if min(map(len, told)) >= number:
            return [each[number - 1].kind for each in told]
        time.sleep(0.002)


def _read(path: Path) -> list[Outcome]:
    found: list[Outcome] = []
    if path.exists():
        with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):  # one that is being written
            while file.peek(1):
                found.append(pickle.load(file))
    return found


def _together(ranks: Sequence[Outcome]) -> Outcome:
    """One outcome of what every rank found."""
    if any(o.kind == "late" for o in ranks):  # the others then wait for the one that is refused
        return next(o for o in ranks if o.kind == "late")
    for kind in ("different", "raw"):
        words = [f"rank {rank}: {o.detail}" for rank, o in enumerate(ranks) if o.kind == kind]
        if words:
            return Outcome(kind, " | ".join(words))
    kinds = {o.kind for o in ranks}
    if len(kinds) > 1:
        return Outcome("raw", "ranks do not agree: " + " | ".join(f"{o.kind} {o.detail}" for o in ranks))
    best = max(ranks, key=lambda o: len(o.detail))
    return best
