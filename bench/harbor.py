"""Build task folders in Harbor's format and grade them unsolved (results/harbor.jsonl).

    python -m bench.harbor FOLDER

One row per folder: seconds of build and verdict, the tests' result, the size of the image, and of
its layers that no earlier folder has. The committed rows are of 44 folders of a public collection
of 3,566: the first ones of a shuffled list that do not install torch, with FROM replaced by an
image of Debian 12 (`mmdebstrap --variant=minbase --include=python3 bookworm root.tar`). RUN steps
use this machine's network, which reaches only mirrors of Debian and PyPI.
"""

import argparse
import os
import time
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

from agentgrpo.actions import InfrastructureError
from agentgrpo.envs.harbor import HarborEnv
from agentgrpo.envs.harbor_tasks import folders_of, make_row
from agentgrpo.sandbox import SandboxException, SandboxPool
from agentgrpo.sandbox.isolation.images import SIZE, get_image
from agentgrpo.sandbox.session.dockerfile import Builder
from agentgrpo.types import Task
from bench.harness import traced_row
from bench.sandbox import note


def megabytes(layers: Iterable[str]) -> float:
    return round(sum(int(os.getxattr(layer, SIZE)) for layer in layers) / 1e6, 1)


def play(folder: Path, env: HarborEnv, builder: Builder, seen: set[str]) -> dict[str, object]:
    """Build a folder's image and judge a session in which nothing was done."""
    begin, result = time.perf_counter(), dict[str, object]()
    try:
        row = make_row(folder, builder)
        built = time.perf_counter()
        layers = get_image(row["image"]).layers
        result = {
            "build_s": round(built - begin, 1), "layers": len(layers), "mb": megabytes(layers),
            "new_mb": megabytes([layer for layer in layers if layer not in seen]),
        }  # fmt: skip
        seen.update(layers)
        with closing(env.reset(Task(id=folder.name, messages=(), spec=row))) as episode:
            result["nothing"] = sum(episode.finish(None).values())
        result["verdict_s"] = round(time.perf_counter() - built, 1)
    except (ValueError, SandboxException, InfrastructureError) as error:
        result |= {"error": str(error)[-400:], "failed_s": round(time.perf_counter() - begin, 1)}
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    seen: set[str] = set()
    with (
        SandboxPool(max_live=1, min_idle=0, zygotes=1) as pool,
        Builder(network=True) as builder,
        closing(HarborEnv(pool, 60.0)) as env,
    ):
        for folder in folders_of(given.folder):
            row = play(folder, env, builder, seen)
            traced_row("harbor", folder.name, {"note": note(), **row})
            print(folder.name, row, flush=True)


if __name__ == "__main__":
    main()
