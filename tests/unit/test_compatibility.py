"""Which features exclude one another: the table, its page, and pipelines that are refused where they are made."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import compatibility_cells as cells
import penstock as ps
import tie_runs
from packed import packed
from penstock.dispatch import Dispatch
from penstock.runtime import RuntimeFailure
from penstock.runtime.compatibility import (
    REFUSALS,
    FeatureCombination,
    allowed_adaptation,
    refusal_of,
    require_compatible,
)
from tied_updates_loop import unlike_the_loop, with_rule
from tiers import others_nightly, sample

FAMILIES = {
    "1f1b": ps.build("1f1b", 4, 8),
    "zb-v": ps.build("zb-v", 4, 8),
    "chimera": ps.build("chimera", 4, 8),
    "mllm": ps.build("mllm", 4, 8),
    "distmm": ps.build("distmm", 4, 8),
    "amdp": ps.build("amdp", 4, 16, window=4),
    "pipedream-2bw": ps.build("pipedream-2bw", 4, 16, window=4),
    "xpipe": ps.build("xpipe", 4, 16, window=4),
    "amdp, xpipe": with_rule(ps.build("amdp", 4, 16, window=4), "xpipe"),
    "reduce beside": ps.passes.add_reductions(ps.build("1f1b", 4, 8), asynchronous=True),
}
CELLS = [
    FeatureCombination(schedule, dp, one_process=one_process, tied={"a, b": [0, 2]} if tied else {})
    for schedule, dp, one_process, tied in product(FAMILIES.values(), [1, 2], [False, True], [False, True])
]


def test_every_row_refuses_something_and_none_what_has_one_of_its_features() -> None:
    on_gpu = [FeatureCombination(FAMILIES["amdp"], 2, device="cuda", one_process=True)]
    scaled = [FeatureCombination(FAMILIES[name], scales_loss=True) for name in ("1f1b", "amdp", "distmm")]
    skipping = [FeatureCombination(FAMILIES["amdp"], skips_updates=True)]
    assert refusal_of(scaled[0]) is None
    plain = FeatureCombination(FAMILIES["1f1b"])
    layers = [replace(plain, sparse=["0.weight"], clips=True), replace(plain, summing=["1 of stage 0"])]
    assert refusal_of(replace(plain, sparse=["0.weight"])) is None
    used = {refusal_of(cell) for cell in CELLS + on_gpu + scaled + skipping + layers} - {None}
    words = "whose lowest stage", "that they share"
    branching = {row for row in REFUSALS if any(word in row.other for word in words)}
    assert used == set(REFUSALS) - branching, "the library has no schedule for the others"
    for cell in CELLS:
        plain = cell.schedule.updates is None
        assert not plain or refusal_of(cell) is None


def test_a_refusal_names_the_schedule_both_features_the_reason_and_a_way_out() -> None:
    for cell in CELLS:
        row = refusal_of(cell)
        if row is None:
            require_compatible(cell)
            continue
        with pytest.raises(RuntimeFailure) as error:
            require_compatible(cell)
        for words in (cell.schedule.name, row.one, row.other, row.why, row.instead):
            assert words in str(error.value)


def test_a_rule_that_predicts_goes_with_every_way_to_share_out_the_optimizers_state() -> None:
    """It was refused for tied weights, for several pipelines of which one has the state, and for zero1 and fsdp."""
    for family, num_replicas, tied in product(("xpipe", "amdp, xpipe"), (1, 2), ({}, {"a, b": [0, 3]})):
        assert refusal_of(FeatureCombination(FAMILIES[family], num_replicas, tied=tied)) is None


MADE_TO_THE_BIT = "1f1b", "zb-v", "chimera", "amdp", "pipedream-2bw", "xpipe", "amdp, xpipe"


@pytest.mark.parametrize(
    ("family", "adapts"),
    others_nightly(
        product(MADE_TO_THE_BIT, [False, True]),
        [(family, number % 2 == 0) for number, family in enumerate(MADE_TO_THE_BIT)],
    ),
)
def test_what_it_does_not_refuse_gives_what_the_schedule_gives_without_it(family: str, adapts: bool) -> None:
    """Steering measures, and may switch dispatch; neither changes a bit."""
    schedule = FAMILIES[family]
    torch.manual_seed(4)
    x, y = torch.randn(32, tie_runs.WIDTH), torch.randn(32, tie_runs.WIDTH)
    found = []
    for options in ({}, {"steering": ps.AdaptOptions()} if adapts else {"sharding": "zero1"}):
        pipe = ps.Pipeline(
            tie_runs.tied_model(schedule.num_stages), schedule, loss_fn=nn.MSELoss(), optimizer=tie_runs.ADAM,
            **packed(**options),
        )  # fmt: skip
        losses = [pipe.step(x, y).loss for _ in range(2)]
        found.append([*losses, *(p.detach() for _, p in pipe.named_parameters())])
        pipe.close()
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("family", "planned", "dispatched"),
    [("1f1b", True, True), ("chimera", False, True), ("mllm", False, True), ("amdp", False, True)],
)
def test_what_adapting_may_do_to_a_schedule(family: str, planned: bool, dispatched: bool) -> None:
    options = allowed_adaptation(FAMILIES[family], ps.AdaptOptions())
    assert options is not None
    assert (options.may_replan, bool(options.dispatches), options.may_delegate) == (planned, dispatched, True)


@pytest.mark.parametrize(
    "family",
    others_nightly(["amdp", "pipedream", "pipedream-2bw", "xpipe", "amdp, xpipe"], ["pipedream", "amdp, xpipe"]),
)
def test_updates_run_under_any_dispatch_and_links(family: str) -> None:
    """Whatever is late, every op meets the weights that the order says, those that stages share among them."""
    schedule = ps.build("pipedream", 4, 16, window=1) if family == "pipedream" else FAMILIES[family]
    for dispatch, delays in [
        ("dynamic", (0, 0, 0)),
        ("dynamic", (2, 0, 3)),
        ("hinted", (0, 4, 1)),
        ("auto", (1, 0, 0)),
    ]:
        links = ps.Links({(rank, rank + 1): float(ms) for rank, ms in enumerate(delays) if ms})
        assert not unlike_the_loop(schedule, tie_runs.ADAM, dispatch=dispatch, links=links, num_steps=2)


def test_dispatch_of_a_schedule_with_updates_is_switched_while_it_runs_and_its_order_is_not() -> None:
    schedule = FAMILIES["amdp"]
    model = tie_runs.tied_model(4)
    pipe = ps.Pipeline(model, schedule, loss_fn=nn.MSELoss(), optimizer=tie_runs.ADAM)
    pipe.reconfigure(replace(pipe.configuration, dispatch=Dispatch.DYNAMIC))
    assert pipe.dispatch is Dispatch.DYNAMIC
    with pytest.raises(RuntimeFailure, match="updates in the order, which nothing may change"):
        pipe.reconfigure(replace(pipe.configuration, schedule=ps.build("amdp", 4, 16, window=4, max_mismatch=0)))
    pipe.close()


def test_cells_of_the_covering_array_that_the_table_refuses() -> None:
    """None on a CPU; on a GPU, each in the words of its row."""
    assert not [cell for cell in cells.read_cells() if cell.refusal is not None]
    on_gpu = [replace(cell, device="cuda") for cell in cells.read_cells()]
    refused = [(cell, row) for cell in on_gpu if (row := cell.refusal) is not None]
    assert refused
    for cell, row in refused:
        with pytest.raises(RuntimeFailure) as error:
            require_compatible(cell.combination)
        assert row.why in str(error.value)


def test_a_cell_whose_plain_loop_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What ends before the pipeline is made is no fault of it."""

    def fails(cell: cells.Cell) -> cells.Wanted:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(cells, "wanted", fails)
    found = cells.run_cell(cells.Cell())
    assert found == cells.Outcome("raw", "in the plain loop, RuntimeError: CUDA error: out of memory")


