"""How text becomes microbatches, by name, and which options go together with it. Needs no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.train.checks import SettingsError
from penstock.train.kinds import CAPTIONER, GPT, is_hugging_face
from penstock.train.own_file import is_own

if TYPE_CHECKING:
    from penstock.train.settings import Settings

WINDOWS, ARRIVAL, PLANNED = "windows", "arrival", "planned"
"""Fixed lengths of the text; whole documents as they come; whole documents, planned for the schedule."""
SIZES, MEASURED = "sizes", "measured"
"""Where costs by length come from: the model's sizes, or the first steps of the run."""


def usual_packing(model: str) -> str:
    """The default."""
    return PLANNED if model == CAPTIONER else WINDOWS


def is_record(packing: str | None) -> bool:
    """Whether it names a file with the batches of a run."""
    return packing not in (None, WINDOWS, ARRIVAL, PLANNED)


def check_packing(settings: Settings) -> None:
    """Raises SettingsError for options that exclude whole documents, or that only whole documents take."""
    if settings.model == CAPTIONER and settings.packing == WINDOWS:
        raise SettingsError(
            f"--packing {WINDOWS} cuts a text into fixed lengths, and the samples of a captioner are images and "
            f"texts of their own lengths; give {ARRIVAL} or {PLANNED}"
        )
    if settings.packing == WINDOWS:
        for name, unset in (("length_costs", SIZES), ("microbatch_tokens", None)):
            if getattr(settings, name) != unset:
                raise SettingsError(
                    f"--{name.replace('_', '-')} is for whole documents; add --packing {PLANNED}, or leave it out"
                )
        return
    if settings.model not in (GPT, CAPTIONER) and not is_hugging_face(settings.model):
        raise SettingsError(
            f"--packing {settings.packing} puts several documents into one row, which only a built-in GPT and "
            f"decoders of Hugging Face's keep apart; --model {settings.model} would see one in another: leave it out"
        )
    if is_hugging_face(settings.model) and is_own(settings.data):
        raise SettingsError(
            f"--packing {settings.packing} cuts a text into documents, and --data {settings.data} gives batches that "
            "are made already; leave out one of the two"
        )
    if settings.is_asynchronous:
        instead = "give" if settings.model == CAPTIONER else f"leave out --packing {settings.packing}, or give"
        raise SettingsError(
            f"{settings.schedule} has its updates among the other ops, so that the order of microbatches says what "
            f"each update gathers; {instead} a schedule without such updates"
        )
    if settings.packing == ARRIVAL and settings.microbatch_tokens is not None:
        raise SettingsError(
            f"--packing {ARRIVAL} takes documents as they come, whatever a microbatch then holds; leave out "
            f"--microbatch-tokens, or give --packing {PLANNED}"
        )
