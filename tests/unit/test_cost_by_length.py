"""Costs by length: fitted to what was measured, and turned into the costs of microbatches that are yet to run."""

from __future__ import annotations

import numpy as np
import pytest

import penstock as ps
from penstock.cost import CostError, CostsByLength, LengthLine, LengthSample, fit_costs
from penstock.cost.by_length import length_sums

pytestmark = pytest.mark.unit

TRUE = {
    ("F", 0): LengthLine(0.5, 0.01, 1e-5), ("B", 0): LengthLine(0.7, 0.02, 3e-5),
    ("F", 1): LengthLine(0.4, 0.015, 0.0),
    ("I", 1): LengthLine(0.0, 0.01, 2e-5), ("W", 1): LengthLine(0.2, 0.01, 0.0),
}  # fmt: skip


def samples(noise: float = 0.0, seed: int = 0, num: int = 40) -> list[LengthSample]:
    draw = np.random.default_rng(seed)
    found = []
    for (kind, stage), line in TRUE.items():
        for _ in range(num):
            lengths = draw.integers(4, 2000, int(draw.integers(1, 6))).tolist()
            ms = float(length_sums([lengths])[0] @ line.row) * float(draw.lognormal(0, noise))
            found.append(LengthSample(kind, stage, lengths, ms))
    return found


def test_what_was_measured_without_noise_is_found_again() -> None:
    fitted = fit_costs([*samples(), LengthSample("U", 0, [3], 9.0)], 2)
    for (kind, stage), line in TRUE.items():
        assert getattr(fitted.costs, kind.lower())[stage].row == pytest.approx(line.row, rel=1e-6, abs=1e-9)
    assert max(each.worst for each in fitted.errors) < 1e-6
    # Halves that were not measured are half of the whole; a whole that was not is both halves.
    assert fitted.costs.i[0].row == pytest.approx([each / 2 for each in TRUE["B", 0].row])
    assert fitted.costs.b[1].row == pytest.approx(np.add(TRUE["I", 1].row, TRUE["W", 1].row))


def test_with_noise_errors_are_reported_and_predictions_hold_between_the_lengths() -> None:
    fitted = fit_costs(samples(0.1), 2)
    assert 0.03 < fitted.median_error < 0.12
    assert {(each.kind, each.stage) for each in fitted.errors} == set(TRUE)
    assert all(each.median <= each.worst and each.num_samples == 40 for each in fitted.errors)
    asked = [[100, 900], [1500], [30] * 20]
    for (kind, stage), line in TRUE.items():
        predicted = [fitted.costs.of(asked).duration(kind, stage, m) for m in range(3)]
        assert predicted == pytest.approx(length_sums(asked) @ line.row, rel=0.15)


def test_one_length_alone_says_that_time_goes_with_tokens() -> None:
    same = [LengthSample(kind, 0, [500], ms) for kind, ms in (("F", 5.0), ("B", 10.0)) for _ in range(3)]
    costs = fit_costs(same, 1).costs
    assert costs.f[0].row == pytest.approx((0, 0.01, 0))
    assert costs.of([[1000]]).duration("B", 0, 0) == pytest.approx(20)


def test_no_part_is_below_zero_where_times_fall_with_length() -> None:
    odd = [LengthSample(kind, 0, [l], 10 - l / 200) for kind in "FB" for l in (100, 500, 1000)]
    costs = fit_costs(odd, 1).costs
    assert min(costs.f[0].row) >= 0
    assert costs.f[0].fixed > 5
    nothing = [LengthSample(kind, 0, [l], 0.0) for kind in "FB" for l in (100, 500)]
    assert fit_costs(nothing, 1).costs.f[0].row == (0, 0, 0)


def test_costs_of_microbatches_are_those_of_their_lengths() -> None:
    line = LengthLine(1.0, 0.01, 1e-5)
    by_length = CostsByLength(
        [line] * 2, [line] * 2, [line] * 2, activation=[LengthLine(per_token=4.0)] * 2,
        message_bytes=[LengthLine(per_token=2.0), LengthLine()], freed_by_input=0.25,
    )  # fmt: skip
    costs = by_length.of([[100, 300], [400], [10]])
    assert costs.duration("F", 1, 0) == pytest.approx(1 + 4 + 1)
    assert costs.duration("B", 0, 1) == pytest.approx(2 * (1 + 4 + 1.6))
    assert costs.memory_change("F", 0, 2) == pytest.approx(40)
    assert costs.memory_change("I", 0, 2) == pytest.approx(-10)
    assert costs.message_size(("F", 0, 1), ("F", 1, 1)) == pytest.approx(800)
    work = by_length.work(length_sums([[100, 300], [400], [10]]))
    timeline = ps.simulate(ps.build("1f1b", 2, 3), costs)
    assert sum(timeline.busy) == pytest.approx(work.sum())


def test_stages_take_the_lengths_of_their_tower() -> None:
    lines = [LengthLine(1.0, 0.02), LengthLine(2.0, 0.01, 1e-5)]
    costs = CostsByLength(lines, lines, lines, towers=("images", "text"))
    of_lengths = costs.of({"text": [[100, 200], [300]], "images": [[], [50]]})
    assert [of_lengths.duration("F", 0, m) for m in (0, 1)] == pytest.approx([1.0, 2.0])
    assert [of_lengths.duration("F", 1, m) for m in (0, 1)] == pytest.approx([2 + 3 + 0.5, 2 + 3 + 0.9])
    assert of_lengths.memory_change("F", 1, 0) == pytest.approx(300)
    sums = costs.sums({"text": [[100, 200], [300]], "images": [[], [50]]})
    assert costs.work_by_tower(sums).sum(axis=1) == pytest.approx(costs.work(sums))
    with pytest.raises(CostError, match="give the name of each stage's tower, 2 in all"):
        CostsByLength(lines, lines, lines, towers=("images",))


def test_samples_that_make_no_sense_are_refused() -> None:
    with pytest.raises(CostError, match="no F of stage 1 was measured"):
        fit_costs([each for each in samples() if (each.kind, each.stage) != ("F", 1)], 2)
    with pytest.raises(CostError, match="no W and no B of stage 1"):
        fit_costs([each for each in samples() if (each.kind, each.stage) != ("W", 1)], 2)
    with pytest.raises(CostError, match="stages from 0 to 0"):
        fit_costs(samples(), 1)
    with pytest.raises(CostError, match="takes nan ms"):
        fit_costs([LengthSample("F", 0, [3], float("nan"))], 1)
    with pytest.raises(CostError, match="lengths of microbatch 0 are"):
        fit_costs([LengthSample("F", 0, [0], 1.0)], 1)
