"""How fast the engine decodes with 64, 256 and 512 requests running.

python -m bench.gpu.decode --async-scheduling true|false [--dry-run] [section.key=value ...]

A Qwen3 of random weights; every request is a prompt of its own and samples exactly as many tokens
as the others. Rows: tokens a second and milliseconds a step, over all steps: those that compute the
prompts are among them, and the median step is one in which all decode. Not yet run on a GPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from agentgrpo.machine.runtime import prepare_environment

NAME = "gpu_decode"


def main(arguments: Sequence[str]) -> None:
    """Start the engine, decode each number of requests twice, write the second's rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--size", default="0.6B")
    parser.add_argument("--async-scheduling", choices=["true", "false"], required=True)
    parser.add_argument("--dry-run", action="store_true", help="tiny, on a CPU")
    asked = parser.parse_args(arguments)
    prepare_environment()
    import numpy as np
    import torch

    from agentgrpo.engine.engine import Engine
    from bench.gpu.colocated import config_for, make_model
    from bench.harness import append_row

    if not asked.dry_run and not torch.cuda.is_available():
        raise SystemExit("no CUDA device: --dry-run shows on a CPU that the script works")
    running, prompt, tokens = ((2, 4), 12, 6) if asked.dry_run else ((64, 256, 512), 128, 256)
    room = ["engine.max_model_len=512", f"engine.max_num_seqs={running[-1]}"]
    room += ["engine.kv_cache_gib=0.25"] if asked.dry_run else ["engine.kv_cache_gib=28"]
    # on a CPU vLLM has it not, and a row must not say so
    on = asked.async_scheduling == "true" and not asked.dry_run
    room.append(f"engine.async_scheduling={str(on).lower()}")
    with tempfile.TemporaryDirectory() as folder:
        size = "tiny" if asked.dry_run else asked.size
        model = make_model(Path(folder) / size, size)
        config = config_for(model, Path(folder) / "run", "shared", [*room, *asked.overrides])
        engine = Engine(model, config.engine)
        try:
            rng = np.random.default_rng(0)
            for count in running:
                for time_it in (False, True):
                    for index in range(count):
                        engine.add_request(
                            f"{count}.{time_it}.{index}",
                            rng.integers(3, 250, prompt, dtype=np.int32), max_tokens=tokens,
                            temperature=1.0, seed=index, filters={"ignore_eos": True},
                        )  # fmt: skip
                    wall, sampled = [], 0
                    while engine.num_in_flight:
                        began = time.perf_counter()
                        done = engine.step()
                        wall.append((time.perf_counter() - began) * 1e3)
                        sampled += sum(len(one.token_ids) for one in done)
                if sampled != count * tokens:
                    raise SystemExit(f"{sampled} tokens were sampled of {count * tokens}")
                shape = {"running": count, "prompt": prompt, "tokens": tokens, "steps": len(wall)}
                way = f"async {'on' if on else 'off'}"
                rate = sampled / (sum(wall) / 1e3)
                append_row(NAME, f"{way}: decode", [rate], unit="tok/s", shape=shape)
                append_row(NAME, f"{way}: step", wall, unit="ms", shape=shape)
        finally:
            engine.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
