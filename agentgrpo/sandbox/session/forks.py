"""Copies a session of an image: its files as a snapshot, the state of its bash as a script.

A copy is exact or is not made. If the session has state that cannot be copied (processes, files in
/dev/shm, descriptors that the shell opened, jobs), or if a shell that has run the script differs,
the caller repeats the session's steps instead.
"""

from __future__ import annotations

import os
import re
import threading
from contextlib import closing
from typing import NamedTuple

from agentgrpo.sandbox.isolation.channels import process_tree
from agentgrpo.sandbox.isolation.errors import SandboxException, SandboxInfraError
from agentgrpo.sandbox.isolation.images import SIZE, Image
from agentgrpo.sandbox.isolation.snapshots import lower_dirs
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus

MAX_BYTES = 16 << 30
"""Size of all copies of this process. A copy in progress counts with its maximum size."""
DUMP = r"""(
builtin set +o; builtin echo "# $-"; builtin echo '#'; builtin set +efuvx
builtin printf 'builtin cd -- %q; builtin unset OLDPWD\n' "$(builtin pwd)"
builtin umask -p; builtin shopt -p; builtin alias -p; builtin declare -f; builtin declare -F
builtin enable -n; builtin trap -p; builtin echo 'builtin set --' "${@@Q}"
for _agentgrpo_fd in /proc/$BASHPID/fd/*; do
    [[ -p $_agentgrpo_fd ]]; _agentgrpo_pipe=$?; [[ $_agentgrpo_fd -ef /proc/$BASHPID/fd/1 ]]
    builtin echo "# ${_agentgrpo_fd##*/} $_agentgrpo_pipe $?"
done
builtin printf '# %q\n' "$(builtin ulimit -a)" "${DIRSTACK[*]}" "${!-}"
builtin echo '#'; builtin declare -p; builtin echo '#'
)"""
"""Prints a script in three parts. `builtin` is needed: the session may have redefined the names."""
DYNAMIC = frozenset(
    {
        *("_", "BASHPID", "BASH_ALIASES", "BASH_ARGC", "BASH_ARGV", "BASH_ARGV0", "BASH_CMDS"),
        *("BASH_COMMAND", "BASH_EXECUTION_STRING", "BASH_LINENO", "BASH_MONOSECONDS"),
        *("BASH_SOURCE", "BASH_SUBSHELL", "BASHOPTS", "COMP_WORDBREAKS", "DIRSTACK"),
        *("EPOCHREALTIME", "EPOCHSECONDS", "FUNCNAME", "GROUPS", "HISTCMD", "LINENO"),
        *("PIPESTATUS", "RANDOM", "SECONDS", "SHELLOPTS", "SRANDOM"),
    }
)
"""Variables that bash sets, or that other lines of the script set."""
PROCESSES = 3
"""Processes of an idle session: init, the interpreter and bash."""
_SEPARATOR = "\n#\n"
_VARIABLE = re.compile(r"^declare -\S+ (\w+)(?:=.*)?\n(?:(?!declare -).*\n)*", re.MULTILINE)
_EVENT = re.compile(r"^trap -- .*(DEBUG|ERR|RETURN)$", re.MULTILINE)
_lock = threading.Lock()
_bytes = 0


class Fork(NamedTuple):
    """A copy of a session. Call close() when no session uses it any more."""

    image: Image
    shell: str
    bytes: int
    pool: SandboxPool

    def close(self) -> None:
        self.pool.discard(self.image)
        _reserve_bytes(-self.bytes)

    def restore(self, session: Session) -> bool:
        """Bring a session that was started from image to the copied state. False if it differs."""
        if session.places.image != self.image:
            return False
        session.evaluate(self.shell)
        return _shell_state(session) == self.shell


def fork(session: Session, pool: SandboxPool) -> Fork | None:
    """Copy a session of an image. None if the copy cannot be exact or would exceed MAX_BYTES."""
    max_bytes = session.limits.home_mib << 20
    if session.places.image is None or not _reserve_bytes(max_bytes):
        return None
    num_bytes = 0
    try:
        shell = None if _has_uncopied_state(session) else _shell_state(session)
        if shell is None:
            return None
        image = session.snapshot()
        try:
            lower_dirs(image)
        except SandboxException:
            pool.discard(image)
            raise
        num_bytes = int(os.getxattr(image.layers[-1], SIZE))
        return Fork(image, shell, num_bytes, pool)
    except SandboxInfraError:
        raise
    except SandboxException:
        return None
    finally:
        _reserve_bytes(num_bytes - max_bytes)


def _reserve_bytes(size: int) -> bool:
    global _bytes
    with _lock:
        fits = _bytes + size <= MAX_BYTES or size < 0
        _bytes += size * fits
        return fits


def _has_uncopied_state(session: Session) -> bool:
    """Whether the session has processes, or files outside of the snapshot."""
    if not session.alive or len(process_tree(session.init_pid, PROCESSES)) > PROCESSES:
        return True
    with closing(session.files()) as files:
        return bool(files.list("/dev/shm"))


def _shell_state(session: Session) -> str | None:
    """A script that brings a new bash to the state of the session's; None if there is none."""
    result = session.evaluate(DUMP)
    text = result.stdout
    if result.status is not StepStatus.OK or len(text.encode()) != result.stdout_bytes:
        return None
    options, _, rest = text.partition(_SEPARATOR)
    body, _, variables = rest.removesuffix(_SEPARATOR).rpartition(_SEPARATOR)
    if not body or _EVENT.search(body):  # such traps would run inside the script
        return None

    def keep_static(match: re.Match[str]) -> str:
        return "" if match[1] in DYNAMIC or match[1].startswith("_agentgrpo_") else match[0]

    body = re.sub(r"shopt -u compat\d+\n", "", body)  # these lines would set BASH_COMPAT
    script = f"{body}\n{_VARIABLE.sub(keep_static, variables)}\n{options}\n"
    return script if len(script) < session.limits.code_kib << 9 else None
