"""A dataset of a hub in the cache of `datasets`, as load_dataset("org/name") leaves it there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def put_in_cache(
    home: Path, name: str, subset: str, splits: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    """Prepare a dataset by the builder that `datasets` takes for one of JSON lines.

    Args:
        home: what HF_HOME will be.
        name: owner/name.
        subset: of it.
        splits: their rows.
    """
    from datasets.packaged_modules.json.json import Json

    files = {}
    for split, rows in splits.items():
        path = home / f"{split}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(map(json.dumps, rows)))
        files[split] = [str(path)]
    builder = Json(
        cache_dir=str(home / "datasets"), dataset_name=name.replace("/", "___"),
        config_name=subset, config_id=subset, data_files=files, hash="0123456789abcdef",
    )  # fmt: skip
    builder.dataset_name = name.partition("/")[2]  # the folder has the owner, its files have not
    builder.download_and_prepare()
