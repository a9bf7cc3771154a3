"""A rule for a key that no batch has is refused in every process alike, also if each replica gives its own batch."""

from __future__ import annotations

import pytest

from processes import run_ranks_to_end
from replica_batch_runs import mistyped

pytestmark = [pytest.mark.multiproc, pytest.mark.usefixtures("one_thread")]


def test_a_mistyped_key_is_refused_in_every_process() -> None:
    outcomes = run_ranks_to_end(2, mistyped)
    assert outcomes[0].value == outcomes[1].value
    assert "a rule for inputs['inputs']; the keys in inputs are 'input': did you mean input?" in outcomes[0].value
