"""Host side of a zygote: start it in its jail, fork sessions from it, end it."""

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import StrEnum
from functools import partial
from itertools import chain
from pathlib import Path
from typing import IO, Any

from agentgrpo import _C
from agentgrpo.sandbox.inside import wire
from agentgrpo.sandbox.isolation import jail, no_namespaces, policy
from agentgrpo.sandbox.isolation.cgroup import ControlGroup, owner_name, stale_of
from agentgrpo.sandbox.isolation.channels import (
    Channels,
    SessionPipes,
    await_ready,
    process_tree,
    ready,
)
from agentgrpo.sandbox.isolation.errors import (
    SandboxInfraError,
    SandboxUnavailable,
    TemplateUnavailable,
)
from agentgrpo.sandbox.isolation.guards import as_bytes
from agentgrpo.sandbox.isolation.images import Image, store_dir
from agentgrpo.sandbox.isolation.jail import FIRST_UID, NUM_UIDS, Bind, has_own_ids
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.snapshots import lower_dirs
from agentgrpo.sandbox.isolation.template import Template

START_TIMEOUT_S = 60.0
SPAWN_TIMEOUT_S = 10.0
END_S = 2.0
"""Time for a zygote to end by itself before it is killed."""
STAGES = ("/mnt", "/media", "/srv", "/run", "/tmp")
MIB = 1 << 20
ADDR_NO_RANDOMIZE = 0x40000


class Rung(StrEnum):
    """Ways of isolating sessions from each other, strongest and fastest first."""

    ZYGOTE_USERNS = "zygote-userns"
    """Each session has all namespaces, including a user namespace, inside a common jail."""
    ZYGOTE_ROOT = "zygote-root"
    """The same without user namespaces: one user id per session instead. Needs root."""
    BARE = "bare"
    """No namespaces: system call filter (no sockets, no signals), Landlock, limits, and one user id
    per session if this process is root. Only for ``allow_degraded=True``."""


LADDER = (Rung.ZYGOTE_USERNS, Rung.ZYGOTE_ROOT)
MODES = {
    Rung.ZYGOTE_USERNS: wire.MODE_USERNS,
    Rung.ZYGOTE_ROOT: wire.MODE_ROOT,
    Rung.BARE: wire.MODE_BARE,
}
_uids = itertools.count(secrets.randbelow(NUM_UIDS))  # random start: other processes count too


@contextlib.contextmanager
def _addresses_not_randomized() -> Iterator[None]:
    """Start processes with the same addresses in each run, where that is allowed, so that code
    which prints addresses (``<object at 0x...>``) is reproducible.
    """
    personality = ctypes.CDLL(None).personality
    previous = personality(0xFFFFFFFF)
    personality(previous | ADDR_NO_RANDOMIZE)
    try:
        yield
    finally:
        personality(previous)


