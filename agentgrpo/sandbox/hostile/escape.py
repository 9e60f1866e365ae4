"""Attempts to see, change or reach something outside of the session."""

import ast
import os
import secrets

from agentgrpo.sandbox.hostile.case import (
    expect,
    needs_proc,
    on_pool,
    on_session,
    value_of,
)
from agentgrpo.sandbox.pool import SandboxPool
from agentgrpo.sandbox.result import StepStatus
from agentgrpo.sandbox.session import Session

LIBC = (
    "import ctypes, errno, os\n"
    "libc = ctypes.CDLL(None, use_errno=True)\n"
    "def call(n, *a):\n"
    " ctypes.set_errno(0)\n"
    " r = libc.syscall(ctypes.c_long(n), *[ctypes.c_long(x) if isinstance(x, int) else x"
    " for x in a])\n"
    " return r if r >= 0 else errno.errorcode[ctypes.get_errno()]\n"
)
DENIED = ("ENOSYS", "EPERM", "EACCES")


def denied(session: Session, calls: dict[str, str]) -> None:
    """Every one of these system calls (x86-64 numbers and arguments, as text) is refused."""
    expect(session.step(LIBC), StepStatus.OK)
    if os.uname().machine != "x86_64":
        return
    for name, arguments in calls.items():
        answer = value_of(session, f"call({arguments})").strip("'")
        assert answer in DENIED, f"{name} answered {answer}"


@on_session
def no_capabilities(s: Session) -> None:
    """There are no capabilities, no new privileges, and a filter."""
    needs_proc(s)
    status = eval(
        value_of(s, "dict(l.split(':\\t') for l in open('/proc/self/status') if ':\\t' in l)")
    )
    for key in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"):
        assert int(status[key], 16) == 0, (key, status[key])
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1\n", "2\n")


@on_session
def secrets_of_the_host(s: Session) -> None:
    """Files of the host are not there."""
    paths = ["/etc/shadow", "/etc/ssh", "/root/.ssh", "/home/user/../../root/.bashrc", "/var/log",
             "/var/run/docker.sock", "/run", "/sys", "/boot", "/proc/sys", "/proc/kallsyms",
             "/proc/cmdline", "/proc/1/root/etc/shadow", os.path.expanduser("~/.netrc"),
             os.path.abspath(__file__ + "/../../../../setup.py")]  # fmt: skip
    assert value_of(s, f"import os; [p for p in {paths!r} if os.path.exists(p)]") == "[]"


@on_pool
def environment_of_the_host(pool: SandboxPool) -> None:
    """The environment of the host is not inherited, nor to be read from any process."""
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


@on_session
def host_processes(s: Session) -> None:
    """Only the session's own processes can be seen."""
    code = "import os; sorted(int(p) for p in os.listdir('/proc') if p.isdigit())"
    assert value_of(s, code) in ("[1, 2]", "[]"), "none where there is no /proc"


@on_session
def new_namespaces(s: Session) -> None:
    """No namespace can be made or entered."""
    flags = {"user": 0x10000000, "mount": 0x20000, "pid": 0x20000000, "net": 0x40000000}
    denied(s, {f"unshare {k}": f"272, {v}" for k, v in flags.items()})
    denied(s, {f"clone {k}": f"56, {v} | 17, 0, 0, 0, 0" for k, v in flags.items()})
    denied(s, {"clone3": "435, ctypes.create_string_buffer(88), 88",
               "setns": "308, 0, 0"})  # fmt: skip


@on_session
def mounts(s: Session) -> None:
    """Nothing can be mounted, unmounted or remounted, by the old calls or the new."""
    denied(s, {
        "mount": "165, b'tmpfs', b'/tmp', b'tmpfs', 0, 0",
        "remount rw": "165, 0, b'/usr', 0, 0x1020, 0",
        "umount": "166, b'/home/user', 2",
        "pivot_root": "155, b'/tmp', b'/tmp'",
        "chroot": "161, b'/tmp'",
        "open_tree": "428, -100, b'/', 1",
        "move_mount": "429, -100, b'/', -100, b'/tmp', 0",
        "fsopen": "430, b'tmpfs', 0",
        "fsmount": "432, 0, 0, 0",
        "fspick": "433, -100, b'/', 0",
        "mount_setattr": "442, -100, b'/usr', 0, ctypes.create_string_buffer(32), 32",
        "statmount": "457, 0, 0, 0, 0",
        "open_tree_attr": "467, -100, b'/', 1, 0, 0",
    })  # fmt: skip


