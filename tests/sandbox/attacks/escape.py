"""Attempts to see, change or reach something outside of the session."""

import ast
import os
import secrets
from pathlib import Path

from agentgrpo.sandbox.selftest import (
    ALIVE,
    ERROR,
    EXIT,
    LIBC,
    OK,
    SIGNAL,
    denied,
    expect,
    refused,
    require_proc,
    require_x86,
    table,
    value_of,
)
from agentgrpo.sandbox.session.pool import SandboxPool
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepResult
from tests.sandbox.attacks.checks import on_pool


def plain_sockets(result: StepResult) -> bool:
    """Whether only unix and internet sockets were made, and of those streams and datagrams."""
    pairs, protocols = ast.literal_eval(result.value or "")
    raw = {(2, 3), (10, 3), (2, 5), (10, 5)}
    families = {family for family, _ in pairs}
    return families <= {1, 2, 10} and not raw & set(pairs) and set(protocols) <= {0, 6, 17}


def as_it_was(session: Session) -> bool:
    """Whether nothing of PID 1 was changed from inside."""
    limits = Path(f"/proc/{session.init_pid}/limits").read_text().splitlines()
    cpu = next(line for line in limits if line.startswith("Max cpu time")).split()[3:5]
    init, own = (os.getpriority(os.PRIO_PROCESS, p) for p in (session.init_pid, session.pid))
    processors = os.sched_getaffinity(session.init_pid) == os.sched_getaffinity(session.pid)
    policy = os.sched_getscheduler(session.init_pid)
    return (cpu, init, processors, policy) == (["unlimited"] * 2, own, True, os.SCHED_OTHER)


row = table(__name__)
# fmt: off
row("System calls with a history of vulnerabilities are denied", denied("""
    bpf: 321, 0, 0, 0; perf_event_open: 298, 0, 0, 0, 0, 0; io_uring_setup: 425, 1, 0;
    io_uring_enter: 426, 0, 0, 0, 0, 0; userfaultfd: 323, 0; keyctl: 250, 0, 0;
    add_key: 248, 0, 0, 0, 0, 0; request_key: 249, 0, 0, 0, 0; kexec_load: 246, 0, 0, 0, 0;
    init_module: 175, 0, 0, 0; finit_module: 313, 0, 0, 0; open_by_handle_at: 304, 0, 0, 0;
    name_to_handle_at: 303, -100, b'/', 0, 0, 0; fanotify_init: 300, 0, 0;
    modify_ldt: 154, 0, 0, 0; iopl: 172, 3; ioperm: 173, 0, 1, 1; syslog: 103, 2, 0, 0;
    acct: 163, b'/tmp/x'; quotactl: 179, 0, 0, 0, 0; swapon: 167, b'/tmp/x', 0;
    reboot: 169, 0, 0, 0, 0; settimeofday: 164, 0, 0; sethostname: 170, b'x', 1;
    vmsplice: 278, 0, 0, 0, 0; memfd_secret: 447, 0; landlock: 444, 0, 0, 1;
    seccomp: 317, 1, 0, 0; lookup_dcookie: 212, 0, 0, 0; inotify_init: 253;
    inotify_init1: 294, 0; inotify_add_watch: 254, 0, b'/tmp', 2; semget: 64, 0, 1, 384;
    msgget: 68, 0, 384; cachestat: 451, 0, 0, 0, 0; mincore: 27, 0, 4096, 0;
    memfd_create: 319, b'x', 0; shmget: 29, 0, 4096, 896; sigqueue: 129, 2, 10, 0;
    personality: 135, 0xffffffff; setxattrat: 463, -100, b'f', 0, 0, 0, 0;
    a call of the future: 5000"""), needs=require_x86)
