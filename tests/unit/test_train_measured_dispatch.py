"""`penstock train --dispatch auto` chooses again over what its first steps took, and trains the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.cli import main
from penstock.dispatch import Dispatch
from penstock.simulation.auto import WITHOUT_WAITING, choose_policy
from penstock.train import measured_dispatch
from penstock.train.measured_dispatch import FIRST_MEASURED, NUM_MEASURED, choose_measured, measured_jitter
from train_runs import SMALL, losses

pytestmark = pytest.mark.unit

SLOW_FORWARDS = ps.Costs.uniform(4, f=3.0, i=1.0, w=1.0)
"""Costs of `zb-h1` over four ranks for which frozen is best; for equal ones hinted is as fast."""
STEPS = FIRST_MEASURED + NUM_MEASURED + 2


@pytest.mark.slow
def test_auto_is_chosen_again_over_measured_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """The ops of this model take what the test says, so that what is measured does not depend on the machine."""
    ran: list[str] = []
    step = ps.Pipeline.step

    def noted(pipe: ps.Pipeline, *given: Any, **options: Any) -> Any:
        ran.append(pipe.dispatch.value)
        return step(pipe, *given, **options)

    monkeypatch.setattr(ps.Pipeline, "step", noted)
    monkeypatch.setattr(ps.Pipeline, "timeline", lambda pipe: ps.simulate(pipe.schedule, SLOW_FORWARDS))
    text = tmp_path / "text.txt"
    text.write_text("a pipeline plans, proves, draws and runs its schedules. " * 60)
    line = f"{SMALL} --steps {STEPS} --threads 1 --in-process --data {text} --json --schedule zb-h1 --ranks 4"
    line += " --batch 16 --microbatches 8"
    for name in ("auto", "frozen"):
        assert main(["train", *line.split(), "--dispatch", name, "--out", str(tmp_path / name)]) == 0
    out = capfd.readouterr().out
    report = json.loads(out.splitlines()[0])
    schedule = ps.build("zb-h1", 4, 8)
    best = [
        choose_policy(schedule, costs, policies=WITHOUT_WAITING).policy.dispatch.value
        for costs in (ps.Costs.uniform(4), SLOW_FORWARDS)
    ]
    assert best == ["hinted", "frozen"]
    measured = FIRST_MEASURED + NUM_MEASURED
    assert ran[:STEPS] == ["hinted"] * measured + ["frozen"] * (STEPS - measured)
    assert report["dispatch"] == "frozen"
    assert any("dispatch frozen was chosen" in each and "hinted before" in each for each in report["notices"])
    assert losses(tmp_path / "auto") == losses(tmp_path / "frozen")


def test_ops_that_differ_are_jitter() -> None:
    schedule = ps.build("zb-h1", 4, 8)
    even = ps.simulate(schedule, SLOW_FORWARDS)
    assert measured_jitter([even, even]) == 0
    differing = ps.simulate(schedule, ps.Costs.uniform(4, f=6.0, i=2.0, w=2.0))
    assert measured_jitter([even, differing]) == pytest.approx(0.34657, abs=1e-4)  # half of log 2
    assert str(choose_measured(schedule, [even]).policy) == "frozen"
    assert len(choose_measured(schedule, [even, differing]).makespans[0][1]) > 1


def test_the_first_rank_simulates_what_was_measured_and_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_dispatch, "choose_measured", None)  # whoever simulates fails

    class SecondRank:
        rank, dispatch = 1, Dispatch.FROZEN

        def timeline(self) -> None:
            return None

        def gather(self, value: Any) -> list[Any]:
            assert value is None
            return [("frozen", 0.25), value]

    pipe: Any = SecondRank()
    measuring = measured_dispatch.MeasuredDispatch(pipe)
    chosen = [measuring.after_pass() for _ in range(STEPS)]
    assert chosen == [None] * (FIRST_MEASURED + NUM_MEASURED - 1) + [Dispatch.FROZEN] + [None] * 2
    assert "simulated 25.0% below frozen" in measuring.notice
