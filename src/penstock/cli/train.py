"""`penstock train`: the command lives with the training loop, which torchrun starts without this command line."""

from __future__ import annotations

from penstock.cli.app import app
from penstock.train.command import TrainHelp, train

app.command(cls=TrainHelp, short_help="Train a built-in model, a Hugging Face one or your own.")(train)
