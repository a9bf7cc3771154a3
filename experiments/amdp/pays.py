"""When asynchrony pays: AMDP under four rules beside 2BW and the best synchronous order within its memory.

    python -m experiments.amdp.pays               an hour of one core; what is there already is gone on with
    python -m experiments.amdp.pays --ranks 16    some of it, here half an hour
    python -m experiments.amdp.pays --show        what was found last

There are d ranks, and an update gathers n microbatches of the GPT-style model. A head of h layers takes as long as h
blocks. Numbers are thousands of tokens a second amid many updates. No order stops all ranks at an update. Stages,
links and the bytes of updates are those of `setups.py`. A PREDICT moves `TENTATIVE_BYTES` a parameter, and is sent as
an update is.

    drained, none, tentative    AMDP with a mismatch of 0; with one; and with one under rule `tentative`
    2bw                         PipeDream-2BW
    synchronous                 the fastest of `synchronous.LIBRARY` that holds no more bytes than AMDP, by the frozen
                                order or by dynamic dispatch
    1f1b, zb-h1, zb-v           these by themselves, whatever they hold

AMDP's orders are made for several guesses at the times of F and B, and the fastest counts. On 16 ranks there are two
guesses instead of four, because the builder tries 8 to 16 ways of ordering for each, one op at a time. So AMDP may be
somewhat faster there than the table says.

Bytes are those of weights, their versions, gradients, optimizer state and activations, of the fullest rank at its
peak.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import islice, product

import penstock as ps
from experiments.amdp import RESULTS
from experiments.amdp.methods import Trial, guesses, num_windows, simulate, trial_of
from experiments.amdp.mismatch import held
from experiments.amdp.setups import Setup
from experiments.amdp.synchronous import LIBRARY
from experiments.common.command import options
from experiments.common.results import Row, known, load, runs, save, table
from penstock.cost.presets import A800
from penstock.schedule.weight_versions import updates_ahead

DEPTHS, PER_RANK, HEADS, LINKS = (4, 8, 16), (1, 2, 4), (0, 1, 3), (A800.link_gb, 25.0)
OWN_HEAD = 2.37
"""Layers whose time the preset's own head takes."""
AMDP = {"drained": {"max_mismatch": 0}, "none": {}, "tentative": {"rule": "tentative"}}
SHOWN = ("1f1b", "zb-h1", "zb-v")
NUM_GUESSES = {4: 4, 8: 4, 16: 2}
"""By ranks, for how many guesses at the times AMDP's orders are made."""
CLOSE = 1e-3
"""A difference of throughput that counts as none: of orders so close, that whose late forwards know most is taken."""


def setup_of(num_ranks: int, per_rank: int, head: float, link_gb: float) -> Setup:
    """The GPT-style model whose head takes as long as `head` of its blocks."""
    like = Setup("GPT", num_ranks, num_ranks * per_rank * Setup("GPT", 4, 4).preset.shape.microbatch_size)
    *_, block, last = like.preset.shape.layers()
    share = sum(getattr(block, kind) for kind in "fiw") / sum(getattr(last, kind) for kind in "fiw")
    return Setup("GPT", num_ranks, like.batch, head=head * share, link_gb=link_gb)


