"""The playground: one page that builds, edits, proves, times and plans schedules in the browser, with no server.

    engine/*.py --to_javascript--> event loop, list schedulers, ...   the same source as here
    schedule.js library.js run.js plan.js                             schedules, their proof, the library, planning
    page.html page.css view.js app.js                                 what is seen
                    |
                  page() -> one file that loads nothing

`tests/unit/test_play.py` runs the scripts beside Python's own functions over a thousand schedules.
"""

from penstock.play.assemble import page, save, scripts

__all__ = ["page", "save", "scripts"]
