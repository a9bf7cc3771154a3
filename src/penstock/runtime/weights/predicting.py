"""What both rules that predict weights ask of a schedule."""

from __future__ import annotations

from penstock.runtime.errors import RuntimeFailure
from penstock.schedule import Schedule


def require_state_everywhere(rule: str, schedule: Schedule, zero: bool) -> None:
    """Raises RuntimeFailure where copies without the optimizer's state would have to predict."""
    num = schedule.placement.num_pipelines
    if num > 1 and zero:
        raise RuntimeFailure(
            f"rule {rule!r} predicts weights from the optimizer's state, and of the {num} copies of each stage in "
            f"{schedule.name} only one has it; give zero=False (--zero off), or use rule 'none'"
        )
