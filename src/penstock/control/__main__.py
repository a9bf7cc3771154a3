"""A controller as a filter: the first line of its log and events go in, its whole log comes out.

    python -m penstock.control [PARENT] < events.jsonl > control.jsonl

It is a separate process, so that deciding never delays a rank. A line `{"record": ...}` comes back once all lines
before it were heard. Beside it stands whether the controller is `calm`, so that the next iterations need not be told
in full, and whether links between nodes should be probed. A search for better places of the nodes runs in a thread,
and its answer is an event of the log like any other. The process ends with its input. If it is given the number
of the process that started it, it also ends with that one, even in the middle of a decision.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import closing

from penstock.control.background import BackgroundPlanner
from penstock.control.controller import Controller
from penstock.control.events import ControlError, Event, event_from_json
from penstock.control.log import read_header


def follow(lines: Iterable[str], write: Callable[[str], object]) -> None:
    """Feeds the lines to a controller, and writes its log, line by line.

    Raises:
        ControlError: the first line is no header, or a line is neither an event nor a record.
    """
    controller: Controller | None = None
    lock, searched = threading.Lock(), None
    with closing(BackgroundPlanner()) as planner:
        for line in filter(str.strip, lines):
            value = json.loads(line)
            with lock:
                if controller is None:
                    controller = Controller(read_header(value), log=write)
                elif "event" in value:
                    controller.feed(event_from_json(value["event"]))
                elif "record" in value:
                    write(json.dumps({**value, "calm": controller.is_calm, "probe": controller.wants_probes}))
                    planner.follow(controller)
                else:
                    raise ControlError(f"neither an event nor a record: {line[:80]!r}")
            if (search := controller.search) is not None and search is not searched:
                searched = search
                threading.Thread(target=_search, args=(controller, search, lock), daemon=True).start()


def _search(controller: Controller, search: Callable[[], Event], lock: threading.Lock) -> None:
    """Searches while the controller goes on deciding, and feeds it the answer."""
    found = search()
    with lock:
        controller.feed(found)


def _end_with(parent: int) -> None:
    """Ends this process soon after its parent has ended, whoever else still holds its input."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


if __name__ == "__main__":
    os.nice(5)  # ranks come first
    for parent in sys.argv[1:]:
        threading.Thread(target=_end_with, args=[int(parent)], daemon=True).start()
    follow(sys.stdin, lambda line: print(line, flush=True))
