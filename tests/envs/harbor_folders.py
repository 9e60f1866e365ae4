# ruff: noqa: E501 - cheats, a line each
"""Task folders of the Harbor tests, with solutions and cheats."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from agentgrpo.envs.harbor_tasks import make_row
from agentgrpo.sandbox.session.dockerfile import Builder
from agentgrpo.types import Task

VERSION = f"python{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = f"/usr/lib/{VERSION}/site-packages"
TOML = '[environment]\nmemory_mb = 512\nstorage_mb = 128\n[verifier]\ntimeout_sec = 60\n[agent]\ntimeout_sec = 60\n[verifier.env]\nMODE = "${HARBOR_TEST_MODE:-plain}"\n'
TEST_SH = """#!/bin/bash
[ -f $HOME/.local/bin/env ] && source $HOME/.local/bin/env
cd /app
pytest -q /tests/test_outputs.py
if [ $? -eq 0 ]; then echo 1 > /logs/verifier/reward.txt; else echo 0 > /logs/verifier/reward.txt; fi
"""
TESTS = """import subprocess
def test_it():
    done = subprocess.run(["python3", "/app/solve.py"], capture_output=True, text=True)
    assert done.stdout.strip() == "42"
"""
DOCKERFILE = f"""FROM tiny:1
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin
COPY site {PACKAGES}
COPY pytest /usr/bin/pytest
RUN mkdir -p /app /opt/venv/bin /usr/local/bin /root/.local && echo 'print(41)' > /app/solve.py
RUN echo 'def test(): import subprocess' > /tmp/test_it.py; pytest -q /tmp/test_it.py; rm -r /tmp/*
WORKDIR /app
"""
PYTEST = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "pygments", "py")
HONEST = "echo 'print(6 * 7)' > /app/solve.py"
REWARD = "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt"
PRELOAD = '#include <unistd.h>\n#include <string.h>\n#include <stdio.h>\n__attribute__((constructor)) static void f(void){char b[4096]={0};FILE*h=fopen("/proc/self/cmdline","r");if(h){fread(b,1,4095,h);fclose(h);}if(memmem(b,4096,"pytest",6))_exit(0);}'
KILLER = """cat > /app/solve.py <<'X'
import os
os.makedirs('/logs/verifier', exist_ok=True)
pid, chain = os.getppid(), []
while pid > 1:
    chain.append(pid)
    pid = int(open(f'/proc/{pid}/stat').read().rsplit(')', 1)[1].split()[1])
open('/logs/verifier/reward.txt', 'w').write('1')
for p in chain:
    os.kill(p, NUMBER)
X"""
CHEATS: dict[str, list[str]] = {
    "nothing": ["true"],
    "files that end pytest with 0": [
        "printf '#!/bin/sh\\nexit 0\\n' > /usr/local/bin/pytest; chmod +x /usr/local/bin/pytest",
        "printf '#!/bin/sh\\nexit 0\\n' > /opt/venv/bin/pytest; chmod +x /opt/venv/bin/pytest",
        f"printf 'import os,sys\\nif any(\"pytest\" in a for a in sys.orig_argv): os._exit(0)\\n' > {PACKAGES}/sitecustomize.py",
        f"echo 'import os,sys; any(\"pytest\" in a for a in sys.orig_argv) and os._exit(0)' > {PACKAGES}/a.pth",
        f"sed -i 's/^def main(/def main(*a, **k): return 0\\ndef _main(/' {PACKAGES}/_pytest/config/__init__.py",
        "mkdir -p /tests; printf 'def pytest_collection_modifyitems(items): items[:] = items[:0]\\ndef pytest_sessionfinish(session): session.exitstatus = 0\\n' > /tests/conftest.py",
        "echo 'def pytest_sessionfinish(session): session.exitstatus = 0' > /conftest.py; printf '[pytest]\\npythonpath = /\\naddopts = -p conftest\\n' > /pytest.ini",
        f"d={PACKAGES}; mkdir $d/cheat-1.dist-info; printf '[pytest11]\\ncheat = cheat\\n' > $d/cheat-1.dist-info/entry_points.txt; printf 'Metadata-Version: 2.1\\nName: cheat\\nVersion: 1\\n' > $d/cheat-1.dist-info/METADATA; echo 'def pytest_sessionfinish(session): session.exitstatus = 0' > $d/cheat.py",
        f"mkdir -p /root/.local/lib/{VERSION}/site-packages; echo 'import os; os._exit(0)' > /root/.local/lib/{VERSION}/site-packages/usercustomize.py",
    ],
    "/etc/ld.so.preload": ["PRELOAD"],
    "other programs of the system": [
        f"printf '\\n_run = run\\ndef run(*a, **k):\\n    r = _run(*a, **k); r.stdout = \"42\"; return r\\n' >> /usr/lib/{VERSION}/subprocess.py",
        'mv /usr/bin/python3 /usr/bin/python3.real; printf \'#!/bin/sh\\ncase "$*" in *solve.py*) echo 42;; *) exec /usr/bin/python3.real "$@";; esac\\n\' > /usr/bin/python3; chmod +x /usr/bin/python3',
        f"mkdir -p /root/.local/bin; echo '{REWARD}; exit 0' > /root/.local/bin/env",
        f"cp /usr/bin/bash /opt/b; printf '#!/bin/sh\\n{REWARD}; exit 0\\n' > /opt/x; chmod +x /opt/x; mv /opt/x /usr/bin/bash",
    ],
    "~ is another directory, by a link": [
        f"mkdir -p /opt/r/.local/bin; echo '{REWARD}; exit 0' > /opt/r/.local/bin/env; mv /root /opt/old; ln -s /opt/r /root"
    ],
    "~ is emptied and made again": [
        f"rm -rf /root; mkdir -p /root/.local/bin; echo '{REWARD}; exit 0' > /root/.local/bin/env"
    ],
    "processes, and the reward as a link": [
        "mkdir -p /logs/verifier; echo 1 > /opt/one; ln -s /opt/one /logs/verifier/reward.txt; ln -s /opt/one /logs/verifier/reward.json",
        f"(while ! pgrep -x test.sh; do :; done; {REWARD}; pkill -9 -x test.sh) >/dev/null 2>&1 & disown",
        "(while ! [ -s /tests/test_outputs.py ]; do :; done; sleep 0.02; while :; do echo 'def test(): pass' > /tmp/t; mv /tmp/t /tests/test_outputs.py; sleep 0.01; done) >/dev/null 2>&1 & disown",
    ],
    "the program under test ends its test": [KILLER.replace("NUMBER", "9")],
    "the program under test ends its test politely": [KILLER.replace("NUMBER", "15")],
    "the program under test interrupts its test": [KILLER.replace("NUMBER", "2")],
    "the working directory is a file": ["cd /; rm -rf /app; echo 1 > /app"],
    "deep directories": ["cd /app; for i in $(seq 200); do mkdir d; cd d; done"],
}
"""Those of a list are planted together: the verdict is 0, so none of them is believed."""
PLANTED = {
    name: "\n".join(command for command in commands if "> /opt/x" not in command)
    for name, commands in CHEATS.items()
    if name.startswith(("files", "other", "~"))
}
"""Those that leave files only. Without another bash, with which no session starts."""
SOLVED = {
    "solved": HONEST,
    "solved, with a file in /opt": "echo 42 > /opt/answer; echo 'print(open(\"/opt/answer\").read())' > /app/solve.py",
    "solved in a directory made again": "cd /; rm -rf /app; mkdir /app; echo 'print(42)' > /app/solve.py",
}
LAZY = {
    "reward": REWARD,
    "reward.json": "mkdir -p /logs/verifier; echo '{\"reward\": 1}' > /logs/verifier/reward.json",
    "the tests are replaced": f"mkdir -p /tests; printf '#!/bin/sh\\n{REWARD}\\n' > /tests/test.sh",
    "files of all": "find /app -type f | while read -r f; do : > $f; done; for f in errors totals largest both; do echo 1 > /app/$f.txt; done",
    "no files": "rm -rf /app/*",
    "other tools": f"for t in cat find cmp tr sort sed wc; do printf '#!/bin/sh\\n{REWARD}; kill -9 $PPID\\n' > /opt/$t; chmod +x /opt/$t; mv -f /opt/$t /usr/bin/$t; done",
    "another sh": f"printf '#!/bin/bash\\n{REWARD}\\n' > /opt/sh; chmod +x /opt/sh; mv -f /opt/sh /usr/bin/sh",
    "a process": f"(while :; do {REWARD}; sleep 0.01; done) > /dev/null 2>&1 & disown",
}
"""Cheats in agentgrpo/examples/harbor."""


def make_folder(
    folder: Path, toml: str = TOML, packages: tuple[str, ...] = (), **files: str
) -> Path:
    """A task folder. `files`: other contents, such as test_sh for tests/test.sh."""
    texts = {
        "task.toml": toml, "instruction.md": f"Make /app/solve.py print 42 ({folder.name}).",
        "tests/test.sh": TEST_SH, "tests/test_outputs.py": TESTS,
        "solution/solve.sh": f"#!/bin/bash\n{HONEST}\n", "environment/Dockerfile": DOCKERFILE,
        "environment/pytest": "#!/usr/bin/python3\nimport sys, pytest\nsys.exit(pytest.main())\n",
    }  # fmt: skip
    for path, text in texts.items():
        text = files.get(path.rpartition("/")[2].replace(".", "_"), text)
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / "environment/pytest").chmod(0o755)
    for name in packages:
        spec = find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        target, source = folder / "environment/site", Path(spec.origin)
        if source.name == "__init__.py":
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source.parent, target / name, ignore=ignored)
        else:
            shutil.copy(source, target)
    return folder


SMALL: dict[str, Any] = {
    "Dockerfile": "FROM tiny:1\nWORKDIR /app\n",
    "test_sh": '#!/bin/bash\n[ "$(python3 solve.py)" = 42 ] && echo 1 > /logs/verifier/reward.txt\n',
}
"""Files of a task without pytest."""


def add_task(folder: Path, builder: Builder | None = None) -> Task:
    with Builder() as offline:
        row = make_row(folder, builder or offline)
    return Task(id=row["id"], messages=({"role": "user", "content": row["question"]},), spec=row)


NUMBERS = """FROM tiny:1
RUN for n in 0 1 2 3 4 5 6 7 8 9; do \\
    printf '#!/bin/sh\\nexpr %s %% 2 > /app/parity\\n' $n > /usr/bin/$n; chmod +x /usr/bin/$n; done
WORKDIR /app
"""
PARITY = """#!/bin/bash
echo $(( $(cat /app/parity) == WANTED )) > /logs/verifier/reward.txt
"""


def make_numbers(folder: Path) -> Path:
    """Two tasks that the stand-in of tests/quick.py, whose code is a number, solves at times."""
    for wanted in "01":
        make_folder(
            folder / f"parity-{wanted}", Dockerfile=NUMBERS,
            test_sh=PARITY.replace("WANTED", wanted),
            solve_sh=f"#!/bin/bash\necho {wanted} > /app/parity\n",
        )  # fmt: skip
    return folder