class Zygote:
    """A preloaded interpreter in its jail, from which sessions are forked. spawn() is thread-safe.

    Raises:
        SandboxUnavailable: the jail cannot be set up here; the message has the remedy.
    """

    def __init__(
        self,
        template: Template,
        limits: Limits,
        *,
        rung: Rung = Rung.ZYGOTE_USERNS,
        nsjail: str | None = None,
        bound_address_space: bool = True,
        own_proc: bool = True,
        own_network: bool = True,
    ) -> None:
        self.template, self.limits, self.rung, self.own_proc = template, limits, rung, own_proc
        self._bounded, self._own_network = bound_address_space, own_network
        self._numbers = itertools.count()
        self._own_ids = has_own_ids() or rung in (Rung.ZYGOTE_ROOT, Rung.BARE)
        if (template.tree or template.image) and rung is not Rung.ZYGOTE_USERNS:
            kind = "image" if template.image else "tree"
            raise SandboxUnavailable(f"a template's {kind} needs user namespaces; {rung} has none")
        if rung is not Rung.BARE:  # that rung does not promise it
            jail.require_no_dumps()
        self.nsjail = "" if rung is Rung.BARE else jail.find_nsjail(nsjail)
        remove_stale_scratch()
        self._scratch = tempfile.mkdtemp(prefix=f"{owner_name(os.getpid())}.")
        self._log = os.memfd_create("nsjail-log")
        self._host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid, self._process, self._lifeline = 0, -1, -1
        self._closed, self._failed = False, ""
        try:
            lifeline, self._lifeline = os.pipe()
            with guest, open(lifeline, "rb") as lifeline_file:
                self.pid = self._launch(guest.fileno(), lifeline)
                with contextlib.suppress(ProcessLookupError):  # it has ended already
                    self._process = os.pidfd_open(self.pid)
                    _end_with(lifeline_file, self.pid)
            find = no_namespaces.places if rung is Rung.BARE else jail.jail_places
            self._places = find(template)
            self.python_version = self._greet(self._settings())
            for pid in process_tree(self.pid):
                # If the machine runs out of memory, the kernel kills sessions, not the trainer.
                # Sessions inherit the value and cannot lower it.
                Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        except BaseException:
            self.close()
            raise

    def _launch(self, guest_fd: int, lifeline: int) -> int:
        """Start nsjail by posix_spawn: forking a trainer with gigabytes resident takes 100 ms."""
        binds = jail.shown_paths(self.template, str(_C.__file__))
        if self.template.image:
            binds.append(Bind(str(store_dir() / "layers"), "/sandbox/layers"))
        config = os.path.join(self._scratch, "nsjail.cfg")
        env = {"TMPDIR": self._scratch}
        argv = [self.nsjail, "--config", config]
        if self.rung is Rung.BARE:
            argv, env = no_namespaces.command(self.template, self._scratch), dict(jail.ENVIRONMENT)
        elif os.geteuid() == 0:
            argv, binds = self._stage(argv, env, binds)
        text = jail.jail_config(
            self.template,
            binds,
            own_users=self.rung is Rung.ZYGOTE_USERNS,
            own_proc=self.own_proc,
            bounded=self._bounded,
            own_network=self._own_network,
        )
        Path(config).write_text(text)
        with open(os.devnull, "r+b") as null:
            actions = [
                (os.POSIX_SPAWN_DUP2, lifeline, 0),
                (os.POSIX_SPAWN_DUP2, null.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, self._log, 2),
                (os.POSIX_SPAWN_DUP2, guest_fd, jail.HOST_FD),
            ]
            defaults = [signal.SIGINT, signal.SIGPIPE]
            with _addresses_not_randomized():
                return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=defaults)

    def _settings(self) -> dict[str, Any]:
        """The settings of inside/zygote.py."""
        template, limits, image = self.template, self.limits, bool(self.template.image)
        bare = self.rung is Rung.BARE
        program = policy.build(
            namespaced=not bare,
            shared_memory=not self._bounded,
            own_user=not bare or os.geteuid() == 0,
            image=image,
        )
        return {
            "image": image,
            "own_network": self._own_network,
            "own_proc": self.own_proc,
            "extension": no_namespaces.reachable(_C.__file__) if bare else jail.EXTENSION_FILE,
            "homes": self._scratch,
            "readable": no_namespaces.readable_paths(template) if bare else [],
            "site_dirs": self._places.site_dirs,
            "preload": template.preload,
            "python_env": self._places.environment(template),
            "tmpfs": [f"size={mib}m,nr_inodes={limits.inodes},mode=0700"
                      for mib in limits.private_mib],
            "limits": [
                limits.memory_mib * MIB if self._bounded else 0,
                limits.processes,
                max(limits.home_mib, limits.tmp_mib, limits.shm_mib) * MIB,
                limits.cpu_s,
                limits.open_files,
                limits.niceness,
            ],
            "mode": MODES[self.rung],
            "filter": program.hex(),
            "value_bytes": limits.value_kib << 10,
            "traceback_bytes": limits.traceback_kib << 10,
        }  # fmt: skip

    def _stage(
        self, argv: list[str], env: dict[str, str], binds: list[Bind]
    ) -> tuple[list[str], list[Bind]]:
        """For root: bind every source where the jail's user can reach it (inside/launch.py)."""
        used = [bind.source for bind in binds] + [self.nsjail, self._scratch]
        stage = next(
            (
                path
                for path in STAGES
                if os.path.isdir(path) and not any(p.startswith(path + "/") for p in used)
            ),
            None,
        )
        if stage is None:
            raise SandboxUnavailable(
                f"all of {', '.join(STAGES)} contain files of the sandbox; remedy: create an empty "
                "/mnt"
            )
        plan = os.path.join(self._scratch, "plan.json")
        with open(plan, "w") as file:
            staged = [[bind.source, str(i)] for i, bind in enumerate(binds)]
            json.dump({"stage": stage, "binds": staged, "argv": argv, "env": env}, file)
        launcher = os.path.join(os.path.dirname(__file__), "..", "inside", "launch.py")
        binds = [Bind(os.path.join(stage, str(i)), bind.target) for i, bind in enumerate(binds)]
        return [sys.executable, "-I", "-S", "-B", launcher, plan], binds

    def _greet(self, settings: dict[str, Any]) -> str:
        try:
            self._host.sendall(json.dumps(settings).encode())
            self._host.settimeout(START_TIMEOUT_S)
            answer = self._host.recv(1 << 16)
            self._host.settimeout(SPAWN_TIMEOUT_S)
        except OSError as error:
            raise SandboxUnavailable(f"the jail did not start: {error}\n{self.log()}") from error
        if answer.startswith(b"ready "):
            return answer[6:].decode()
        if answer.startswith(b"failed "):
            raise TemplateUnavailable(
                f"template {self.template.name!r} could not be loaded in the jail:\n"
                + answer[7:].decode(errors="replace")
            )
        raise SandboxUnavailable(f"nsjail could not set up the jail:\n{self.log()}")

    def log(self) -> str:
        """Standard error of nsjail and the zygote."""
        if self._log < 0:
            return ""
        return os.pread(self._log, 65536, 0).decode(errors="replace").strip()

    def spawn(
        self, group: ControlGroup | None = None, image: Image | None = None
    ) -> tuple[Channels, Callable[[], None]]:
        """Start a session, with an image if given. Returns its descriptors and the clean-up."""
        number, uid, places = next(self._numbers), self._next_uid(), self._places
        if self.rung is Rung.BARE:
            home = no_namespaces.make_home(self._scratch, number, uid)
            places = replace(places, home=home, tmp=home)
        fields = [f"{uid} {number}", "", ""]
        if image is not None:
            places = replace(places, home=image.workdir or "/", image=image)
            variables = places.environment(self.template).items()
            fields[1:] = [lower_dirs(image), places.home, *chain(*variables)]
        with SessionPipes(uid if os.geteuid() == 0 else None) as pipes:
            with contextlib.ExitStack() as opened:
                groups = opened.enter_context(group.attaching()) if group is not None else []
                message = as_bytes("\0".join(fields))
                try:
                    socket.send_fds(self._host, [message], [*pipes.theirs, *groups])
                except OSError as error:
                    raise SandboxInfraError(
                        f"the zygote is gone ({error}): {self.log()}"
                    ) from error
            pipes.close_theirs()
            received = await_ready(pipes.status, 2 if image is None else 3)
            return pipes.detach(received, self.failure, places), partial(self._clear_up, number)

    def _next_uid(self) -> int:
        """The session's user id on the machine: its own, or the shared one."""
        shared = (
            self.template.tree or self.template.image
        )  # an overlay copies only its user's files
        number = 0 if shared else next(_uids)
        return FIRST_UID + number % NUM_UIDS if self._own_ids else jail.JAIL_ID

    def _clear_up(self, number: int) -> None:
        if self.rung is Rung.BARE:
            no_namespaces.remove(os.path.join(self._scratch, str(number)))

    def failure(self) -> str:
        """Why the zygote's sessions ended; "" if it works.

        The zygote's socket is closed before the kernel kills its sessions, so its end is visible by
        the time a session's end is.
        """
        if self._closed:
            return self._failed
        return "" if self.answers() else f"the session's zygote ended or is stuck: {self.log()}"

    def answers(self) -> bool:
        if self._closed:
            return False
        read, write = os.pipe()
        try:
            try:
                socket.send_fds(self._host, [b"answer"], [write])
            finally:
                os.close(write)
            return ready(read, SPAWN_TIMEOUT_S * 1e3) and bool(os.read(read, 1))
        except OSError:
            return False
        finally:
            os.close(read)

    def give_up(self) -> None:
        """End a zygote that does not answer. Its sessions report that as the reason."""
        self._failed = f"the session's zygote ended or was stuck: {self.log()}"
        self.close()

    def close(self) -> None:
        """End the zygote and all its sessions. Idempotent."""
        self._closed = True
        self._host.close()
        if self._process >= 0:
            _reap(self._process)
            self._process, self.pid = -1, 0
        for fd in (self._log, self._lifeline):
            if fd >= 0:
                os.close(fd)
        self._log = self._lifeline = -1
        no_namespaces.remove(self._scratch)


def _end_with(lifeline: IO[bytes], pid: int) -> None:
    """Make the kernel kill a process when the other end of a pipe is closed, as it is when this
    process is killed. That ends a stopped process too, which would not read the end of file.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, pid)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)


def remove_stale_scratch() -> None:
    """Remove the scratch directories of this user's processes that were killed."""
    for path in stale_of(Path(tempfile.gettempdir())):
        with contextlib.suppress(FileNotFoundError):  # another process removes it at the same time
            if path.lstat().st_uid == os.geteuid():
                no_namespaces.remove(str(path))


def _reap(pidfd: int) -> None:
    """Wait for nsjail, which ends when its zygote does; kill it after END_S. Closes the pidfd.

    By pidfd, not by pid: if the trainer ignores SIGCHLD, the pid may be reused.
    """
    if not ready(pidfd, END_S * 1e3):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        ready(pidfd, None)
    with contextlib.suppress(ChildProcessError):
        os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
    os.close(pidfd)
