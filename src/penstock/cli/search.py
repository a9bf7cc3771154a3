"""`penstock plan --placement all`: the best program of every placement, over rules and traversals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli.failure import Misuse
from penstock.cli.options import limits_of
from penstock.cli.output import in_colour, print_json
from penstock.planning.programs import Found, Outcome, search_space
from penstock.schedule.placement import circular
from penstock.schedule.placement import shared_ends as with_shared_ends
from penstock.simulation.memory_footprint import in_bytes as size_words

PARTS_A_RANK = 4
"""What divides among one, two and four stages per rank."""

NAMES_IN_DOCS = "docs/planning.md, Searching every placement"
"""Where names of placements and rules are explained."""
SHARED_ENDS = "shared-ends"
"""The word of --placement for a first and a last stage that all ranks run together."""


@dataclass(frozen=True)
class SearchSpace:
    """What is searched, as the options of `penstock plan` say it.

    Attributes:
        placements: names; none for every placement.
        parts: of the model, of which stages are made. None: four per rank.
        shared_ends: whether all ranks together run the first and the last part.
        split: whether backwards are split.
    """

    placements: Sequence[str] = ()
    parts: int | None = None
    shared_ends: bool = False
    split: bool = True

    def model(self, ranks: int) -> ps.Placement:
        """The placement of single parts, by which costs of parts are read. Raises Misuse for no part."""
        ends = 2 if self.shared_ends else 0
        num_parts = PARTS_A_RANK * ranks + ends if self.parts is None else self.parts
        if num_parts < 1:
            raise Misuse(f"--stages {num_parts}: at least 1 is needed")
        inner = circular(ranks, max(1, num_parts - ends))
        return with_shared_ends(inner) if self.shared_ends and ranks > 1 else inner

    def costs(
        self, given: costs_options.GivenCosts, ranks: int, microbatches: int
    ) -> ps.Costs | Callable[[int], ps.Costs]:
        """The costs of parts; or by the number of stages, those of a model that is cut anew for each placement.

        Raises:
            Misuse: a number of parts, or shared ends, for a model that is cut anew.
        """
        of_model = given.of_model()
        if of_model is None or self.shared_ends:
            return given.read(ranks, self.model(ranks), microbatches)
        if self.parts is not None:
            raise Misuse(
                f"--stages {self.parts} is for costs of equal parts; the layers of {given.source} are cut anew for "
                "each placement, so leave --stages out, and say with --placement which to try"
            )
        return of_model


def search(
    ranks: int,
    microbatches: int,
    given: costs_options.GivenCosts,
    link: list[str],
    memory_limit: str | None,
    space: SearchSpace,
    out: str | None,
    json: bool,
) -> None:
    """Simulates every placement, rule and traversal; lists the shortest of each placement, and draws the best.

    Costs are those of a part; stages are made of consecutive parts.
    """
    given, model = replace(given, of="part"), space.model(ranks)
    chosen = space.costs(given, ranks, microbatches)
    most, in_bytes = limits_of("--memory-limit", memory_limit, ranks)
    if in_bytes and isinstance(chosen, ps.Costs):
        given.require_weights(memory_limit, chosen)
    outcome = search_space(
        chosen,
        ranks,
        microbatches,
        links=costs_options.read_links(link),
        memory_limit=None if in_bytes else most,
        total_limit=most if in_bytes else None,
        shapes=space.placements or None,
        shared_ends=space.shared_ends,
        split=space.split,
    )
    if out is not None:
        _save(outcome, out)
    assumed = given.assumed(ranks, model)
    if json:
        print_json(_as_json(outcome, ranks, microbatches, assumed, out, in_bytes))
        return
    _show(outcome, assumed, in_bytes)
    if out is not None:
        print(f"wrote {out}")


def _save(outcome: Outcome, out: str) -> None:
    from penstock.schedule.picture import save_either

    if out.endswith(".csv") and outcome.best.program.placement.num_pipelines > 1:
        raise Misuse(
            f"--out {out}: torch's pipelining lacks several pipelines, and the best is {outcome.best.placement}; "
            "name placements without +bidirectional, like --placement one-to-one --placement v-shape, or write .json"
        )
    save_either(outcome.best.schedule, outcome.best.timeline, out)


def _show(outcome: Outcome, assumed: str | None, in_bytes: bool) -> None:
    """Prints the best schedule, and the shortest of each placement."""
    from penstock.draw.terminal import to_terminal

    if assumed:
        print(f"assumed  {assumed}\n")
    print(to_terminal(outcome.best.schedule, color=in_colour()))
    stuck = f", {outcome.num_stuck} of which cannot run within the limits" if outcome.num_stuck else ""
    print(f"\n{outcome.num_tried} programs tried{stuck}.\n")
    peaks = [size_words(found.footprint.peak, 4) if in_bytes else f"{_peak(found):.6g}" for found in outcome.found]
    for found, peak in zip(outcome.found, peaks, strict=True):
        room = max(map(len, peaks))
        print(f"{found.makespan:>10.6g} ms  bubble {found.bubble_ratio:6.1%}  peak {peak:>{room}}  {found.name}")
    for name, why in outcome.left_out:
        print(f"nothing on {name}: {why}")
    what = "all that a rank holds" if in_bytes else "the activations of a rank, in those of a part"
    print(f"\npeak counts {what}; names are explained in {NAMES_IN_DOCS}")


def _peak(found: Found) -> float:
    return max(found.timeline.peak_activations)


def _as_json(
    outcome: Outcome, ranks: int, microbatches: int, assumed: str | None, out: str | None, in_bytes: bool
) -> dict[str, Any]:
    return {
        "makespan": outcome.best.makespan,
        "num_ranks": ranks,
        "num_microbatches": microbatches,
        "num_tried": outcome.num_tried,
        "num_stuck": outcome.num_stuck,
        "assumed": assumed,
        "found": [
            {
                "placement": found.placement,
                "program": found.name,
                "makespan": found.makespan,
                "bubble_ratio": found.bubble_ratio,
                "peak_activations": _peak(found),
                "peak_bytes": found.footprint.peak if in_bytes else None,
            }
            for found in outcome.found
        ],
        "left_out": dict(outcome.left_out),
        "grid": str(outcome.best.schedule),
        "out": out,
    }
