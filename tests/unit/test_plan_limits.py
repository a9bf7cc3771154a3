"""The time limit of a plan: every phase counts, compiled loops come to their end, and nothing waits for a compiler.

The clocks here are numbers that tests move; no test takes the time.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.engine import compiled as compiling
from penstock.engine import event_loop, list_by_values, sweep
from penstock.engine.list_by_values import ListSpace
from penstock.planning import anneal, compile_ahead, exact, forward_backward, longest_paths, repeat, strategy, threads
from penstock.planning.annealing import annealed
from penstock.planning.bounds import jackson_bound
from penstock.planning.building_blocks import BlockSearch
from penstock.planning.graph import sequence
from penstock.planning.graph.problem import pose_graph
from penstock.planning.graph.search import SequenceWalk
from penstock.planning.graph.search import begin as begin_graph
from penstock.planning.joint import listing, moves
from penstock.planning.joint import search as joint
from penstock.planning.joint.problem import pose_joint
from penstock.planning.options import Limits, OpForms
from penstock.planning.problem import Problem, pose
from penstock.planning.search import PerturbationSearch, Search, Trials, Walk, greedy, justified, time_of
from penstock.planning.threads import Threads
from penstock.schedule import one_to_one
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Decoupled

pytestmark = pytest.mark.unit

COMPILED = compiling.compiled
BEGIN = compile_ahead.begin
"""As it is outside tests, which compile what is missing before they go on."""

COSTS = ps.Costs(f=[100, 91, 108, 95], i=[97, 120, 111, 93], w=[84, 70, 102, 90])


class Clock:
    """A clock that goes on by so much at every look, and by what tests add."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step, self.num_looks = 0.0, step, 0

    def __call__(self) -> float:
        self.num_looks += 1
        self.now += self.step
        return self.now


def tight(num_microbatches: int = 12) -> Problem:
    return pose(COSTS, ps.placements.one_to_one(4), 4, num_microbatches, ps.Links({(1, 2): 150.0}),
                [(1.0, 0.0)] * 4, [3.0] * 4, split=True)  # fmt: skip


def begun(problem: Problem, until: float, clock: Callable[[], float]) -> Search:
    search = Search(problem, jackson_bound(problem), began=0.0, until=until, clock=clock)
    strategy.first_order(search)
    return search


class StopAfter:
    """A flag that is 0 the first few times it is looked at, and counts the looks."""

    def __init__(self, num_looks: int) -> None:
        self.num_looks, self.looked = num_looks, 0

    def __getitem__(self, index: int) -> int:
        self.looked += 1
        return int(self.looked > self.num_looks)