row("Only unix, TCP and UDP sockets can be made", ("""
    import socket, errno
    got = []
    for family in range(50):
     for kind in (1, 2, 3, 4, 5, 10):
      for proto in (0, 1, 6, 17, 33, 132, 136, 255, 262):
       try: socket.socket(family, kind, proto).close()
       except OSError: continue
       got.append((family, kind, proto))
    sorted({(f, k) for f, k, p in got}), sorted({p for f, k, p in got if f in (2, 10)})
    """, plain_sockets))
row("Socket options cannot load kernel modules or attach programs", ("""
    import socket
    a = socket.create_server(('127.0.0.1', 0))
    s = socket.create_connection(a.getsockname()); got = []
    for level, name, value in ((6, 31, b'tls'), (1, 26, b'\\0' * 16), (1, 50, b'\\0' * 4),
                               (1, 51, b'\\0' * 16), (1, 52, b'\\0' * 4)):
     try: s.setsockopt(level, name, value); got.append(name)
     except OSError as e: got += [name] * (e.errno != 92)
    s.setsockopt(6, 1, 1); s.setsockopt(1, 7, 65536); got""", "[]"))
row("32-bit and x32 system calls do not bypass the filter",
    denied("x32 getpid: 0x40000000 + 39"), ("""
    import mmap
    m = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)
    m.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20; int 0x80; ret
    f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))
    print('pid', f())""", (SIGNAL, lambda result: result.signal == 31)), needs=require_x86)
row("Loopback is the only network device, and it works", ("""
    import os, socket
    server = socket.create_server(('127.0.0.1', 0))
    client = socket.create_connection(server.getsockname())
    devices = '/proc/self/net/dev'
    open(devices).read().count(':') if os.path.exists(devices) else 1""", "1"))
row("A set-user-id bit on a session's file has no effect", ("""
    import os, shutil, subprocess
    os.close(os.open('id', os.O_CREAT, 0o6755)); shutil.copyfile('/usr/bin/id', 'id')
    os.chmod('id', 0o6755)
    shown = subprocess.run(['./id', '-u'], capture_output=True, text=True).stdout.strip()
    shown == str(os.getuid())""", "True"))
row("Devices cannot be made; FIFOs can",
    refused(["os.mknod('d', stat.S_IFCHR | 0o666, os.makedev(1, 1))",
             "os.mknod('d', stat.S_IFBLK | 0o666, os.makedev(1, 1))"], "import os, stat"),
    ("os.mkfifo('f')", OK))
row("Characters cannot be typed into a terminal", ("""
    import fcntl
    got = []
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32):
     try: fcntl.ioctl(0, request & 0xffffffff, b'x'); got.append(request)
     except OSError as e: got.append(e.errno)
    got""", "[25, 25, 25]"))
row("File system ioctls on the machine's files are denied", ("""
    import fcntl, os
    got = []
    for p in ('/usr', '/usr/bin/env', os.__file__, '/home/user', '/dev/null'):
     fd = os.open(p, os.O_RDONLY)
     for request in (0x9408, 0x6612, 0x6628, 0xC0185879, 0x80111500, 1, 2, 0x80087601, 0x8940):
      try: fcntl.ioctl(fd, request, bytes(64)); got.append((p, request))
      except OSError as e: got += [] if e.errno == 25 else [(p, request, e.errno)]
    got""", "[]"))
row("/dev has no GPUs, disks, kvm or kernel memory",
    ("import os; ' '.join(sorted(os.listdir('/dev')))",
     "'fd full null random shm stderr stdin stdout urandom zero'"))
row("A directory descriptor and chdir do not lead out of the root", ("""
    import os
    fd = os.open('/', os.O_RDONLY); os.fchdir(fd)
    for _ in range(50): os.chdir('..')
    sorted(os.listdir('.')) == sorted(os.listdir('/')), os.path.exists('etc/shadow')
    """, "(True, False)"))
row("/proc/*/root and /proc/*/cwd stay inside", ("""
    import os, glob
    [p for p in glob.glob('/proc/*/root') + glob.glob('/proc/*/cwd')
     if os.path.exists(p + '/etc/shadow') or os.path.exists(p + '/root/.bashrc')]""", "[]"))
