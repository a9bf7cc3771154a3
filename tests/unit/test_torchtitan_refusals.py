"""`planned` refuses a plan that does not fit TorchTitan's config, before TorchTitan does anything.

That its trainer runs plans is in tests/multiproc/test_torchtitan.py.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import penstock as ps
from penstock.integrations.torch import Replanner
from penstock.integrations.torchtitan import planned

PARALLELISM = {
    "pipeline_parallel_schedule": "1F1B",
    "pipeline_parallel_microbatch_size": 2,
    "pipeline_parallel_schedule_csv": "",
    "pipeline_parallel_layers_per_stage": None,
    "module_fqns_per_model_part": None,
}


pytestmark = pytest.mark.unit


class CrossEntropyLoss:
    pass


class ChunkedLossWrapper:
    pass


class ChunkedLossWithMore(ChunkedLossWrapper):
    pass


class SelectiveAC:
    class Config:
        pass


def config(*, pp: int = 2, batch: int = 8, loss: Any = None, ac: Any = None, **more: Any) -> Any:
    """What TorchTitan's trainer calls a pipelining_fn with: by default four microbatches of two samples."""
    return {
        "parallel_dims": SimpleNamespace(pp=pp),
        "training": SimpleNamespace(local_batch_size=batch),
        "parallelism": SimpleNamespace(**(PARALLELISM | more)),
        "loss_fn": loss or CrossEntropyLoss(),
        "ac_config": ac,
    }


@pytest.mark.parametrize(
    ("plan", "given", "words"),
    [
        ("1f1b", {"pp": 4}, ["2 ranks", "pipeline_parallel_degree is 4"]),
        ("1f1b", {"batch": 6}, ["4 microbatches", "local_batch_size 6", "make 3", "to 8"]),
        ("1f1b", {"batch": 7}, ["local_batch_size 7", "make 3.5"]),
        ("1f1b", {"pipeline_parallel_schedule_csv": "a.csv"}, ["schedule_csv is 'a.csv'", "leave it out"]),
        (
            "1f1b",
            {"pipeline_parallel_layers_per_stage": 3},
            ["layers_per_stage is 3", "module_fqns_per_model_part"],
        ),
        ("zb-v", {"module_fqns_per_model_part": [["norm"]] * 3}, ["4 stages", "has 3 parts"]),
        (
            "zb",
            {"loss": ChunkedLossWrapper()},
            ["I and W", "ChunkedLossWrapper", "CrossEntropyLoss.Config", "1f1b"],
        ),
        ("zb-v", {"loss": ChunkedLossWithMore()}, ["last stage (3)", "ChunkedLossWithMore"]),
        ("zb", {"ac": SelectiveAC.Config()}, ["SelectiveAC.Config", "FullAC.Config", "1f1b"]),
    ],
)
def test_a_plan_that_does_not_fit_the_config_is_refused(plan: str, given: dict[str, Any], words: list[str]) -> None:
    function = planned(ps.build(plan, 2, 4), base=lambda *_, **__: pytest.fail("the model is cut"))
    with pytest.raises(ps.ScheduleError) as caught:
        function(None, **config(**given))
    assert caught.value.rule == "torch"
    assert [word for word in words if word not in str(caught.value)] == []


