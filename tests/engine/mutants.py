"""Change what is asked of vLLM for the engine to sleep and see that the tests notice."""

from __future__ import annotations

from tests.mutation import Mutant

FOLDER = "agentgrpo"
FILES = ("engine/engine.py", "engine/start.py", "loop.py", "learn/publish.py")
TESTS = {file: ["engine/test_sleep.py"] for file in FILES}

MUTANTS = [
    Mutant("engine/engine.py", 'self._engine.sleep(self._config.sleep_level, mode="keep")', "pass"),
    Mutant(
        "engine/engine.py",
        'self._engine.sleep(self._config.sleep_level, mode="keep")',
        'self._engine.sleep(1, mode="keep")',
    ),
    Mutant(
        "engine/engine.py",
        'self._engine.sleep(self._config.sleep_level, mode="keep")',
        "self._engine.sleep(self._config.sleep_level)",
    ),
    Mutant("engine/engine.py", 'wake_up(["weights"] if hollow else None)', "wake_up(None)"),
    Mutant("engine/engine.py", 'self._engine.wake_up(["kv_cache"])', "pass"),
    Mutant("engine/start.py", '"enable_sleep_mode": not on_cpu', '"enable_sleep_mode": False'),
    Mutant("engine/start.py", '"enable_sleep_mode": not on_cpu', '"enable_sleep_mode": True'),
    Mutant("loop.py", "metrics = parts.engine.wake()", "metrics = {}"),
    Mutant("loop.py", "parts.engine.sleep()", "pass"),
    Mutant("learn/publish.py", "self._engine.reset_prefix_cache()", "pass"),
    Mutant("learn/publish.py", "self._engine.weights_loaded()", "pass"),
]
