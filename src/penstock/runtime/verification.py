"""What `Pipeline.verify` found: which ways to compute a step agree, and which sentence of the contract was broken.

docs/contract.md has the sentences in full, and says which comparison finds which.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor
from torch.nn import Parameter

from penstock.runtime.tensors.digest import hash_of
from penstock.runtime.tensors.sketch import Sketch

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


@dataclass
class Computed:
    """What one way to compute a step came to in this process.

    Attributes:
        losses: by microbatch, each one's share of the loss. Empty where another process has them.
        digests: of each gradient and buffer, by its name in words.
        sketches: of each gradient, if gradients are to be compared but for rounding.
        has_failed: whether some process could not compute it. error: what kept this one from that.
    """

    losses: dict[int, Tensor] = field(default_factory=dict)
    digests: dict[str, int] = field(default_factory=dict)
    sketches: dict[str, Sketch] = field(default_factory=dict)
    has_failed: bool = False
    error: Exception | None = None

    def note_gradients(self, parameters: Mapping[str, Parameter], where: str = "", sketched: bool = False) -> None:
        """Takes digests of the gradients of parameters, and sketches if those are asked for."""
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                self.digests[f"the gradient of {name}{where}"] = hash_of(parameter.grad)
                if sketched:
                    self.sketches[f"the gradient of {name}{where}"] = Sketch.of(parameter.grad)

    @property
    def said(self) -> str | None:
        """The first line of the error."""
        if self.error is None:
            return None
        first = str(self.error).strip().splitlines()
        return f"{type(self.error).__name__}: {first[0] if first else ''}"

    def difference(self, other: Computed) -> str | None:
        """The first thing that differs by a bit."""
        mine, theirs = (
            {f"the loss of microbatch {m}": repr(loss.item()) for m, loss in sorted(each.losses.items())}
            for each in (self, other)
        )
        for name in dict.fromkeys((*mine, *theirs)):
            if mine.get(name) != theirs.get(name):
                return f"{name} is {mine.get(name)} and {theirs.get(name)}"
        return self.changed(other.digests) or other.changed(self.digests)

    def changed(self, digests: Mapping[str, int]) -> str | None:
        """The first name with another digest here than the given one."""
        return next((name for name, digest in digests.items() if self.digests.get(name) != digest), None)
