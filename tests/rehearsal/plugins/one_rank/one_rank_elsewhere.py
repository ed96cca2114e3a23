"""Starts one rank of an engine with another tree: the rank REHEARSAL_OTHER_RANK gets the folder REHEARSAL_OTHER_TREE.

The engine spawns its ranks in order through multiprocessing's executable, which is replaced by a script here. A child
takes over its parent's sys.path, so the other tree is put before it when that is done.
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
    for number in range(64):
        try:
            os.mkdir(os.path.join({folder!r}, str(number)))
            break
        except FileExistsError:
            continue
    if number == {rank}:
        first = "import multiprocessing.spawn as s, sys; p = s.prepare; "
        first += "s.prepare = lambda d: (p(d), sys.path.insert(0, {tree!r}))[0]; "
        arguments[place] = first + arguments[place]
os.execv({python!r}, [{python!r}, *arguments])
"""


def register() -> None:
    if multiprocessing.parent_process() is not None:
        return
    folder = Path(tempfile.mkdtemp(prefix="one-rank-"))
    script = folder / "python"
    what = {"python": sys.executable, "folder": str(folder)}
    what |= {"rank": int(os.environ["REHEARSAL_OTHER_RANK"]), "tree": os.environ["REHEARSAL_OTHER_TREE"]}
    script.write_text(SCRIPT.format(**what))
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    multiprocessing.set_executable(str(script))
