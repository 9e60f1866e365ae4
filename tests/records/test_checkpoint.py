"""A checkpoint is complete or absent, whenever the process dies."""

from __future__ import annotations

import contextlib
import re
import resource
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentgrpo.records import checkpoint
from agentgrpo.support.files import (
    CHECKSUMS,
    read_json,
    read_toml,
    verify_checksums,
    write_checksums,
)


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "sub").mkdir()
        (folder / "weights").write_text(text)
        (folder / "sub" / "more").write_text(text)

    return write


def listed(out_dir: Path) -> list[str]:
    return sorted(path.name for path in (out_dir / "checkpoints").iterdir())


def test_newest_has_highest_step_and_old_ones_are_deleted(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    steps = (3, 20, 999_999, 1_000_000)
    for step in steps:
        saved = checkpoint.save(tmp_path, step, writer(str(step)), keep=2)
        assert saved == tmp_path / "checkpoints" / f"step_{step:06d}"
        assert checkpoint.newest(tmp_path) == saved
        assert checkpoint.step_of(saved) == step
    assert (saved / "weights").read_text() == (saved / "sub" / "more").read_text() == "1000000"
    assert sorted(checkpoint.step_of(tmp_path / name) for name in listed(tmp_path)) == [*steps[2:]]


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt()])
def test_failed_write_keeps_old_checkpoints_and_leaves_no_files(
    tmp_path: Path, error: BaseException
) -> None:
    def fail(folder: Path) -> None:
        writer("half")(folder)
        raise error

    old = checkpoint.save(tmp_path, 1, writer("old"), keep=1)
    with pytest.raises(type(error)):
        checkpoint.save(tmp_path, 2, fail, keep=1)
    assert listed(tmp_path) == [old.name]
    assert (old / "weights").read_text() == "old"


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, writer("old"), keep=2)
    checkpoint.save(tmp_path, 1, lambda folder: (folder / "new").touch(), keep=2)
    saved = checkpoint.newest(tmp_path)
    assert saved is not None
    assert {path.name for path in saved.iterdir()} == {"new", CHECKSUMS}


class Killed(BaseException):
    """Simulates the end of the process."""


def kill_at(monkeypatch: pytest.MonkeyPatch, call: int) -> None:
    """Die before the call-th rename, or in the middle of the call-th removal."""
    calls, remove = 0, shutil.rmtree

    def dying(original: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls >= call:
                if original is remove and calls == call:
                    next(p for p in Path(str(args[0])).rglob("*") if p.is_file()).unlink()
                raise Killed
            return original(*args, **kwargs)

        return run

    monkeypatch.setattr(Path, "rename", dying(Path.rename))
    monkeypatch.setattr(shutil, "rmtree", dying(shutil.rmtree))


@pytest.mark.parametrize("call", range(1, 9))
@pytest.mark.parametrize("step", [2, 3])
def test_kill_at_any_point_leaves_complete_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int, step: int
) -> None:
    for done in (1, 2):
        checkpoint.save(tmp_path, done, writer(str(done)), keep=2)
    with monkeypatch.context() as patch:
        kill_at(patch, call)
        with contextlib.suppress(Killed):
            checkpoint.save(tmp_path, step, writer("again"), keep=2)
    newest = checkpoint.newest(tmp_path)
    assert newest is not None
    assert (newest / "weights").read_text() == (newest / "sub" / "more").read_text()
    # the next save succeeds and removes the leftovers
    checkpoint.save(tmp_path, step, writer("again"), keep=2)
    checkpoint.save(tmp_path, 4, writer("4"), keep=2)
    assert listed(tmp_path) == [f"step_{step:06d}", "step_000004"]


def test_other_names_are_ignored(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, writer("1"), keep=2)
    for name in (".partial-step_000009", ".removed-step_000008", "step_7", "step_000009.old"):
        (saved.parent / name).mkdir()
    assert checkpoint.newest(tmp_path) == saved


# --- full disks and damaged files


