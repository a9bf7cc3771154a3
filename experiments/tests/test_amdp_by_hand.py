"""The loop by hand: it learns as a pipeline does, and rule `tentative` has the two exact cases."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock as ps
from experiments.amdp.by_hand import Known, Loop, Training, _rows_of, plan_of, trained
from experiments.amdp.learning import OPTIMIZERS, Batch, cut
from penstock.models import CrossEntropy, GPTConfig, gpt_stage
from tiers import others_nightly

pytestmark = pytest.mark.unit

CONFIG = GPTConfig(vocab_size=32, context=8, depth=4, width=16, num_heads=2)
STAGES, WINDOW, UPDATES = 4, 16, 5
RATES = [2e-3, 4e-3, 8e-3, 8e-3, 4e-3]


def order(mismatch: int = 1, rule: str = "none", name: str = "amdp") -> ps.Schedule:
    """The library's order, of four ranks and windows of 16, with this rule."""
    if rule == "tentative":
        return ps.schedule.with_tentative_updates(order(mismatch, "none", name))
    options: dict[str, Any] = {"max_mismatch": mismatch} if name == "amdp" else {}
    schedule = ps.build(name, STAGES, WINDOW * UPDATES, window=WINDOW, **options)
    return schedule if name != "amdp" else replace(schedule, updates=ps.schedule.Updates(WINDOW, mismatch, rule))


def batch(number: int) -> Batch:
    """A window's samples, each of which has another text to learn."""
    random = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, 32, (WINDOW, 9), generator=random)
    return tokens[:, :-1], (tokens[:, :-1] * 3 + 1) % 32


def by_hand(
    rule: str,
    schedule: ps.Schedule,
    known: Known | None = None,
    optimizer: str = "AdamW",
    dtype: torch.dtype = torch.float32,
) -> list[float]:
    config = replace(CONFIG, depth=schedule.num_stages)
    training = Training(config, schedule.num_stages, optimizer, RATES, clip=0.5, dtype=dtype)
    return trained(Loop(training, plan_of(schedule, rule, known), rule), batch, UPDATES)


def by_pipeline(rule: str, name: str = "amdp", optimizer: str = "AdamW") -> list[float]:
    schedule = order(1, rule, name)
    parts = cut(CONFIG, STAGES)
    with ps.Pipeline(
        [functools.partial(gpt_stage, CONFIG, part) for part in parts],
        schedule,
        loss_fn=CrossEntropy(),
        optimizer=functools.partial(OPTIMIZERS[optimizer], lr=0.0),
        precision=ps.PrecisionOptions(clip_norm=0.5 / STAGES**0.5),
        parallel=ps.ParallelOptions(sharding="none"),
    ) as pipe:
        samples = [batch(number) for number in range(UPDATES)]
        sides = ([row for each in samples for row in each[side].split(1)] for side in (0, 1))
        losses = [float(loss) for loss in pipe.step(*sides, rates=RATES).losses]
    return [sum(losses[at : at + WINDOW]) for at in range(0, len(losses), WINDOW)]


@pytest.mark.parametrize(
    ("rule", "name", "optimizer"),
    others_nightly(
        [
            ("none", "amdp", "AdamW"),
            ("xpipe", "amdp", "AdamW"),
            ("tentative", "amdp", "AdamW"),
            ("tentative", "pipedream-2bw", "AdamW"),
            ("tentative", "amdp", "Muon"),
            ("pipedream", "amdp", "AdamW"),
            ("pipedream-2bw", "pipedream-2bw", "AdamW"),
            ("xpipe", "amdp", "Muon"),
        ],
        [("none", "amdp", "AdamW"), ("xpipe", "amdp", "AdamW"), ("tentative", "amdp", "AdamW")],
    ),
)
def test_it_learns_as_a_pipeline_does(rule: str, name: str, optimizer: str) -> None:
    own = by_hand(rule, order(1, rule, name), optimizer=optimizer)
    beside = by_pipeline(rule, name, optimizer)
    assert own == pytest.approx(beside, rel=2e-6 if optimizer == "AdamW" else 1e-3)
    synchronous = by_hand("none", order(0), optimizer=optimizer)
    assert max(abs(a - b) for a, b in zip(own, synchronous, strict=True)) > 1e-3, "the rule must matter"


