"""What a name means before any file is opened: a place on this machine, or a name of a hub's."""

from __future__ import annotations

from pathlib import Path


def looks_like_path(name: str) -> bool:
    """Whether a name can only be meant as a place on this machine, and is no name of a hub's.

    >>> [looks_like_path(n) for n in ("./a", "~/a", "a/b/c", "a/b.gguf", "a/", "a/b", "a/b-1.5B")]
    [True, True, True, True, True, False, False]
    """
    return (
        name.startswith(("/", ".", "~"))
        or name.endswith("/")
        or name.count("/") > 1
        or Path(name).suffix.lower() in SUFFIXES
    )


SUFFIXES = {
    *(".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".zip", ".tar", ".gz", ".py"),
    *(".json", ".jsonl", ".ndjson", ".parquet", ".arrow", ".csv", ".txt", ".toml", ".yaml", ".yml"),
}
"""Of files; what follows the last dot of "Qwen2.5-0.5B" is none."""
