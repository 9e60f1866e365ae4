"""Imports for the fork server of warm.py: all that a command with engine and learner needs."""

import gc
import importlib
import os

from agentgrpo.support.runtime import prepare_environment

os.environ.pop("TRITON_INTERPRET", None)  # inherited from the process of the tests
prepare_environment()
for name in ("train.build", "engine.engine", "learn.learner", "recipe.sft"):
    importlib.import_module(f"agentgrpo.{name}")
gc.freeze()  # vLLM collects garbage seven times per start and end, 0.4 s each without this
