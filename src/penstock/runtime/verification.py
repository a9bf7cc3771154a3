"""What `Pipeline.verify` found: which ways to compute a step agree, and which sentence of the contract was broken.

docs/contract.md has the sentences in full, and says which comparison finds which.
"""

from __future__ import annotations

from dataclasses import dataclass

CONTRACT = {
    1: "a forward depends on its inputs, parameters, buffers and torch's generator alone",
    2: "forwards of other microbatches run between a forward and its backward: do not change in place what a "
    "backward needs, and leave weights to the optimizer",
    3: "a traced model is traced once: after a change of what its forward reads, make a new pipeline; between layers "
    "it asks isinstance(x, Tensor), not type(x), and whether a layer returned None only with an example",
    4: "modules and parameters stay the same objects, alike on every process that holds them",
    5: "a stage uses its own parameters; a shared one is one object in the model, or is named in tied=",
    6: "tensors, numbers, text, None, and tuples, lists and dicts of them travel between stages",
    7: "the loss is a mean over samples, or says what it is (weight, adds_up, reduction, ignore_index); samples do "
    "not see one another, and each input is cut along its samples (ps.BatchRules)",
}
"""The sentences of the contract that a step can break, shortened, by number."""
SAME, DIFFERS, LEFT_OUT = "same", "differs", "not compared"


@dataclass(frozen=True)
class ComparedWays:
    """Two ways to compute the same step, and whether they agree.

    Attributes:
        ways: the two ways, in words.
        outcome: "same", "differs" or "not compared".
        found: the first thing that differs, or why nothing was compared, or what was left out.
        sentence: the number of the sentence of the contract that was most likely broken. None if none was.

    Examples:
        >>> from penstock.runtime import ComparedWays
        >>> ComparedWays("the stages, and the model's own forward", "same").outcome
        'same'
    """

    ways: str
    outcome: str
    found: str = ""
    sentence: int | None = None


@dataclass(frozen=True)
class Verification:
    """What `Pipeline.verify` found. Printed, it is a table.

    Attributes:
        comparisons: the comparisons, in the order in which they were made.

    Examples:
        >>> from penstock.runtime import ComparedWays, Verification
        >>> print(Verification((ComparedWays("the stages, and the model's own forward", "same"),)))
        the stages, and the model's own forward  same
    """

    comparisons: tuple[ComparedWays, ...]

    @property
    def holds(self) -> bool:
        """Whether no comparison differs."""
        return all(each.outcome != DIFFERS for each in self.comparisons)

    def __str__(self) -> str:
        width = max(len(each.ways) for each in self.comparisons)
        lines = []
        for each in self.comparisons:
            lines.append(f"{each.ways:<{width}}  {each.outcome}" + f": {each.found}" * bool(each.found))
            if each.sentence is not None:
                lines.append(f"  likely cause, sentence {each.sentence} of the contract: {CONTRACT[each.sentence]}")
        return "\n".join(lines)