row("Namespace flags in the upper half of the argument do not pass the filter",
    denied("clone: 56, (1 << 40) | 0x10000000 | 17, 0, 0, 0, 0"), needs=require_x86)
row("Leases and watches on shared read-only files are denied", refused(
    ["fcntl.fcntl(fd, 1024, 0)", "fcntl.fcntl(fd, 1024, 1)", "fcntl.fcntl(d, 1026, 1)"], """
import fcntl, os
fd, d = (os.open(p, os.O_RDONLY) for p in (os.__file__, os.path.dirname(os.__file__)))"""))
row("The times of the machine's devices cannot be set", refused(
    [f"os.utime('/dev/{name}')" for name in ("null", "zero", "full", "random", "urandom")],
    "import os"))
row("The control group's path shows nothing of the machine",
    ("{line.split(':')[2] for line in open('/proc/self/cgroup')}", "{'/\\n'}"), needs=require_proc)
row("/proc shows only processes",
    ("import os; sorted(p for p in os.listdir('/proc') if not p.isdigit())",
     ("['self', 'thread-self']", "[]")))
row("No call with a process id reaches PID 1: limits, priority, processors, clocks, signals",
    (LIBC,), ("""
    null = ctypes.create_string_buffer(64)
    one, named = ctypes.c_uint32(1), os.open('/proc/1' if os.path.exists('/proc/1') else '/', 0)
    got = {}
    for name, call_ in {
        'prlimit': (302, 1, 0, null, 0), 'prlimit high': (302, 1 << 32 | 1, 7, null, 0),
        'prlimit read': (302, 1, 7, 0, null), 'setpriority': (141, 0, 1, 19),
        'setpriority group': (141, 1, 1, 19), 'setpriority user': (141, 2, 0, 19),
        'setpriority user by id': (141, 2, os.getuid(), 19), 'getpriority': (140, 0, 1),
        'ioprio process': (251, 1, 1, 0x6000), 'ioprio user': (251, 3, 0, 0x6000),
        'setaffinity': (203, 1, 8, b'\\1' + bytes(7)), 'setscheduler': (144, 1, 5, null),
        'setparam': (142, 1, null), 'setattr': (314, 1, null, 0), 'pidfd_open': (434, 1, 0),
        'robust list': (274, 1, null, null), 'timer': (222, -16, 0, null),
        'own signals': (72, 0, 8, 1), 'kcmp': (312, 1, 2, 0, 0, 0), 'move_pages': (279, 1, 0),
        'migrate_pages': (256, 1, 0), 'process_madvise': (440, 3, 0, 0, 0, 0),
        'process_mrelease': (448, 3, 0), 'setpgid': (109, 1, 1), 'getpgid': (121, 1),
        'getsid': (124, 1), 'pidfd signal': (424, named, 0, 0, 0),
        'inherit priority': (202, ctypes.byref(one), 8 | 128, 0, 0, 0, 0)}.items():
     got[name] = call(*call_)
    {k: v for k, v in got.items() if v not in ('ESRCH', 'EPERM', 'EINVAL', 'ENOSYS')}""", "{}"),
    as_it_was, ALIVE, needs=require_x86)
row("PID 1 outlives a storm of orphans and reports the end", ("""
    import os, resource, time
    for what in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE, resource.RLIMIT_AS):
     try: resource.prlimit(1, what, (0, 0))
     except OSError: pass
    for n in (9, 15, 17, 19, 23, 64): os.kill(1, n)
    stop = time.monotonic() + 3
    while time.monotonic() < stop:
     try: p = os.fork()
     except BlockingIOError: continue  # as many processes as it may have: init is still reaping
     if p == 0:
      for _ in range(3):
       try: os.fork()
       except OSError: pass
      os._exit(0)
     os.waitpid(p, 0)
    os._exit(7)""", (EXIT, lambda result: result.exit_code == 7)), alone=True)
