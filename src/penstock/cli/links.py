"""`penstock links`: latency and bandwidth between all ranks, and which links are late.

penstock links --ranks 4                                                   one host
torchrun --nproc-per-node 4 -m penstock links                              the same on each of several hosts
penstock lab run --hosts 4 --link 2:3=latency:30ms -- torchrun -m penstock links
"""

from __future__ import annotations

import json as json_format
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.app import app
from penstock.cli.failure import INVALID, Misuse
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json, table
from penstock.rank_environment import RankEnvironment

if TYPE_CHECKING:
    from penstock.tune.links import MeasuredLinks

TRANSPORTS = ("gloo", "nccl")
_UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
MOST_IN_MATRIX = 16
"""Ranks up to which all pairs are shown."""


@app.command(short_help="Measure the links between ranks.")
def links(
    ranks: Annotated[
        int | None, typer.Option("--ranks", help="Number of ranks, on this host. [those of torchrun]")
    ] = None,
    transport: Annotated[
        str, typer.Option("--transport", help="What carries messages: gloo, or nccl where each rank has a GPU.")
    ] = "gloo",
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.1, help="For how many seconds to measure, all pairs together.")
    ] = 10.0,
    json: Json = False,
) -> None:
    """Measure all pairs of ranks, name the late ones, and print the --link options that simulate and plan take.

    Under torchrun every process is a rank, on any number of hosts. Rank 0 prints.
    """
    if transport not in TRANSPORTS:
        raise Misuse(f"--transport {transport}: write {' or '.join(TRANSPORTS)}")
    environment = RankEnvironment.of(os.environ)
    num_ranks = _num_ranks(ranks, environment)
    found = _measured(environment, num_ranks, seconds, transport)
    if found is None:
        return
    if json:
        print_json(_as_json(found, transport))
        return
    _show(found, transport)
    print("options   " + (" ".join(f"--link {text}" for text in found.links.texts()) or "none: no link is late"))
    if found.links.default is not None:
        print(
            f"          and, for simulate, emulate and plan, --link default={found.links.default.latency.at(0.0, '')}"
        )


def _num_ranks(ranks: int | None, environment: RankEnvironment | None) -> int:
    if environment is None:
        if ranks is None or ranks < 2:
            given = "" if ranks is None else f"--ranks {ranks}: links are between 2 ranks or more; "
            raise Misuse(f"{given}give --ranks 4, say, or run torchrun -m penstock links on every host")
        return ranks
    if ranks not in (None, environment.num_ranks):
        raise Misuse(f"--ranks {ranks}: torchrun has started {environment.num_ranks}; leave --ranks out")
    return environment.num_ranks


def _measured(
    environment: RankEnvironment | None, num_ranks: int, seconds: float, transport: str
) -> MeasuredLinks | None:
    """The links, measured by this process as one of the ranks, or by ranks that it starts. None except on rank 0."""
    from penstock.runtime import RuntimeFailure
    from penstock.train.start import RunFailed, start_ranks
    from penstock.tune.links import MeasuredLinks, measure_as_rank

    if environment is not None:
        try:
            rank, found = measure_as_rank(seconds, transport)
        except RuntimeFailure as error:
            if environment.rank == 0:
                raise
            print(f"penstock: {error}", file=sys.stderr)
            raise typer.Exit(INVALID) from None
        return found if rank == 0 else None
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        path = Path(folder) / "links.json"
        program = ["-m", "penstock.tune.links", str(seconds), transport, str(path)]
        code, said = start_ranks(program, num_ranks, "penstock.runtime")
        if code or said:
            raise RunFailed(said, code or INVALID)
        return MeasuredLinks.from_json(json_format.loads(path.read_text()))


def _as_json(found: MeasuredLinks, transport: str) -> dict[str, Any]:
    default = found.links.default
    return {
        "num_ranks": len(found.hosts),
        "hosts": list(found.hosts),
        "transport": transport,
        "seconds": found.seconds,
        "pairs": [
            {
                "link": f"{a}:{b}",
                "latency": pair.latency,
                "median_latency": pair.median,
                "bandwidth": pair.there,
                "bandwidth_back": pair.back,
                "loopback": found.is_loopback((a, b)),
                "late": found.is_late((a, b)),
                "slow": found.is_slow(a, b),
                "slow_back": found.is_slow(b, a),
            }
            for (a, b), pair in found.pairs.items()
        ],
        "links": found.links.texts(),
        "default_delay": 0.0 if default is None else default.latency.at(0.0, ""),
    }


def _show(found: MeasuredLinks, transport: str) -> None:
    num_ranks, num_hosts = len(found.hosts), len(set(found.networks))
    where = "this host, over loopback" if num_hosts == 1 else f"{num_hosts} hosts"
    print(
        f"{plural(len(found.pairs), 'link')} between {num_ranks} ranks on {where}, by {transport}, in "
        f"{found.seconds:.1f} s\n"
    )
    if found.late:
        head = ["late", "hosts", "latency ms", "usual", "bandwidth", "back", "usual"]
        rows = [
            [
                f"{a}:{b}",
                f"{found.hosts[a]} {found.hosts[b]}",
                f"{found.pairs[a, b].latency:.3g}",
                f"{found.usual_latency((a, b)):.3g}",
                *(_rate(rate) for rate in (*found.pairs[a, b][2:], found.usual_rate((a, b)))),
            ]
            for a, b in found.late
        ]
        print(table(head, rows), end="\n\n")
    else:
        print("No link stands out of the others.\n" if len(found.pairs) > 2 else "Too few links to compare.\n")
    if num_ranks <= MOST_IN_MATRIX:
        names = [str(rank) for rank in range(num_ranks)]
        pairs = [[(min(a, b), max(a, b)) for b in range(num_ranks)] for a in range(num_ranks)]
        latencies = [[f"{found.pairs[p].latency:.3g}" if p in found.pairs else "" for p in row] for row in pairs]
        rates = [["" if a == b else _rate(found.rate(a, b)) for b in range(num_ranks)] for a in range(num_ranks)]
        for title, cells in (("latency, ms", latencies), ("bandwidth, bit/s", rates)):
            print(table([title, *names], [[name, *row] for name, row in zip(names, cells, strict=True)]), end="\n\n")


def _rate(rate: float | None) -> str:
    """Bytes a second as 940M or 9.4G, in bits."""
    if rate is None:
        return "-"
    size, unit = next(((size, unit) for size, unit in _UNITS if rate * 8 >= size), _UNITS[-1])
    return f"{float(f'{rate * 8 / size:.3g}'):g}{unit}"
