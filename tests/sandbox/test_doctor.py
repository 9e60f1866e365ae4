"""On a machine that cannot isolate, nothing runs and the remedy is named."""

import errno
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.nsjail

# What a container's default seccomp profile does to us: no new namespaces, no mounts.
IN_A_CONTAINER = textwrap.dedent(
    """
    import ctypes, struct, sys
    from agentgrpo.sandbox import policy
    numbers = {"unshare": 272, "mount": 165}
    program = [(policy.LOAD, 0, 0, policy.NUMBER)]
    program += [(policy.EQUAL, 0, 1, 435), (policy.RETURN, 0, 0, policy.ERRNO | 38)]  # clone3
    for number in numbers.values():
        program += [(policy.EQUAL, 0, 1, number), (policy.RETURN, 0, 0, policy.ERRNO | ERRNO_HERE)]
    program += [(policy.EQUAL, 0, 3, 56), (policy.LOAD, 0, 0, policy.ARGUMENT)]
    program += [(policy.ANY_BIT, 0, 1, policy.NEW_NAMESPACES)]
    program += [(policy.RETURN, 0, 0, policy.ERRNO | ERRNO_HERE)]
    program += [(policy.RETURN, 0, 0, policy.ALLOW)]
    code = b"".join(struct.pack("<HBBI", *i) for i in program)
    buffer = ctypes.create_string_buffer(code)
    class Program(ctypes.Structure):
        _fields_ = [("len", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    filled = Program(len(program), ctypes.addressof(buffer))
    assert libc.prctl(22, 2, ctypes.byref(filled), 0, 0) == 0
    """
)


def in_a_container(code: str, error: int = errno.EPERM) -> subprocess.CompletedProcess[str]:
    """Run code in a Python that may not make namespaces."""
    prelude = IN_A_CONTAINER.replace("ERRNO_HERE", str(error))
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def test_pool_fails_closed_and_names_the_remedy() -> None:
    code = "from agentgrpo.sandbox import SandboxPool; SandboxPool(); print('RAN')"
    result = in_a_container(code)
    assert result.returncode != 0
    assert "RAN" not in result.stdout
    assert "SandboxUnavailable" in result.stderr
    assert "none will be run" in result.stderr
    assert "--security-opt seccomp=unconfined" in result.stderr


def test_doctor_reports_every_rung_and_fails() -> None:
    code = (
        "import runpy\nsys.argv = ['x', 'doctor']\n"
        "runpy.run_module('agentgrpo.sandbox', run_name='__main__')"
    )
    result = in_a_container(code)
    assert result.returncode == 1, result.stderr
    for rung in ("zygote-userns", "zygote-root", "nsjail-once"):
        assert f"MISS {rung}" in result.stdout
    assert "nothing will be run" in result.stdout


def test_exhausted_user_namespaces_name_the_sysctl() -> None:
    code = "from agentgrpo.sandbox import SandboxPool; SandboxPool()"
    result = in_a_container(code, errno.ENOSPC)
    assert "user.max_user_namespaces" in result.stderr