row("kill(-1, SIGKILL) kills nothing outside and not init",
    ("import os; os.kill(-1, 9)", (OK, SIGNAL, ERROR)))
row("Descriptors, memory and environment of init cannot be opened", ("""
    got = []
    import os
    for n in ('fd', 'mem', 'environ', 'maps', 'root', 'cwd', 'exe', 'fdinfo'):
     for go in (lambda p: os.listdir(p), lambda p: open(p).read(1), os.readlink):
      try: got.append((n, go(f'/proc/1/{n}')))
      except OSError: pass
    got""", "[]"))
row("The interpreter has only its three streams and two pipes open", ("""
    import fcntl
    got = []
    for fd in range(5000):
     try: fcntl.fcntl(fd, fcntl.F_GETFD); got.append(fd)
     except OSError: pass
    got""", "[0, 1, 2, 3, 4]"))
# fmt: on


@on_pool
def environment_of_the_host(pool: SandboxPool) -> None:
    """The environment of the host is not inherited and cannot be read from any process."""
    token = secrets.token_hex(8)
    os.environ["AGENTGRPO_SELFTEST_TOKEN"] = token
    try:
        with pool.acquire() as s:
            code = (
                "import os, glob\nfound = list(os.environ.values())\n"
                "for p in glob.glob('/proc/*/environ'):\n"
                " try: found.append(open(p, errors='replace').read())\n"
                " except OSError: pass\n"
                "''.join(found)"
            )
            assert token not in value_of(s, code)
    finally:
        del os.environ["AGENTGRPO_SELFTEST_TOKEN"]


@on_pool
def neighbours_sockets(pool: SandboxPool) -> None:
    """Another session's abstract sockets and loopback servers cannot be reached."""
    with pool.acquire() as a, pool.acquire() as b:
        code = (
            "import socket\nu = socket.socket(socket.AF_UNIX); u.bind('\\0meet'); u.listen()\n"
            "t = socket.create_server(('127.0.0.1', 34567))"
        )
        expect(a.step(code), OK)
        attempts = ("socket.socket(socket.AF_UNIX).connect('\\0meet')",
                    "socket.create_connection(('127.0.0.1', 34567), 1)")  # fmt: skip
        code, nothing = refused(attempts, "import socket")
        expect(b.step(code), nothing)


@on_pool
def neighbours_memory(pool: SandboxPool) -> None:
    """Another session's shared memory, files and processes are not visible."""
    with pool.acquire() as a, pool.acquire() as b:
        code = LIBC + (
            "open('/tmp/a', 'w'); open('/dev/shm/a', 'w'); open('/home/user/a', 'w')\n"
            "libc.shmget(0x1234, 4096, 0o1666)"
        )
        value_of(a, code)  # -1 where shared memory is not to be had at all
        code = LIBC + (
            "libc.shmget(0x1234, 4096, 0), [os.listdir(d) for d in "
            "('/tmp', '/dev/shm', '/home/user')], len([p for p in os.listdir('/proc')"
            " if p.isdigit()])"
        )
        expect(b.step(code), "(-1, [[], [], []], 2)", "(-1, [[], [], []], 0)")


@on_pool
def randomness(pool: SandboxPool) -> None:
    """Sessions of one zygote do not share their random numbers."""
    code = (
        "import os, random, subprocess, sys, uuid, multiprocessing.process as m\n"
        "hashed = subprocess.run([sys.executable, '-c', 'print(hash(\"x\"))'], "
        "capture_output=True).stdout\n"
        "(random.random(), uuid.uuid4().hex, os.urandom(4), m.current_process().authkey, hashed)"
    )
    with pool.acquire() as a, pool.acquire() as b, pool.acquire() as c, pool.acquire() as d:
        seen = [ast.literal_eval(value_of(s, code)) for s in (a, b, c, d)]
    assert all(len(set(column)) == 4 for column in zip(*seen, strict=True)), seen
