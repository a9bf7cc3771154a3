"""What a pipeline's calls must do besides gradients, one process a rank; all in one launch."""

from __future__ import annotations

import traceback

import pytest

from processes import run_ranks
from runtime_checks import CHECKS, run

pytestmark = pytest.mark.multiproc


def run_checks(rank: int) -> dict[str, str]:
    failed = {}
    for name in CHECKS:
        try:
            run(name, 4)
        except Exception:
            failed[name] = traceback.format_exc()
    return failed


@pytest.mark.slow
def test_in_four_processes() -> None:
    outcomes = run_ranks(4, run_checks)
    assert all(o.code == 0 for o in outcomes), "\n".join(o.text[-3000:] for o in outcomes)
    assert not [f"rank {o.rank}, {n}: {text}" for o in outcomes for n, text in o.value.items()]
