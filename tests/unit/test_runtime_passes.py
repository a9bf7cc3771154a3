"""What the passes make of a schedule trains as the plain loop does, to the last bit."""

from __future__ import annotations

import warnings

import pytest

import penstock as ps
from penstock.passes import recompute, separate_gradients
from runtime_cases import CASES, compare

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("one_thread")]

LATE = ps.Links({(0, 1): 3.0})


def passed(name: str, num_ranks: int) -> list[ps.Schedule]:
    """The schedule separated for a late link; and with less memory, then separated."""
    schedule = ps.build(name, num_ranks, 4)
    costs = ps.Costs.uniform(schedule.num_stages)
    separated = separate_gradients(schedule, costs, LATE)
    limit = 0.7 * max(ps.simulate(schedule, costs).peak_activations)
    lighter = recompute(schedule, costs, limit)
    return [separated, separate_gradients(lighter, costs, LATE, memory_limit=limit)]


@pytest.mark.parametrize(
    "case",
    ["dropout_and_a_ragged_last_microbatch", "batch_norm", "convolutions", "one_layer_several_times_in_a_sequential"],
)
def test_as_the_plain_loop(case: str) -> None:
    assert case in CASES
    found, kinds = [], ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, num_ranks in (("1f1b", 3), ("gpipe", 2), ("interleaved-1f1b", 2)):
            for schedule in passed(name, num_ranks):
                kinds += "".join(op.kind for row in schedule.order for op in row)
                for dispatch in ("frozen", "dynamic"):
                    differing = compare(case, schedule, dispatch, True)
                    found += [f"{name} {dispatch}: {text}\n{schedule}" for text in differing]
    assert set(kinds) == set("FBIWR")
    assert not found, "\n".join(found)
