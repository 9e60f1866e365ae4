"""The system call filter, run by a small interpreter of classic BPF and checked against headers."""

import errno
import re
import struct
from pathlib import Path

import pytest

from agentgrpo.sandbox import SandboxUnavailable, policy

ALLOW, KILL = policy.ALLOW, policy.KILL_PROCESS
HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


def decide(program: bytes, arch: int, number: int, *arguments: int) -> int:
    """What the kernel would answer: the return value of the filter."""
    data = struct.pack("<IIQ", number, arch, 0)
    data += struct.pack("<6Q", *(a & 2**64 - 1 for a in (*arguments, *[0] * (6 - len(arguments)))))
    code = list(struct.iter_unpack("<HBBI", program))
    accumulator, at = 0, 0
    while True:
        operation, yes, no, operand = code[at]
        at += 1
        if operation == policy.LOAD:
            (accumulator,) = struct.unpack_from("<I", data, operand)
        elif operation == policy.AND:
            accumulator &= operand
        elif operation == policy.RETURN:
            return int(operand)
        elif operation == policy.JUMP:
            at += operand
        else:
            holds = {
                policy.EQUAL: accumulator == operand,
                policy.GREATER: accumulator > operand,
                policy.AT_LEAST: accumulator >= operand,
                policy.ANY_BIT: bool(accumulator & operand),
            }[operation]
            at += yes if holds else no


def denied(error: int) -> int:
    return policy.ERRNO | error


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_exactly_the_named_calls_are_allowed(machine: str) -> None:
    program, arch = policy.build(machine), policy.AUDIT_ARCH[machine]
    known = policy.system_calls(machine)
    filtered = {known[name] for name in policy._filters(alone=True) if name in known}
    for number in range(600):
        answer = decide(program, arch, number)
        if number in filtered:
            continue
        wanted = ALLOW if number in known.values() else denied(errno.ENOSYS)
        assert answer == wanted, number


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    header = HEADERS[machine]
    if not header.exists():
        pytest.skip(f"{header} is not installed")
    pattern = r"#define __NR(?:3264)?_(\w+)\s+(\d+)"
    numbers = {name: int(n) for name, n in re.findall(pattern, header.read_text())}
    numbers.setdefault("newfstatat", 79)
    compared = 0
    for name, number in policy.system_calls(machine).items():
        if name in numbers:
            assert numbers[name] == number, name
            compared += 1
    assert compared > 150


def test_other_architectures_are_killed_and_x32_is_not_there() -> None:
    program, arch = policy.build("x86_64"), policy.AUDIT_ARCH["x86_64"]
    assert decide(program, 0x40000003, 20) == KILL  # i386
    assert decide(program, arch, 0x40000000 | 39) == denied(errno.ENOSYS)


