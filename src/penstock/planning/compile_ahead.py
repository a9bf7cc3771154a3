"""Compiles the planner's machine code ahead, so that no plan with a time limit waits for it.

    python -m penstock.planning.compile_ahead               compiles all of it, once per machine; `make install` does
    python -m penstock.planning.compile_ahead --in-order    in one process, what a plan needs first first

Where that has not been done the first plan starts this command as a process of its own, searches with the same
functions as they stand, and uses the machine code from the moment it is there. The process ends by itself, and all
later plans find its work on disk. A problem that is too large to be searched without waits for machine code as long
as its time limit allows, and makes do with orders in step where that is too short. Their timing it waits for anyhow.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType

import numpy as np

from penstock.cost import Costs, Links
from penstock.engine import event_loop, list_by_rules, list_by_values, sweep
from penstock.engine.compiled import cache_folder, compiling, is_compiled
from penstock.engine.list_by_values import ListSpace
from penstock.engine.network import of_queues
from penstock.engine.timing import Timer
from penstock.library import build
from penstock.planning import anneal, forward_backward, longest_paths, ramps, repeat, time_windows
from penstock.planning.bounds import jackson_bound, path_bound, ramp_bound, span_bound, work_bound
from penstock.planning.building_blocks import BlockSearch
from penstock.planning.destructive_bound import destructive_bound
from penstock.planning.graph import sequence as sequences
from penstock.planning.graph.problem import pose_graph
from penstock.planning.graph.search import SequenceWalk
from penstock.planning.graph.search import begin as begin_graph
from penstock.planning.joint import listing, moves, rows
from penstock.planning.joint import search as joint
from penstock.planning.joint.problem import pose_joint
from penstock.planning.library_starts import named
from penstock.planning.options import Limits, OpForms
from penstock.planning.problem import Problem, pose
from penstock.planning.search import PerturbationSearch, Search, Trials, Walk, greedy, time_of
from penstock.planning.threads import LOOK, awaited, num_cores
from penstock.program.placements import bidirectional
from penstock.schedule import circular, one_to_one, v_shape
from penstock.simulation import simulate
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

IN_ORDER = "--in-order"

_children: list[subprocess.Popen[bytes]] = []
"""The process that compiles, where this one started it."""


def missing() -> list[ModuleType]:
    """The modules whose machine code is not there yet."""
    return [module for module in STEPS if not is_compiled(module)]


def compile_all() -> None:
    """Compiles what is not there, by planning next to nothing."""
    _compile(missing())


def compile_all_at_once() -> None:
    """The same, with a process for each core."""
    longest_first = sorted(missing(), key=lambda module: -len(Path(str(module.__file__)).read_bytes()))
    left = [module.__name__ for module in longest_first]
    with ProcessPoolExecutor(max(1, min(os.cpu_count() or 1, len(left))), get_context("spawn")) as pool:
        list(pool.map(_compile_named, left))


def _compile_named(name: str) -> None:
    _compile([module for module in STEPS if module.__name__ == name])


def begin() -> None:
    """Sees to it that machine code is made, by another process and without waiting for it.

    Where none can be started, or it could keep its work nowhere, nothing is done.
    """
    if _children or not missing() or not sys.executable or any(cache_folder(module) is None for module in STEPS):
        return
    source = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, (source, os.environ.get("PYTHONPATH"))))
    try:
        _children.append(
            subprocess.Popen(
                [sys.executable, "-m", __name__, IN_ORDER],
                env={**os.environ, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt of the plan leaves it its work
            )
        )
    except OSError:
        return


def wait_for(*modules: ModuleType) -> None:
    """Waits until the machine code of these modules is there, and compiles it here where no other process does.

    Where there are processors for both the last of them is compiled here while another process begins with the first.
    """
    begin()
    if num_cores() > 1:
        _compile([module for module in modules[:0:-1] if not is_compiled(module)])
    while not all(map(is_compiled, modules)):
        if any(child.poll() is None for child in _children):
            time.sleep(LOOK)
        else:
            _compile([module for module in missing() if module in modules])


def wait_for_first_order(seconds: float) -> None:
    """Waits till the first order of a large problem can be made, if possible by list scheduling and Jackson's bound.

    Timing is waited for however long it takes; the others only while they may still come within `seconds`. What comes
    too late is done without (see `in_step`).
    """
    began = time.perf_counter()
    begin()
    _compile([sweep])
    unit = time.perf_counter() - began
    helped = any(child.poll() is None for child in _children)
    for module, units in _UNITS.items():
        if not (helped and module is list_by_values) and began + seconds - time.perf_counter() > units * unit:
            _compile([module])
    if helped:
        awaited(list_by_values, sys.maxsize, began + seconds - time.perf_counter())


_UNITS = {longest_paths: 2.0, list_by_values: 5.0}
"""How long compiling takes at most, beside that of `sweep`."""


def _compile(modules: Sequence[ModuleType]) -> None:
    problem = _problem()
    for module in modules:
        if is_compiled(module):  # another process was sooner
            continue
        with compiling(module):
            STEPS[module](problem)


def _problem() -> Problem:
    """A small problem with all that compiled functions tell apart."""
    return pose(Costs.uniform(2), one_to_one(2), 2, 3, Links({(0, 1): 0.5}), [(1.0, 0.5)] * 2, [2.0] * 2, split=True)


def _begun(problem: Problem) -> Search:
    search = Search(problem, 0.0)
    greedy(search, ListSpace.of(problem.queues))
    time_of(problem, search.row)
    return search


def _bounds(problem: Problem) -> None:
    jackson_bound(problem), work_bound(problem), span_bound(problem), path_bound(problem)


def _ramps(problem: Problem) -> None:
    ramp_bound(problem, 0.0)


def _windows(problem: Problem) -> None:
    destructive_bound(problem, 0.0, 100.0)


def _time(problem: Problem) -> None:
    _begun(problem)
    _prove(problem)
    Timer(*of_queues([1], [1.0], [(0,)], [[]], 1), compile=True).time([0])


def _prove(problem: Problem) -> None:
    """What `check` and `simulate` do with a schedule so large that they run compiled."""
    simulate(build("zb-h1", 64, 300), Costs.uniform(64))


def _dispatch(problem: Problem) -> None:
    """What `simulate` and plans do with ranks that pick their ops, with streams beside them and without."""
    runner = Runner(Costs.uniform(2), compile=True)
    for overlap in (False, True):
        order = runner.order(build("distmm", 2, 2, overlap=overlap))
        runner.run(order, Links(), dispatch="hinted:1", transport=Decoupled(), caps=order.peaks)


def _build(problem: Problem) -> None:
    """What programs and library schedules do that are built by compiled code: large ones, and those a plan begins
    with."""
    build("zb-v", 4, 1700)
    for placement in (v_shape(4), circular(4, 8), bidirectional(one_to_one(4)), bidirectional(v_shape(4))):
        num_stages = placement.num_stages
        costs, held = Costs.uniform(num_stages), [(1.0, 0.0)] * num_stages
        for split in (True, False):
            named(Search(pose(costs, placement, 4, 8, Links(), held, [100.0] * 4, split), 0.0))


def _justify(problem: Problem) -> None:
    search, stop = _begun(problem), np.zeros(1, np.int64)
    Trials(search, 0).go(0.0, stop)
    shaking = PerturbationSearch(problem, 0)
    shaking.begin(search, 0.0)
    shaking.go(1e-3, 0.0, 1.0, 0.0, stop)


def _walk(problem: Problem) -> None:
    walk = Walk(problem, 0)
    walk.begin(_begun(problem), 0.0)
    walk.go(1e-3, 0.0, 1.0, 0.0, np.zeros(1, np.int64))


def _repeat(problem: Problem) -> None:
    blocks, stop = BlockSearch(problem, 0), np.zeros(1, np.int64)
    blocks.adopt(_begun(problem).row)
    for done in (0.0, 1.0):  # it draws, then it anneals
        blocks.move(1, done, 0.1, 0.1, 0.0, stop)


def _decide_forms(problem: Problem) -> None:
    """What plans do in which forms are decided with the order."""
    forms = OpForms(again=True, whole=True, split=True)
    costs, limits = Costs.uniform(2, b=1.5), Limits((1.5, 1.5), ((1.0, 0.5),) * 2)
    search = joint.begin(pose_joint(costs, one_to_one(2), 2, [3], Links(), limits, forms), 0, 0.0, None, 0.0)
    search.began, search.lower_bound = time.perf_counter(), 0.0
    # Once each, however long that takes: what is not called is not compiled.
    joint.listed(search, math.inf, num_trials=1)
    walk = joint.JointWalk(search.problem, 0)
    walk.begin(search, math.inf)
    walk.go(1e-3, 0.0, 1.0, 0.0, np.zeros(1, np.int64))


def _walk_sequence(problem: Problem) -> None:
    """Shared stages and stages that branch."""
    limits = Limits((4.0, 4.0), ((1.0, 0.5),) * 2)
    posed = pose_graph(Costs.uniform(2), one_to_one(2), 2, 3, Links({(0, 1): 0.5}), limits, True)
    search = begin_graph(posed, [(posed.serial(), "serial")], [], 0.0, 0, 0.0, None, 0.0)
    walk = SequenceWalk(posed, 0)
    walk.begin(search, 0.0)
    walk.go(1e-3, 0.0, 1.0, 0.0, np.zeros(1, np.int64))


STEPS: dict[ModuleType, Callable[[Problem], object]] = {
    list_by_values: _begun,
    sweep: _time,
    longest_paths: _bounds,
    ramps: _ramps,
    time_windows: _windows,
    event_loop: _dispatch,
    list_by_rules: _build,
    forward_backward: _justify,
    anneal: _walk,
    repeat: _repeat,
    rows: _decide_forms,
    listing: _decide_forms,
    moves: _decide_forms,
    sequences: _walk_sequence,
}
"""What uses all that plans use of each module, in the order in which a plan needs them."""


if __name__ == "__main__":
    print("compiling the planner's loops, once for this environment", flush=True)
    began = time.perf_counter()
    compile_all() if IN_ORDER in sys.argv[1:] else compile_all_at_once()
    print(f"compiled them in {time.perf_counter() - began:.1f} s")