@on_session
def other_processes_memory(s: Session) -> None:
    """No process can be traced, read or robbed of descriptors."""
    denied(s, {
        "ptrace attach": "101, 16, 1, 0, 0",
        "ptrace traceme": "101, 0, 0, 0, 0",
        "process_vm_readv": "310, 1, 0, 0, 0, 0, 0",
        "process_vm_writev": "311, 1, 0, 0, 0, 0, 0",
        "pidfd_getfd": "438, 0, 0, 0",
        "kcmp": "312, 1, 2, 0, 0, 0",
        "process_madvise": "440, 0, 0, 0, 0, 0",
    })  # fmt: skip


@on_session
def kernel_attack_surface(s: Session) -> None:
    """System calls with a history of holes are not there."""
    denied(s, {
        "bpf": "321, 0, 0, 0",
        "perf_event_open": "298, 0, 0, 0, 0, 0",
        "io_uring_setup": "425, 1, 0",
        "io_uring_enter": "426, 0, 0, 0, 0, 0",
        "userfaultfd": "323, 0",
        "keyctl": "250, 0, 0",
        "add_key": "248, 0, 0, 0, 0, 0",
        "request_key": "249, 0, 0, 0, 0",
        "kexec_load": "246, 0, 0, 0, 0",
        "init_module": "175, 0, 0, 0",
        "finit_module": "313, 0, 0, 0",
        "open_by_handle_at": "304, 0, 0, 0",
        "name_to_handle_at": "303, -100, b'/', 0, 0, 0",
        "fanotify_init": "300, 0, 0",
        "modify_ldt": "154, 0, 0, 0",
        "iopl": "172, 3",
        "ioperm": "173, 0, 1, 1",
        "syslog": "103, 2, 0, 0",
        "acct": "163, b'/tmp/x'",
        "quotactl": "179, 0, 0, 0, 0",
        "swapon": "167, b'/tmp/x', 0",
        "reboot": "169, 0, 0, 0, 0",
        "settimeofday": "164, 0, 0",
        "sethostname": "170, b'x', 1",
        "vmsplice": "278, 0, 0, 0, 0",
        "memfd_secret": "447, 0",
        "landlock": "444, 0, 0, 1",
        "seccomp": "317, 1, 0, 0",
        "lookup_dcookie": "212, 0, 0, 0",
        "inotify_init": "253",
        "inotify_init1": "294, 0",
        "inotify_add_watch": "254, 0, b'/tmp', 2",
        "semget": "64, 0, 1, 384",
        "msgget": "68, 0, 384",
        "cachestat": "451, 0, 0, 0, 0",
        "setxattrat": "463, -100, b'f', 0, 0, 0, 0",
        "a call of the future": "5000",
    })  # fmt: skip


@on_session
def strange_sockets(s: Session) -> None:
    """Only unix and internet sockets can be made, and of those only streams and datagrams."""
    code = (
        "import socket, errno\ngot = []\n"
        "for family in range(50):\n"
        " for kind in (1, 2, 3, 4, 5, 10):\n"
        "  for proto in (0, 1, 6, 17, 33, 132, 136, 255, 262):\n"
        "   try: socket.socket(family, kind, proto).close()\n"
        "   except OSError: continue\n"
        "   got.append((family, kind, proto))\n"
        "sorted({(f, k) for f, k, p in got}), sorted({p for f, k, p in got if f in (2, 10)})"
    )
    pairs, protocols = ast.literal_eval(value_of(s, code))
    assert {family for family, _ in pairs} <= {1, 2, 10}, pairs
    assert not {(2, 3), (10, 3), (2, 5), (10, 5)} & set(pairs), pairs
    assert set(protocols) <= {0, 6, 17}, protocols


@on_session
def socket_options(s: Session) -> None:
    """Options of sockets load no kernel modules and attach no programs."""
    code = (
        "import socket\na = socket.create_server(('127.0.0.1', 0))\n"
        "s = socket.create_connection(a.getsockname())\ngot = []\n"
        "for level, name, value in ((6, 31, b'tls'), (1, 26, b'\\0' * 16), (1, 50, b'\\0' * 4),\n"
        "                           (1, 51, b'\\0' * 16), (1, 52, b'\\0' * 4)):\n"
        " try: s.setsockopt(level, name, value); got.append(name)\n"
        " except OSError as e: got += [name] * (e.errno != 92)\n"
        "s.setsockopt(6, 1, 1); s.setsockopt(1, 7, 65536); s.setsockopt(0, 2, 64); got"
    )
    assert value_of(s, code) == "[]"