@pytest.mark.parametrize("num_looks", [0, 1, 2, 7])
def test_trials_look_whether_to_stop_after_every_listing(monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
    listings = 0
    list_ops = forward_backward.list_ops

    def counted(*args: Any) -> float:
        nonlocal listings
        listings += 1
        return list_ops(*args)

    monkeypatch.setattr(forward_backward, "list_ops", counted)
    problem = tight()
    search = begun(problem, 1.0, Clock())
    space, row, stop = ListSpace.of(problem.queues), search.row.copy(), StopAfter(num_looks)
    best = forward_backward.trials(
        problem.queues, problem.queues.turned(), np.stack([problem.priority_class] * 2), 100.0, 1000, 10, 0.0,
        search.value, row, space, stop,
    )  # fmt: skip
    assert listings <= num_looks
    assert num_looks < stop.looked <= num_looks + 2
    assert best <= search.value


@pytest.mark.parametrize("num_looks", [0, 1, 2, 7])
def test_shaking_looks_whether_to_stop_after_every_listing(monkeypatch: pytest.MonkeyPatch, num_looks: int) -> None:
    listings = 0
    list_ops = forward_backward.list_ops

    def counted(*args: Any) -> float:
        nonlocal listings
        listings += 1
        return list_ops(*args)

    monkeypatch.setattr(forward_backward, "list_ops", counted)
    problem = tight()
    search = begun(problem, 1.0, Clock())
    shaking = PerturbationSearch(problem, 0)
    shaking._module = forward_backward
    shaking.begin(search, 1.0)
    shaking.moves_a_second = 1e6
    shaking.go(1.0, 0.0, 1.0, 0.0, StopAfter(num_looks))
    assert listings <= num_looks
    shaking.bring(search)
    assert time_of(problem, search.row) == search.value


def test_a_walk_ends_where_it_is_stopped() -> None:
    problem = tight()
    walk = Walk(problem, 0)
    walk._module = anneal
    walk.begin(begun(problem, 1.0, Clock()), 1.0)
    walk.moves_a_second = 1e6
    stop = StopAfter(5)
    walk.go(1.0, 0.0, 1.0, 0.0, stop)
    assert stop.looked <= 5 + 3  # the walk's own looks beside those of the loop
    walk.moves_a_second = 1e6
    walk.go(1.0, 0.0, 1.0, 0.0, StopAfter(0))
    assert not walk.stuck  # it could not have moved


def test_threads_are_stopped_when_the_time_is_over() -> None:
    with Threads(2, compiled=True) as threads:
        seen = threading.Event()

        def until_stopped() -> None:
            while threads.stop[0] == 0:
                pass
            seen.set()

        threads.run([until_stopped, until_stopped], 0.0)
        assert seen.is_set()


def test_threads_are_stopped_by_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.planning.threads.wait", interrupted)
    with Threads(1, compiled=True) as threads:

        def until_stopped() -> None:
            while threads.stop[0] == 0:
                pass

        with pytest.raises(KeyboardInterrupt):
            threads.run([until_stopped], 1e6)


def test_uncompiled_trials_leave_the_users_random_numbers_alone() -> None:
    np.random.seed(5)
    expected = np.random.random()
    np.random.seed(5)
    with Threads(4, compiled=False) as threads:
        assert threads.num == 1
        threads.run([partial(forward_backward.seed, 1)], 1.0)
    assert np.random.random() == expected


@pytest.mark.parametrize("spent", [1.0, 50.0])
def test_nothing_is_searched_where_the_first_order_took_the_time(
    monkeypatch: pytest.MonkeyPatch, spent: float
) -> None:
    clock = Clock()
    search = begun(tight(), 1.0, clock)
    clock.now = spent
    before = search.row
    for name in ("work_bound", "named"):
        monkeypatch.setattr(strategy, name, lambda *_: pytest.fail("the time was over"))
    monkeypatch.setattr(Trials, "go", lambda *_: pytest.fail("the time was over"))
    monkeypatch.setattr(Walk, "go", lambda *_: pytest.fail("the time was over"))
    monkeypatch.setattr(exact, "within", lambda *_, **__: pytest.fail("the time was over"))
    strategy.run(search)
    assert search.row is before


@pytest.mark.slow
def test_a_search_ends_within_a_few_looks_at_its_clock_after_the_time() -> None:
    clock = Clock(step=0.01)
    search = begun(tight(40), 1.0, clock)  # 480 ops
    search.stop_at_gap = 0.0
    strategy.run(search)
    assert search.closed or clock.now <= 1.0 + 0.01 * 40


def test_what_a_proof_takes_is_spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first order of a large problem is proved at once: what that takes is left for the last proof."""
    module = sys.modules["penstock.planning.planner"]
    clock, seen = Clock(), []
    monkeypatch.setattr("time.perf_counter", clock)
    checked = ps.check

    def check(schedule: ps.Schedule) -> None:
        clock.now += 3.0
        checked(schedule)

    monkeypatch.setattr(module, "check", check)
    monkeypatch.setattr(strategy, "run", lambda search: seen.append((search.until, search.seconds)))
    ps.plan(ps.Costs.uniform(16), 16, 128, max_in_flight=3, time_limit=20.0)
    ((until, seconds),) = seen
    assert seconds == 3.0
    assert until <= 20.0 - 3.0


@pytest.fixture
def without_machine_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> Iterator[list[Any]]:
    """As on a machine where nothing has been compiled. Yields the commands that were started."""
    started: list[Any] = []

    class Child:
        def __init__(self, command: Any, **_: Any) -> None:
            started.append(command)

        def poll(self) -> None:
            return None

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_READY", set())
    monkeypatch.setattr(compile_ahead, "begin", BEGIN)
    monkeypatch.setattr(compile_ahead, "_children", [])
    monkeypatch.setattr(subprocess, "Popen", Child)
    compiling.cache_folder.cache_clear()
    yield started
    compiling.cache_folder.cache_clear()
    COMPILED.cache_clear()


@pytest.mark.parametrize("objective", ["makespan", "span"])
def test_a_plan_waits_for_no_compiler(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch, objective: Any
) -> None:
    """Another process compiles meanwhile, and only one, however many plans are made."""
    monkeypatch.setattr(compiling, "compiled", lambda module: pytest.fail(f"{module.__name__} is compiled here"))
    for _ in range(2):
        p = ps.plan(COSTS, 4, 12, ps.Links({(1, 2): 150.0}), max_in_flight=3, objective=objective, time_limit=0.3)
        assert p.lower_bound <= p.value
        ps.check(p.schedule)
    assert [command[1:] for command in without_machine_code] == [
        ["-m", "penstock.planning.compile_ahead", "--in-order"]
    ]


@pytest.mark.parametrize("placement", [one_to_one(4), ps.placements.v_shape(4)], ids=["one-to-one", "V"])
def test_a_large_plan_waits_for_the_compiler_no_longer_than_its_limit(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch, placement: ps.Placement
) -> None:
    """128 ranks with 1024 microbatches and a limit of 2 s took 7.2 s, of which list scheduling compiled for 4.7."""
    compiled: list[ModuleType] = []
    monkeypatch.setattr(threads, "MOST_UNCOMPILED", 100)
    monkeypatch.setattr(compile_ahead, "_compile", compiled.extend)
    monkeypatch.setattr(compile_ahead, "wait_for", lambda *_: pytest.fail("it waits, however long that takes"))
    costs = ps.Costs.uniform(placement.num_stages, f=90.0, i=110.0, w=80.0)
    p = ps.plan(costs, 4, 24, ps.Links({(1, 2): 50.0}), placement=placement, max_in_flight=6, time_limit=0.2)
    assert compiled[0] is sweep  # which times what was made, and proves it
    assert list_by_values not in compiled
    assert p.how == "in step"
    assert p.lower_bound <= p.value
    ps.check(p.schedule)


def test_list_scheduling_is_compiled_here_where_no_process_could_be_started_and_time_is_left(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[ModuleType] = []
    clock = Clock()
    lengths = {sweep: 1.0, longest_paths: 1.0, list_by_values: 4.0}

    def compile_here(modules: list[ModuleType]) -> None:
        compiled.extend(modules)
        clock.now += sum(lengths[module] for module in modules)
        compiling._READY.update(modules)

    monkeypatch.setattr("time.perf_counter", clock)
    monkeypatch.setattr(compile_ahead, "_compile", compile_here)
    monkeypatch.setattr(compile_ahead, "begin", lambda: None)
    for seconds, expected in (
        (2.0, [sweep]), (4.0, [sweep, longest_paths]), (30.0, [sweep, longest_paths, list_by_values])
    ):  # fmt: skip
        compiled.clear()
        compiling._READY.clear()
        before = clock.now
        compile_ahead.wait_for_first_order(seconds)
        assert compiled == expected
        assert clock.now - before <= seconds


class Begun(Exception):
    """A step that is slow without machine code began."""


@pytest.mark.parametrize(
    ("step", "module", "function"),
    [
        (justified, forward_backward, "trials"),
        (PerturbationSearch, forward_backward, "shaken"),
        (Walk, anneal, "anneal"),
        (BlockSearch, repeat, "drawn"),
        (joint.listed, listing, "listed"),
        (joint.JointWalk, moves, "anneal"),
        (SequenceWalk, sequence, "walk"),
    ],
)
def test_no_step_of_a_large_problem_begins_without_machine_code(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch, step: Any, module: ModuleType, function: str
) -> None:
    """128 ranks with 1024 microbatches took 14.5 s of 10: a trial that is not compiled seldom looks at the clock."""
    search: Any
    limits = Limits((3.0,) * 4, ((1.0, 0.0),) * 4)
    if step in (joint.listed, joint.JointWalk):
        forms = OpForms(again=False, whole=True, split=True)
        search = joint.begin(pose_joint(COSTS, one_to_one(4), 4, [12], ps.Links(), limits, forms), 0, 0.0, None, 0.0)
    elif step is SequenceWalk:
        graph = pose_graph(COSTS, one_to_one(4), 4, 12, ps.Links(), limits, True)
        search = begin_graph(graph, [(graph.serial(), "serial")], [], 0.0, 0, 0.0, None, 0.0)
    else:
        search = begun(tight(), np.inf, Clock())
    search.clock, search.began, search.lower_bound = time.perf_counter, time.perf_counter(), 0.0
    monkeypatch.setattr(threads, "MOST_UNCOMPILED", 100, raising=False)

    def begins(*_: Any) -> None:
        raise Begun(f"{function} runs without machine code")

    monkeypatch.setattr(module, function, begins)

    def run(until: float) -> None:
        annealed(search, step, until) if isinstance(step, type) else step(search, until)

    run(search.seconds + 0.1)
    monkeypatch.setattr(threads, "MOST_UNCOMPILED", 10_000, raising=False)
    with pytest.raises(Begun):
        run(search.seconds + 60.0)


FIRST_PLAN = """
import resource
import signal
import subprocess
import penstock as ps

class Child:
    def __init__(self, *_, **__): ...
    def poll(self): ...

subprocess.Popen = Child
ps.plan(ps.Costs.uniform(4), 4, 12, max_in_flight=3, time_limit=0.2)
import sys
from penstock.engine import compiled
print(sorted(name for name in sys.modules if name.endswith("__compiled")))
"""


def test_the_first_plan_after_installing_compiles_nothing(tmp_path: Any) -> None:
    """In a process of its own, where no machine code is."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", FIRST_PLAN]
    said = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert said.strip() == "[]"


