"""The headline of a run says what was late, every link that moved, the dispatch, the nodes, and what was saved."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import penstock as ps
from penstock.control import Configuration, Controller, Job, rehearse
from penstock.control.advice import Obstacle, Unanswered
from penstock.cost import Links
from penstock.formats.perfetto import from_perfetto, to_perfetto
from penstock.report.from_logs import read_story
from penstock.report.page import to_page
from penstock.report.run_story import RunPlan, RunStory
from penstock.report.words import headline, more, range_of
from penstock.train.metrics import ProgressView
from penstock.train.report import read_adaptation
from report_cases import decided, iteration, job, log_of, story_of, told

pytestmark = pytest.mark.unit


def slower(lines: tuple[str, ...], added: dict[int, float]) -> list[str]:
    """A log in which some iterations took longer, by so many ms."""
    found = []
    for line in lines:
        value = json.loads(line)
        ended = value.get("event", {}).get("iteration")
        if ended is not None:
            ended["ms"] += added.get(ended["number"], 0.0)
        found.append(json.dumps(value))
    return found


def test_the_headline_of_a_run_whose_nodes_moved_names_the_link_of_the_ring() -> None:
    """It said that no link was late: it looked at links between ranks alone."""
    mesh = ps.Mesh(pp=2, dp=2)
    costs = ps.Costs([10] * 2, [10] * 2, [10] * 2, gradient_bytes=[40e6] * 2)
    start = Configuration(ps.build("zb-h1", 2, 8), "frozen", caps=(8.0, 8.0), nodes=mesh.nodes)
    late, ring = Links.parse("0:1=latency:steps:0ms/0ms,5s/40ms"), ps.cost.Ring(window=10e6)
    lines: list[str] = []
    controller = Controller(Job(costs, start, mesh=mesh, ring=ring), log=lines.append)
    run = rehearse(controller, late, until=30_000)
    left = Job(costs, start, mesh=mesh, ring=ring, may_replan=False, may_delegate=False, dispatches=("frozen",))
    told = read_story(lines, name="a late ring")
    said = headline(told)
    assert "between nodes 0–1 (DP ring of rank 0) was 40 ms late" in said
    assert "nodes 1 and 3 changed places" in said
    assert "no link was late" not in said.lower()
    assert controller.verdicts[0].kept
    truth = 410.0 * sum(each.start >= 5_000 for each in run.iterations)
    truth -= sum(each.ms for each in run.iterations if each.start >= 5_000)
    assert left.start.nodes == mesh.nodes
    assert told.saved == pytest.approx(truth, rel=0.2)


def test_the_headline_names_every_link_that_was_delegated_and_the_dispatch_that_runs() -> None:
    """All three links were delegated and dispatch had changed, and it named one link."""
    calm = [iteration(n, 100, 0, None, 0.0, 0.1, 0.1) for n in range(6)]
    late = [iteration(n, 400, 0, None, 60.0, 0.1, 0.1) for n in range(6, 10)]
    after = [iteration(n, 102, 1, 400, 60.0, 0.1, 0.1) for n in range(10, 20)]
    plan = RunPlan("zb", "dynamic", ((0, 1), (1, 2), (2, 3)))
    story = told([*calm, *late, *after], [decided(1, 8, 10, plan=plan)])
    said = headline(story)
    assert "was 60 ms late from iteration 6 on; from iteration 10 on links" in said
    assert "links 0–1, 1–2 and 2–3 went by delegates and dispatch became dynamic" in said


def test_bug_a_resumed_run_counted_iterations_from_where_it_was_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Resumed after step 100, it told of iteration 21 where step 121 was meant."""
    (tmp_path / "control.jsonl").write_text("\n".join(log_of()), encoding="utf-8")
    (tmp_path / "iterations.jsonl").touch()
    whole, resumed = read_adaptation(tmp_path), read_adaptation(tmp_path, 100)
    assert whole is not None
    assert resumed is not None
    assert [each["first"] for each in resumed["spells"]] == [each["first"] + 100 for each in whole["spells"]]
    assert [each["made"] for each in resumed["decisions"]] == [each["made"] + 100 for each in whole["decisions"]]
    assert f"late from iteration {resumed['spells'][0]['first']} to" in resumed["headline"]
    decision = {"number": 1, "iteration": 20, "action": "re-plan", "reason": "a link is late"}
    ProgressView(100, 200, quiet=False).decisions([decision], 100)
    assert "change 1 after iteration 121, re-plan" in capsys.readouterr().err


