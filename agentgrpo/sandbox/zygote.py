"""The host's handle on a zygote: start it in its jail, ask it for sessions, end it."""

import json
import os
import select
import shutil
import signal
import socket
import struct
import sys
import tempfile
from dataclasses import dataclass
from typing import Any

from agentgrpo import _C
from agentgrpo.sandbox import policy
from agentgrpo.sandbox.errors import SandboxInfraError, SandboxUnavailable
from agentgrpo.sandbox.jail import (
    EXTENSION_FILE,
    HOST_FD,
    JAIL_ID,
    Bind,
    find_nsjail,
    shown_paths,
    zygote_config,
)
from agentgrpo.sandbox.limits import Limits
from agentgrpo.sandbox.template import Template

START_TIMEOUT_S = 60.0
SPAWN_TIMEOUT_S = 10.0
STAGES = ("/mnt", "/media", "/srv", "/run", "/tmp")
REPORT = struct.Struct("<IiiiqQ")  # struct sandbox_report in csrc/sandbox.h
REPORT_READY, REPORT_EXIT, REPORT_FAILED = 1, 2, 3
SETUP_STEPS = (
    "cloning into new namespaces",
    "mapping its user",
    "mounting its private directories",
    "mounting its /proc",
    "setting up its network and host name",
    "setting resource limits",
    "dropping privileges",
    "forking the interpreter",
    "arranging its descriptors",
    "installing the system call filter",
)
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Channels:
    """The host's descriptors of one live session. Whoever holds this closes them."""

    request: int
    response: int
    out: int
    err: int
    status: int
    init: int
    """pidfd of PID 1 of the session"""
    interpreter: int
    """pidfd of PID 2, which runs the untrusted code"""

    def close(self) -> None:
        for name in self.__slots__:
            os.close(getattr(self, name))


def _settings(template: Template, limits: Limits, *, bound_address_space: bool) -> dict[str, Any]:
    size = f"size={{}}m,nr_inodes={limits.inodes},mode=0700"
    largest_file = max(limits.home_mib, limits.tmp_mib, limits.shm_mib) * MIB
    return {
        "extension": EXTENSION_FILE,
        "site_dirs": list(template.site_dirs),
        "preload": list(template.preload),
        "python_env": {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": "/home/user",
            "LANG": "C.UTF-8",
            "TMPDIR": "/tmp",
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            **template.env,
        },
        "home": size.format(limits.home_mib),
        "tmp": size.format(limits.tmp_mib),
        "shm": size.format(limits.shm_mib),
        "address_space": limits.memory_mib * MIB if bound_address_space else 0,
        "processes": limits.processes,
        "open_files": limits.open_files,
        "file_size": largest_file,
        "cpu_s": limits.cpu_s,
        "niceness": limits.niceness,
        "own_users": True,
        "uid": JAIL_ID,
        "filter": policy.build().hex(),
        "value_bytes": limits.value_kib << 10,
        "traceback_bytes": limits.traceback_kib << 10,
    }


