"""`penstock play`: the playground in a browser, served from this machine or written as one file.

penstock play          penstock play zb-v --ranks 4 --microbatches 8          penstock play --out play.html
"""

from __future__ import annotations

import contextlib
import webbrowser
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any
from urllib.parse import quote

import typer

from penstock.cli import source
from penstock.cli.app import app
from penstock.cli.failure import Misuse
from penstock.cli.options import Json, page_option, taken
from penstock.cli.output import print_json
from penstock.schedule import check
from penstock.train.options import options_of, with_options

HOST = "127.0.0.1"


@app.command(short_help="Open the playground: schedules in the browser, proved and timed as you edit.")
@with_options(source.GivenCounts)
def play(
    schedule: Annotated[
        str | None, typer.Argument(metavar="[NAME|FILE]", help=f"The schedule to open. {source.SCHEDULE}.")
    ] = None,
    out: Annotated[
        str | None, page_option("Where the result goes: the page, .html, which is then not served.", "the playground")
    ] = None,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port to use, for serving the page. [any free port]")
    ] = 0,
    json: Json = False,
    **given: Any,
) -> None:
    """Open a page to pick or write a schedule, and see it proved and timed while you change times and link delays.

    The page needs no network and no server: written with --out it opens as a file. When it is served, only this
    machine reaches it, and Ctrl-C ends that. With --json the address is printed, and no browser is opened.
    """
    from penstock.play import page, save

    fragment = ""
    if schedule is not None:
        opened = source.read_or_build(schedule, taken(source.GivenCounts, given))
        check(opened)
        fragment = "#g=" + quote(str(opened), safe="")
    elif extra := next((name for name in ("ranks", "microbatches", "options") if name in given), None):
        flag = options_of(source.GivenCounts)[extra].flags[0]
        raise Misuse(f"{flag} is for a schedule: name one, like penstock play zb-v --ranks 4 --microbatches 8")
    if out is not None:
        if port:
            raise Misuse(f"--port {port} is for a page that is served, and --out writes it; leave one of them out")
        save(out)
        if json:
            print_json({"out": out, "fragment": fragment})
        else:
            print(f"wrote {out}" + (f"; open it with {fragment} after its name" if fragment else ""))
        return
    try:
        server = ThreadingHTTPServer((HOST, port), _handler(page().encode()))
    except OSError as error:
        raise Misuse(f"--port {port}: {error.strerror}; give another, or none for any that is free") from None
    address = f"http://{HOST}:{server.server_port}/{fragment}"
    if json:
        print_json({"url": address})
    else:
        print(f"{address}\nCtrl-C ends it.")
    with server, contextlib.suppress(KeyboardInterrupt):
        if not json:
            webbrowser.open(address)
        server.serve_forever()


def _handler(page: bytes) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        """Answers with the page, and with nothing else."""

        def do_GET(self) -> None:
            is_page = self.path.partition("?")[0] == "/"
            self.send_response(200 if is_page else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(page) if is_page else 0))
            self.end_headers()
            if is_page:
                self.wfile.write(page)

        def log_message(self, format: str, *args: object) -> None:
            """Says nothing: requests are the browser's business."""

    return PageHandler
