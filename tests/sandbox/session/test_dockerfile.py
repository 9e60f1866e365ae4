"""Images built from Dockerfiles: what is parsed, run, cached and refused."""

import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgrpo.sandbox import SandboxPool, Template
from agentgrpo.sandbox.isolation import images
from agentgrpo.sandbox.isolation.images import add_image, get_image, store_dir
from agentgrpo.sandbox.isolation.layers import ImageError
from agentgrpo.sandbox.isolation.limits import Limits
from agentgrpo.sandbox.session.dockerfile import Builder, expand, instructions
from tests.sandbox.isolation.tiny_image import add_tiny_image

LIMITS = Limits(memory_mib=256, home_mib=64, processes=64, timeout_s=30)

PARSED = {
    "FROM a": [(1, "FROM", {}, "a")],
    "# c\n\nrun x \\\n  # c\n  && y\nENV A=1": [(3, "RUN", {}, "x  && y"), (6, "ENV", {}, "A=1")],
    "COPY --chown=a:b --link x y": [(1, "COPY", {"chown": "a:b", "link": ""}, "x y")],
    "RUN <<E\na\nb\nE\nCMD x": [(1, "RUN", {}, "<<E\na\nb\nE"), (5, "CMD", {}, "x")],
    'RUN cat <<"E F"\nCMD x': [(1, "RUN", {}, 'cat <<"E F"'), (2, "CMD", {}, "x")],
    "RUN cat <<-E > f\n\ta\n\tE\nCMD x": [(1, "RUN", {}, "cat <<-E > f\n\ta\nE"), (4, "CMD", {}, "x")],  # noqa: E501
    "RUN echo $((1<<n)) <<<x\nCMD x": [(1, "RUN", {}, "echo $((1<<n)) <<<x"), (2, "CMD", {}, "x")],
}  # fmt: skip


@pytest.mark.parametrize("text", PARSED)
def test_instructions_are_parsed(text: str) -> None:
    assert list(instructions(text)) == PARSED[text]