def test_machine_code_is_used_from_the_moment_it_is_there(without_machine_code: list[Any]) -> None:
    assert compile_ahead.missing() == list(compile_ahead.STEPS)
    assert compiling.ready(longest_paths) is longest_paths
    folder = compiling.cache_folder(longest_paths)
    assert folder is not None
    (folder / compiling._note(longest_paths)).write_text("{}")  # as another process does
    assert compiling.ready(longest_paths) is compiling.compiled(longest_paths)
    assert longest_paths not in compile_ahead.missing()


def test_what_was_cut_off_in_the_middle_is_not_taken_for_compiled(without_machine_code: list[Any]) -> None:
    def fails() -> None:
        with compiling.compiling(longest_paths):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fails()
    assert not compiling.is_compiled(longest_paths)


def test_machine_code_of_another_copy_of_the_source_is_not_taken_for_ours(
    without_machine_code: list[Any], tmp_path: Path
) -> None:
    """Numba keeps machine code by the path of the source. Of a copy elsewhere nothing was compiled, but what was
    noted for the first stood for it too where both keep machine code in one folder: so its first plan compiled."""
    copies = []
    for name in ("here", "there"):
        file = tmp_path / name / "once.py"
        file.parent.mkdir()
        file.write_text("def twice(n):\n    return 2 * n\n")
        spec = importlib.util.spec_from_file_location(f"once_{name}", file)
        assert spec is not None
        assert spec.loader is not None
        copies.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(copies[-1])
    here, there = copies
    with compiling.compiling(here):
        assert COMPILED(here).twice(2) == 4
    compiling._READY.clear()
    assert compiling.is_compiled(here)
    assert not compiling.is_compiled(there)


