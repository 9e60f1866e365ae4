"""Attacks on resources that the kernel counts for the machine, per user, or not at all."""

import os
from pathlib import Path

from agentgrpo.sandbox.selftest import (
    ALIVE,
    ERROR,
    LIBC,
    LIMITS,
    OK,
    OOM,
    TIMEOUT,
    Skip,
    at_most,
    expect,
    run_steps,
    table,
    value_of,
)
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepResult
from tests.sandbox.attacks.checks import on_pool

HOPS = (
    "import os, time\nread, write = os.pipe()\nstop = time.monotonic() + {seconds}\n"
    "for _ in range({chains}):\n"
    " if os.fork() == 0:\n"
    "  x = []\n"
    "  while len(x) < {mib} or time.monotonic() < stop:\n"
    "   try:\n    if os.fork() != 0: os._exit(0)\n"
    "   except OSError: continue  # too many have not been reaped yet\n"
    "   if len(x) < {mib}: x.append(b'1' * (1 << 20))\n"
    "  os._exit(0)\n"
    "os.close(write); os.read(read, 1)  # until all of them have ended"
)
"""Chains of processes, each the child of the one before, that hand on memory, until each has mib
and for some seconds at least."""


def hops(session: Session) -> str:
    """A control group meets them at once; a watchdog, which ends the session, is given time."""
    return HOPS.format(seconds=15 if session.group is None else 0, chains=10, mib=50)


def bounded(result: StepResult) -> bool:
    """Whether the memory limit ended the session, or some of its processes."""
    return result.status is OOM or result.oom_kills > 0


def no_locks(session: Session) -> bool:
    """Whether the kernel holds no lock of the session's interpreter."""
    lines = Path("/proc/locks").read_text().splitlines()
    return str(session.pid) not in {line.split()[4] for line in lines}


row = table(__name__)
# fmt: off
row("No socket or process option takes kernel memory that is not counted",
    (LIBC,), ("""
    import socket; s = socket.socket(); big = ctypes.create_string_buffer(512)
    got = [o for o in ((6, 14), (6, 32), (6, 38), (0, 35), (0, 39), (41, 17), (41, 42), (1, 60))
           if libc.setsockopt(s.fileno(), *o, big, 216) == 0 or ctypes.get_errno() != 92]
    got += [p for p in ((78, 1, 1 << 20), (0x53564D41, 0, 0), (36, 1)) if libc.prctl(*p, 0, 0) == 0]
    r, w = os.pipe(); s.setsockopt(1, 7, 1 << 24)
    got += [c for c in (1031, 1024, 1033) if libc.fcntl(w, c, 1 << 20) >= 0]
    got, s.getsockopt(1, 7) < 1 << 20""", "([], True)"))
row("Socket buffers are limited like other memory", ("""
    import socket, time
    server = socket.create_server(('127.0.0.1', 0), backlog=200)
    keep = []; n = 0
    for _ in range(100):
     a = socket.create_connection(server.getsockname()); b, _ = server.accept()
     a.setblocking(False); keep += [a, b]; stop = time.monotonic() + 0.1
     try:
      while time.monotonic() < stop: n += a.send(b'x' * 65536)
     except BlockingIOError: pass
    time.sleep(1); n >> 20  # a watchdog's time""",
    (OK, OOM, TIMEOUT, at_most(2 * LIMITS.memory_mib))))
row("A crash cannot start the machine's core dump handler", ("""
    import resource as r, ctypes, mmap
    libc = ctypes.CDLL(None)
    r.setrlimit(r.RLIMIT_CORE, (0, 0)); libc.setrlimit(4, (ctypes.c_uint64 * 2)(0, 0))
    libc.syscall(ctypes.c_long(160), 4, (ctypes.c_uint64 * 2)(0, 0))
    libc.mmap.restype = ctypes.c_void_p
    low = libc.mmap(ctypes.c_void_p(1 << 32), 4096, 3, 0x32, -1, 0)  # its lower half is 0
    libc.prlimit64(0, 4, ctypes.c_void_p(low), None)
    low == 1 << 32, r.getrlimit(r.RLIMIT_CORE)""", "(True, (1, 1))"))
row("The machine's pool of huge pages cannot be used", ("""
    import ctypes, errno, mmap, os
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p; got = []
    libc.mmap(None, 2 << 20, 3, 0x40022, -1, 0); got.append(ctypes.get_errno())
    try: os.memfd_create('x', 4)
    except OSError as e: got.append(e.errno)
    libc.shmget(0, 2 << 20, 0o4600); got.append(ctypes.get_errno()); set(got) <= {12, 38}
    """, "True"))
row("sync() returns success and flushes nothing",
    ("import os; [os.sync() for _ in range(1000)] == [None] * 1000", "True"))
row("Page merging and core scheduling are denied", ("""
    import ctypes, mmap
    libc = ctypes.CDLL(None, use_errno=True); got = []
    try: mmap.mmap(-1, 8192).madvise(12); got.append('merged')
    except OSError: pass
    got += [p for p in ((62, 1, 0, 0, 0), (67, 1, 0, 0, 0)) if libc.prctl(*p) == 0]
    got""", "[]"))
row("Without free memory the kernel kills sessions first, and no session can change that",
    lambda s: Path(f"/proc/{s.init_pid}/oom_score_adj").read_text() == "1000\n",
    ("open('/proc/self/oom_score_adj', 'w').write('-1000')", ERROR))
