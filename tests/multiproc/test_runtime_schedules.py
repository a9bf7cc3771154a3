"""Library schedules of one pipeline, one process a rank, frozen and dynamic: the plain loop's numbers to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
import penstock.runtime.split_backward.prepared as slot_module
from penstock.runtime.execute import plan as step_plan
from processes import run_ranks_to_end
from runtime_cases import Case, Plain, batches, compare_case, mlp, plain_case
from tiers import in_turn, others_nightly

pytestmark = pytest.mark.multiproc

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved-1f1b", {}),
    ("interleaved-1f1b", {"stages_a_rank": 3}),
    ("interleaved-1f1b", {"stages_a_rank": 4}),
    ("zb-h1", {}),
    ("zb-h2", {}),
    ("zb-v", {}),
    ("zb", {"warmup": [7, 5, 3, 1]}),
    ("looped-bfs", {}),
    ("v-half", {}),
    ("v-min", {}),
    ("hanayo", {"waves": 1, "backward": "split"}),
    ("hanayo", {"waves": 2}),
    ("dualpipe-v", {}),
    ("dualpipe-v", {"overlap": True}),
]


def run_schedules(rank: int, ranks: int) -> dict[str, list[str]]:
    slot_module.MERGE_WORK = 0
    found = {}
    plain: dict[int, Plain] = {}
    for number, (name, given) in enumerate(SCHEDULES):
        options = dict(given)
        if "stages_a_rank" in options:
            options["num_stages"] = options.pop("stages_a_rank") * ranks
        if "warmup" in options:
            options["warmup"] = options["warmup"][-ranks:]
        schedule = ps.build(name, ranks, 8, **options)
        for dispatch in in_turn(("frozen", ("hinted", "dynamic")[number // 2 % 2]), number):
            torch.manual_seed(3)
            model = nn.Sequential(*(mlp() for _ in range(schedule.num_stages + 1)))
            case = Case(model, batches(8, 3, 8))
            if schedule.num_stages not in plain:
                plain[schedule.num_stages] = plain_case(case, 8)
            differences = compare_case(case, schedule, dispatch, plain[schedule.num_stages])
            found[f"{schedule.name} {given} {dispatch}"] = differences
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", others_nightly([2, 4], [4]))
def test_bitwise(ranks: int) -> None:
    outcomes = run_ranks_to_end(ranks, run_schedules, ranks)
    wrong = [f"rank {o.rank}, {name}: {text}" for o in outcomes for name, found in o.value.items() for text in found]
    assert not wrong, "\n".join(wrong)
    assert all(len(o.value) == len(in_turn(("frozen", "other"), 0)) * len(SCHEDULES) for o in outcomes)


def run_auto(rank: int) -> list[str]:
    if rank:
        step_plan.choose_policy = None  # type: ignore[assignment]  # whoever simulates here fails
    schedule = ps.build("zb-h1", 2, 8)
    torch.manual_seed(3)
    case = Case(nn.Sequential(*(mlp() for _ in range(3))), batches(8, 3, 8))
    return compare_case(case, schedule, "auto", plain_case(case, 8))


@pytest.mark.slow
def test_a_dispatch_that_one_process_chose_gives_the_plain_loop_s_numbers() -> None:
    outcomes = run_ranks_to_end(2, run_auto)
    assert [o.value for o in outcomes] == [[], []]