@on_session
def foreign_system_calls(s: Session) -> None:
    """32-bit and x32 system calls do not get around the filter."""
    if os.uname().machine != "x86_64":
        return
    expect(s.step(LIBC), StepStatus.OK)
    assert value_of(s, "call(0x40000000 + 39)").strip("'") in DENIED
    code = (
        "import mmap\nm = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 7)\n"
        "m.write(bytes.fromhex('b814000000cd80c3'))  # mov eax, 20; int 0x80; ret\n"
        "f = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(m)))\n"
        "print('pid', f())"
    )
    result = s.step(code)
    assert result.status is StepStatus.SIGNAL, f"expected death by the filter, got {result}"
    assert result.signal == 31


@on_session
def the_internet(s: Session) -> None:
    """There is no way out: addresses, names, the cloud's metadata service."""
    code = (
        "import socket\ngot = []\n"
        "for host, port in (('1.1.1.1', 80), ('169.254.169.254', 80), ('10.0.0.1', 22),\n"
        "                   ('2606:4700:4700::1111', 80), ('example.com', 80)):\n"
        " try: socket.create_connection((host, port), timeout=1); got.append(host)\n"
        " except OSError: pass\n"
        "u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "try: u.sendto(b'x', ('8.8.8.8', 53)); got.append('udp')\n"
        "except OSError: pass\ngot"
    )
    assert value_of(s, code) == "[]"


@on_session
def network_devices(s: Session) -> None:
    """Loopback is the only network device, and it works."""
    code = (
        "import socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "client = socket.create_connection(server.getsockname())\n"
        "[name for _, name in socket.if_nameindex()] if hasattr(socket, 'AF_NETLINK') and 0 else "
        "open('/proc/self/net/dev').read().count(':') if __import__('os').path.exists("
        "'/proc/self/net/dev') else 1"
    )
    assert value_of(s, code) == "1"


@on_pool
def neighbours_sockets(pool: SandboxPool) -> None:
    """Another session's abstract sockets and loopback servers cannot be reached."""
    with pool.acquire() as a, pool.acquire() as b:
        code = (
            "import socket\nu = socket.socket(socket.AF_UNIX); u.bind('\\0meet'); u.listen()\n"
            "t = socket.create_server(('127.0.0.1', 34567))"
        )
        expect(a.step(code), StepStatus.OK)
        code = (
            "import socket\ngot = []\n"
            "try: socket.socket(socket.AF_UNIX).connect('\\0meet'); got.append('unix')\n"
            "except OSError: pass\n"
            "try: socket.create_connection(('127.0.0.1', 34567), 1); got.append('tcp')\n"
            "except OSError: pass\ngot"
        )
        assert value_of(b, code) == "[]"


@on_pool
def neighbours_memory(pool: SandboxPool) -> None:
    """Another session's shared memory, files and processes are not there."""
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
        assert value_of(b, code) in ("(-1, [[], [], []], 2)", "(-1, [[], [], []], 0)")


@on_pool
def randomness(pool: SandboxPool) -> None:
    """Sessions of one zygote do not share their random numbers."""
    code = "import random, uuid, os; (random.random(), uuid.uuid4().hex, os.urandom(4))"
    with pool.acquire() as a, pool.acquire() as b, pool.acquire() as c, pool.acquire() as d:
        seen = {value_of(s, code) for s in (a, b, c, d)}
    assert len(seen) == 4


@on_session
def other_users(s: Session) -> None:
    """Set-user-id programs and set*id calls gain nothing."""
    code = (
        "import os, subprocess\ngot = []\n"
        "me = os.getuid()\n"
        "for go in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.setgroups([0]),\n"
        "           lambda: os.setresuid(0, 0, 0), lambda: os.seteuid(0)):\n"
        " try: go(); got.append(go)\n"
        " except OSError: pass\n"
        "for cmd in ('su -c id', 'passwd -S root', 'newgrp root'):\n"
        " out = subprocess.run(cmd, shell=True, capture_output=True, text=True).stdout\n"
        " if 'uid=0' in out: got.append(cmd)\n"
        "got, os.getuid() == me, me != 0"
    )
    assert value_of(s, code) == "([], True, True)"


@on_session
def set_user_id_file(s: Session) -> None:
    """A set-user-id bit on an own file gains nothing."""
    code = (
        "import os, shutil, subprocess\nshutil.copy('/usr/bin/id', 'id'); os.chmod('id', 0o6755)\n"
        "subprocess.run(['./id', '-u'], capture_output=True, text=True).stdout.strip() == "
        "str(os.getuid())"
    )
    assert value_of(s, code) == "True"