def forget_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the next process."""
    COMPILED.cache_clear()
    monkeypatch.setattr(compiling, "_READY", set())


@pytest.mark.slow
def test_machine_code_for_a_type_that_is_gone_is_made_again(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an update that renames the tuple of arrays which a function takes."""
    from penstock.engine import network

    problem = tight()
    COMPILED.cache_clear()
    with compiling.compiling(longest_paths):
        bound = jackson_bound(problem)
    folder = compiling.cache_folder(longest_paths)
    assert folder is not None
    assert list(folder.rglob("*.nbi"))
    assert list(folder.glob("compiled-*"))
    forget_what_is_compiled(monkeypatch)
    with monkeypatch.context() as patch:
        patch.delattr(network, "Network")
        assert compiling.ready(longest_paths) is longest_paths
        COMPILED(longest_paths)
    assert not list(folder.rglob("*.nb*"))
    assert not list(folder.glob("compiled-*"))
    COMPILED.cache_clear()
    assert jackson_bound(problem) == bound


def test_a_disk_that_is_too_full_for_machine_code_costs_only_time(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ended a simulation with OSError. No other process may take the code for compiled."""
    (tmp_path / "doubles.py").write_text("def doubled(x):\n    return x + x\n")
    monkeypatch.syspath_prepend(tmp_path)
    doubles = importlib.import_module("doubles")
    monkeypatch.setattr(compiling, "_NOT_KEPT", set())
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with compiling.compiling(doubles):
            assert COMPILED(doubles).doubled(2.0) == 4.0
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        del sys.modules["doubles"]
    assert list(compiling._NOT_KEPT) == ["doubled"]
    forget_what_is_compiled(monkeypatch)
    assert not compiling.is_compiled(doubles)


def test_a_user_without_a_home_has_no_folder_for_machine_code(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ended a simulation with RuntimeError: Could not determine home directory."""
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(file))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as it is for a user that the system does not know
    assert compiling.cache_folder(longest_paths) is None


