"""Figure 16's two sizes whose towers are guessed, with other guesses: FlexPipe over DistMM-Pipe.

    python -m experiments.flexpipe.guessed_towers            a quarter of an hour of one core
    python -m experiments.flexpipe.guessed_towers --resume   goes on with what is there already

Of Table 4 only the 4.7B adds up as printed (audio and text). What the 8.2B and the 9.7B have besides is changed here,
one guess at a time, and so is how long a kernel takes to launch. Simulated; each method has its best layout. For
FlexPipe that is the best of the 300 with the lowest bounds, for each number of gathers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.common.command import options
from experiments.common.results import Row, known, load, runs, save, table
from experiments.flexpipe import RESULTS
from experiments.flexpipe.clip import AUDIO, CLIPS, LAUNCH_MS, TEXT, VIDEO, Tower
from experiments.flexpipe.clip_methods import DISTMM, MOST_LAYOUTS, best_run
from experiments.flexpipe.figure16 import PAPER

NAME = "guessed_towers"
METHODS = (DISTMM, "FlexPipe")
SIZES = tuple(clip for clip, towers in CLIPS.items() if len(towers) > 2)
BLOCKS_STEP = 10
"""Numbers of blocks are multiples of it, so that many numbers of ranks divide them."""


@dataclass(frozen=True)
class Guess:
    """What is other than in the figure.

    Attributes:
        width: of the third tower; None where there is none, and audio has as many more blocks.
    """

    width: int | None = VIDEO.width
    sequence: int = VIDEO.sequence
    launch_ms: float = LAUNCH_MS


GUESSES: Mapping[str, Guess] = {
    "as in the figure: video, 1024 wide": Guess(),
    "video, 768 wide": Guess(width=768),
    "video, 1536 wide": Guess(width=1536),
    "video, 2048 wide": Guess(width=2048),
    "video of twice the sequence": Guess(sequence=2 * VIDEO.sequence),
    "no third tower, deeper audio": Guess(width=None),
    "kernels of half the time": Guess(launch_ms=LAUNCH_MS / 2),
    "kernels of twice the time": Guess(launch_ms=2 * LAUNCH_MS),
}


def towers_of(clip: str, guess: Guess) -> tuple[Tower, ...]:
    """Towers that come to about as many parameters as the figure's."""
    missing = CLIPS[clip][2].num_parameters
    width = AUDIO.width if guess.width is None else guess.width
    blocks = max(1, round(missing / (12 * width**2) / BLOCKS_STEP)) * BLOCKS_STEP
    if guess.width is None:
        return replace(AUDIO, num_blocks=AUDIO.num_blocks + blocks), TEXT
    return AUDIO, TEXT, replace(VIDEO, num_blocks=blocks, width=width, sequence=guess.sequence)


def row_of(clip: str, name: str) -> Row:
    guess = GUESSES[name]
    towers = towers_of(clip, guess)
    began = time.perf_counter()
    found: Row = {"clip": clip, "guess": name, "parameters": sum(tower.num_parameters for tower in towers)}
    for method in METHODS:
        most = None if method == DISTMM else MOST_LAYOUTS
        run = best_run(method, towers, launch_ms=guess.launch_ms, most_layouts=most)
        found[method] = run.samples()
        found[f"{method}, layout"] = "; ".join(
            f"{share.tower.name} {share.pp} x {share.dp}, {share.microbatch}, {v}"
            for share, v in zip(run.layout, run.stages, strict=True)
        )
    return found | {"seconds": time.perf_counter() - began}


def gain(row: Row) -> float:
    """FlexPipe over DistMM-Pipe."""
    return float(row["FlexPipe"] / row[DISTMM])


def lines(rows: Sequence[Row]) -> Iterator[str]:
    yield f"FlexPipe over DistMM-Pipe, simulated; the paper: {', '.join(f'{c} {PAPER[c]:.2f}' for c in SIZES)}"
    body = []
    for name in GUESSES:
        of_sizes = [row for clip in SIZES for row in rows if (row["clip"], row["guess"]) == (clip, name)]
        if len(of_sizes) == len(SIZES):
            body.append([name, *(f"{gain(row):.2f} of {row['parameters'] / 1e9:.1f}B" for row in of_sizes)])
    yield from table(["", *SIZES], body)
    for clip in SIZES:
        gains = [gain(row) for row in rows if row["clip"] == clip]
        if gains:
            yield f"{clip}: {min(gains):.2f} to {max(gains):.2f} over {len(gains)} guesses"


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--resume", action="store_true", help="go on with what is there already")
    given = parser.parse_args()
    if not given.show:
        rows, earlier = (each(given.out, NAME, given.resume) for each in (known, runs))
        for name in GUESSES:
            for clip in SIZES:
                if any((row["clip"], row["guess"]) == (clip, name) for row in rows):
                    continue
                rows.append(row_of(clip, name))
                print(f"{clip}, {name}: {gain(rows[-1]):.2f} ({rows[-1]['seconds']:.0f} s)", flush=True)
                save(given.out, NAME, rows, earlier=earlier)
    print("\n".join(lines(load(given.out, NAME))))


if __name__ == "__main__":
    main()
