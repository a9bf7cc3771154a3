"""`penstock data prepare`: text tokenised once, so that training maps it and starts at once.

penstock data prepare my-texts/ corpus --tokenizer tokenizer.json
"""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.app import app
from penstock.cli.options import Json
from penstock.cli.output import plural, print_json

data = typer.Typer(
    help="Prepare text for training.", no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(data, name="data")


@data.callback()
def root() -> None:
    """Prepare text for training."""


@data.command(short_help="Tokenise text into a .bin/.idx pair.")
def prepare(
    source: Annotated[
        str,
        typer.Argument(metavar="TEXT", help="A text file, a folder, JSONL with a text field; stdlib is Python's."),
    ],
    prefix: Annotated[str, typer.Argument(metavar="PREFIX", help="Writes PREFIX.bin and PREFIX.idx.")],
    tokenizer: Annotated[str, typer.Option("--tokenizer", help="bytes, or a tokenizers JSON file.")] = "bytes",
    end_of_document: Annotated[
        bool,
        typer.Option("--end-of-document/--no-end-of-document", help="End each document with the tokenizer's token."),
    ] = True,
    json: Json = False,
) -> None:
    """Tokenise text into a Megatron .bin/.idx pair, which training maps into memory."""
    from penstock.data import ByteTokenizer, load_tokenizer
    from penstock.data import prepare as write

    chosen = ByteTokenizer() if tokenizer == "bytes" else load_tokenizer(tokenizer)
    made = write(None if source == "stdlib" else source, prefix, chosen, append_eod=end_of_document)
    if json:
        print_json(
            {
                "prefix": str(made.prefix),
                "num_documents": made.num_documents,
                "num_tokens": made.num_tokens,
                "num_text_bytes": made.num_text_bytes,
                "dtype": made.dtype,
                "seconds": made.seconds,
            }
        )
    else:
        print(
            f"wrote {made.prefix}.bin and .idx: {plural(made.num_documents, 'document')}, "
            f"{plural(made.num_tokens, 'token')} as {made.dtype}, in {made.seconds:.1f} s"
        )
