"""What runs as C gives what the same functions give as Python, bit by bit, on problems drawn by lot.

Each call of a function of the library is made twice here: in C, and in Python on copies of its arrays.
"""

from __future__ import annotations

import copy
import ctypes
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock as ps
from in_python import in_python
from penstock.dispatch.queues import Lister
from penstock.engine import compiled as compiling
from penstock.engine import sweep
from penstock.planning.bounds import jackson_bound, ramp_bound, span_bound, work_bound
from penstock.planning.building_blocks import BlockSearch
from penstock.planning.destructive_bound import DestructiveBound
from penstock.planning.graph.problem import pose_graph
from penstock.planning.graph.search import SequenceWalk
from penstock.planning.graph.search import begin as begin_graph
from penstock.planning.joint import search as joint
from penstock.planning.joint.problem import pose_joint
from penstock.planning.options import Limits, OpForms
from penstock.planning.problem import Problem, pose
from penstock.planning.search import PerturbationSearch, Search, Trials, Walk
from penstock.planning.starts import greedy
from penstock.schedule import circular, one_to_one, v_shape
from penstock.simulation.runner import Runner
from penstock.simulation.transport import Blocking, Decoupled
from penstock.translate.subset import SubsetError
from penstock.translate.to_c import TranslationUnit, translated
from tiers import others_nightly

pytestmark = pytest.mark.property

STOP = np.zeros(1, np.int64)


def same(one: Any, other: Any) -> bool:
    """Whether two values, or all arrays in them, are the same to the last bit."""
    if isinstance(one, np.ndarray):
        return one.tobytes() == np.asarray(other).tobytes()
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return bool(one == other)


