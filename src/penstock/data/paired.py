"""Generated samples that several modalities describe, each in its way. Seed and number alone say what a sample is.

A sample is a combination of factors, each with one of a few values (as a red circle on the left is of colour, shape
and place). Every modality shows the same combination:

    tokens    a word for each factor's value, at places of their own, between words that say nothing
    vectors   the sum of a pattern for each factor's value, and noise

Whoever learns the factors finds, among many samples of one modality, the one that another modality tells of, also for
combinations never seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.data.shuffle import mix, permuted, uniform
from penstock.data.tokens import DataError

__all__ = ["PairedSamples", "TokenForm", "VectorForm"]


@dataclass(frozen=True, slots=True)
class TokenForm:
    """A modality that is text.

    Attributes:
        length: tokens per sample.
        vocab_size: how many different tokens there are.

    Examples:
        >>> import penstock as ps
        >>> ps.data.TokenForm(length=6, vocab_size=32)
        TokenForm(length=6, vocab_size=32)
    """

    length: int
    vocab_size: int


@dataclass(frozen=True, slots=True)
class VectorForm:
    """A modality of vectors: frames of sound, patches of a picture or of a film.

    Attributes:
        length: vectors per sample.
        num_features: numbers per vector.

    Examples:
        >>> import penstock as ps
        >>> ps.data.VectorForm(length=8, num_features=6)
        VectorForm(length=8, num_features=6)
    """

    length: int
    num_features: int


class PairedSamples:
    """`samples(numbers)` for any sample numbers from 0 on: modality -> int64[B, T] or float32[B, T, features].

    Every `num_combinations` numbers in a row are all combinations, each once.

    Args:
        forms: modality -> the form in which it shows the factors.
        num_factors: factors of a sample.
        num_values: values that each factor can have.
        noise: its amplitude in vectors, where a pattern's is 1.
        seed: decides patterns and noise.

    Raises:
        DataError: a length or a vocabulary too small to tell the factors.

    Examples:
        >>> import penstock as ps
        >>> samples = ps.data.PairedSamples({"audio": ps.data.VectorForm(8, 6), "text": ps.data.TokenForm(6, 32)})
        >>> {name: value.shape for name, value in samples.samples(range(4)).items()}
        {'audio': (4, 8, 6), 'text': (4, 6)}
    """

    def __init__(
        self,
        forms: Mapping[str, TokenForm | VectorForm],
        num_factors: int = 3,
        num_values: int = 6,
        noise: float = 0.5,
        seed: int = 0,
    ) -> None:
        if not forms or num_factors < 1 or num_values < 2:
            raise DataError(
                f"{len(forms)} modalities, {num_factors} factors of {num_values} values; there must be at least one "
                "modality, one factor and two values."
            )
        for name, form in forms.items():
            if form.length < 1 or (isinstance(form, VectorForm) and form.num_features < 1):
                raise DataError(f"{name} of length {form.length}; sizes must be at least 1.")
            if isinstance(form, TokenForm):
                words = num_factors * num_values + 1
                if form.length < num_factors or form.vocab_size < words:
                    raise DataError(
                        f"{name} of {form.length} tokens out of {form.vocab_size}; {num_factors} factors of "
                        f"{num_values} values need at least {num_factors} tokens out of {words}."
                    )
        self.forms = dict(forms)
        self.num_combinations = num_values**num_factors
        self._num_factors = num_factors
        self._num_values = num_values
        self._noise = noise
        self._seed = seed
        self._patterns = {
            name: self._draw_patterns(form, place)
            for place, (name, form) in enumerate(forms.items())
            if isinstance(form, VectorForm)
        }

    def _draw_patterns(self, form: VectorForm, place: int) -> NDArray[np.float32]:
        shape = (self._num_factors, self._num_values, form.length, form.num_features)
        return uniform(int(np.prod(shape)), self._seed, -1, place).reshape(shape) * 2 - 1

    def factors(self, number: int) -> NDArray[np.int64]:
        """The values of a sample's factors, int64[factors]."""
        if number < 0:
            raise IndexError(f"sample {number}; samples count from 0")
        place = np.array([number % self.num_combinations])
        index = int(permuted(place, self.num_combinations, self._seed, 0)[0])
        return np.array([index // self._num_values**factor % self._num_values for factor in range(self._num_factors)])

    def samples(self, numbers: Iterable[int]) -> dict[str, NDArray[Any]]:
        wanted = list(numbers)
        values = [self.factors(number) for number in wanted]
        samples: dict[str, NDArray[Any]] = {}
        for place, (name, form) in enumerate(self.forms.items()):
            tell = self._tokens if isinstance(form, TokenForm) else self._vectors
            samples[name] = np.stack([tell(name, place, number, v) for number, v in zip(wanted, values, strict=True)])
        return samples

    def _tokens(self, name: str, place: int, number: int, values: NDArray[np.int64]) -> NDArray[np.int64]:
        form = self.forms[name]
        assert isinstance(form, TokenForm)
        words = self._num_factors * self._num_values
        empty = [mix(self._seed, 1, place, number, t) % (form.vocab_size - words) for t in range(form.length)]
        tokens = words + np.array(empty, np.int64)
        places = permuted(np.arange(self._num_factors), form.length, self._seed, 2, place, number)
        tokens[places] = np.arange(self._num_factors) * self._num_values + values
        return tokens

    def _vectors(self, name: str, place: int, number: int, values: NDArray[np.int64]) -> NDArray[np.float32]:
        patterns = self._patterns[name]
        shown = patterns[np.arange(self._num_factors), values].sum(0)  # T, features
        noise = uniform(shown.size, self._seed, 3, place, number).reshape(shown.shape) * 2 - 1
        return (shown + self._noise * noise).astype(np.float32)