def test_variables_are_expanded() -> None:
    variables = {"A": "1", "E": ""}
    text = r"$A ${A}b ${B:-2} ${E:-3} ${A:+4} ${B:+5} \$A $B."
    assert expand(text, variables) == "1 1b 2 3 4  $A ."


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A build context, with a store that has image "tiny:1"."""
    place = tmp_path_factory.mktemp("build")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        add_tiny_image("tiny", python=False)
        context = place / "context"
        (context / "sub").mkdir(parents=True)
        (context / "a.txt").write_text("a\n")
        (context / "sub" / "b.txt").write_text("b\n")
        (context / "sub" / "run.sh").write_text("#!/bin/sh\necho ran\n")
        (context / "sub" / "run.sh").chmod(0o755)
        (context / "link").symlink_to("/etc/passwd")
        yield context


@pytest.fixture(scope="module")
def builder(folder: Path) -> Iterator[Builder]:
    with Builder(limits=LIMITS) as builder:
        yield builder


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[SandboxPool]:
    """For sessions of all images."""
    with SandboxPool(template=Template(image="tiny"), limits=LIMITS, min_idle=0) as pool:
        yield pool


def build(builder: Builder, folder: Path, text: str, name: str = "x") -> images.Image:
    (folder / "Dockerfile").write_text(text)
    return builder.build(name, folder)


BUILT = {
    "RUN echo 1 > /f && cat /f": ("cat /f", "1"),
    'ARG V=2\nENV A=$V B="x y"\nENV C d e\nRUN echo $A $B $C $V > /f': ("cat /f; echo $B$V", "2 x y d e 2 x y"),  # noqa: E501
    "WORKDIR /w\nWORKDIR deep\nRUN pwd > f": ("pwd; cat f", "/w/deep /w/deep"),
    "COPY a.txt /c": ("cat /c", "a"),
    "COPY a.txt /d/": ("cat /d/a.txt", "a"),
    "WORKDIR /w\nCOPY . .": ("cat a.txt sub/b.txt; sub/run.sh", "a b ran"),
    "COPY sub /root": ("ls /root", "b.txt run.sh"),
    "COPY sub/*.txt a.txt /d/": ("ls /d", "a.txt b.txt"),
    'COPY ["a.txt", "/d e"]': ("cat '/d e'", "a"),
    "COPY --chmod=700 a.txt /c": ("stat -c %a /c", "700"),
    "RUN mkdir /d\nCOPY a.txt /d": ("cat /d/a.txt", "a"),
    "RUN ln -s /root /l\nCOPY a.txt /l/x": ("cat /root/x", "a"),
    'RUN ["/bin/sh", "-c", "echo $0 > /f"]': ("cat /f", "/bin/sh"),
    'SHELL ["/bin/bash", "-c"]\nRUN [[ a < b ]] && echo $0 > /f': ("cat /f", "/bin/bash"),
    "RUN <<E\nread x < /etc/version\necho v$x > /f\nE": ("cat /f", "v1"),
    "RUN rm /etc/version": ("ls /etc/version 2>/dev/null; echo gone", "gone"),
    "CMD a\nEXPOSE 1\nLABEL a=b\nUSER root\nENTRYPOINT x": ("cat /etc/version", "1"),
}  # fmt: skip


@pytest.mark.nsjail
@pytest.mark.parametrize("steps", BUILT)
def test_dockerfiles_are_built(
    steps: str, builder: Builder, folder: Path, pool: SandboxPool
) -> None:
    command, expected = BUILT[steps]
    image = build(builder, folder, f"FROM tiny\n{steps}\n")
    with pool.acquire(image) as session:
        assert session.step(command).stdout.split() == expected.split()


REFUSED = {
    "": "expected a FROM",
    "RUN true": "1: RUN: expected FROM first",
    "FROM nothing": r"1: FROM: image: expected one in the store \(.*image add nothing",
    "FROM tiny AS a\nFROM tiny": "1: FROM: expected one stage",
    "FROM tiny\nFROM tiny": "2: FROM: expected one stage",
    "FROM tiny\n\nUSER app": "3: USER: expected root, got app",
    "FROM tiny\nCOPY --from=a /x /y": "2: COPY: --from is not supported",
    "FROM tiny\nRUN --mount=type=cache,target=/c true": "2: RUN: --mount is not supported",
    "FROM tiny\nADD https://x/y /z": "2: ADD: https://x/y: here-documents and URLs",
    "FROM tiny\nADD a.tar.gz /z": "2: ADD: a.tar.gz: archives",
    "FROM tiny\nCOPY <<E /z\nx\nE": "2: COPY: <<E: here-documents",
    "FROM tiny\nCOPY none /z": "2: COPY: none: expected a file or folder in",
    "FROM tiny\nCOPY ../Dockerfile /z": "2: COPY: ../Dockerfile: expected",
    "FROM tiny\nCOPY link /z": "2: COPY: link: expected a file or folder in",
    "FROM tiny\nRUN echo no >&2; exit 3": "2: RUN: the command ended with 3 \nno",
    "FROM tiny\nPULL x": "2: PULL: this instruction is not supported",
    'FROM tiny\nRUN echo "unfinished': "2: RUN: the command ended with",
    'FROM tiny\nENV A="unfinished': "2: ENV: No closing quotation",
    "FROM tiny\nENV": "2: ENV",
    "FROM tiny\nCOPY a.txt": "2: COPY",
}


@pytest.mark.nsjail
@pytest.mark.parametrize("text", REFUSED)
def test_unsupported_instructions_raise_with_their_line(
    text: str, builder: Builder, folder: Path
) -> None:
    with pytest.raises(ImageError, match=REFUSED[text]):
        build(builder, folder, text, "refused")
    assert "refused" not in {image.name for image in images.list_images()}
    assert not list((store_dir() / "layers").glob(".new-*"))


@pytest.mark.nsjail
def test_steps_are_cached(builder: Builder, folder: Path) -> None:
    step = "RUN cat /proc/sys/kernel/random/uuid > /f"
    first = build(builder, folder, f"FROM tiny\n{step}\n", "a")
    again = build(builder, folder, f"FROM tiny\n{step}\nRUN true", "b")
    assert again.layers[: len(first.layers)] == first.layers
    other = build(builder, folder, f"FROM tiny\nENV A=1\n{step}\n", "c")
    assert other.layers[-1] != first.layers[-1]
    (folder / "a.txt").touch()
    copied = build(builder, folder, "FROM tiny\nCOPY a.txt /\n", "d")
    os.utime(folder / "a.txt", (1, 1))
    assert build(builder, folder, "FROM tiny\nCOPY a.txt /\n", "d").layers == copied.layers


@pytest.mark.nsjail
def test_links_of_a_run_step_do_not_lead_out_of_its_layer(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "resolv.conf").write_text(Path("/etc/resolv.conf").read_text())
    text = f"FROM tiny\nRUN rm -r /etc && ln -s {tmp_path} /etc\n"
    (folder / "Dockerfile").write_text(text)
    with Builder(limits=LIMITS, network=True) as builder:
        image = builder.build("links", folder)
    assert (tmp_path / "resolv.conf").is_file()
    assert os.readlink(Path(image.layers[-1], "etc")) == str(tmp_path)


@pytest.mark.nsjail
@pytest.mark.parametrize("network", [False, True])
def test_network_is_available_only_on_request(network: bool, folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        def serve() -> None:
            with server.accept()[0] as connection:
                connection.sendall(b"served\n")

        threading.Thread(target=serve, daemon=True).start()
        command = f"exec 3<>/dev/tcp/127.0.0.1/{port} && cat <&3 > /f"
        (folder / "Dockerfile").write_text(
            f'FROM tiny\nSHELL ["/bin/bash", "-c"]\nRUN {command} || echo none > /f\n'
        )
        with Builder(limits=LIMITS, network=network) as builder:
            image = builder.build("net", folder)
    assert Path(image.layers[-1], "f").read_text() == ("served\n" if network else "none\n")
    assert not Path(image.layers[-1], "etc/resolv.conf").exists()
    assert get_image("net") == image


def test_image_names_can_be_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "root" / "etc").mkdir(parents=True)
    image = add_image("org/x:1.0", tmp_path / "root")
    assert [known.name for known in images.list_images()] == ["org/x:1.0"]
    assert get_image("org/x:1.0") == image
