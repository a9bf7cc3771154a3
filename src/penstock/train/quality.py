"""How good a model has become, in numbers and words, compared with guessing by frequency or by chance."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelQuality:
    """What the report says about a model at the end. Fields that do not apply to its kind are None.

    Attributes:
        unit: what the loss is counted in, and on what. beside: sentences that compare it with something known.
        unigram, bigram: nats per token of models that count single tokens and pairs.
        beats_bigram: whether the model is better than counting pairs.
        accuracy: the share of guesses that are right. chance: the same for guessing blindly.
        writes: whether it is a model that writes text. text: what it wrote.
    """

    unit: str
    beside: tuple[str, ...] = ()
    unigram: float | None = None
    bigram: float | None = None
    beats_bigram: bool | None = None
    accuracy: float | None = None
    chance: float | None = None
    text: str = ""
    writes: bool = False

    def to_json(self) -> dict[str, Any]:
        """Everything except the text, which has a file of its own."""
        values = dataclasses.asdict(self)
        del values["text"], values["writes"]
        return values

    @classmethod
    def take(cls, values: dict[str, Any]) -> ModelQuality:
        """Reads from a larger object what `to_json` made."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in values]
        found: Mapping[str, Any] = {name: values.pop(name) for name in names}
        return cls(**{**found, "beside": tuple(found["beside"])})

    def rows(self, loss: float) -> list[tuple[str, str]]:
        """Lines for people."""
        return [("loss", f"{loss:.3f} {self.unit}"), *(("", line) for line in self.beside)]
