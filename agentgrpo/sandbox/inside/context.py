"""Another Python context of a session: a new interpreter, started by the session's init.

Usage: python context.py VALUE_BYTES TRACEBACK_BYTES NOTEBOOK [SITE_DIR ...], with the descriptors 3
and 4 of repl.py. NOTEBOOK is "IPython" to run cells in a notebook, otherwise "sys".
"""

import fcntl
import importlib
import os
import sys

sys.path.insert(0, os.path.dirname(__file__))
from load import isolated  # type: ignore[import-not-found]

loop = isolated("repl")
for fd in (3, 4):
    fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
value_bytes, traceback_bytes, notebook, *site_dirs = sys.argv[1:]
sys.path[:] = [*sys.path[1:], *site_dirs]
importlib.import_module(notebook)
loop["serve"](loop["prepare"](dict(os.environ), int(value_bytes), int(traceback_bytes)))