def as_python(module: Any, name: str, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What a function returns as Python, and its arguments after it."""
    given = copy.deepcopy(args)
    with np.errstate(all="ignore"):
        return getattr(module, name)(*given), given


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """The functions that were called, each of them twice."""
    found: set[str] = set()
    entry = compiling._entry

    def checked(library: ctypes.PyDLL, module: Any, name: str) -> Callable[..., Any]:
        function = entry(library, module, name)

        def call(*args: Any, **named: Any) -> Any:
            if named:
                names = list(function.__wrapped__.__code__.co_varnames)  # type: ignore[attr-defined]
                args += tuple(
                    named.get(each) for each in names[len(args) : function.__wrapped__.__code__.co_argcount]
                )  # type: ignore[attr-defined]
            returned, after = as_python(module, name, args)
            result = function(*args)
            found.add(f"{module.__name__.rpartition('.')[2]}.{name}")
            assert same(result, returned), (module.__name__, name, result, returned)
            for parameter, one, other in zip(function.__wrapped__.__code__.co_varnames, args, after, strict=False):  # type: ignore[attr-defined]
                assert same(one, other), (module.__name__, name, parameter)
            return result

        return call

    monkeypatch.setattr(compiling, "_entry", checked)
    compiling.compiled.cache_clear()
    assert compiling.is_compiled(), "these tests need a C compiler"
    yield found
    compiling.compiled.cache_clear()


def drawn(seed: int) -> tuple[np.random.Generator, Problem]:
    random = np.random.default_rng(seed)
    ranks = int(random.integers(2, 5))
    placement = (one_to_one(ranks), v_shape(ranks), circular(ranks, 2 * ranks))[seed % 3]
    stages = placement.num_stages
    whole = bool(random.integers(2))
    costs = ps.Costs(*(random.integers(1, 40, stages).astype(float).tolist() for _ in range(3)))
    links = ps.Links({(0, 1): float(random.integers(0, 30))})
    caps = random.integers(2 * stages // ranks, 3 * stages, ranks).astype(float).tolist()
    held = [(1.0, 0.5 if random.integers(2) else 0.0)] * stages
    num = int(random.integers(2, 7))
    return random, pose(costs, placement, ranks, num, links, held, caps, split=not whole)


def begun(problem: Problem) -> Search:
    search = Search(problem, 0.0)
    greedy(search)
    return search


def bounds(problem: Problem) -> None:
    for bound in (jackson_bound, work_bound, span_bound, ramp_bound):
        bound(problem)
    DestructiveBound(problem, 0.0, begun(problem).value).go(STOP)


def searches(problem: Problem, seed: int) -> None:
    search = begun(problem)
    for each in (Trials(problem, seed), PerturbationSearch(problem, seed), Walk(problem, seed)):
        each.begin(search, math.inf)
        each.moves_a_second = 1.0 if type(each) is Trials else 40.0
        each.go(1.0, 0.0, 1.0, 0.0, STOP)
    blocks = BlockSearch(problem, seed)
    blocks.adopt(search.row)
    for done in (0.0, 1.0):  # it draws, then it anneals
        blocks.moves_a_second = 8.0
        blocks.go(1.0, done, 0.0, 0.0, STOP)


def forms(random: np.random.Generator, seed: int) -> None:
    may = OpForms(again=seed % 4 != 3, whole=bool(seed % 2), split=True, away=seed % 3 == 0)
    ranks = int(random.integers(2, 4))
    costs = ps.Costs.uniform(ranks, f=3.0, i=2.0, w=float(random.integers(1, 5)), b=4.5)
    costs = replace(costs, other={"OFFLOAD": 1.5, "RELOAD": 1.0}) if may.away else costs
    limits = Limits((2.5,) * ranks, ((1.0, 0.5),) * ranks, host=(2.0,) * ranks if may.away else ())
    posed = pose_joint(costs, one_to_one(ranks), ranks, [5], ps.Links({(0, 1): 0.5}), limits, may)
    search = joint.begin(posed, seed, 0.0, None, 0.0)
    walk = joint.JointWalk(search.problem, seed)
    walk.begin(search, math.inf)
    walk.moves_a_second = 150.0
    walk.go(1.0, 0.0, 1.0, 0.0, STOP)


def graphs(random: np.random.Generator, seed: int) -> None:
    ranks = int(random.integers(2, 4))
    limits = Limits((3.0,) * ranks, ((1.0, 0.5),) * ranks)
    posed = pose_graph(ps.Costs.uniform(ranks), one_to_one(ranks), ranks, 5, ps.Links({(0, 1): 0.5}), limits, True)
    walk = SequenceWalk(posed, seed)
    walk.begin(begin_graph(posed, [(posed.serial(), "serial")], [], 0.0, 0, 0.0, None, 0.0), math.inf)
    walk.moves_a_second = 60.0
    walk.go(1.0, 0.0, 1.0, 0.0, STOP)


def runs(random: np.random.Generator, seed: int) -> None:
    name = ("1f1b", "zb-h1", "zb-v", "distmm", "dualpipe")[seed % 5]
    schedule = ps.build(name, 4, 8, **({"overlap": True} if name == "distmm" and seed % 2 else {}))
    stages = schedule.num_stages
    runner = Runner(ps.Costs(*(random.integers(1, 9, stages).astype(float).tolist() for _ in range(3))))
    order = runner.order(schedule)
    late = ps.Links({(0, 1): "latency:2ms+occupancy:1ms"}) if seed % 2 else ps.Links({(1, 2): 3.0})
    for dispatch in ("frozen", "dynamic", "hinted:0.5"):
        for transport in (Decoupled(), Blocking(1)):
            runner.run(order, late, dispatch=dispatch, transport=transport, caps=order.peaks)

    program = ps.Program(v_shape(4), 6, costs=ps.Costs.uniform(8))
    graph = program.queues()
    Lister(graph).list_by_rules(program.tables(graph))


def everything(seed: int) -> None:
    """Calls all functions of the library, on problems drawn by lot."""
    random, problem = drawn(seed)
    bounds(problem)
    searches(problem, seed)
    forms(random, seed)
    graphs(random, seed)
    runs(random, seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", others_nightly(range(0, 12, 3), [3, 6, 9]))  # a bound of 2 takes Python 15 s
def test_what_runs_as_c_gives_what_python_gives(called: set[str], seed: int) -> None:
    for each in range(seed, seed + 3):
        everything(each)
    kernels = {f"{name.rpartition('.')[2]}.{each}" for name, names in compiling.KERNELS.items() for each in names}
    assert called == kernels


IN_ANOTHER_PROCESS = """
import ctypes, sys
from penstock.engine import compiled
compiled._library = lambda library=ctypes.PyDLL(sys.argv[1]): library
import test_compiled_any
for seed in range(24):
    test_compiled_any.everything(seed)
print("done")
"""


@pytest.mark.slow
def test_no_array_is_left_and_nothing_is_undefined(tmp_path: Path) -> None:
    """Once under the compiler's sanitizers, which end the process at the first place beside an array."""
    library = tmp_path / "core.so"
    checks = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    try:
        compiling.build(library, *checks)
        preloaded = subprocess.run(
            ["gcc", "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs gcc with its sanitizers: {error}")
    ran = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, str(library)],
        env={
            **os.environ,
            "LD_PRELOAD": preloaded,
            "ASAN_OPTIONS": "detect_leaks=0",
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        },
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ran.stdout, ran.returncode) == ("done\n", 0), ran.stderr[-3000:]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("    with n:\n        pass", "with n"),
        ("    return n.bit_length()", "n.bit_length"),
        ("    n = 0.5", "0.5"),
        ("    return unknown", "unknown"),
        ("    for k in n:\n        pass", "for k in n"),
        ("    return n / {}", "{}"),
    ],
)
def test_what_has_no_translation_is_refused_by_its_line(tmp_path: Path, line: str, said: str) -> None:
    (tmp_path / "engine").mkdir()
    (tmp_path / "translate").mkdir()
    (tmp_path / "translate" / "header.h").write_text("")
    (tmp_path / "engine" / "odd.py").write_text(f"def odd(n: int) -> float:\n{line}\n")
    with pytest.raises(SubsetError, match=r"odd.py, line [02]: .*has no translation to C") as told:
        list(translated(tmp_path, {"penstock.engine.odd": ("odd",)}))
    assert said in str(told.value)


def test_an_edit_of_any_function_that_c_calls_is_built_anew() -> None:
    program = TranslationUnit(compiling.PACKAGE)
    for module, names in compiling.KERNELS.items():
        for name in names:
            program.export(module, name)
    outside = {name for name in program.sources if not name.startswith("penstock.engine.")}
    assert outside == {name for name in (*compiling.KERNELS, *compiling.CALLED) if ".engine." not in name}


def test_arrays_of_another_kind_are_refused() -> None:
    _, problem = drawn(0)
    queues, spans = problem.queues, [np.zeros(99, np.int64)] * 7
    earliest = compiling.compiled(sweep).earliest
    with pytest.raises(TypeError, match="sweep_earliest: row"):
        earliest(queues, None, np.zeros(3, np.int32), *spans)


def test_without_a_compiler_the_same_python_runs_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setattr(compiling, "digest", lambda: "0" * 16)
    with pytest.warns(RuntimeWarning, match="install a C compiler"):
        assert compiling._library.__wrapped__() is None
    with in_python():
        assert compiling.compiled(sweep) is sweep