@pytest.mark.parametrize("cut_off", [False, True])
def test_machine_code_for_a_tuple_with_other_fields_is_not_used(
    cut_off: bool, without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Numba knows a class of named tuples by its name. When two fields had changed places and the functions that take
    it had not, their old machine code was used and read the one for the other. Cut off: compiling had not ended."""
    (tmp_path / "halves.py").write_text(
        "from typing import Any, NamedTuple\n\n\nclass Halves(NamedTuple):\n    left: Any\n    right: Any\n"
    )
    (tmp_path / "takes_halves.py").write_text("def left(halves):\n    return halves.left[0]\n")
    monkeypatch.syspath_prepend(tmp_path)
    halves, takes_halves = map(importlib.import_module, ("halves", "takes_halves"))
    given = {"left": np.array([1.0]), "right": np.array([2.0])}
    with compiling.compiling(takes_halves):
        assert COMPILED(takes_halves).left(halves.Halves(**given)) == 1.0
    folder = compiling.cache_folder(takes_halves)
    assert folder is not None
    if cut_off:
        for note in folder.glob("compiled-*"):
            note.unlink()
    forget_what_is_compiled(monkeypatch)
    halves.Halves = namedtuple("Halves", ["right", "left"], module="halves")
    assert not compiling.is_compiled(takes_halves)
    assert COMPILED(takes_halves).left(halves.Halves(**given)) == 1.0
    for name in ("halves", "takes_halves"):
        del sys.modules[name]


@pytest.mark.slow
def test_whether_machine_code_is_there_is_known_without_reading_it(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that only asked read the indices of all machine code that was ever kept in the folder."""
    COMPILED.cache_clear()
    with compiling.compiling(longest_paths):
        jackson_bound(tight())
    forget_what_is_compiled(monkeypatch)
    monkeypatch.setattr(compiling, "_clear_what_cannot_be_used", lambda folder: pytest.fail(f"{folder} was read"))
    assert compiling.ready(longest_paths) is COMPILED(longest_paths)


@pytest.mark.usefixtures("without_machine_code")
def test_a_note_on_machine_code_that_another_process_removed_as_it_was_looked_for_ended_the_plan(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = compiling.cache_folder(sweep)
    assert folder is not None
    note = folder / compiling._note(sweep)
    note.write_text("{}")
    read = Path.read_text

    def gone(path: Path, *given: Any, **options: Any) -> str:
        if path == note:
            note.unlink()
        return read(path, *given, **options)

    with monkeypatch.context() as here:
        here.setattr(Path, "read_text", gone)
        assert not compiling.is_compiled(sweep)
    assert not note.exists()


def test_no_process_is_started_whose_work_would_be_lost(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_ahead, "cache_folder", lambda _: None)
    compile_ahead.begin()
    assert not without_machine_code


def test_compiling_takes_nothing_of_a_tests_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes minutes on a busy machine, and the test that happened to plan first was ended for it."""
    running = signal.getitimer(signal.ITIMER_REAL)[0]
    if not running:
        pytest.skip("tests run without pytest-timeout's timer")
    seen: list[float] = []
    monkeypatch.setattr(compile_ahead, "missing", lambda: [longest_paths])
    monkeypatch.setattr(compile_ahead, "compile_all", lambda: seen.append(signal.getitimer(signal.ITIMER_REAL)[0]))
    compile_ahead.begin()
    assert seen == [0.0]
    assert signal.getitimer(signal.ITIMER_REAL)[0] > 0


def test_what_another_process_fails_to_compile_is_compiled_here(
    without_machine_code: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Dead:
        def poll(self) -> int:
            return 1

    done: list[ModuleType] = []
    steps = {module: (lambda _, module=module: done.append(module)) for module in (list_by_values, longest_paths)}
    monkeypatch.setattr(compile_ahead, "_children", [Dead()])
    monkeypatch.setattr(compile_ahead, "STEPS", steps)
    compile_ahead.wait_for(longest_paths)
    assert done == [longest_paths]


@pytest.mark.timeout(900)  # what is not there yet is compiled, which takes minutes on a busy machine
def test_all_that_plans_need_is_compiled_ahead() -> None:
    """After `compile_all` no plan compiles anything, whatever it asks for."""
    from numba.core import event

    compile_ahead.compile_all()
    found: list[str] = []

    class Listener(event.Listener):  # type: ignore[misc]
        def on_start(self, each: Any) -> None:
            found.append(str(each.data["dispatcher"]))

        def on_end(self, each: Any) -> None: ...

    listener = Listener()
    event.register("numba:compile", listener)
    try:
        links = ps.Links({(1, 2): 150.0})
        ps.plan(COSTS, 4, 12, links, max_in_flight=3, time_limit=0.5, stop_at_gap=0.0)
        ps.plan(COSTS, 4, 12, links, max_in_flight=3, objective="span", time_limit=0.5)
        ps.plan(COSTS, 4, 12, links, max_in_flight=3, dispatch="hinted", time_limit=0.3)
        ps.plan(ps.Costs.uniform(8), 4, 12, placement=ps.placements.v_shape(4), memory_limit=6.0, time_limit=0.5)
        ps.plan(COSTS, 4, 12, links, max_in_flight=3, split=False, time_limit=0.3)
        greedy(Search(tight(), 0.0), ListSpace.of(tight().queues))
    finally:
        event.unregister("numba:compile", listener)
    assert found == []


@pytest.mark.parametrize("options", [{}, {"overlap": True}], ids=["ranks", "streams"])
def test_the_event_loop_is_compiled_ahead(options: dict[str, bool]) -> None:
    """With streams and without, which are compiled apart: what runs later has nothing to compile."""
    compile_ahead.STEPS[event_loop](compile_ahead._problem())
    run = COMPILED(event_loop).run
    before = list(run.signatures)
    assert before
    costs = ps.Costs.uniform(4)
    runner = Runner(costs, compile=True)
    order = runner.order(ps.build("distmm", 4, 4, **options))
    for dispatch, links in (("dynamic", ps.Links()), ("hinted:0.5", ps.Links({(0, 1): "latency:2ms+occupancy:1ms"}))):
        runner.run(order, links, dispatch=dispatch, transport=Decoupled(), caps=order.peaks)
    assert run.signatures == before


@pytest.mark.nightly
def test_processes_for_each_core_leave_nothing_to_compile(tmp_path: Path) -> None:
    """What one process would compile in turn several compile at once, and a second call finds it all done."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", PARALLEL]
    assert subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout == "2 0\n"


PARALLEL = """
from pathlib import Path

from penstock.planning import compile_ahead

if __name__ == "__main__":
    shortest_first = sorted(compile_ahead.STEPS, key=lambda module: len(Path(module.__file__).read_bytes()))
    kept = shortest_first[:2]
    for module in [module for module in compile_ahead.STEPS if module not in kept]:
        del compile_ahead.STEPS[module]
    before = len(compile_ahead.missing())
    compile_ahead.compile_all_at_once()
    print(before, len(compile_ahead.missing()))
"""
