"""Three towers and their contrast in one pipeline, each with a placement, rules and microbatches of its own."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import clip_runs as runs
import penstock as ps
from backends import Backend, backends
from branches_runs import Joined, Plain
from clip_runs import NANO, SIZES, batch
from penstock.models import (
    CLIPConfig,
    CLIPStages,
    ContrastiveLoss,
    TowerConfig,
    clip_program,
    retrieval_accuracy,
    tower_stage,
)
from penstock.runtime import RuntimeFailure
from tiers import examples

TWO = CLIPConfig({name: dataclasses.replace(NANO.towers[name], depth=1) for name in ("audio", "text")}, 8)


pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_graph_of_stages_is_that_of_the_cut() -> None:
    for sizes in SIZES.values():
        program = runs.program(sizes, False)
        cut = CLIPStages.of(NANO, program)
        assert dict(cut.num_stages) == {"audio": 2, "text": 4, "video": 1}
        assert program.build().graph == cut.graph(None if len(set(sizes.values())) == 1 else sizes)


EVEN, GATHERED = SIZES
WAYS = [(EVEN, "dynamic", True), (GATHERED, "frozen", False), (GATHERED, "dynamic", True), (EVEN, "frozen", False)]
"""The sizes of microbatches, the dispatch, and whether backwards are split."""


def run_all(rank: int) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, dispatch, split in WAYS:
        program = runs.program(SIZES[name], split)
        cut = CLIPStages.of(NANO, program)
        found[f"{name}, {dispatch}"] = runs.wrong(SIZES[name], program.build(), cut, dispatch)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", backends(5))
def test_loss_and_gradients_are_those_of_the_model_in_one_module(backend: Backend) -> None:
    assert not backend.wrong(run_all)


COUNTS = [1, 2, 4, 8]


@pytest.mark.slow
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_any_cut_and_any_numbers_of_microbatches_that_match(data: st.DataObject) -> None:
    draw = data.draw
    sizes = {name: draw(st.sampled_from(COUNTS), name) for name in (*NANO.towers, "contrast")}
    towers: dict[str, ps.Branch] = {}
    for name in NANO.towers:
        ranks, stages = draw(st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (3, 3)]), f"{name}'s stages")
        kinds = draw(st.sampled_from(["backward-first", "forward-first", "interleaved"]), f"{name}'s rules")
        deep = draw(st.booleans(), f"{name} depth first")
        rules = ps.Rules(kinds, forward=ps.depth_first() if deep else ps.breadth_first(2))
        towers[name] = ps.Branch(ps.placements.circular(ranks, stages), sizes[name], rules)
    contrast = ps.Branch(ps.placements.one_to_one(1), sizes["contrast"])
    program = clip_program(NANO, towers, contrast, split=draw(st.booleans(), "split"))
    dispatch = draw(st.sampled_from(["frozen", "dynamic"]), "dispatch")
    assert not runs.wrong(sizes, program.build(), CLIPStages.of(NANO, program), dispatch)


@pytest.mark.nightly
def test_mixed_schedules_train_until_retrieval_beats_chance_ten_times() -> None:
    """On combinations never seen; and every step is run in the order that the simulator says."""
    program = runs.program(SIZES["gathered over microbatches"])
    cut, built = CLIPStages.of(NANO, program), program.build()
    optimizer = partial(torch.optim.AdamW, lr=5e-3)
    pipe = ps.Pipeline(cut.sources(), built, loss_fn=ContrastiveLoss(), optimizer=optimizer)
    seen = 152  # of the 216 combinations, the first in each round of numbers
    pool = batch([number for number in range(216 * 4) if number % 216 < seen][:576])
    fresh = cut.inputs(batch([216 * round_ + number for round_ in (50, 51) for number in range(seen, 216)]))
    before = torch.stack([retrieval_accuracy(logits) for logits in pipe.predict(fresh)]).mean(0)
    losses = []
    for step in range(64):
        first = 64 * step % 576
        losses.append(pipe.step(cut.inputs({name: value[first : first + 64] for name, value in pool.items()})).loss)
        if step % 16 == 0:
            assert not runs.out_of_order(pipe.timeline(), built)
    assert sum(losses[-5:]) / 5 < losses[0] / 2
    said = pipe.predict(fresh)
    assert [logits.shape for logits in said] == [(3, 64, 64)] * 2
    after = torch.stack([retrieval_accuracy(logits) for logits in said]).mean(0)
    assert before.max() < 5 / 64
    assert after.min() > 10 / 64, "ten times chance, in each pair of towers"


def test_a_contrast_of_larger_microbatches_tells_more_samples_apart() -> None:
    sizes = SIZES["as many microbatches everywhere"]
    losses = []
    for num in (4, 2, 1):
        program = runs.program({**sizes, "contrast": num})
        cut = CLIPStages.of(NANO, program)
        pipe = ps.Pipeline(cut.sources(), program.build(), loss_fn=ContrastiveLoss())
        given = batch(range(32))
        losses.append(pipe.step(cut.inputs(given), update=False).loss)
        assert torch.allclose(losses[-1], runs.whole(given, num, seed=0)[1], rtol=1e-5)
    assert losses[0] < losses[1] < losses[2]


def test_towers_of_one_shape_draw_dropout_of_their_own() -> None:
    tower = TowerConfig(context=4, depth=1, width=8, num_heads=2, num_features=3, dropout=0.5)
    twins = CLIPConfig({"left": tower, "right": tower}, shared_width=8)
    left, right = (tower_stage(twins, name, [0]) for name in twins.towers)
    right.load_state_dict({name.replace("left", "right"): value for name, value in left.state_dict().items()})
    x = torch.randn(16, 4, 3)
    assert torch.equal(left(x, seed=5), left(x, seed=5))
    assert not torch.equal(left(x, seed=5), right(x, seed=5))


def two_towers(counts: tuple[int, int, int]) -> tuple[ps.Pipeline, CLIPStages]:
    towers = {
        name: ps.Branch(ps.placements.one_to_one(1), num) for name, num in zip(TWO.towers, counts, strict=False)
    }
    program = clip_program(TWO, towers, ps.Branch(ps.placements.one_to_one(1), counts[2]))
    cut = CLIPStages.of(TWO, program)
    return ps.Pipeline(cut.sources(), program.build(), loss_fn=ContrastiveLoss()), cut


def samples(num: int) -> dict[str, Any]:
    return {name: value for name, value in batch(range(num)).items() if name in TWO.towers}


def test_a_stage_with_more_microbatches_than_any_that_the_batch_goes_into() -> None:
    """Its split backwards looked for shapes of microbatches that no tower has."""
    graph = ps.schedule.StageGraph(3, ((0, 2), (1, 2)), num_microbatches=(2, 2, 8))
    built = ps.Program(ps.placements.one_to_one(3), 8, stages=graph, split=True).build()
    pipe = ps.Pipeline([Plain(), Plain(), Joined()], built, loss_fn=torch.nn.MSELoss())
    result = pipe.step({0: torch.randn(16, 6), 1: torch.randn(16, 6)}, torch.randn(16, 6), update=False)
    assert len(result.losses) == 8


def test_a_batch_that_stages_would_cut_at_different_samples_is_refused() -> None:
    pipe, cut = two_towers((4, 2, 2))
    with pytest.raises(
        RuntimeFailure, match="a batch of 18 samples, and stages that work on 2, 4 microbatches; give a"
    ):
        pipe.step(cut.inputs(samples(18)))
    listed = {stage: list(value.tensor_split((4, 2)[stage])) for stage, value in cut.inputs(samples(16)).items()}
    with pytest.raises(RuntimeFailure, match=r"the inputs of stages 0, .* have unknown \(cut already\).* as tensors"):
        pipe.step(listed)
    even, cut = two_towers((4, 4, 4))
    assert even.step(cut.inputs(samples(18)), update=False).loss > 0
    with pytest.raises(
        RuntimeFailure, match="the inputs of stages 0, 1 have 16, 12 samples; give all the same number"
    ):
        even.step({0: samples(16)["audio"], 1: samples(12)["text"]})


def test_wrong_towers_and_numbers_are_refused_by_name() -> None:
    one = ps.Branch(ps.placements.one_to_one(1), 4)
    with pytest.raises(ValueError, match="a branch given for audio; give one for each of audio, text"):
        clip_program(TWO, {"audio": one}, one)
    with pytest.raises(ValueError, match="tower 'text' in 4 stages; it has 3 layers, so give 1 to 3"):
        clip_program(TWO, {"audio": one, "text": ps.Branch(ps.placements.one_to_one(4), 4)}, one)
    with pytest.raises(ValueError, match="a contrast of 2 stages; it is one stage"):
        clip_program(TWO, {"audio": one, "text": one}, ps.Branch(ps.placements.one_to_one(2), 4))
    with pytest.raises(ValueError, match=r"a tower called 'contrast'.* rename it"):
        CLIPStages(CLIPConfig({"contrast": TWO.towers["audio"], "text": TWO.towers["text"]}), {})
    cut = CLIPStages(TWO, {"text": 1, "audio": 2})
    assert cut.stages == {"audio": range(2), "text": range(2, 3)}
    assert cut.contrast == 3
    with pytest.raises(ValueError, match="input given for text; give one for each of audio, text"):
        cut.inputs({"text": torch.zeros(4, 6)})
    with pytest.raises(ValueError, match=r"a number of microbatches given for audio, text; give .* contrast"):
        cut.graph({"audio": 4, "text": 4})
    with pytest.raises(
        ValueError, match="tower 'audio' works on 4 microbatches and the contrast on 6; one must be a"
    ):
        two_towers((4, 6, 6))
    with pytest.raises(ValueError, match="tower 'text' works on 3 microbatches and the contrast on 2"):
        cut.graph({"audio": 4, "text": 3, "contrast": 2})
    held = ps.Branch(ps.placements.one_to_one(1), 4, ps.Rules(max_in_flight=1))
    with pytest.raises(ps.ScheduleError, match="no rank can go on"):
        clip_program(TWO, {"audio": held, "text": one}, ps.Branch(ps.placements.one_to_one(1), 2)).build()