# fmt: off
BY_ARGUMENT = [
    ("clone", ALLOW, [(0x11,), (0x3D0F00,)]),
    ("clone", errno.EPERM, [(0x10000000 | 17,), (0x00020000,)]),
    ("clone", errno.EINVAL, [(0x10000,), (0x10900,), (1 << 32 | 0x10900,)]),
    ("close_range", ALLOW, [(3, 9, 0), (3, 9, 4)]),
    ("close_range", errno.EINVAL, [(3, 9, 2), (3, 9, 6)]),
    ("socket", ALLOW, [(1, 5, 0), (2, 1, 6), (10, 0x80802, 17)]),
    ("socket", errno.EPROTONOSUPPORT, [(2, 3, 1), (2, 5, 0), (2, 1, 262)]),
    ("socket", errno.EAFNOSUPPORT, [(16, 3, 0), (40, 1, 0)]),
    ("socketpair", ALLOW, [(1, 1, 0)]),
    ("socketpair", errno.EAFNOSUPPORT, [(30, 1, 0)]),
    ("ioctl", ALLOW, [(0, r) for r in (0x5401, 0x541B, 0x5421, 0x5451, 0x80045430, 0x8906)]),
    ("ioctl", errno.EPERM, [(0, 0x5412), (0, 0x1_0000_5412), (0, 0x541C), (0, 0x5423)]),
    ("ioctl", errno.ENOTTY, [(0, r) for r in (
        0, 1, 2, 0x6612, 0x9408, 0x40049409, 0xC020660B, 0x80086601, 0xC0045877, 0x8940, 0x8982,
        0x89A0, 0x8946, 0x5300, 0x1_0000_0000)]),
    ("fcntl", ALLOW, [(0, 3), (3, 5)]),
    ("fcntl", errno.EPERM, [(0, 1024), (0, 1026)]),
    ("fcntl", 0, [(3, 6), (3, 7), (3, 37), (3, 38)]),
    ("personality", ALLOW, [(0xFFFFFFFF,)]),
    ("personality", errno.EPERM, [(0x0400000,)]),
    ("mknod", ALLOW, [(0, 0o010644)]),
    ("mknod", errno.EPERM, [(0, 0o020644)]),
    ("mknodat", ALLOW, [(0, 0, 0o140644)]),
    ("mknodat", errno.EPERM, [(0, 0, 0o060644)]),
    ("mmap", ALLOW, [(0, 4096, 3, 0x22)]),
    ("mmap", errno.ENOMEM, [(0, 4096, 3, 0x40022)]),
    ("memfd_create", ALLOW, [(1, 1)]),
    ("memfd_create", errno.ENOMEM, [(1, 4), (1, 21 << 26 | 4)]),
    ("shmget", ALLOW, [(0, 4096, 0o1600)]),
    ("shmget", errno.ENOMEM, [(0, 4096, 0o4600)]),
    ("madvise", ALLOW, [(0, 4096, 4)]),
    ("madvise", errno.EINVAL, [(0, 4096, 12)]),
    ("prctl", ALLOW, [(15,)]),
    ("prctl", 0, [(4, 0), (4, 1), (1 << 32 | 4, 0)]),
    ("prctl", errno.EINVAL, [(62, 1), (67, 1), (22, 2)]),
    *((name, 0, [(3,)]) for name in ("sync", "fsync", "fdatasync", "sync_file_range")),
    *((name, errno.EOPNOTSUPP, [()]) for name in ("setxattr", "lsetxattr", "fsetxattr")),
    *((call, 0, [(1, 9), (1 << 32 | 1, 9)]) for call in policy.SIGNALS),
    *((call, ALLOW, [(2, 9), (0, 9), (-1, 9), (1 << 32, 9)]) for call in policy.SIGNALS),
    *((call, errno.ESRCH, [(1,), (1, 1), (1 << 32 | 1,)]) for call in policy.ABOUT_A_PROCESS),
    *((call, ALLOW, [(0,), (2, 1), (-1,)]) for call in policy.ABOUT_A_PROCESS),
    ("prlimit64", errno.ESRCH, [(1, 0), (1, 4, 8), (7 << 32 | 1, 7)]),
    ("prlimit64", ALLOW, [(0, 0), (2, 7, 8), (0, 4)]),
    ("prlimit64", 0, [(0, 4, 8), (0, 4, 1 << 32)]),
    ("setpriority", errno.ESRCH, [(0, 1), (1, 1), (0, 1 << 32 | 1)]),
    ("setpriority", errno.EPERM, [(2, 0), (2, 65534), (1 << 32 | 2, 5)]),
    ("setpriority", ALLOW, [(0, 0), (0, 2), (1, 0)]),
    ("ioprio_set", errno.ESRCH, [(1, 1), (2, 1)]),
    ("ioprio_set", errno.EPERM, [(3, 0)]),
    ("ioprio_set", ALLOW, [(1, 0), (1, 2)]),
    ("timer_create", errno.EINVAL, [(0xFFFFFFF2,), (-16,), (-10,), (0xFFFFFFF6,)]),
    ("timer_create", ALLOW, [(0,), (1,), (2,), (0xFFFFFFEA,), (-6,)]),
    ("fcntl", errno.EPERM, [(0, 8), (0, 10), (0, 15)]),
    ("futex", ALLOW, [(0, 0), (0, 1 | 128), (0, 9 | 128 | 256), (0, 10), (0, 3), (0, 6 << 32)]),
    ("futex", errno.ENOSYS, [(0, op | flags) for op in (6, 7, 8, 11, 12, 13)
                             for flags in (0, 128, 256, 384, 1 << 32)]),
    ("ioctl", errno.EPERM, [(0, 0x8901), (0, 0x8902)]),
    ("setrlimit", 0, [(4, 1)]),
    ("setrlimit", ALLOW, [(7, 1)]),
]
# fmt: on


