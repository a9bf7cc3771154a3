"""The playground's scripts say what Python says: the same schedules, times, errors; and plans that are proved."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import ModuleType

import pytest

import penstock as ps
from penstock.formats import to_torch_csv
from penstock.play import page, save, scripts
from penstock.schedule.messages import CHANNELS
from penstock.schedule.text_parser import parse
from penstock.translate.subset import SubsetError
from penstock.translate.to_javascript import bundle
from play_cases import (
    CHECK_GRIDS,
    DISPATCHES,
    GRID_OF_RULE,
    NAMES,
    RUN_JOBS,
    TORCH_CSV,
    by_python,
    draw_grid,
    draw_job,
    in_node,
    proved,
    torch_csv_by_python,
)
from tiers import sample

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs node to run the page's scripts")


@needs_node
@pytest.mark.slow
def test_schedules_run_in_the_page_as_in_python(tmp_path: Path) -> None:
    rng = random.Random(2026)
    jobs = [draw_job(rng) for _ in range(sample(1000, 150))]
    assert {job["name"] for job in jobs} == set(NAMES)
    assert {job["dispatch"] for job in jobs} == set(DISPATCHES)
    built = 0
    for job, found in zip(jobs, in_node(RUN_JOBS, jobs), strict=True):
        expected = by_python(job)
        if "error" in expected:
            assert found == expected, job
            continue
        built += 1
        assert (found.get("text"), found.get("dispatch")) == (expected["text"], expected["dispatch"]), job
        if built % 20 == 0:
            (tmp_path / "one.json").write_text(found["json"])
            assert ps.load(tmp_path / "one.json") == parse(expected["text"]), job
        assert found["peaks"] == expected["peaks"], job
        assert [found["makespan"], found["bubble"]] == pytest.approx(
            [expected["makespan"], expected["bubble"]], abs=1e-9
        ), job
        assert found["times"].keys() == expected["times"].keys()
        for op, times in found["times"].items():
            assert times == pytest.approx(expected["times"][op], abs=1e-9), (job, op)
    assert built > 0.6 * len(jobs)


@needs_node
@pytest.mark.slow
def test_grids_get_the_errors_that_check_gives() -> None:
    rng = random.Random(7)
    texts = [*GRID_OF_RULE.values(), *(draw_grid(rng) for _ in range(sample(1000, 300)))]
    rules = []
    for text, found in zip(texts, in_node(CHECK_GRIDS, texts), strict=True):
        if isinstance(found, list) and "the playground has no" in found[0]:
            continue
        expected = proved(text)
        assert found == expected, text
        rules.append(expected[1] if isinstance(expected, list) else None)
    assert rules[: len(GRID_OF_RULE)] == list(GRID_OF_RULE)


@pytest.mark.slow
@needs_node
def test_the_csv_for_torch_has_the_messages_where_python_places_them() -> None:
    rng = random.Random(37)
    jobs = [draw_job(rng) | {"channel": rng.choice([*CHANNELS[1:], ""])} for _ in range(sample(1000, 100))]
    placed = {}
    for job, found in zip(jobs, in_node(TORCH_CSV, jobs), strict=True):
        assert found == torch_csv_by_python(job), job
        if "SEND_F" in found:
            placed[job["channel"]] = found
    assert set(placed) == set(CHANNELS[1:])


@needs_node
def test_what_torch_lacks_is_refused_by_the_page_as_in_python() -> None:
    grids = [
        "rank 0 | F0 R0 B0",
        "schedule g: 2 ranks, 1 stage, 1 microbatch\npipeline 0: stages on ranks 0\nrank 0 | F0 B0\nrank 1 |",
    ]
    grids.append(str(ps.build("chimera", 4, 4)))
    body = """return given.map((text) => {
      try { torch.toCsv(schedules.parse(text), { channel: "nccl" }); } catch (error) { return error.message; }
    });"""
    for grid, found in zip(grids, in_node(body, grids), strict=True):
        with pytest.raises(ps.ScheduleError) as refused:
            to_torch_csv(parse(grid))
        assert found == str(refused.value)


PLAN = """return given.map((job) => {
  const p = job.ranks, places = { one: () => schedules.oneToOne(p), v: () => schedules.vShape(p),
    circular: () => schedules.circular(p, 2 * p), both: () => schedules.bidirectional(schedules.oneToOne(p)) };
  const [f, i, w, b] = job.costs;
  const { cap, split } = job, links = new Map(Object.entries(job.links)), pipelines = places[job.place]();
  const search = planner.search(
    { pipelines, numRanks: p, numMicrobatches: job.microbatches, cap, split, costs: { f, i, w, b }, links });
  for (let k = 0; k < 5; k++) search.step();
  const { schedule, makespan, lower } = search.found;
  return { text: schedules.toText(schedule), makespan, lower };
});"""


@needs_node
def test_plans_of_the_page_are_proved_and_no_bound_is_above_what_python_plans() -> None:
    rng = random.Random(3)
    jobs = []
    for _ in range(40):
        p = rng.choice([2, 4])
        jobs.append(
            {
                "place": rng.choice(["one", "v", "circular", "both"]),
                "ranks": p,
                "microbatches": rng.choice([4, 6]),
                "cap": rng.choice([None, p, 2 * p]),
                "split": rng.random() < 0.7,
                "links": {"0>1": rng.choice([0, 5, 20]), "1>0": rng.choice([0, 5])},
                "costs": [rng.choice([1, 2, 3]) for _ in range(4)],
            }
        )
    for job, found in zip(jobs, in_node(PLAN, jobs), strict=True):
        schedule = parse(found["text"])
        ps.check(schedule)
        assert schedule.max_in_flight == job["cap"]
        per = schedule.num_stages / schedule.num_ranks
        f, i, w, b = (cost / per for cost in job["costs"])
        costs = ps.Costs.uniform(schedule.num_stages, f, i, w, b=b)
        links = ps.Links({tuple(map(int, link.split(">"))): ms for link, ms in job["links"].items()})
        assert ps.simulate(schedule, costs, links=links).makespan == pytest.approx(found["makespan"])
        assert found["lower"] <= found["makespan"] * (1 + 1e-9)


@needs_node
def test_a_cap_below_one_microbatch_is_refused_by_the_planner_of_the_page() -> None:
    body = """try {
      planner.search({ pipelines: schedules.vShape(2), numRanks: 2, numMicrobatches: 2, cap: 1, split: true,
        costs: { f: 1, i: 1, w: 1, b: 2 }, links: new Map() });
    } catch (error) { return error.message; }"""
    assert "needs 2 activations" in in_node(body, None)


@needs_node
def test_heaps_and_rounding_are_those_of_python() -> None:
    rng = random.Random(0)
    pairs = [[rng.choice([0.0, 1.0, 2.5]), rng.randrange(9)] for _ in range(200)]
    body = "const heap = []; for (const each of given) heapPush(heap, each); return given.map(() => heapPop(heap));"
    assert in_node(body, pairs) == sorted(pairs)
    numbers = [0.5, 1.5, 2.5, -0.5, -1.5, 3.2, 7.9, 1e9 + 0.5]
    assert in_node("return given.map(roundEven);", numbers) == [round(each) for each in numbers]
    assert in_node("return given.map((each) => floorMod(each, 3));", [-4, -1, 0, 5]) == [-4 % 3, -1 % 3, 0, 5 % 3]


def test_what_has_no_translation_is_refused_by_its_line(tmp_path: Path) -> None:
    module = ModuleType("penstock.engine.odd")
    module.__file__ = str(tmp_path / "odd.py")
    (tmp_path / "odd.py").write_text("def odd(a):\n    with a:\n        pass\n")
    with pytest.raises(SubsetError, match=r"odd.py, line 2: .*has no translation to JavaScript"):
        bundle([module])


def test_the_page_loads_nothing_and_holds_all_its_scripts() -> None:
    text = page()
    assert "{{" not in text.replace("{{ ", "")
    assert scripts() in text
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "src=" not in text
    assert "@import" not in text


def test_a_page_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    with pytest.raises(ps.ScheduleError, match="No such file or directory; name a file in a folder that is there"):
        save(f"{tmp_path}/nowhere/play.html")


@needs_node
def test_pairs_are_refused_by_name_at_their_cell() -> None:
    text = str(ps.build("dualpipe-v", 2, 4, overlap=True))
    (found,) = in_node(CHECK_GRIDS, [text])
    message, rule, _, _, line, column = found
    assert "the playground has no pairs like '0F3+3B1'" in message
    assert rule == "text"
    assert text.splitlines()[line - 1][column - 1 :].startswith("0F3+3B1")
