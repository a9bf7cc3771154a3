"""Each queue of ops runs its microbatches in the order that the schedule declares, ascending where it declares none."""

from __future__ import annotations

import pytest

import penstock as ps

pytestmark = pytest.mark.unit

HEAD = "schedule mine: 1 rank, 1 stage, 3 microbatches\npipeline 0: stages on ranks 0\n"

SWAPPED = {
    "forwards out of order": "rank 0 | F1 F0 F2 B0 B1 B2",
    "backwards out of order": "rank 0 | F0 F1 F2 B0 B2 B1",
    "input halves out of order": "rank 0 | F0 F1 F2 I1 I0 I2 W0 W1 W2",
    "weight halves out of order": "rank 0 | F0 F1 F2 I0 I1 I2 W0 W2 W1",
    "a whole backward before the weight half of an earlier one": "rank 0 | F0 F1 F2 I0 B1 B2 W0",
    "a whole backward before the input half of an earlier one": "rank 0 | F0 F1 F2 B1 I0 W0 B2",
    "recomputations out of order": "rank 0 | F0 F1 F2 R1 R0 B0 B1 B2",
}


@pytest.mark.xfail(strict=True, reason="check accepts any order of a queue's microbatches")
@pytest.mark.parametrize("name", SWAPPED)
def test_an_undeclared_order_is_refused(name: str) -> None:
    with pytest.raises(ps.ScheduleError) as caught:
        ps.check(ps.parse(HEAD + SWAPPED[name]))
    assert caught.value.rule == "microbatches"
