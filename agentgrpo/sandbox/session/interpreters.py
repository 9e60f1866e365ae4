"""More interpreters in a session: Python, bash, Node.js.

Each is a process that implements the step protocol, so it is stepped like the session itself.
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
from agentgrpo.sandbox.session.session import Session
from agentgrpo.sandbox.session.step_result import StepStatus

START_TIMEOUT_S = 30.0
NAMES = {
    "python": ("python", "python3"),
    "bash": ("bash", "sh", "shell"),
    "javascript": ("javascript", "js", "node"),
}


def language_of(name: str | None) -> str:
    """The language of a name or an alias; python for None."""
    alias = (name or "python").lower()
    for language, names in NAMES.items():
        if alias in names:
            return language
    raise NotSupportedException(
        f"language: expected one of {', '.join(sorted(NAMES))}, got {alias!r}"
    )


def command_of(
    language: str, places: Places, limits: Limits, template: Template | None = None
) -> list[str]:
    """The command line of a language's interpreter. NotSupportedException if there is none."""
    sizes = [str(limits.value_kib << 10), str(limits.traceback_kib << 10)]
    if places.image is not None:
        return [*_command_in_image(language), *sizes]
    python = [places.interpreter, *PYTHON_OPTIONS]
    if language == "python":
        notebook = "IPython" if template is not None and "IPython" in template.preload else "sys"
        return [*python, f"{places.guest}/context.py", *sizes, notebook, *places.site_dirs]
    if language == "bash":
        return [*python, f"{places.guest}/shell.py"]
    for node in ("/usr/bin/node", "/usr/local/bin/node"):
        if os.path.exists(node):
            return [node, "--max-old-space-size=192", f"{places.guest}/node.js", *sizes]
    raise NotSupportedException("node is not installed under /usr; remedy: install Node.js there")


def _command_in_image(language: str) -> list[str]:
    """Run the image's own interpreter, with our program as an argument."""
    if language == "bash":
        raise NotSupportedException(
            "language: a session of an image has one bash, its default context"
        )
    file, *command = {
        "python": ("plain.py", "python3", "-uc"),
        "javascript": ("node.js", "node", "--max-old-space-size=192", "-e"),
    }[language]
    text = (Path(__file__).parents[1] / "inside" / file).read_text()
    return ["/bin/bash", "-c", f'exec {" ".join(command)} "$0" "$@"', text]


def detach_interpreter(session: Session) -> Session:
    """Make the interpreter of a new session a context that can end without the session.

    Afterwards the session itself cannot run steps. It must not have run any code.
    """
    if session.channels is None:
        raise SandboxNotFoundException("the session has ended")
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
    """Start another interpreter in a session, under the session's limits.

    env is the complete environment (None: that of the session's interpreter), directory an
    absolute path (None: the session's home).

    Raises:
        SandboxException: it did not start, which the session's own code may have caused.
        SandboxInfraError: the machine failed.
    """
    limits, places = session.limits, session.places
    directory = directory or places.home
    if not directory.startswith("/"):
        raise InvalidArgumentException(f"cwd: expected an absolute path, got {directory!r}")
    if session.channels is None:
        raise SandboxNotFoundException("the session has ended")
    env = places.environment(template) if env is None else env
    argv = command_of(language, places, limits, template)
    channels = launch(session.channels, argv, env=env, directory=directory, has_protocol=True)
    context = Session(channels, limits, guest_of=session, group=session.group)
    result = context.warm_up(START_TIMEOUT_S)  # so that the first cell's time has no start-up
    if result.status is not StepStatus.OK:
        context.close()
        if result.status is StepStatus.INFRA_ERROR:
            raise SandboxInfraError(result.detail)
        if places.image is not None and result.exit_code == 127:
            raise NotSupportedException(
                f"image {places.image.name!r} has no {language}; remedy: install it when the image "
                "is built, or use language='bash'"
            )
        hint = "; Node.js needs a control group or limits.memory_mib of 1024" * (
            language == "javascript"
        )
        raise SandboxException(
            f"{language} did not start: {result.detail}{hint}\n{result.stderr[-2000:]}"
        )
    if session.host is not None and language == "python":
        context.attach_host_tools(session.host)
    return context