class Full:
    """Limits the size of files, to simulate a full disk."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self._size, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, self._before)


def write_tensors(folder: Path) -> None:
    save_file({"w": torch.zeros(100_000)}, folder / "model.safetensors")


def write_state(folder: Path) -> None:
    torch.save({"w": torch.zeros(100_000)}, folder / checkpoint.STATE)


def write_text(folder: Path) -> None:
    (folder / "config.json").write_text("x" * 400_000)


@pytest.mark.parametrize("write", [write_tensors, write_state, write_text])
def test_full_disk_is_reported_and_loses_nothing(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    old = checkpoint.save(tmp_path, 1, writer("old"), keep=1)
    message = r"step_000002: checkpoint could not be written: .*; older ones are unchanged"
    with Full(1000), pytest.raises(OSError, match=message):
        checkpoint.save(tmp_path, 2, write, keep=1)
    assert listed(tmp_path) == [old.name]
    assert (old / "weights").read_text() == "old"
    checkpoint.save(tmp_path, 2, write, keep=1)
    assert listed(tmp_path) == ["step_000002"]


def test_other_errors_are_not_reported_as_full_disk(tmp_path: Path) -> None:
    def bug(folder: Path) -> None:
        raise KeyError("typo")

    with pytest.raises(KeyError, match="typo"):
        checkpoint.save(tmp_path, 1, bug, keep=1)


WHOLE = {"config.json", "model-00001-of-00002.safetensors", checkpoint.STATE}
ADAPTER = {"adapter_config.json", "adapter_model.safetensors", checkpoint.STATE}


def write_part(path: Path) -> None:
    if path.suffix == ".safetensors":
        save_file({"w": torch.zeros(3, 4), "b": torch.zeros(5)}, path, metadata={"format": "pt"})
    else:
        path.write_text("x")


@pytest.mark.parametrize("adapter", [False, True])
def test_incomplete_checkpoint_names_missing_files(tmp_path: Path, adapter: bool) -> None:
    names = ADAPTER if adapter else WHOLE
    for name in names:
        write_part(tmp_path / name)
    write_checksums(tmp_path)
    checkpoint.require_whole(tmp_path, adapter=adapter)
    for name in sorted(names):
        (tmp_path / name).unlink()
        label = "*.safetensors" if name.startswith("model") else name
        with pytest.raises(ValueError, match=f"{re.escape(label)} missing or empty; move the che"):
            checkpoint.require_whole(tmp_path, adapter=adapter)
        write_part(tmp_path / name)
    (tmp_path / CHECKSUMS).unlink()
    with pytest.raises(ValueError, match=f"{CHECKSUMS} missing or empty; move the che"):
        checkpoint.require_whole(tmp_path, adapter=adapter)
    write_checksums(tmp_path)
    (tmp_path / checkpoint.STATE).write_text("")
    with pytest.raises(ValueError, match=f"{checkpoint.STATE} missing or empty"):
        checkpoint.require_whole(tmp_path, adapter=adapter)
    with pytest.raises(ValueError, match="not a complete checkpoint"):
        checkpoint.require_whole(tmp_path, adapter=not adapter)


@pytest.mark.parametrize("size", [1, 7, 8, 20, -1])
def test_truncated_weights_are_detected_before_loading(tmp_path: Path, size: int) -> None:
    for name in WHOLE:
        write_part(tmp_path / name)
    write_checksums(tmp_path)
    path = tmp_path / "model-00001-of-00002.safetensors"
    assert checkpoint.shapes_in(path) == {"w": (3, 4), "b": (5,)}
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model-00001.*: not a complete safetensors file"):
        checkpoint.shapes_in(path)
    with pytest.raises(ValueError, match=r"model-00001.*; move the checkpoint away"):
        checkpoint.require_whole(tmp_path, adapter=False)


def test_flipped_bit_is_detected_in_every_file(tmp_path: Path) -> None:
    """Changed weights load without an error, so only checksums can detect them."""

    def write(folder: Path) -> None:
        for name in WHOLE:
            write_part(folder / name)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "more").mkdir()
        (folder / "more" / "bytes").write_bytes(bytes(1 << 19))

    saved = checkpoint.save(tmp_path, 3, write, keep=1)
    checkpoint.require_whole(saved, adapter=False)
    files = [path for path in saved.rglob("*") if path.is_file()]
    assert {"bytes", CHECKSUMS, checkpoint.STATE} < {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        for place in {0, len(whole) // 2, len(whole) - 1}:
            for bit in (0, 7):
                flipped = bytearray(whole)
                flipped[place] ^= 1 << bit
                path.write_bytes(flipped)
                with pytest.raises(ValueError, match=f"^{path}: .*; move the checkpoint away"):
                    checkpoint.require_whole(saved, adapter=False)
        path.write_bytes(whole)
    checkpoint.require_whole(saved, adapter=False)


def test_checksums_published_with_a_model_are_ignored(tmp_path: Path) -> None:
    (tmp_path / CHECKSUMS).write_text(f"{'0' * 64}  config.json\n")
    verify_checksums(tmp_path, foreign_ok=True)
    with pytest.raises(ValueError, match="is not as it was written"):
        verify_checksums(tmp_path)


def test_sha256sum_accepts_the_checksums(tmp_path: Path) -> None:
    saved = checkpoint.save(tmp_path, 1, writer("a text"), keep=1)
    check = ["sha256sum", "--check", "--strict", CHECKSUMS]
    result = subprocess.run(check, cwd=saved, capture_output=True, text=True, check=True)
    assert result.stdout == "sub/more: OK\nweights: OK\n"


@pytest.mark.parametrize(("read", "text"), [(read_json, "["), (read_toml, "x = [")])
def test_deeply_nested_file_is_named(
    tmp_path: Path, read: Callable[[Path], object], text: str
) -> None:
    (tmp_path / "deep").write_text(text + "[" * 100_000)
    with pytest.raises(ValueError, match=f"^{tmp_path / 'deep'}: not .*: nested too deeply$"):
        read(tmp_path / "deep")


@pytest.mark.parametrize(("read", "text"), [(read_json, '{"x": 1}'), (read_toml, "x = 1")])
def test_byte_order_mark_is_ignored(
    tmp_path: Path, read: Callable[[Path], object], text: str
) -> None:
    (tmp_path / "marked").write_text(text, encoding="utf-8-sig")
    assert read(tmp_path / "marked") == {"x": 1}


def test_removed_folder_is_not_recreated(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone: the folder was removed during the run"):
        checkpoint.save(tmp_path / "gone", 1, writer("a"), keep=1)
    assert not (tmp_path / "gone").exists()


@pytest.mark.parametrize("mmap", [False, True])
def test_unreadable_state_is_named(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / checkpoint.STATE
    torch.save({"step": 3, "tasks": {"at": 1}, "moments": torch.arange(4)}, path)
    assert checkpoint.read_state(path, "step", "tasks", mmap=mmap)["tasks"] == {"at": 1}
    with pytest.raises(ValueError, match=rf"{path}: cannot be read as the state .*: no optimizer"):
        checkpoint.read_state(path, "optimizer", mmap=mmap)
    whole = path.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"not a state", b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{path}: cannot be read as the state"):
            checkpoint.read_state(path, "step", mmap=mmap)