@on_session
def device_nodes(s: Session) -> None:
    """Devices cannot be made; FIFOs can."""
    code = (
        "import os, stat\ngot = []\n"
        "for kind in (stat.S_IFCHR, stat.S_IFBLK):\n"
        " try: os.mknod('d', kind | 0o666, os.makedev(1, 1)); got.append(kind)\n"
        " except OSError: pass\n"
        "os.mkfifo('f'); got"
    )
    assert value_of(s, code) == "[]"


@on_session
def read_only_files(s: Session) -> None:
    """Everything but home, /tmp and /dev/shm is read-only."""
    paths = ["/usr/x", "/usr/bin/python3", "/etc/passwd", "/etc/x", "/x", "/dev/x", "/proc/x",
             "/sandbox/x", "/sandbox/guest/repl.py", "/sandbox/_C.so", "/home/x"]  # fmt: skip
    code = (
        f"import os, sys\ngot = []\nfor p in {paths!r} + [os.__file__, sys.executable]:\n"
        " for go in (lambda: open(p, 'a'), lambda: os.unlink(p), lambda: os.chmod(p, 0o777)):\n"
        "  try: go(); got.append(p)\n"
        "  except OSError: pass\ngot"
    )
    assert value_of(s, code) == "[]"


@on_session
def writable_places(s: Session) -> None:
    """No other directory can be written to."""
    code = (
        "import os\ngot = []\nfor top in os.listdir('/'):\n"
        " if top == 'proc': continue\n"
        " for d, dirs, _ in os.walk('/' + top):\n"
        "  if d.count('/') > 4: dirs.clear()\n"
        "  if os.access(d, os.W_OK): got.append(d)\n"
        "sorted(got)"
    )
    assert value_of(s, code) == "['/dev/shm', '/home/user', '/tmp']"


@on_session
def terminal_injection(s: Session) -> None:
    """Characters cannot be pushed into a terminal."""
    code = (
        "import fcntl\ngot = []\n"
        "for request in (0x5412, 0x541C, 0x5412 | 1 << 32):\n"
        " try: fcntl.ioctl(0, request & 0xffffffff, b'x'); got.append(request)\n"
        " except OSError as e: got.append(e.errno)\ngot"
    )
    assert value_of(s, code) == "[1, 1, 1]"


@on_session
def devices_of_the_host(s: Session) -> None:
    """GPUs, disks, kvm, the kernel's memory are not in /dev."""
    names = ast.literal_eval(value_of(s, "import os; os.listdir('/dev')"))
    assert set(names) == {"null", "zero", "full", "random", "urandom", "fd", "stdin", "stdout",
                          "stderr", "shm"}  # fmt: skip


@on_session
def working_directory_trick(s: Session) -> None:
    """A directory held open across chdir and fchdir leads nowhere new."""
    code = (
        "import os\nfd = os.open('/', os.O_RDONLY)\nos.fchdir(fd)\n"
        "for _ in range(50): os.chdir('..')\n"
        "sorted(os.listdir('.')) == sorted(os.listdir('/')), os.path.exists('etc/shadow')"
    )
    assert value_of(s, code) == "(True, False)"


@on_session
def process_root_links(s: Session) -> None:
    """/proc/*/root and /proc/*/cwd stay inside."""
    code = (
        "import os, glob\n"
        "[p for p in glob.glob('/proc/*/root') + glob.glob('/proc/*/cwd') "
        "if os.path.exists(p + '/etc/shadow') or os.path.exists(p + '/root/.bashrc')]"
    )
    assert value_of(s, code) == "[]"


@on_session
def magic_clone_flags(s: Session) -> None:
    """Namespace flags hidden in the upper half of the argument do not pass the filter."""
    denied(s, {"clone": "56, (1 << 40) | 0x10000000 | 17, 0, 0, 0, 0"})


@on_session
def leases(s: Session) -> None:
    """Shared read-only files cannot be leased or watched to hold up their owner."""
    code = (
        "import fcntl, os\ngot = []\nfd = os.open(os.__file__, os.O_RDONLY)\n"
        "d = os.open(os.path.dirname(os.__file__), os.O_RDONLY)\n"
        "for f, command, argument in ((fd, 1024, 0), (fd, 1024, 1), (d, 1026, 1)):\n"
        " try: fcntl.fcntl(f, command, argument); got.append(command)\n"
        " except OSError: pass\ngot"
    )
    assert value_of(s, code) == "[]"


@on_session
def kernel_interfaces(s: Session) -> None:
    """/proc shows processes and nothing of the machine."""
    assert value_of(s, "import os; sorted(p for p in os.listdir('/proc') if not p.isdigit())") in (
        "['self', 'thread-self']",
        "[]",
    )
