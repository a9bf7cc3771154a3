"""`penstock train`: its options live with the training loop, which torchrun starts without this command line."""

from __future__ import annotations

from penstock.cli.app import app
from penstock.train.command import train

app.command(short_help="Train a GPT, BERT, CLIP or Hugging Face decoder.")(train)