def test_links_that_went_back_and_changes_that_ended_are_said_to_have_been_for_a_time() -> None:
    rows = [iteration(n, 100 + 100 * (n > 5), n // 8, 300 if n > 7 else None, 30.0 * (n > 5)) for n in range(24)]
    plans = RunPlan("zb", "dynamic", ((0, 1), (1, 2))), RunPlan("zb", "frozen", ((1, 2),))
    changed = [decided(1, 6, 8, plan=plans[0]), decided(2, 14, 16, "stop delegating", plan=plans[1])]
    said = headline(told(rows, changed))
    for done in ("link 1–2 went by delegates", "link 0–1 went by delegates for a time"):
        assert done in said
    assert "dispatch became dynamic for a time" in said


def test_steps_that_prepare_a_change_count_on_neither_side_and_are_charged_to_it() -> None:
    """The step in which delegates start was taken for a step before them, and 46.5 s were claimed for 17."""
    plain = story_of()
    (change, *_) = plain.decisions
    assert change.first is not None
    added = dict.fromkeys(range(change.made + 1, change.first + 1), 800.0)
    found = read_story(slower(log_of(), added), name="slow to prepare")
    (again, *_) = found.decisions
    assert (again.measured_before, again.measured_after) == (change.measured_before, change.measured_after)
    assert plain.saved is not None
    assert found.saved == pytest.approx(plain.saved - sum(added.values()), rel=0.01)
    assert not [each for each in found.iterations if each.number in added and each.is_clean]


@pytest.mark.parametrize("link", ["2:3=latency:steps:0ms/0ms,1600ms/60ms", "0:1=latency:steps:0ms/0ms,2s/40ms"])
def test_saved_is_within_a_fifth_of_what_two_runs_differ_by(link: str) -> None:
    lines: list[str] = []
    run = rehearse(Controller(job(), log=lines.append), Links.parse(link), until=14_000)
    alone = job(may_replan=False, may_delegate=False, dispatches=("frozen",))
    number = len(run.iterations)
    without = rehearse(Controller(alone), Links.parse(link), until=40_000).iterations[:number]
    truth = sum(each.ms for each in without) - run.ms
    saved = read_story(lines, name="run").saved
    assert saved is not None
    assert saved == pytest.approx(truth, rel=0.2)


def test_what_is_within_the_noise_of_steps_is_not_called_saved() -> None:
    story = story_of()
    assert story.saved is not None
    about = replace(story, saved_error=story.saved / 4)
    assert about.saved is None
    assert "iterations vary too much to say it more exactly" in headline(about)
    assert "saved -" in headline(replace(story, saved_error=story.lost))
    assert about.saved_about is not None
    assert to_page(about).count(range_of(*about.saved_about)) == 2, "the headline and the large number say the same"


def test_bug_steps_that_were_not_reported_in_full_counted_as_steps_without_a_late_link() -> None:
    """Of a link that is late from the start, ranks report one step in eight. The page said that changes cost seconds
    which they saved: it held all other steps against steps without a late link."""
    log, sparse, number = log_of("2:3=latency:60ms"), [], 0
    for line in log:
        if '"transfers"' not in line or number < 12 or number % 8 == 0:
            sparse.append(line)
        number += '{"event":{"iteration"' in line
    whole, found = read_story(log, name="whole"), read_story(sparse, name="sparse")
    assert len(sparse) < len(log)
    assert len(found.late) == len(found.iterations)
    assert whole.saved_about is not None
    assert found.saved_about is not None
    assert found.saved_about[0] == pytest.approx(whole.saved_about[0], rel=0.05)
    assert found.saved_about[0] > 0


@pytest.mark.parametrize("noise", [0.02, 0.1])
def test_saved_is_told_as_a_range_where_iterations_vary_and_never_has_the_other_sign(noise: float) -> None:
    plain = story_of()
    assert plain.saved is not None
    for seed in range(8):
        draw = random.Random(seed)
        spread = {each.number: draw.gauss(0, noise) * each.ms for each in plain.iterations}
        found = read_story(slower(log_of(), spread), name="noisy", most=4)
        assert found.saved_about is not None
        ms, error = found.saved_about
        assert ms - 4 * error < plain.saved < ms + 4 * error
        assert found.saved is None or found.saved > 0


def test_a_run_that_ends_slower_than_it_began_says_so_first() -> None:
    rows = [iteration(n, 100 if n < 10 else 140, 0, None, 0.0) for n in range(30)]
    assert headline(told(rows)).startswith("Iterations take 140 ms at the end, 100 at the start; ")
    assert not headline(told(rows[:10])).startswith("Iterations take")


def test_a_cause_without_an_answer_is_said_with_its_size() -> None:
    cause = Unanswered(20, Obstacle.NOISE, "too noisy", (((2, 3), 60.0),), 284.0, 523.0, 500.0)
    found = read_story([*log_of(), json.dumps({"unanswered": msgspec.to_builtins(cause)})], name="not answered")
    (said,) = (each for each in more(found) if "too noisy" in each)
    assert "link 2:3 is 60 ms late" in said
    assert "284 to 523 ms" in said


@pytest.mark.parametrize(
    ("story", "said"),
    [
        (told([iteration(n, 100, 0, None, 0.2) for n in range(5)]), ["no link was late by 1 ms or more"]),
        (
            told([iteration(n, 100.1, 0, None, 10.0) for n in range(5)]),
            ["link 0–1 was 10 ms late from iteration 0 on", "0 ms"],
        ),
        (
            told([iteration(n, 200, 0, None, 30.0 + 20 * (n == 4)) for n in range(5)]),
            ["(at most 50)", "500 ms"],
        ),
        (
            told([iteration(n, 200, 0, None, 30.0, 30.0, 40.0, 1.0) for n in range(5)]),
            ["links 0–1 and 1–2 were 30 to 40 ms late", "the plan was never changed", "none of it was saved"],
        ),
        (
            told(
                [iteration(n, 200, 0, None, 30.0 if n in (1, 9) else 0.0) for n in range(12)],
                [decided(1, 5, None, outcome="given up")],
            ),
            ["late from iteration 1 to 9, in 2 of 12 iterations", "the plan was never changed"],
        ),
    ],
)
def test_runs_in_which_nothing_was_changed_are_told_too(story: RunStory, said: list[str]) -> None:
    assert all(each in headline(story).lower() for each in said)


def test_a_run_that_became_slower_is_not_praised() -> None:
    calm = [iteration(n, 110, 0, None, 0.0, 0.1) for n in range(6)]
    slow = [iteration(n, 206, 1, 110, 5.0, 0.1) for n in range(6, 20)]
    change = replace(decided(1, 4, 6), measured_before=110.0, measured_after=206.0)
    said = headline(told([*calm, *slow], [change]))
    assert said.startswith("Iterations take 206 ms at the end, 110 before the last change")
    assert "the changes cost 1.3 s, by measured iterations" in said
    assert "saved" not in said


def test_what_could_not_be_measured_is_not_called_saved() -> None:
    changed = [iteration(n, 100, 1, None, 0.0, 0.1) for n in range(6)]
    late = [iteration(n, 530, 1, None, 120.0, 0.1) for n in range(6, 12)]
    story = told([*changed, *late], [decided(1, -1, 0)])
    assert story.saved is None
    assert "too few iterations ran under the same links before the change to measure what it saved" in headline(story)


def test_a_change_that_was_tried_and_taken_back_is_no_answer() -> None:
    calm = [iteration(n, 100, 0, None, 0.0) for n in range(6)]
    tried = [iteration(n, 130, 1, 100, 0.0) for n in range(6, 12)]
    after = [iteration(n, 100, 2, None, 0.0) for n in range(12, 20)]
    change = replace(decided(1, 4, 6), taken_back=True, verdict="it is slower")
    story = told([*calm, *tried, *after], [change, decided(2, 11, 12, "take back")])
    assert (
        "1 change of the plan was tried and taken back; the changes cost 180 ms, by measured iterations"
        in headline(story)
    )
    assert "1 of them taken back because measured iterations were no faster" in more(story)[0]


def test_the_trace_of_a_step_with_blocked_senders_is_read_back() -> None:
    """No run over direct links, as in the tutorial, had a page once a simulated sender had stood still."""
    schedule = ps.build("zb", 4, 8)
    timeline = ps.simulate(schedule, links=ps.Links({(2, 3): 40.0}), transport=ps.Blocking(2))
    assert any(timed.blocked for timed in timeline.ops)
    (read,) = from_perfetto(to_perfetto(timeline), schedule)
    assert read.makespan == pytest.approx(timeline.makespan)