def known_share(schedule: ps.Schedule) -> float:
    """The share of their window that late forwards know, in the mean over late forwards; 1 where none is late."""
    windows, found = schedule.windows, ps.schedule.known_to(schedule)
    assert windows is not None
    shares = [
        len(found.get((stage, m // windows.window - 1), ())) / windows.window
        for stage in range(schedule.num_stages)
        for m, ahead in updates_ahead(schedule, stage).items()
        if ahead > 0
    ]
    return sum(shares) / len(shares) if shares else 1.0


@cache
def _order(num_ranks: int, n: int, name: str, f: tuple[float, ...], b: tuple[float, ...]) -> ps.Schedule:
    num = n * num_windows(n, num_ranks)
    return ps.build("amdp", num_ranks, num, window=n, f=f, b=b, **AMDP[name])  # type: ignore[arg-type]


def amdp(setup: Setup, name: str) -> tuple[Trial, float]:
    """AMDP by one of the rules, in the fastest of its orders for several guesses at its times, and its speed."""
    costs, d = setup.costs(copies=setup.num_ranks // 2), setup.num_ranks
    found = []
    for guess in islice(guesses(costs), NUM_GUESSES[d]):
        f, b = (tuple(each) if isinstance(each, Sequence) else (each,) * d for each in (guess["f"], guess["b"]))
        trial = Trial(name, _order(d, setup.window, name, f, b), costs, setup.links, setup.window, setup.tokens)
        found.append((trial.ktokens(simulate(trial)), trial))
    most = max(speed for speed, _ in found)
    close = [(known_share(trial.schedule), speed, trial) for speed, trial in found if speed >= most * (1 - CLOSE)]
    _, speed, trial = max(close, key=lambda each: each[:2])
    return trial, speed


@cache
def _repeated(name: str, num_ranks: int, n: int) -> ps.Schedule:
    """An order of the library, window after window. Costs do not shape it, so it serves all heads and links."""
    one = ps.build(name, num_ranks, n, **LIBRARY[name])
    return ps.passes.repeat_windows(one, 2 * max(3, -(-2 * num_ranks // n)) + 3)


def synchronous(setup: Setup) -> Iterator[tuple[str, float, float]]:
    """Name, speed and GB of each order of the library, window after window, frozen and by dynamic dispatch."""
    for name in LIBRARY:
        try:
            schedule = _repeated(name, setup.num_ranks, setup.window)
            costs = setup.costs(schedule.num_stages, schedule.placement.num_pipelines)
        except (ps.ScheduleError, ps.CostError):
            continue  # not for so few microbatches, or so many stages
        trial = Trial(name, schedule, costs, setup.links, setup.window, setup.tokens)
        for dispatch in ("frozen", "dynamic"):
            timeline = ps.simulate(schedule, costs, links=setup.links, dispatch=dispatch)
            memory = max(held(schedule, costs, timeline.peak_activations)) / 1e9
            yield f"{name}, {dispatch}", trial.ktokens(timeline), memory


def row(num_ranks: int, per_rank: int, head: float, link_gb: float) -> Row:
    """One cell of the table."""
    setup = setup_of(num_ranks, per_rank, head, link_gb)
    trials = {name: amdp(setup, name) for name in AMDP}
    trial = trials["tentative"][0]
    memory = max(held(trial.schedule, trial.costs, simulate(trial).peak_activations)) / 1e9
    two_buffers = trial_of("pipedream-2bw", setup)
    orders = list(synchronous(setup))
    best = max((each for each in orders if each[2] <= memory), key=lambda each: each[1], default=("-", 0.0, 0.0))
    return {
        "d": num_ranks,
        "n": setup.window,
        "head": head,
        "link": link_gb,
        **{name: speed for name, (_, speed) in trials.items()},
        "2bw": two_buffers.ktokens(simulate(two_buffers)),
        "synchronous": best[1],
        "order": best[0],
        **{name: max((s for each, s, _ in orders if each.split(",")[0] == name), default=None) for name in SHOWN},
        "known": known_share(trial.schedule),
        "gb": memory,
        "order_gb": best[2],
    }


def lines(rows: Sequence[Row]) -> Iterator[str]:
    """The table, and where AMDP by rule `tentative` is the fastest."""
    yield "thousands of tokens a second; known: the share of the window that late forwards know"
    names = ("drained", "none", "tentative", "2bw", "synchronous", *SHOWN)
    over = ("drained", "2bw", "synchronous")
    yield from table(
        ["d, n, head, GB/s", *names, "best order", "known", *(f"/{name}" for name in over)],
        [
            [
                f"{each['d']}, {each['n']}, {each['head']:g}, {each['link']:.0f}",
                *("-" if each[name] is None else f"{each[name]:.1f}" for name in names),
                each["order"],
                f"{each['known']:.2f}",
                *(f"{each['tentative'] / each[name]:.3f}" for name in over),
            ]
            for each in rows
        ],
    )
    yield ""
    for least in (1.0, 1.01):
        won = [each for each in rows if each["tentative"] >= least * max(each["drained"], each["synchronous"])]
        cells = "; ".join(f"{each['d']}, {each['n']}, {each['head']:g}, {each['link']:.0f}" for each in won)
        yield (
            f"at least {least:g} times as fast as draining and as the best synchronous order within its memory, "
            f"in {len(won)} cells of {len(rows)}: {cells}"
        )


def cells(depths: Sequence[int], per_rank: Sequence[int]) -> Iterator[tuple[int, int, float, float]]:
    """Ranks, microbatches an update and rank, layers of the head, and GB/s of a link; first that of Table 3."""
    if 8 in depths and 4 in per_rank:
        yield 8, 4, OWN_HEAD, LINKS[0]
    yield from product(depths, per_rank, HEADS, LINKS)


def main() -> None:
    parser = options(__doc__, RESULTS, show=True)
    parser.add_argument("--ranks", action="append", type=int, choices=DEPTHS, help="only these; may be repeated")
    parser.add_argument("--per-rank", action="append", type=int, choices=PER_RANK, help="microbatches; likewise")
    given = parser.parse_args()
    if not given.show:
        found, earlier = known(given.out, "pays"), runs(given.out, "pays")
        done = {(each["d"], each["n"], each["head"], each["link"]) for each in found}
        for d, per_rank, head, link_gb in cells(given.ranks or DEPTHS, given.per_rank or PER_RANK):
            if (d, d * per_rank, head, link_gb) not in done:
                began = time.perf_counter()
                found.append(row(d, per_rank, head, link_gb))
                found.sort(key=lambda each: (each["d"], each["n"], each["head"], -each["link"]))
                save(given.out, "pays", found, earlier=earlier)
                took = time.perf_counter() - began
                print(f"({d}, {d * per_rank}, {head:g}, {link_gb:.0f}: {took:.0f} s)", flush=True)
    print("\n".join(lines(load(given.out, "pays"))))


if __name__ == "__main__":
    main()
