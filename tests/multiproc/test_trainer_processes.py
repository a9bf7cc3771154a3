"""The Trainer over pipeline ranks against the plain Trainer in one process: the same numbers, to the bit."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from processes import run_ranks_to_end
from tiers import NIGHTLY
from trainer_runs import Tokens, arguments, run, tiny, trained

pytestmark = [pytest.mark.multiproc, pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


SCHEDULES = ("1f1b", "zb-v") if NIGHTLY else ("zb-v",)


def under_each(rank: int, folder: Path) -> dict[str, dict[str, Any]]:
    """In one start of the processes, each of which loads transformers."""
    return {schedule: trained(rank, folder / schedule, schedule) for schedule in SCHEDULES}


def test_losses_norms_rates_and_weights_are_the_plain_trainers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, Trainer

    plain_trainer = Trainer(tiny(), arguments(tmp_path / "plain", eval_strategy="no"), train_dataset=Tokens())
    plain = run(plain_trainer)
    outcomes = run_ranks_to_end(2, under_each, tmp_path)
    for outcome, schedule in product(outcomes, SCHEDULES):
        whole, resumed = outcome.value[schedule]["whole"], outcome.value[schedule]["resumed"]
        assert [line for line in whole["logged"] if "eval_loss" not in line] == plain["logged"]
        assert whole["loss"] == plain["loss"]
        for name, value in plain["weights"].items():
            assert torch.equal(whole["weights"][name], value), name
            assert torch.equal(resumed["weights"][name], value), name
        assert resumed["logged"] == whole["logged"]
    for schedule in SCHEDULES:
        assert all(rank["optimizer"] > 0 for rank in outcomes[0].value[schedule]["held"])
        opened = AutoModelForCausalLM.from_pretrained(tmp_path / schedule / "final")
        for name, value in opened.state_dict().items():
            assert torch.equal(value, plain["weights"][name]), name
