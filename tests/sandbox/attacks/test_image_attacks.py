"""Attacks by root in a session of an image: 29, each in its own session."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgrpo.sandbox import Limits, SandboxPool, Template
from agentgrpo.sandbox.isolation.images import get_image
from tests.sandbox.isolation.tiny_image import add_tiny_image

pytestmark = pytest.mark.nsjail
LIMITS = Limits(memory_mib=256, home_mib=128, inodes=8192, processes=64, timeout_s=30.0)
LIBC = "import ctypes, os, sys; l = ctypes.CDLL(None, use_errno=True)\n"
SOCKET = "\0agentgrpo-test-attacks"


def python(code: str) -> str:
    return f"python3 - <<'CODE'\n{LIBC}{code}\nCODE"


LEAVE = """
os.mkdir('/x'); os.chroot('/x')
for _ in range(50): os.chdir('..')
os.chroot('.')
if os.path.exists('@SECRET'): print('REACHED')
"""
FAMILIES = """
import socket
for family in ((16, 3, 0), (17, 3, 0), (2, 3, 1)):
    try: socket.socket(*family); print('REACHED')
    except OSError: pass
"""
CALLS = """
for number in (321, 298, 248, 425, 323, 304, 272, 165, 166, 155, 308, 310, 311, 175, 246, 435, 442):
    if l.syscall(number, 0, 0, 0, 0, 0) >= 0: print('REACHED', number)
"""
ATTACKS = {  # each prints REACHED if it worked
    "read a file of the host by its name": "cat @SECRET && echo REACHED",
    "the host's root by /proc/1/root": "cat /proc/1/root@SECRET && echo REACHED",
    "the host's root by /proc/2/root": "cat /proc/2/root@SECRET && echo REACHED",
    "descriptors of PID 1": "ls /proc/1/fd/ | grep -q . && echo REACHED",
    "memory of PID 1": "head -c1 /proc/1/mem >/dev/null && echo REACHED",
    "write the interpreter of the host": "(: >> /proc/2/exe) && echo REACHED",
    "leave by chroot and ..": python(LEAVE),
    "mount": "mount -t tmpfs x /tmp && echo REACHED",
    "mount the root again": "mount -o remount,rw / && echo REACHED",
    "unmount /proc": "umount /proc && echo REACHED",
    "another user namespace": "unshare -Ur true && echo REACHED",
    "the namespaces of PID 1": "nsenter -t 1 -m true && echo REACHED",
    "device of a disk": "mknod /root/sda b 8 0 && echo REACHED",
    "whiteout by mknod": python("os.mknod('/root/w', 0o20600, 0); print('REACHED')"),
    "attribute of overlayfs": python(
        "os.setxattr('/root', 'user.overlay.redirect', b'/etc'); print('REACHED')"
    ),
    "set-id program": "cp /usr/bin/id /root/i && chmod 4755 /root/i && chown nobody /root/i && "
    '[ "$(/root/i -u)" != 0 ] && echo REACHED',
    "write a sysctl": "(echo 1 > /proc/sys/kernel/sysrq) && echo REACHED; "
    "(echo 0 > /proc/sys/net/ipv4/ip_forward) && echo REACHED",
    "sysrq": "(echo h > /proc/sysrq-trigger) && echo REACHED",
    "more than its size": "head -c 200M /dev/zero > /root/big; "
    "[ $(stat -c %s /root/big) -gt 140000000 ] && echo REACHED",
    "more than its files": python(
        "for i in range(20000): open(f'/root/{i}', 'w').close()\nprint('REACHED')"
    ),
    "a network": python(
        "import socket; socket.create_connection(('1.1.1.1', 53), 2); print('REACHED')"
    ),
    "a unix socket of the host": python(
        f"import socket; s = socket.socket(1); s.connect({SOCKET!r}); print('REACHED')"
    ),
    "netlink, packet and raw sockets": python(FAMILIES),
    "ptrace": python("if l.ptrace(16, 2, 0, 0) == 0: print('REACHED')"),
    "bpf, perf, keys, io_uring, handles, namespaces, modules": python(CALLS),
    "type into a terminal": python(
        "import fcntl; fcntl.ioctl(os.openpty()[1], 0x5412, b'x'); print('REACHED')"
    ),
    "kill PID 1": "kill -9 1; sleep 0.2; kill -0 1 || echo REACHED",
    "more capabilities than its nine": python(
        "for line in open('/proc/self/status'):\n"
        "  if line.startswith('Cap') and int(line.split()[1], 16) & ~0x404fb: print('REACHED')"
    ),
    "kernel memory and addresses": "head -c1 /proc/kcore && echo REACHED; "
    "grep -v '^0000000000000000' /proc/kallsyms | grep -q . && echo REACHED; "
    "cat /proc/kmsg /proc/timer_list /proc/slabinfo /proc/keys 2>/dev/null | grep -q . && "
    "echo REACHED",
}


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxPool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        add_tiny_image()
        template = Template(image="base")
        with SandboxPool(template=template, limits=LIMITS, min_idle=0, zygotes=1) as made:
            yield made


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = Path("/tmp") / f"agentgrpo-secret-{os.getpid()}"
    path.write_text("secret\n")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(SOCKET)
        listening.listen()
        yield path
    path.unlink()


@pytest.mark.parametrize("name", ATTACKS)
def test_root_in_an_image_cannot_escape(name: str, pool: SandboxPool, secret: Path) -> None:
    with pool.acquire() as session:
        result = session.step(ATTACKS[name].replace("@SECRET", str(secret)), 20.0)
    assert "REACHED" not in result.stdout, result
    assert "not found" not in result.stderr, result


def test_changes_to_a_layer_file_are_private(pool: SandboxPool) -> None:
    with pool.acquire() as session:
        session.step("echo 2 > /etc/version; rm -rf /usr/lib/python3*; touch -d @0 /etc/passwd")
    with pool.acquire() as session:
        assert session.step("cat /etc/version; python3 -c 'print(1)'").stdout == "1\n1\n"
    assert Path(get_image("base").layers[0], "etc/version").read_text() == "1\n"
