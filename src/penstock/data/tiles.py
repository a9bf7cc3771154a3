"""Generated pictures of coloured tiles, and what is on them in words. Seed and number alone say what one shows.

    red    blue
    green  white       with noise  ->  "red blue green white"

Who does not look can say no more than that any of the combinations is as likely as another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from penstock.data.errors import DataError
from penstock.data.shuffle import permuted

__all__ = ["TilePictures"]

COLOURS = {"red": (1.0, -1.0, -1.0), "green": (-1.0, 1.0, -1.0), "blue": (-1.0, -1.0, 1.0), "white": (1.0, 1.0, 1.0)}
NUM_TILES = 4
NOISE = 0.1


class TilePictures:
    """Pictures [num_channels, size, size] of two by two tiles.

    Args:
        num_channels: of a picture; one that is not red, green or blue has the mean of them.
        size: of a picture, in pixels.
        seed: of the combinations that are never trained on, and of the noise.

    Attributes:
        num_combinations: of colours. num_seen: those of them that are trained on.

    Raises:
        DataError: pictures too small for tiles.

    Examples:
        >>> import penstock as ps
        >>> pictures = ps.data.TilePictures(num_channels=3, size=8)
        >>> pictures.num_seen < pictures.num_combinations
        True
    """

    num_combinations = len(COLOURS) ** NUM_TILES
    num_seen = num_combinations * 7 // 8

    def __init__(self, num_channels: int, size: int, seed: int = 0) -> None:
        if num_channels < 1 or size < 2:
            raise DataError(f"pictures [{num_channels}, {size}, {size}] are too small for two by two tiles")
        self._num_channels, self._size, self._seed = num_channels, size, seed
        colours = np.array(list(COLOURS.values()), np.float32)
        grey = np.repeat(colours.mean(1, keepdims=True), max(0, num_channels - 3), 1)
        self._colours = np.concatenate([colours, grey], 1)[:, :num_channels]

    @property
    def nats(self) -> float:
        """What it takes to say a combination without looking."""
        return math.log(self.num_combinations)

    def words(self, combination: int) -> str:
        """What is on a picture."""
        names = list(COLOURS)
        return " ".join(names[colour] for colour in _digits(combination))

    def combination(self, number: int, fresh: bool = False) -> int:
        """Of a sample: of those trained on, in an order of its own each round, or, `fresh`, of the others."""
        first, count = (self.num_seen, self.num_combinations - self.num_seen) if fresh else (0, self.num_seen)
        turn, place = divmod(number, count)
        place = first + int(permuted(np.array([place]), count, self._seed, turn)[0])
        return int(permuted(np.array([place]), self.num_combinations, self._seed, 1 << 20)[0])

    def pictures(self, numbers: Iterable[int], fresh: bool = False) -> NDArray[np.float32]:
        """The pictures of samples, [N, num_channels, size, size]."""
        half = self._size // 2
        made = []
        for number in numbers:
            tiles = self._colours[_digits(self.combination(number, fresh))]
            grid = tiles.T.reshape(self._num_channels, 2, 2)
            sides = [half, self._size - half]
            whole = grid.repeat(sides, 1).repeat(sides, 2)
            draw = np.random.default_rng((self._seed, int(fresh), number))
            made.append(whole + NOISE * draw.standard_normal(whole.shape, np.float32))
        return np.stack(made)


def _digits(combination: int) -> list[int]:
    """The colour of each tile, row by row."""
    return [combination // len(COLOURS) ** place % len(COLOURS) for place in range(NUM_TILES)]