class Zygote:
    """One preloaded interpreter in its jail. ``spawn()`` may be called from several threads.

    Raises:
        SandboxUnavailable: the jail cannot be set up here; the message says what to do.
    """

    def __init__(
        self,
        template: Template,
        limits: Limits,
        *,
        nsjail: str | None = None,
        bound_address_space: bool = True,
    ) -> None:
        self.template = template
        self.nsjail = find_nsjail(nsjail)
        self._scratch = tempfile.mkdtemp(prefix="agentgrpo-sandbox-")
        self._log = os.memfd_create("nsjail-log")
        self._host, guest = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = 0
        try:
            with guest:
                self.pid = self._launch(guest.fileno())
            settings = _settings(template, limits, bound_address_space=bound_address_space)
            self.python_version = self._greet(settings)
        except BaseException:
            self.close()
            raise

    def _launch(self, guest_fd: int) -> int:
        """Start nsjail by posix_spawn: a fork of a trainer with gigabytes resident takes 100 ms."""
        binds = shown_paths(self.template, str(_C.__file__))
        config = os.path.join(self._scratch, "nsjail.cfg")
        env = {"TMPDIR": self._scratch}
        argv = [self.nsjail, "--config", config]
        if os.geteuid() == 0:
            argv, binds = self._stage(argv, env, binds)
        with open(config, "w") as file:
            file.write(zygote_config(self.template, binds, open_files=4096))
        with open(os.devnull, "r+b") as null:
            actions = [
                (os.POSIX_SPAWN_DUP2, null.fileno(), 0),
                (os.POSIX_SPAWN_DUP2, null.fileno(), 1),
                (os.POSIX_SPAWN_DUP2, self._log, 2),
                (os.POSIX_SPAWN_DUP2, guest_fd, HOST_FD),
            ]
            defaults = [signal.SIGINT, signal.SIGPIPE]
            return os.posix_spawn(argv[0], argv, env, file_actions=actions, setsigdef=defaults)

    def _stage(
        self, argv: list[str], env: dict[str, str], binds: list[Bind]
    ) -> tuple[list[str], list[Bind]]:
        """For root: bind every source where the jail's user can reach it (guest/launch.py)."""
        touched = [bind.source for bind in binds] + [self.nsjail, self._scratch]
        stage = next(
            (
                path
                for path in STAGES
                if os.path.isdir(path) and not any(p.startswith(path + "/") for p in touched)
            ),
            None,
        )
        if stage is None:
            raise SandboxUnavailable(
                f"every directory of {', '.join(STAGES)} is in use by the sandbox's own files; "
                "remedy: create an empty /mnt"
            )
        plan = os.path.join(self._scratch, "plan.json")
        with open(plan, "w") as file:
            staged = [[bind.source, str(i)] for i, bind in enumerate(binds)]
            json.dump({"stage": stage, "binds": staged, "argv": argv, "env": env}, file)
        launcher = os.path.join(os.path.dirname(os.path.abspath(__file__)), "guest", "launch.py")
        binds = [Bind(os.path.join(stage, str(i)), bind.target) for i, bind in enumerate(binds)]
        return [sys.executable, "-I", "-S", "-B", launcher, str(_C.__file__), plan], binds

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
            raise SandboxUnavailable(
                f"template {self.template.name!r} could not be loaded in the jail:\n"
                + answer[7:].decode(errors="replace")
            )
        raise SandboxUnavailable(f"nsjail could not set up the jail:\n{self.log()}")

    def log(self) -> str:
        """What nsjail and the zygote wrote to their standard error."""
        return os.pread(self._log, 65536, 0).decode(errors="replace").strip()

    def spawn(self) -> Channels:
        """Start a session; its interpreter is ready or about to be.

        Raises:
            SandboxInfraError: the zygote is gone, or a step of the setup failed.
        """
        channels, theirs = self._make_channels()
        try:
            socket.send_fds(self._host, [b"+"], theirs)
        except OSError as error:
            for fd in channels[:4]:
                os.close(fd)
            channels[4].close()
            raise SandboxInfraError(f"the zygote is gone ({error}): {self.log()}") from error
        finally:
            for fd in theirs:
                os.close(fd)
        status = channels[4]
        try:
            init, interpreter = _await_ready(status)
        except BaseException:
            for fd in channels[:4]:
                os.close(fd)
            status.close()
            raise
        return Channels(*channels[:4], status.detach(), init, interpreter)

    @staticmethod
    def _make_channels() -> tuple[tuple[int, int, int, int, socket.socket], list[int]]:
        """The host's (request, response, out, err, status socket), and the session's in order."""
        opened: list[int] = []
        try:
            for _ in range(4):
                opened += os.pipe()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            for fd in opened:
                os.close(fd)
            raise SandboxInfraError(f"no descriptors for another session: {error}") from error
        request_r, request_w, response_r, response_w, out_r, out_w, err_r, err_w = opened
        for fd in (request_w, response_r, out_r, err_r):
            os.set_blocking(fd, False)
        if os.geteuid() == 0:  # so that the code may open /dev/stdout
            os.fchown(out_w, JAIL_ID, JAIL_ID)
            os.fchown(err_w, JAIL_ID, JAIL_ID)
        mine = (request_w, response_r, out_r, err_r, ours)
        return mine, [theirs.detach(), request_r, response_w, out_w, err_w]

    def close(self) -> None:
        """End the zygote and with it every session. May be called twice."""
        self._host.close()
        if self.pid:
            _reap(self.pid)
            self.pid = 0
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        shutil.rmtree(self._scratch, ignore_errors=True)


def _await_ready(status: socket.socket) -> tuple[int, int]:
    """The pidfds of PID 1 and PID 2, once PID 1 has set the session up."""
    status.settimeout(SPAWN_TIMEOUT_S)
    try:
        message, fds, _, _ = socket.recv_fds(status, REPORT.size, 2)
    except OSError as error:
        raise SandboxInfraError(f"a new session did not report: {error}") from error
    finally:
        status.settimeout(0)
    if len(message) != REPORT.size:
        raise SandboxInfraError("a new session ended before it reported: is the zygote alive?")
    kind, step, code, *_ = REPORT.unpack(message)
    if kind != REPORT_READY:
        for fd in fds:
            os.close(fd)
        raise SandboxInfraError(
            f"a new session failed at {SETUP_STEPS[step]}: {os.strerror(code)} (errno {code})"
        )
    return fds[0], fds[1]


def _reap(pid: int) -> None:
    """Wait for nsjail, which ends when its zygote does; kill it if it takes long."""
    pidfd = os.pidfd_open(pid)
    try:
        if not select.select([pidfd], [], [], 2.0)[0]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    finally:
        os.close(pidfd)