@pytest.mark.parametrize("optimizer", ["AdamW", "NAdam", "Muon"])
def test_with_the_whole_window_known_it_reads_what_synchronous_training_reads(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding, on eight ranks, where no late microbatch has its backward before the update too."""
    monkeypatch.setattr("experiments.amdp.by_hand.CrossEntropy", lambda: loss_in_double)
    plain, drained = (ps.build("amdp", 8, WINDOW * UPDATES, window=WINDOW, max_mismatch=most) for most in (1, 0))
    windows = [frozenset(range(update * WINDOW, (update + 1) * WINDOW)) for update in range(UPDATES)]
    whole = {(stage, update): members for stage in range(8) for update, members in enumerate(windows)}
    in_double = functools.partial(by_hand, optimizer=optimizer, dtype=torch.float64)
    synchronous = in_double("none", drained)
    assert in_double("tentative", plain, whole) == pytest.approx(synchronous, rel=1e-12)
    assert in_double("none", plain) != pytest.approx(synchronous, rel=1e-4)


def loss_in_double(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """What `CrossEntropy` computes in single precision."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon"])
def test_with_nothing_known_it_is_xpipe(optimizer: str) -> None:
    """In 2BW's order, where backwards of late forwards come after the update."""
    schedule = order(name="pipedream-2bw")
    assert by_hand("tentative", schedule, {}, optimizer) == by_hand("xpipe", schedule, None, optimizer)


def test_what_is_known_of_a_window_is_what_ended_before_its_first_late_forward() -> None:
    """AMDP on eight ranks, windows of 32: the shares of the window that each stage knows, and how many are late."""
    schedule = ps.schedule.with_tentative_updates(ps.build("amdp", 8, 32 * 6, window=32, max_mismatch=1))
    known = ps.schedule.known_to(schedule)
    assert [len(known.get((stage, 3), ())) for stage in range(8)] == [24, 24, 24, 32, 32, 32, 0, 0]
    groups = plan_of(schedule, "tentative")[3]
    late = [sum(len(group.members) for group in groups if group.forward[stage].is_tentative) for stage in range(8)]
    assert late == [8, 8, 4, 4, 4, 4, 0, 0]
    assert [group.members for group in groups] == [
        tuple(range(4)), tuple(range(4, 8)), tuple(range(8, 24)), tuple(range(24, 32))
    ]  # fmt: skip
    assert not any(any(group.late) for group in groups)
    late = [sum(len(g.members) for g in plan_of(schedule, "half")[3] if g.late[stage]) for stage in range(8)]
    assert late == [8, 8, 4, 4, 4, 4, 0, 0]


def test_part_of_a_window_known_is_neither_synchronous_nor_xpipe() -> None:
    schedule = order(rule="tentative")
    assert 0 < len(ps.schedule.known_to(schedule)[0, 2]) < WINDOW
    own = by_hand("tentative", schedule)
    for other in (by_hand("none", order(0)), by_hand("xpipe", schedule), by_hand("none", schedule)):
        assert own != pytest.approx(other, rel=1e-5)


def test_a_late_microbatch_weighs_half_where_it_is_late() -> None:
    """With nothing late it is rule `none`; with something late it is not, though all ops read the same versions."""
    assert by_hand("half", order(0)) == pytest.approx(by_hand("none", order(0)), rel=1e-6)
    assert by_hand("half", order())[:2] == pytest.approx(by_hand("none", order())[:2], rel=1e-6)
    assert by_hand("half", order()) != pytest.approx(by_hand("none", order()), rel=1e-4)


def test_parts_of_a_sample_are_trained_with_the_sample() -> None:
    """Microbatches of half a sample: the window's gradient is the same mean if nothing is late."""
    assert _rows_of([0, 1, 4, 5], 8, 4).tolist() == [0, 2]
    assert _rows_of([1, 3], 4, 8).tolist() == [2, 3, 6, 7]
    with pytest.raises(ValueError, match="no whole number of samples"):
        _rows_of([0, 2], 8, 4)


def test_what_the_loop_cannot_do_is_refused() -> None:
    with pytest.raises(ValueError, match="no rule 'other'"):
        plan_of(order(), "other")
    late = ps.build("pipedream", 4, 6, window=1)
    with pytest.raises(ValueError, match="lacks 2 updates"):
        plan_of(late, "tentative", {(0, update): frozenset([update]) for update in range(6)})