@pytest.mark.slow
def test_cells_of_the_covering_array_in_one_process_are_the_plain_loop() -> None:
    chosen = cells.some_cells(1, sample(20, 8))
    ended = {str(cell): cells.run_cell(cell) for cell in chosen}
    assert not {cell: outcome for cell, outcome in ended.items() if outcome.kind != "same"}


@pytest.mark.slow
def test_rules_that_predict_go_with_every_other_feature_in_one_process() -> None:
    """All four; those between processes are in tests/multiproc/test_compatibility_processes.py."""
    ended = {str(cell): cells.run_cell(cell) for cell in cells.some_cells(1, 4, "rules")}
    assert not {cell: outcome for cell, outcome in ended.items() if outcome != cells.Outcome("same", "bitwise")}


def test_adapting_says_that_the_order_of_a_schedule_with_updates_stays() -> None:
    stages = [torch.nn.Linear(4, 4) for _ in range(4)]
    made = {"loss_fn": torch.nn.MSELoss(), "optimizer": torch.optim.SGD, "adapt": ps.AdaptOptions()}
    with ps.Pipeline(stages, ps.build("amdp", 4, 8, window=4), **made) as pipe:
        assert any("and never its order" in notice for notice in pipe.notices)
    with ps.Pipeline(stages, ps.build("1f1b", 4, 8), **made) as pipe:
        assert not any("never its order" in notice for notice in pipe.notices)
