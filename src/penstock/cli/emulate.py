"""`penstock emulate`: a schedule run on emulated devices: dispatch, messages and clocks are real, ops only take time.

penstock emulate zb --ranks 8 --microbatches 12 --costs gpt2-7b --link 6:7=60 --dispatch auto
torchrun --nproc-per-node 4 -m penstock emulate zb --microbatches 12 --costs gpt2-7b --adapt
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

import penstock as ps
from penstock.cli import costs as costs_options
from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, number_of_bytes, taken
from penstock.cli.simulate import GivenRun, require_ops_of, simulated
from penstock.rank_environment import RankEnvironment
from penstock.schedule.op import UPDATE
from penstock.train.checks import BASE, STORES, check_choices, check_numbers, host_memory_of
from penstock.train.folder import RunFolder, free_folder
from penstock.train.options import LINKS, MACHINE, RUN, setting, with_options

TRANSPORTS = (*BASE, "delegate")
BETWEEN_PROCESSES = ("gloo", "delegate")
"""Transports that threads of one process do not have: they hand messages over, at once or as "direct" does."""


@dataclass(frozen=True)
class EmulationSettings:
    """How a schedule is emulated, beside what is simulated.

    Raises:
        SettingsError: a number out of range, or a transport that is none.
        Misuse: options that exclude each other.
    """

    steps: int = setting(20, "How many steps to run.", RUN)
    stretch: float = setting(1.0, "Make ops and links slower by this factor, so that noise matters less.", MACHINE)
    message_cap: str = setting(
        "1MB", "Most bytes of a message; larger ones are cut to this.", MACHINE, metavar="BYTES", is_rare=True
    )
    transport: str = setting("host", "What carries messages: host, gloo, direct or delegate.", LINKS)
    adapt: bool = setting(False, "Measure links, and change to a faster plan.", LINKS)
    store: str | None = setting(
        None, "Where ranks that adapt report. [the job's own store]", LINKS, metavar="redis://HOST:PORT", is_rare=True
    )
    host_memory: str | None = setting(
        None,
        "How many activations (4), or bytes (8GB) for costs in bytes, may wait on each host for a delegated link.",
        LINKS,
        metavar="N",
        is_rare=True,
    )
    in_process: bool = setting(False, "Run all ranks in one process, as a thread each.", MACHINE)
    timeout: float = setting(60.0, "Most seconds that any wait may last.", MACHINE, is_rare=True)

    def __post_init__(self) -> None:
        check_numbers(self, least={"steps": 1}, above_zero=("stretch", "timeout"))
        check_choices(self, {"transport": TRANSPORTS})
        if self.in_process and self.transport in BETWEEN_PROCESSES:
            raise Misuse(
                f"--transport {self.transport} is between processes, and --in-process has one; leave one of them out"
            )
        for name in ("store", "host_memory"):
            if getattr(self, name) is not None and not self.adapt:
                raise Misuse(f"--{name.replace('_', '-')} is for a run that adapts; add --adapt")
        if self.store is not None and STORES.fullmatch(self.store) is None:
            from penstock.runtime.adapt.store import without_password  # here, for it imports torch

            raise Misuse(f"--set store={without_password(self.store)}: write redis://HOST:PORT")


@app.command(short_help="Run a schedule on emulated devices, beside what is simulated.")
@with_options(source.GivenCounts, costs_options.GivenCosts, GivenRun, EmulationSettings)
def emulate(
    schedule: Annotated[str, typer.Argument(metavar="NAME|FILE", help=f"{source.SCHEDULE}.")],
    out: Annotated[
        str | None, typer.Option("--out", help="Where the result goes: a folder. [a new one in runs/]")
    ] = None,
    json: Json = False,
    **options: Any,
) -> int:
    """Run a schedule on emulated devices: real dispatch, messages and clocks, and ops that only take their time.

    Each rank is a process. Under torchrun, on one machine, every process is a rank. The run's folder has
    metrics, timelines and a report with what was simulated beside what was measured.
    """
    settings, run = taken(EmulationSettings, options), taken(GivenRun, options)
    counts, given = taken(source.GivenCounts, options), taken(costs_options.GivenCosts, options)
    environment = None if settings.in_process else RankEnvironment.of(os.environ)
    if environment is not None and counts.ranks is None and not source.is_file(schedule):
        counts = replace(counts, ranks=environment.num_ranks)
    plan = source.read_or_build(schedule, counts)
    ps.check(plan, max_in_flight=counts.most)
    require_ops_of(given, [plan])
    _, costs, cap, _ = simulated(plan, given, run, {})
    if environment is not None and environment.num_ranks != plan.num_ranks:
        raise Misuse(
            f"{schedule} is for {plan.num_ranks} ranks, and torchrun has started {environment.num_ranks}; start as "
            "many, or give another --ranks"
        )
    sent, is_cut = with_message_cap(costs, plan, settings.message_cap)
    cut = [f"messages of more than {settings.message_cap} are sent, and simulated, as so many"] if is_cut else []
    folder = RunFolder(Path(out)) if out is not None else free_folder(
        Path("runs"), f"emulated-{Path(schedule).stem}-{plan.num_ranks}"
    )  # fmt: skip
    folder.require_new(learns=False)
    assumed, _, advice = (given.assumed(plan.num_ranks, plan.placement) or "").rpartition("; ")
    from penstock.runtime.adapt.store import without_password
    from penstock.train.emulated import EmulatedJob
    from penstock.train.start import check_store, run_job

    check_store(settings.store)
    words = {
        **asdict(settings),
        "store": None if settings.store is None else without_password(settings.store),
        "schedule": schedule,
        "ranks": plan.num_ranks,
        "microbatches": plan.num_microbatches,
        "dispatch": run.dispatch,
        "link": run.link or None,
        "device": "emulated",
        "costs": given.words or assumed,
    }
    job = EmulatedJob(
        schedule=plan,
        costs=sent,
        links=run.links,
        dispatch=run.dispatch,
        memory_limit=cap,
        steps=settings.steps,
        stretch=settings.stretch,
        transport=settings.transport,
        adapt=settings.adapt,
        store=settings.store,
        host_memory=host_memory_of(settings.host_memory, sent),
        in_process=settings.in_process,
        timeout=settings.timeout,
        folder=str(folder.path),
        as_json=json,
        settings=words,
        notices=(
            *([f"costs were assumed; {advice}"] if assumed else []),
            *(f"link {text} was injected" for text in run.links.texts()),
            *([costs_options.UNSIZED] if costs_options.unsized_links(costs, run.links) else []),
            *cut,
        ),
    )
    raise typer.Exit(run_job(job))


def with_message_cap(costs: ps.Costs, schedule: ps.Schedule, cap: str) -> tuple[ps.Costs, bool]:
    """The costs with messages of at most `cap` bytes, such as "1MB", and whether any message is larger.

    Raises:
        Misuse: a cap that is no size; messages above it that differ by microbatch.
    """
    most = number_of_bytes("--set message_cap", cap)
    count, sizes = schedule.num_microbatches, costs.message_bytes
    heaviest = [costs.factors.table("message", kind, costs.num_stages, count).max(axis=1) for kind in "FB"]
    sent = [size * factor for row in heaviest for size, factor in zip(sizes, row.tolist(), strict=False)]
    if schedule.windows is not None:
        predicted = costs.with_predictions(schedule).factors
        factors = predicted.table("message", UPDATE, costs.num_stages, schedule.windows.num_ops).max(axis=1).tolist()
        sent += [size * factor for size, factor in zip(costs.update_bytes, factors, strict=False)]
    is_cut = max(sent, default=0.0) > most
    if costs.factors.message and is_cut:
        raise Misuse(
            f"some messages of these costs are larger than --set message_cap={cap}, and they differ by microbatch; "
            "raise message_cap, or leave the message factors out of the costs"
        )
    capped = replace(
        costs,
        message_bytes=[min(size, most) for size in costs.message_bytes],
        update_bytes=[min(size, most) for size in costs.update_bytes],
    )
    return capped.with_predictions(schedule, most=most), is_cut
