"""Which settings exclude each other, as one table that a run is checked against before it starts. Needs no torch.

What only the model, the data or the optimizer can tell is checked by them (`train/inputs.py`, `train/tasks/`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.train.asynchronous import ASYNCHRONOUS, OPTIONS
from penstock.train.checks import SettingsError, is_schedule_file
from penstock.train.kinds import CLIP, GPT, is_hugging_face, is_path
from penstock.train.options import Option, options_of
from penstock.train.own_file import is_own

if TYPE_CHECKING:
    from penstock.train.settings import Settings


IN_PROCESS = "--in-process"


class Exclusion(NamedTuple):
    """Options that can't be combined with something else.

    Attributes:
        names: settings; one that has not its default breaks the rule. beside: with or without what, where names in
            braces stand for the values of settings. why: the reason, as the end of a sentence.
        when: whether the rest of the settings are those of the rule.
    """

    names: tuple[str, ...]
    beside: str
    why: str
    when: Callable[[Any], bool]


EXCLUSIONS = (
    Exclusion(("store", "host_memory"), "without --adapt", "only a run that adapts uses it", lambda s: not s.adapt),
    Exclusion(
        OPTIONS,
        "with --schedule {schedule}",
        f"it is for schedules with their updates among the other ops ({', '.join(ASYNCHRONOUS)})",
        lambda s: not (s.is_asynchronous and (s.schedule in ASYNCHRONOUS or is_schedule_file(s.schedule))),
    ),
    Exclusion(("lora",), "with --tp {tp}", "layers with adapters stay whole", lambda s: s.tp > 1),
    Exclusion(
        ("lora",),
        "with --model {model}",
        "peft adapts models of Hugging Face",
        lambda s: not is_hugging_face(s.model),
    ),
    Exclusion(
        ("tp",),
        "with --model {model}",
        "Penstock divides layers that it knows, and the model is your own; in Python, give "
        "ps.ParallelOptions(parallelize=)",
        lambda s: is_own(s.model),
    ),
    Exclusion(("tp",), "with --in-process", "processes share the layers", lambda s: s.in_process),
    Exclusion(
        ("sharding",),
        "with --in-process",
        "processes share the state",
        lambda s: s.is_sharded and s.in_process and s.dp > 1,
    ),
    Exclusion(
        ("sharding",),
        "without --dp",
        "replicas share the state, and there is one",
        lambda s: s.is_sharded and s.dp == 1,
    ),
    Exclusion(("transport",), "with --in-process", "in one process nothing is sent", lambda s: s.in_process),
    Exclusion(
        ("adapt",),
        "with --in-process and --dp {dp}",
        "over a mesh links between processes are measured",
        lambda s: s.in_process and s.dp > 1,
    ),
    Exclusion(
        ("schedule",),
        "with --in-process and --dp {dp}",
        "one pipeline runs the microbatches of all replicas, and the order of this schedule is for those of one",
        lambda s: s.in_process and s.dp > 1 and (s.is_asynchronous or is_schedule_file(s.schedule)),
    ),
    Exclusion(
        ("model_options",),
        "with --model {model}",
        "they are arguments of a model of your own, FILE.py:NAME",
        lambda s: not is_own(s.model),
    ),
    Exclusion(
        ("depth", "width", "heads", "dropout", "tied", "preset"),
        "with --model {model}",
        "a model of your own takes its sizes by --model-options, and one of Hugging Face's has them in its config",
        lambda s: is_path(s.model),
    ),
    Exclusion(
        ("context", "tied", "data", "tokenizer"),
        "with --model {model}",
        "a CLIP learns from samples that are generated for it",
        lambda s: s.model == CLIP,
    ),
    Exclusion(
        ("stages", "cut", "schedule_options"),
        "with --model {model}",
        "it is for one chain of stages, and each tower has its own, which a schedule file can say",
        lambda s: s.model == CLIP,
    ),
    Exclusion(
        ("context", "tokenizer", "packing"),
        "with --data {data}",
        "its batches are made already",
        lambda s: is_own(s.data),
    ),
    Exclusion(
        ("data",),
        "with --model {model}",
        "it makes batches for a model of your own or of Hugging Face's",
        lambda s: is_own(s.data) and not is_path(s.model),
    ),
    Exclusion(
        ("packing",),
        "with --model {model}",
        "a row holds several documents, which only a built-in GPT and decoders of Hugging Face's keep apart",
        lambda s: s.model != GPT and not is_hugging_face(s.model),
    ),
    Exclusion(
        ("packing",),
        "with --schedule {schedule}",
        "the order of microbatches says what each of its updates gathers",
        lambda s: s.is_asynchronous,
    ),
    Exclusion(
        ("microbatch_tokens",),
        "without --packing planned",
        "whole documents keep to it only where their batches are planned",
        lambda s: s.packing != "planned",
    ),
)


def check_exclusions(settings: Settings) -> None:
    """Raises SettingsError if settings exclude each other."""
    kind: Any = type(settings)
    options = options_of(kind)
    for rule in EXCLUSIONS:
        given = [name for name in rule.names if getattr(settings, name) != options[name].default]
        if given and rule.when(settings):
            option = options[given[0]]
            beside = rule.beside.format(**vars(settings))
            add = f"add {beside.removeprefix('without ')}, or " if beside.startswith("without") else ""
            either = f"{option.flags[0]} or {IN_PROCESS}" if IN_PROCESS in beside else option.flags[0]
            raise SettingsError(
                f"{_shown(option, getattr(settings, given[0]))} {beside}: {rule.why}; {add}leave {either} out"
            )


def table(kind: type) -> list[tuple[str, str]]:
    """What can't be combined and why, as rows of the docs.

    Args:
        kind: the class of settings.
    """
    options = options_of(kind)
    rows = []
    for rule in EXCLUSIONS:
        flags = [f"`{options[name].flags[0]}`" for name in rule.names]
        beside = re.sub(r"(--[a-z-]+)( \{\w+\}| planned)?", r"`\1`", rule.beside)
        rows.append((f"{' or '.join(flags)} {beside}", rule.why))
    return rows


def _shown(option: Option, value: Any) -> str:
    """An option with its value, as on the command line; without that of a store, which may hold a password."""
    flag = option.flags[0]
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return flag if isinstance(value, dict) or option.name == "store" else f"{flag} {value}"
