"""Further interpreters of a session: more Pythons, bash, Node.js. Each is a process of its own that
speaks the step protocol, so that a context is stepped exactly like the session itself.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from agentgrpo.sandbox.isolation.errors import (
    InvalidArgumentException,
    NotSupportedException,
    SandboxException,
    SandboxInfraError,
    SandboxNotFoundException,
)
from agentgrpo.sandbox.isolation.jail import PYTHON_OPTIONS, Places
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.isolation.template import Template
from agentgrpo.sandbox.session.program import launch
from agentgrpo.sandbox.session.result import StepStatus
from agentgrpo.sandbox.session.session import Session

START_TIMEOUT_S = 30.0
NAMES = {
    "python": ("python", "python3"),
    "bash": ("bash", "sh", "shell"),
    "javascript": ("javascript", "js", "node"),
}


def language_of(name: str | None) -> str:
    """The language behind a name or an alias; python for None."""
    wanted = (name or "python").lower()
    for language, names in NAMES.items():
        if wanted in names:
            return language
    raise NotSupportedException(
        f"language {wanted!r}; this sandbox speaks {', '.join(sorted(NAMES))}"
    )


def command_of(
    language: str, places: Places, limits: Limits, template: Template | None = None
) -> list[str]:
    """How the interpreter of a language is started; NotSupportedException if it is not there."""
    if places.image is not None:
        return _of_image(language, limits)
    python = [places.interpreter, *PYTHON_OPTIONS]
    sizes = [str(limits.value_kib << 10), str(limits.traceback_kib << 10)]
    if language == "python":
        notebook = "IPython" if template is not None and "IPython" in template.preload else "sys"
        return [*python, f"{places.guest}/context.py", *sizes, notebook, *places.site_dirs]
    if language == "bash":
        return [*python, f"{places.guest}/shell.py"]
    for node in ("/usr/bin/node", "/usr/local/bin/node"):
        if os.path.exists(node):
            return [node, "--max-old-space-size=192", f"{places.guest}/node.js", *sizes]
    raise NotSupportedException("node is not installed under /usr; remedy: install Node.js there")


def _of_image(language: str, limits: Limits) -> list[str]:
    """By the image's own programs, which get our part as an argument."""
    if language == "bash":
        raise NotSupportedException("a session of an image has one bash: its default context")
    file, *command = {
        "python": ("plain.py", "python3", "-uc"),
        "javascript": ("node.js", "node", "--max-old-space-size=192", "-e"),
    }[language]
    text = (Path(__file__).parents[1] / "inside" / file).read_text()
    sizes = [str(limits.value_kib << 10), str(limits.traceback_kib << 10)]
    return ["/bin/bash", "-c", f'exec {" ".join(command)} "$0" "$@"', text, *sizes]


def outlived(session: Session) -> Session:
    """The interpreter of a session that has run no code, as a context whose end the session
    outlives. The session itself can run no step any more.
    """
    if session.channels is None:
        raise SandboxNotFoundException("the session is over")
    channels = launch(session.channels, [], env={}, directory="")
    context = Session(channels, session.limits, guest_of=session, group=session.group)
    if session.host is not None:
        context.attach_host_tools(session.host)
    return context


def start_context(
    session: Session,
    language: str,
    template: Template,
    *,
    env: Mapping[str, str] | None = None,
    directory: str | None = None,
) -> Session:
    """Start an interpreter in a session, within its limits, and return it as something to step().
    env: all of its environment; None: what the session's own interpreter has by its template.
    directory: where it starts, an absolute path; None: at home.

    Raises:
        SandboxException: it did not start, which the session's own code may have brought about.
        SandboxInfraError: the machine failed.
    """
    limits, places = session.limits, session.places
    directory = directory or places.home
    if not directory.startswith("/"):
        raise InvalidArgumentException(f"cwd: expected an absolute path, got {directory!r}")
    if session.channels is None:
        raise SandboxNotFoundException("the session is over")
    env = places.environment(template) if env is None else env
    argv = command_of(language, places, limits, template)
    channels = launch(session.channels, argv, env=env, directory=directory, speaks=True)
    context = Session(channels, limits, guest_of=session, group=session.group)
    ready = context.warm_up(START_TIMEOUT_S)  # its start is not the first cell's time
    if ready.status is not StepStatus.OK:
        context.close()
        if ready.status is StepStatus.INFRA_ERROR:
            raise SandboxInfraError(ready.detail)
        if places.image is not None and ready.exit_code == 127:
            raise NotSupportedException(
                f"image {places.image.name!r} has no {language}; remedy: install it when the image "
                "is built, or use language='bash'"
            )
        hint = "; Node.js needs a control group or limits.memory_mib of 1024" * (
            language == "javascript"
        )
        raise SandboxException(
            f"{language} did not start: {ready.detail}{hint}\n{ready.stderr[-2000:]}"
        )
    if session.host is not None and language == "python":
        context.attach_host_tools(session.host)
    return context