@pytest.mark.parametrize(("call", "wanted", "cases"), BY_ARGUMENT)
def test_calls_that_depend_on_their_arguments(
    call: str, wanted: int, cases: list[tuple[int, ...]]
) -> None:
    number, arch = policy.system_calls("x86_64")[call], policy.AUDIT_ARCH["x86_64"]
    for arguments in cases:
        answer = decide(policy.build("x86_64"), arch, number, *arguments)
        assert answer == (wanted if wanted == ALLOW else denied(wanted)), arguments


def test_memory_that_is_not_mapped_needs_a_control_group() -> None:
    arch = policy.AUDIT_ARCH["x86_64"]
    for name in ("memfd_create", "shmget"):
        number = policy.system_calls("x86_64")[name]
        assert decide(policy.build("x86_64"), arch, number) == ALLOW
        strict = policy.build("x86_64", memory_by_address_space=True)
        assert decide(strict, arch, number) == denied(errno.ENOSYS)
    for flags, wanted in (
        (0x21, denied(errno.EPERM)),  # MAP_SHARED | MAP_ANONYMOUS
        (0x23, denied(errno.EPERM)),  # MAP_SHARED_VALIDATE | MAP_ANONYMOUS
        (0x4021, denied(errno.EPERM)),
        (0x22, ALLOW),
        (0x1, ALLOW),
        (0x40022, denied(errno.ENOMEM)),
    ):
        assert decide(strict, arch, 9, 0, 4096, 3, flags) == wanted, hex(flags)
        shared = flags & 0x21 == 0x21
        assert decide(policy.build("x86_64"), arch, 9, 0, 4096, 3, flags) == (
            ALLOW if shared else wanted
        )


def test_unknown_machine_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="riscv64"):
        policy.build("riscv64")


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_limits_may_be_asked_for_and_core_dumps_not_switched_on(machine: str, alone: bool) -> None:
    program, arch = policy.build(machine, alone=alone), policy.AUDIT_ARCH[machine]
    number = policy.system_calls(machine)["prlimit64"]
    core, files, somewhere = policy.RLIMIT_CORE, 7, 0x7F00_1234_5678
    assert decide(program, arch, number, 0, core, 0, somewhere) == ALLOW
    assert decide(program, arch, number, 0, core, somewhere, 0) == denied(0)
    assert decide(program, arch, number, 0, core, 1 << 32, 0) == denied(0)
    assert decide(program, arch, number, 0, files, somewhere, 0) == ALLOW
    other = decide(program, arch, number, 2, files, 0, somewhere)
    assert other == (ALLOW if alone else denied(errno.EPERM))


def test_socket_options() -> None:
    program, arch = policy.build("x86_64"), policy.AUDIT_ARCH["x86_64"]
    number = policy.system_calls("x86_64")["setsockopt"]
    refused = {(6, 31), (1, 26), (1, 50), (1, 51), (1, 52)}
    for level in range(45):
        for name in range(80):
            wanted = denied(errno.ENOPROTOOPT) if (level, name) in refused else ALLOW
            assert decide(program, arch, number, 3, level, name) == wanted, (level, name)


def test_without_namespaces_no_call_reaches_another_process() -> None:
    program, arch = policy.build("x86_64", alone=False), policy.AUDIT_ARCH["x86_64"]
    known = policy.system_calls("x86_64")
    for name in policy.OTHER_PROCESSES.split():
        assert decide(program, arch, known[name]) == denied(errno.ENOSYS), name
    for command in (policy.F_SETOWN, policy.F_SETOWN_EX, policy.F_SETSIG):
        assert decide(program, arch, known["fcntl"], 0, command) == denied(errno.EPERM)
    for request in (policy.FIOSETOWN, policy.SIOCSPGRP):  # SIGIO for whomever one names
        assert decide(program, arch, known["ioctl"], 0, request) == denied(errno.EPERM)
