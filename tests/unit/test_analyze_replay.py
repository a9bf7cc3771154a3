"""A recorded run is replayed to the microsecond, and what is wrong with it is named."""

from __future__ import annotations

import csv
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

import penstock as ps
from penstock.analyze import RunAnalysis, analyze_trace
from penstock.analyze.what_if import better_cut
from penstock.formats.traces import read_trace
from trace_samples import B, F, Sample, study_sample

pytestmark = pytest.mark.unit


def analysis_of(tmp_path: Path, **faults: Any) -> tuple[RunAnalysis, Sample]:
    sample = study_sample(**faults)
    return analyze_trace(read_trace(sample.write(tmp_path / "run.parquet"))), sample


def test_steps_are_replayed_as_they_would_be_without_late_starts(tmp_path: Path) -> None:
    found, sample = analysis_of(tmp_path, lengths=0.3, launch=7.0)
    assert found.run.table.steps.tolist() == list(sample.no_delay)
    assert found.run.replayed == pytest.approx(list(sample.no_delay.values()), rel=1e-9)
    assert found.run.measured == pytest.approx(list(sample.measured.values()), rel=1e-9)
    gone = np.mean(list(sample.measured.values())) - np.mean(list(sample.no_delay.values()))
    launch = next(each for each in found.causes if each.kind == "launch")
    assert launch.cost == pytest.approx(gone, rel=1e-6)
    assert found.replay_error > 0.01


def test_a_run_in_which_nothing_is_wrong_has_no_slowdown_and_no_cause(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path, noise=0.0, message=0.0)
    assert found.slowdown == pytest.approx(1.0, abs=1e-9)
    assert found.causes == ()
    assert found.metrics.worst_workers == found.metrics.last_stage == 0.0
    # 8 microbatches over 4 ranks are 11 forwards and backwards long; then come the collectives and the update.
    assert found.run.replayed[0] == pytest.approx(2.0 + 11 * (F + B) + 5.0 + 1.0 + 3.0)


def test_a_slow_worker_is_named_and_not_its_stage_or_replica(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path, slow_worker=(1, 2, 1.8))
    first = found.causes[0]
    assert (first.kind, dict(first.names)) == ("worker", {"replica": 1, "rank": 2})
    assert first.factor == pytest.approx(1.8, rel=0.01)
    assert not {"stage", "replica"} & {each.kind for each in found.causes}
    assert found.metrics.worst_workers == pytest.approx(1.0, abs=0.15)
    worst = max(found.metrics.by_worker, key=lambda worker: found.metrics.by_worker[worker])
    assert worst == "1:2"


def test_a_long_last_stage_is_named_and_none_of_its_workers(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path, slow_stage=(3, 1.5))
    first = found.causes[0]
    assert (first.kind, dict(first.names)) == ("stage", {"stage": 3})
    assert "worker" not in {each.kind for each in found.causes}
    assert found.metrics.last_stage > 1
    cut = next(each for each in found.what_ifs if each.kind == "cut")
    assert cut.speedup == pytest.approx(found.metrics.measured / (found.metrics.measured - first.cost))
    layers = analyze_trace(found.run.table.trace, layers=[8, 8, 8, 8])
    assert "layers 9, 9, 9, 5 to the stages" in next(each.what for each in layers.what_ifs if each.kind == "cut")


def test_microbatches_of_other_lengths_are_the_cause_and_no_worker(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path, lengths=0.6)
    assert found.causes[0].kind == "microbatches"
    assert "worker" not in {each.kind for each in found.causes}
    speedups = {each.what: each.speedup for each in found.what_ifs}
    assert speedups["microbatches packed so that all take as long"] > 1.2
    dealt = "microbatches dealt out to replicas by their work"
    assert 1 < speedups[dealt] < speedups[f"{dealt}, then in the best order"]


def test_a_slow_link_is_named_with_what_its_messages_take(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path, slow_link=(2, 1, 2, 30.0))
    first = found.causes[0]
    assert (first.kind, dict(first.names)) == ("link", {"replica": 2, "source": 1, "target": 2})
    assert first.factor == pytest.approx(60.0)


