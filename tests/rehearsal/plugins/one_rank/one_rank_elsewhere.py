"""Starts one rank of an engine with another tree: the rank REHEARSAL_OTHER_RANK gets the folder REHEARSAL_OTHER_TREE.

The engine spawns its ranks first and in order, and multiprocessing numbers them; their starts may overlap. Its
executable is replaced by a script here. A child takes over its parent's sys.path, so the other tree is put before it
when that is done.
"""

import multiprocessing
import os
import stat
import sys
import tempfile
from pathlib import Path

SCRIPT = """#!{python}
import os, sys
arguments = sys.argv[1:]
place = arguments.index("-c") + 1 if "-c" in arguments else 0
if place and "spawn_main" in arguments[place]:
    first = "import multiprocessing.spawn as s, sys; p = s.prepare; "
    first += "s.prepare = lambda d: (p(d), d['name'].endswith({number!r}) and sys.path.insert(0, {tree!r}))[0]; "
    arguments[place] = first + arguments[place]
os.execv({python!r}, [{python!r}, *arguments])
"""


def register() -> None:
    if multiprocessing.parent_process() is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="one-rank-"))
    script = folder / "python"
    number = f"Process-{int(os.environ['REHEARSAL_OTHER_RANK']) + 1}"
    what = {"python": sys.executable, "number": number, "tree": os.environ["REHEARSAL_OTHER_TREE"]}
    script.write_text(SCRIPT.format(**what))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    multiprocessing.set_executable(str(script))
