"""What a run's folder says of its steps: loss, learning rate, speed and bubble of each, and how the run ended.

metrics.jsonl                   one line a step
report.json                     memory, notices, what was simulated; once the run has ended
timeline.json, schedule.txt     one of the last steps, measured and simulated
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.control.log import json_lines
from penstock.report.run_story import rounded
from penstock.simulation import Timeline


@dataclass(frozen=True)
class RunRecord:
    """The steps of a run and its end.

    Attributes:
        name: of the run.
        facts: what it was, as names and values.
        steps: the numbers of its steps, from 1; of iterations, from 0.
        asked: how many were asked for; None if that is not known.
        columns: by the name of a metric, its value in each step; None for a step without a finite one.
        ended: the report.json of the run; empty while there is none.
        shown: the timelines of one of its last steps, each with its title.
        text: what the model wrote.
    """

    name: str
    facts: tuple[tuple[str, str], ...]
    steps: tuple[int, ...]
    asked: int | None
    columns: Mapping[str, tuple[float | None, ...]]
    ended: Mapping[str, Any]
    shown: tuple[tuple[str, Timeline], ...] = ()
    text: str = ""

    def known(self, metric: str) -> list[tuple[int, float]]:
        """The steps that have a value of a metric, each with it."""
        values = self.columns.get(metric, ())
        return [(step, value) for step, value in zip(self.steps, values, strict=False) if value is not None]

    @property
    def not_finite(self) -> str:
        """From which step on the loss is not finite, or in how many steps, in words; nothing if it always is."""
        losses = self.columns.get("loss", ())
        if None not in losses:
            return ""
        first = losses.index(None)
        is_over = losses.count(None) == len(losses) - first
        when = f"from step {self.steps[first]} on" if is_over else f"in {losses.count(None)} steps"
        return f"the loss is not finite {when}" + f", first in step {self.steps[first]}" * (not is_over)

    @property
    def noun(self) -> str:
        """The name of a step. On emulated devices, which learn nothing, it is an iteration."""
        return "iteration" if "ms" in self.columns else "step"

    @property
    def bubbles(self) -> tuple[float | None, float | None]:
        """The share of all ranks' time without an op in one of the last steps: measured, and simulated."""
        timing = self.ended.get("timing") or self.ended
        return timing.get("measured_bubble_ratio"), timing.get("simulated_bubble_ratio")

    def to_json(self) -> dict[str, Any]:
        """All but the timelines and the text, as a JSON object; the metrics in columns."""
        value = {"steps": self.steps, "asked": self.asked, "columns": dict(self.columns), "ended": dict(self.ended)}
        found: dict[str, Any] = rounded(value)
        return found


def read_record(
    metrics: Iterable[str],
    *,
    name: str,
    facts: Sequence[tuple[str, str]] = (),
    asked: int | None = None,
    ended: Mapping[str, Any] | None = None,
    shown: Sequence[tuple[str, Timeline]] = (),
    text: str = "",
) -> RunRecord | None:
    """Makes a record of the lines of metrics.jsonl; None if no step has ended.

    Args:
        The others are attributes of the record.

    Raises:
        ControlError: a line that is no JSON object, unless it is the last one and was cut off.
    """
    rows = [row for row in json_lines(metrics, "metrics.jsonl") if isinstance(row.get("step"), int)]
    if not rows:
        return None
    names = dict.fromkeys(name for row in rows for name in row if name != "step")
    columns = {name: tuple(_number(row.get(name)) for row in rows) for name in names}
    first = 0 if "ms" in columns else 1  # iterations count from 0 here as in stories
    steps = tuple(first + row["step"] for row in rows)
    return RunRecord(name, tuple(facts), steps, asked, columns, ended or {}, tuple(shown), text)


def strict_json(value: Any) -> Any:
    """A JSON value in which null stands for each number that is not finite, as JSON has no nan."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None
