"""`penstock train`: its options live with the training loop, which torchrun starts without this command line.

`--help` shows those that most runs need, `--help-all` every one.
"""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from penstock.cli.app import app
from penstock.train.command import ALL, COMMON, GROUPS, train


class _GroupedHelpCommand(TyperCommand):
    """A command whose help lists its options in groups."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        left = {param.name: record for param in self.get_params(ctx) if (record := param.get_help_record(ctx))}
        for title, names in GROUPS.items():
            records = [left.pop(name) for name in names if name in left and (ALL in ctx.meta or name in COMMON)]
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)
        if ALL not in ctx.meta:
            formatter.write_paragraph()
            formatter.write_text(f"{len(left)} more options, with --help-all")


app.command(cls=_GroupedHelpCommand, short_help="Train a built-in model, a Hugging Face one or your own.")(train)