row("No file gets an access control list: 64 KiB that no limit counts", ("""
    import os
    open('f', 'w').close(); fd = os.open('f', os.O_RDWR); got = []
    for f, follow in (('f', True), (fd, True), ('f', False)):
     try: os.setxattr(f, 'user.x', b'', follow_symlinks=follow); got.append('set')
     except OSError as e: got.append(e.errno)
    got""", "[95, 95, 95]"))
row("A hundred thousand record locks take no kernel memory", ("""
    import fcntl
    f = open('f', 'w')
    for i in range(100_000): fcntl.lockf(f, fcntl.LOCK_EX, 1, 2 * i)""", OK), no_locks)
row("fsync() returns success and flushes no disk",
    (f"{LIBC}[libc.fsync(-1), libc.fdatasync(-1), libc.sync_file_range(-1, 0, 0, 7)]",
     "[0, 0, 0]"))  # not even the descriptor was looked at
row("More seccomp filters cannot be installed: their code would use up a limit of the machine",
    (LIBC,), ("""
    class P(ctypes.Structure): _fields_ = [('len', ctypes.c_ushort), ('f', ctypes.c_void_p)]
    allow = ctypes.create_string_buffer(bytes.fromhex('060000000000ff7f'))
    p = P(1, ctypes.addressof(allow))
    libc.prctl(22, 2, ctypes.byref(p), 0, 0)""", "-1"))
row("Shared memory that is unmapped except for a page is limited", (LIBC,), ("""
    libc.mmap.restype = ctypes.c_void_p; n = 0
    zero = libc.open(b'/dev/zero', os.O_RDWR)
    for flags, fd in 20 * [(0x21, -1), (0x1, zero)]:
     at = libc.mmap(None, 20 << 20, 3, flags, fd, 0)
     if at is None or at == 2**64 - 1: continue
     ctypes.memset(at, 1, 20 << 20); n += 20
     libc.munmap(ctypes.c_void_p(at + 4096), ctypes.c_size_t((20 << 20) - 4096))
    n""", (OK, OOM, at_most(LIMITS.memory_mib))))
row("Memory of processes that constantly replace themselves by children is limited",
    (hops, (OK, OOM, bounded), 120.0), alone=True)
row("Buffers of unix sockets are limited like other memory", ("""
    import os, signal, socket, time
    read, write = os.pipe()
    def fill():
     keep = []; n = 0
     try:
      while True:
       keep += socket.socketpair()
       for s in keep[-2:]:
        s.setblocking(False)
        try:
         while True: n += s.send(b'x' * 65536)
        except BlockingIOError: pass
     except OSError: pass
     os.write(write, n.to_bytes(8, 'little')); os.close(write); signal.pause()
    for _ in range(10):
     if os.fork() == 0: fill()
    os.close(write); sent = b''
    while len(sent) < 80 and (more := os.read(read, 80)): sent += more
    time.sleep(1)  # a watchdog's time
    sum(int.from_bytes(sent[i : i + 8], 'little') for i in range(0, len(sent), 8)) >> 20
    """, (OK, OOM, lambda r: bounded(r) or at_most(LIMITS.memory_mib)(r)), 30.0), alone=True)
# fmt: on


@on_pool
def queued_signals(pool: SandboxPool) -> None:
    """Signals queued by a session do not use up the queue of the user who runs the host."""
    before = _queued()
    code = (
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "n = 0; timer = ctypes.c_void_p()\n"
        "while n < 100_000 and libc.timer_create(1, None, ctypes.byref(timer)) == 0: n += 1\nn"
    )
    with pool.acquire() as s:
        assert int(value_of(s, code)) < 1000
        assert _queued() - before < 1000


def _queued() -> int:
    """Signals queued for this process's user."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("SigQ:"))
    return int(line.split()[1].split("/")[0])


@on_pool
def descriptors_in_flight(pool: SandboxPool) -> None:
    """Descriptors that a session leaves in flight do not keep others from starting."""
    code = (
        "import socket\nkeep = []\ntry:\n while True:\n  keep += socket.socketpair()\n"
        "  for _ in range(4): socket.send_fds(keep[-2], [b'x'], [0] * 250)\n"
        "except OSError as e: print(e.errno)"
    )
    with pool.acquire() as a:
        assert a.step(code).stdout in ("109\n", "24\n")
        for _ in range(pool.min_idle + 2):  # those that were ready before, and later ones
            with pool.acquire() as b:
                run_steps(b, ALIVE)


@on_pool
def counted_per_user(pool: SandboxPool) -> None:
    """Kernel limits per user (pipes, descriptors in flight) are separate for each session."""
    with pool.acquire() as a, pool.acquire() as b:
        if os.stat(f"/proc/{a.pid}").st_uid == os.stat(f"/proc/{b.pid}").st_uid:
            raise Skip("sessions share a user of the machine (no root to give them their own)")
        code = (
            "import os, signal, socket\nkeep = []; read, write = os.pipe()\n"
            "for _ in range(20):\n"
            " if os.fork() == 0:\n"
            "  keep = [os.pipe() for _ in range(110)]; os.close(write); signal.pause()\n"
            "os.close(write); os.read(read, 1)\n"
            "try:\n while True:\n  keep += socket.socketpair()\n"
            "  for _ in range(4): socket.send_fds(keep[-2], [b'x'], [0] * 250)\n"
            "except OSError: pass"
        )
        expect(a.step(code), OK)
        code = (
            "import fcntl, os, socket\nl, r = socket.socketpair()\n"
            "socket.send_fds(l, [b'x'], [0] * 200); fcntl.fcntl(os.pipe()[0], 1032)"
        )
        expect(b.step(code), "65536")