@pytest.mark.parametrize("late", [(15.0, 15.0), (15.0, 60.0), (15.0, 1.0), (15.0, 15.0, 1.0)])
def test_regression_a_link_that_is_slow_in_several_replicas_was_no_cause(
    tmp_path: Path, late: tuple[float, ...]
) -> None:
    """With one of them mended the other still holds up the step, so that each alone seemed to cost nothing."""
    random, rows = Random(0), list[tuple[object, ...]]()
    for step, (replica, ms) in product(range(3), enumerate(late)):
        times = [[10 * random.uniform(0.97, 1.03) for _ in range(8)] for _ in range(4)]
        links = ps.Links({(2, 3): ms}, default=1.0)
        run = ps.simulate(ps.build("1f1b", 4, 8), ps.Costs.by_microbatch(f=times, i=times, w=times), links)
        rows += [(*t.op[:3], t.rank, replica, step, 1e3 * step + t.start, 1e3 * step + t.end) for t in run.ops]
    path = tmp_path / "run.csv"
    with path.open("w", newline="") as file:
        head = ("op", "stage", "microbatch", "rank", "replica", "step", "start", "end")
        csv.writer(file).writerows([head, *rows])
    found = analyze_trace(read_trace(path))
    links = [each for each in found.causes if each.kind == "link"]
    assert {(each.names["source"], each.names["target"]) for each in links} == {(2, 3), (3, 2)}
    assert links[0].share > 0.1
    assert ("replica" in links[0].names) == (late[1] == 1)
    if late[1] > 1:
        where = {2: "all replicas", 3: "2 of 3 replicas"}[len(late)]
        assert f" of {where}, " in links[0].what
    worst_alone = [each for each in links if each.names.get("replica") == 1]
    assert bool(worst_alone) == (late[1] == 60)


def _held_sender(tmp_path: Path, held: float, pause: float = 0.0) -> RunAnalysis:
    """A run of gpipe without ops for messages. Each send of rank 1 to rank 2 holds rank 1 for `held` ms, and arrives
    then; other messages take 1 ms and hold nobody. Rank 1 pauses for `pause` ms before the backward of microbatch 3,
    whose message was there, and for a thirtieth of that before all other ops.
    """
    orders, free = ps.build("gpipe", 4, 8).order, [0.0] * 4
    sent: dict[tuple[str, int, int], float] = {("F", -1, m): 0.0 for m in range(8)}
    sent |= {("B", 4, m): 0.0 for m in range(8)}
    done, rows = [0] * 4, list[tuple[object, ...]]()
    while len(rows) < 64:
        for rank in range(4):
            op = orders[rank][min(done[rank], 15)]
            needed = (op.kind, rank + (-1 if op.kind == "F" else 1), op.microbatch)
            if done[rank] == 16 or needed not in sent:
                continue
            start = max(free[rank], sent[needed])
            start += (pause if (op.kind, op.microbatch) == ("B", 3) else pause / 30) * (rank == 1)
            end = start + (10.0 if op.kind == "F" else 20.0)
            free[rank] = end + (held if (op.kind, rank) == ("F", 1) else 0.0)
            sent[op.kind, rank, op.microbatch] = free[rank] + 1.0
            rows.append((op.kind, rank, op.microbatch, rank, 0, start, end))
            done[rank] += 1
    path = tmp_path / f"held-{held:g}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("op", "stage", "microbatch", "rank", "step", "start", "end"), *rows])
    return analyze_trace(read_trace([str(path)]))


def _posted_ahead(tmp_path: Path, num_ahead: int) -> RunAnalysis:
    """A run of gpipe whose ops take 10 ms and whose messages take 100. As many receives of activations are posted
    ahead, those of later microbatches first; all receives of gradients are.
    """
    rows, ended, free, back = list[tuple[object, ...]](), list[float](), 0.0, 0.0
    for m in range(4):
        sent, posted = 10.0 * (m + 1), 0.5 * (3 - m) if m < num_ahead else ended[m - num_ahead]
        there = max(sent, posted) + 100.0
        free = max(there, free) + 10.0
        ended.append(free)
        rows += [("F", 0, m, 0, sent - 10.0, sent), ("SEND_F", 0, m, 0, sent, there)]
        rows += [("RECV_F", 1, m, 1, posted, there), ("F", 1, m, 1, free - 10.0, free)]
    for m in range(4):
        free += 10.0
        back = max(back, free + 100.0) + 10.0
        rows += [("B", 1, m, 1, free - 10.0, free), ("SEND_B", 1, m, 1, free, free + 100.0)]
        rows += [("RECV_B", 0, m, 0, 0.5 * (3 - m), free + 100.0), ("B", 0, m, 0, back - 10.0, back)]
    path = tmp_path / f"ahead-{num_ahead}.csv"
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([("op", "stage", "microbatch", "rank", "start", "end"), *rows])
    return analyze_trace(read_trace([str(path)]))