def test_plans_of_a_users_planner_are_refused_like_the_first_one(
    titan: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Given:
        def __init__(self, *stages_and_plan: Any, replan: Replanner, **others: Any) -> None:
            self.planner = replan.planner

    def build_stages(*_: Any, parallelism: Any, training: Any, loss_fn: Any, **others: Any) -> Any:
        batch = training.local_batch_size
        return [
            titan._build_pipeline_schedule(
                parallelism=parallelism, local_batch_size=batch, stages=[], loss_fn=loss_fn
            )
        ]

    monkeypatch.setattr("penstock.integrations.torchtitan.PlannedSchedule", Given)
    plans = {"zb": ps.build("zb", 2, 4), "gpipe": ps.build("gpipe", 2, 4)}
    replan = Replanner(lambda costs, links, running: plans[running], group="all ranks")
    made = planned(ps.build("1f1b", 2, 4), base=build_stages, replan=replan)(
        None, **config(loss=ChunkedLossWrapper())
    )
    assert made[0].planner(None, None, "gpipe") == plans["gpipe"]
    with pytest.raises(ps.ScheduleError, match="loss is a ChunkedLossWrapper"):
        made[0].planner(None, None, "zb")


def test_what_torch_lacks_is_refused_when_the_config_is_read() -> None:
    with pytest.raises(ps.ScheduleError, match="several pipelines"):
        planned(ps.build("chimera", 2, 4))


@pytest.fixture
def titan(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module in the place of TorchTitan's, with the names that `planned` replaces for a while."""
    module = ModuleType("torchtitan.distributed.pipeline_parallel")
    module._get_pipeline_metadata = lambda *_: (2, 6, 1, 1)  # type: ignore[attr-defined]
    module._get_pp_rank_to_stage_indices_mapping = lambda *_: (7,)  # type: ignore[attr-defined]
    module._build_pipeline_schedule = lambda **_: None  # type: ignore[attr-defined]
    for name in ("torchtitan", "torchtitan.distributed"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_the_base_sees_the_plans_stages_and_placement_and_others_do_not(titan: ModuleType, tmp_path: Path) -> None:
    ps.save(ps.build("zb-v", 2, 4), tmp_path / "plan.csv")
    before = dict(vars(titan))
    seen = []

    def base(model: Any, **given: Any) -> Any:
        seen.append(titan._get_pipeline_metadata(given["parallel_dims"], given["parallelism"], model))
        seen.extend(titan._get_pp_rank_to_stage_indices_mapping(rank, 2, "1F1B", 4) for rank in range(2))
        return SimpleNamespace(), [], True, True

    function = planned(tmp_path / "plan.csv", base=base)
    with pytest.raises(ps.ScheduleError, match="made a SimpleNamespace and did not call"):
        function(None, **config(pipeline_parallel_schedule="ZBVZeroBubble"))
    assert seen == [(4, 6, 1, 1), (0, 3), (1, 2)]
    assert vars(titan) == before


def test_another_torchtitan_is_refused_by_the_names_that_it_lacks(titan: ModuleType) -> None:
    del titan._build_pipeline_schedule
    with pytest.raises(ps.ScheduleError, match=r"has no _build_pipeline_schedule; .* TorchTitan 0\.3\.0"):
        planned(ps.build("1f1b", 2, 4))(None, **config())


ON_THE_MIDDLE_RANK = "0F0,,,,,0B0\n,,2F0,2B0,,\n,1F0,,,1B0,"


@pytest.mark.parametrize(
    ("name", "plan", "given", "words"),
    [
        ("1F1B", ps.build("zb-v", 2, 4), {}, "on rank 0. .* of rank 1; set .* to 'ZBVZeroBubble'"),
        ("ZBVZeroBubble", ps.build("zb", 2, 4), {}, "on rank 1. .* of rank 0; set .* to '1F1B'"),
        ("1F1B", ps.formats.from_torch_csv(ON_THE_MIDDLE_RANK), {"pp": 3, "batch": 2}, "rank 1.*save_for_all_ranks"),
    ],
)
def test_a_user_is_warned_where_torchtitan_reports_a_rank_without_the_loss(
    titan: ModuleType, name: str, plan: ps.Schedule, given: dict[str, Any], words: str
) -> None:
    with pytest.warns(UserWarning, match=words), pytest.raises(ps.ScheduleError):
        planned(plan, base=lambda *_, **__: [None])(None, **config(pipeline_parallel_schedule=name, **given))


def test_nobody_is_warned_where_torchtitan_reports_the_rank_with_the_loss(titan: ModuleType) -> None:
    function = planned(ps.build("1f1b", 2, 4), base=lambda *_, **__: [None])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ps.ScheduleError):
            function(None, **config())
