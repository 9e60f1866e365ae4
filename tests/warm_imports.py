"""What warm.py's server imports: all that a command with an engine and a learner needs."""

import gc
import importlib
import os

from agentgrpo.support.runtime import prepare_environment

os.environ.pop("TRITON_INTERPRET", None)  # of the tests' own process
prepare_environment()
for name in ("train.build", "engine.engine", "learn.learner", "recipe.sft"):
    importlib.import_module(f"agentgrpo.{name}")
gc.freeze()  # vLLM collects seven times as it starts and ends: over these, 0.4 s each
