"""`penstock train`: its options live with the training loop, which torchrun starts without this command line."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from penstock.cli.app import app
from penstock.train.command import GROUPS, train


class _Grouped(TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        left = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        for title, names in GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([left.pop(name) for name in names if name in left])
        if left:
            with formatter.section("Other options"):
                formatter.write_dl(list(left.values()))


app.command(cls=_Grouped, short_help="Train a GPT, BERT, CLIP or Hugging Face decoder.")(train)