@pytest.mark.parametrize(("num_ahead", "ms"), [(4, 300.0), (2, 390.0)])
def test_messages_whose_receives_are_posted_ahead_are_under_way_at_once(
    tmp_path: Path, num_ahead: int, ms: float
) -> None:
    """They were replayed one after the other, so a step of 300 ms took 570, of which messages cost 160%."""
    found = _posted_ahead(tmp_path, num_ahead)
    assert found.run.measured == pytest.approx([ms])
    assert found.run.replayed == pytest.approx([ms])
    assert found.run.messages.own == pytest.approx(100.0 * np.ones((1, 8)))
    assert max(each.cost for each in found.causes if each.kind == "messages") == pytest.approx(ms - 100.0)


def test_late_starts_of_a_rank_that_a_late_link_holds_are_the_cost_of_that_link(tmp_path: Path) -> None:
    found, healthy = _held_sender(tmp_path, 60.0), _held_sender(tmp_path, 0.0)
    first = found.causes[0]
    assert (first.kind, dict(first.names)) == ("link", {"replica": 0, "source": 1, "target": 2})
    assert first.what.endswith("and late starts of the ops around them")
    lost = found.metrics.measured - healthy.metrics.measured
    assert found.metrics.measured - found.metrics.replayed > 0.3 * lost, "much of what is lost are late starts"
    assert first.cost == pytest.approx(lost, rel=0.15)
    assert sum(each.cost for each in found.causes if each.kind == "launch") < 0.05 * lost


def test_regression_pauses_of_a_rank_were_the_cost_of_a_link_whose_messages_waited_for_it(tmp_path: Path) -> None:
    """Its messages wait for the rank, too, so its links look slow: they explain late starts as long as that alone."""
    found, healthy = _held_sender(tmp_path, 0.0, pause=60.0), _held_sender(tmp_path, 0.0)
    lost = found.metrics.measured - found.metrics.replayed - (healthy.metrics.measured - healthy.metrics.replayed)
    assert lost > 40
    by_launch = sum(each.cost for each in found.causes if each.kind == "launch")
    assert by_launch > 0.5 * lost, [(each.kind, each.cost) for each in found.causes]


def test_a_slow_stage_and_a_slow_worker_are_told_apart_where_both_are_there(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path, slow_stage=(3, 1.4), slow_worker=(0, 1, 2.0), lengths=0.2)
    kinds = [each.kind for each in found.causes]
    assert kinds[0] == "worker"
    assert dict(found.causes[0].names) == {"replica": 0, "rank": 1}
    assert found.effects.by_worker[0, 1] == pytest.approx(2.0, rel=0.05)
    stages = found.effects.by_stage.sum(axis=0)
    assert stages[3] / stages[:3].mean() == pytest.approx(1.4, rel=0.05)


def test_the_schedule_that_ran_is_known_by_its_name_and_others_keep_to_its_memory(tmp_path: Path) -> None:
    found, _ = analysis_of(tmp_path)
    assert found.fit is not None
    assert found.fit.name == "1f1b"
    assert found.fit.in_flight == 4
    schedules = [each for each in found.what_ifs if each.kind == "schedule"]
    assert schedules
    assert all(each.memory is not None and each.memory <= 4 for each in schedules)


def test_clocks_of_hosts_are_brought_together(tmp_path: Path) -> None:
    right, _ = analysis_of(tmp_path, slow_stage=(2, 1.3))
    skewed, _ = analysis_of(tmp_path, slow_stage=(2, 1.3), skew={1: 45.0, 3: -20.0})
    assert skewed.run.replayed == pytest.approx(right.run.replayed, rel=1e-3)
    assert skewed.metrics.measured == pytest.approx(right.metrics.measured, rel=1e-3)
    assert any("clocks of ranks were brought together" in note for note in skewed.notes)
    assert right.notes == ()


def test_layers_are_moved_to_where_the_longest_stage_is_shortest() -> None:
    assert better_cut(np.array([8.0, 8.0, 8.0, 12.0]), [8, 8, 8, 8]) == [9, 9, 9, 5]
    assert better_cut(np.array([4.0, 4.0]), [4, 4]) == [4, 4]
