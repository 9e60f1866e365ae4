"""Rows of a dataset that a hub has, by its name: `datasets` finds it, in its cache or on the hub.

What Hugging Face's own variables say holds here too: HF_HOME and HF_DATASETS_CACHE (where the cache
is), HF_HUB_OFFLINE (ask no hub), HF_ENDPOINT and HF_TOKEN. No code of a dataset is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from agentgrpo.extras import import_optional
from agentgrpo.files import looks_like_path


def is_from_hub(name: str) -> bool:
    """Whether it is `owner/name`, nothing that looks like a path, and nothing that is here."""
    return name.count("/") == 1 and not looks_like_path(name) and not Path(name).exists()


def hub_rows(
    name: str, *, subset: str | None, split: str, columns: Collection[str] | None
) -> Iterator[dict[str, Any]]:
    """The rows of a dataset, `owner/name`; what of `columns` it lacks is missing in all rows.

    `split` is as `datasets` reads it: "train", "train[:1000]", "train+validation".
    """
    datasets = import_optional(
        "datasets", f"{name!r} is no file here, and of a hub it is read by datasets"
    )
    if int(datasets.__version__.partition(".")[0]) < 4:
        raise ValueError(
            f"{name!r} is no file here, and the package 'datasets' {datasets.__version__} would "
            "run a dataset's own code; remedy: pip install 'datasets>=4'"
        )
    try:
        found = datasets.load_dataset(name, subset, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(
            f"dataset {name!r}, subset {subset!r}, split {split!r}: no file or directory here has "
            f"that name, and from the hub and its cache: {type(error).__name__}: {error}"
        ) from error
    if columns is not None:
        found = found.select_columns([c for c in found.column_names if c in columns])
    yield from found
