"""An optimizer with a list of tensors by position trained other numbers where a process steps a part of them."""

from __future__ import annotations

from functools import partial

import pytest

from lookahead_runs import ByGroup, ByParameter, Lookahead, a_function, all_trained, an_object, trained
from processes import run_ranks_to_end

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("one_thread")]

REFUSED = [
    (partial(an_object, Lookahead), None, 1, "Lookahead.slow holds a list of 4 tensors"),
    (partial(an_object, ByGroup), None, 1, "ByGroup.param_groups holds a list of 4 tensors"),
    (partial(a_function, Lookahead), "zero1", 2, "self.state[p]"),
]
TAKEN = [
    (partial(a_function, Lookahead), None, 1),
    (partial(an_object, ByParameter), None, 1),
    (partial(a_function, ByParameter), "zero1", 2),
]


def test_a_list_by_position_is_refused_and_a_function_trains_as_in_one_process() -> None:
    outcomes = run_ranks_to_end(2, all_trained, [case[:3] for case in REFUSED] + TAKEN)
    said, found = zip(*((o.value[: len(REFUSED)], o.value[len(REFUSED) :]) for o in outcomes), strict=True)
    for texts in said:
        for text, (_, _, _, words) in zip(texts, REFUSED, strict=True):
            assert isinstance(text, str)
            assert words in text
            assert "optimizer=lambda params: " in text
    want = trained(None, partial(an_object, Lookahead), None, 1)
    for each in found:
        assert all(values and values.items() <= want.items() for values in each), each
