"""A folder as parts that are carried one by one, and unpacked as far as they have come.

    python bench/gpu/parts.py pack FOLDER PARTS BYTES NAME ...   in order, into PARTS/1, 2 ...
    python bench/gpu/parts.py unpack PARTS FOLDER

A part is chunks of one tar stream, each compressed alone (all cores) and led by its length.
Standard library only: a bare machine may have no xz.
"""

from __future__ import annotations

import lzma
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import Pool
from pathlib import Path

CHUNK = 8 << 20


def pack(folder: str, parts: Path, most: int, names: list[str]) -> None:
    """Each part at most `most` bytes."""
    tar = subprocess.Popen(["tar", "c", "-C", folder, *names], stdout=subprocess.PIPE)
    assert tar.stdout is not None
    number, room, part = 0, 0, None
    with Pool() as pool:
        for chunk in pool.imap(lzma.compress, iter(lambda: tar.stdout.read(CHUNK), b"")):  # type: ignore[union-attr]
            if len(chunk) + 8 > room:
                number, room = number + 1, most
                part = (parts / str(number)).open("wb")
            assert part is not None
            part.write(len(chunk).to_bytes(8, "little") + chunk)
            room -= len(chunk) + 8
    if part is not None:
        part.close()
    if tar.wait():
        raise SystemExit("tar failed")


def chunks(part: Path) -> Iterator[bytes]:
    data, at = part.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield data[at + 8 : at + 8 + size]
        at += 8 + size


def unpack(parts: Path, folder: Path) -> None:
    """What is there by now; a file that breaks off comes whole with the next part."""
    stream = folder.with_suffix(".tar")
    done = folder.with_suffix(".done")  # how many parts the stream has
    have = int(done.read_text()) if done.exists() else 0
    while (part := parts / str(have + 1)).exists():
        with Pool() as pool, stream.open("ab") as file:
            for chunk in pool.imap(lzma.decompress, chunks(part)):
                file.write(chunk)
        have += 1
        done.write_text(str(have))
    if stream.exists():
        folder.mkdir(parents=True, exist_ok=True)
        whole = subprocess.run(["tar", "xf", stream, "-C", folder], stderr=subprocess.DEVNULL)
        print(f"parts: {have} are here{'' if whole.returncode == 0 else ', more are to come'}")


if __name__ == "__main__":
    if sys.argv[1] == "pack":
        pack(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5:])
    else:
        unpack(Path(sys.argv[2]), Path(sys.argv[3]))
