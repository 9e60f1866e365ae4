"""A lost rank ends the others with one line; a finished rank does not."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tests.warm import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANK = """
import os, signal, sys, time
from agentgrpo.support import parallel
parallel.SILENCE_S, parallel.BEAT_S, parallel.GRACE_S = 10.0, 0.2, 2.0
parallel.start()
try:
    exec(sys.argv[1 if parallel.rank() == 1 else 2])
finally:
    parallel.stop()
"""
PLAY = "while True: time.sleep(0.1)"
DEAD, FAILED = "has died or lost its network", "has failed"
CASES: dict[str, tuple[str, str, str | None]] = {
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", PLAY, DEAD),
    "silent": ("os.kill(os.getpid(), signal.SIGSTOP)", PLAY, DEAD),
    "killed, others in a collective": ("os._exit(9)", "parallel.gather(0)", DEAD),
    "an error": ("raise KeyError", PLAY, FAILED),
    "an error, others in a collective": ("raise KeyError", "parallel.gather(0)", FAILED),
    "an error that names gloo": ("raise RuntimeError('NCCL, gloo')", PLAY, FAILED),
    "finished": ("pass", "time.sleep(2)", None),
    "finished first": ("parallel.stop(); os._exit(0)", "time.sleep(2)", None),
}
"""What rank 1 does, what the others do meanwhile, and what they say of it."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int | None, str]]]:
    """Of each case, the status and output of ranks 0 and 2. All cases run at once."""
    script = tmp_path_factory.mktemp("ranks") / "rank.py"
    script.write_text(RANK)
    with contextlib.ExitStack() as ports:
        free = [ports.enter_context(socket.create_server(("localhost", 0))) for _ in CASES]
        numbers = [str(server.getsockname()[1]) for server in free]
    started = {
        case: [
            Command(
                str(script), victim, others, RANK=str(rank), LOCAL_RANK="0", WORLD_SIZE="3",
                MASTER_ADDR="localhost", MASTER_PORT=port,
            )
            for rank in range(3)
        ]
        for (case, (victim, others, _)), port in zip(CASES.items(), numbers, strict=True)
    }  # fmt: skip
    results: dict[str, list[tuple[int | None, str]]] = {case: [] for case in CASES}
    for case, ranks in started.items():
        for rank in (ranks[0], ranks[2]):
            out = "".join(rank.communicate(timeout=200))
            results[case].append((rank.returncode, out))
    for ranks in started.values():
        ranks[1].kill()
        ranks[1].communicate(timeout=10)
    return results


@pytest.mark.parametrize("case", CASES)
def test_lost_rank_ends_the_others(
    case: str, ended: dict[str, list[tuple[int | None, str]]]
) -> None:
    message = CASES[case][2]
    for status, out in ended[case]:
        assert status == (0 if message is None else 1), out
        lines = [line for line in out.splitlines() if line.startswith("error: ")]
        assert len(lines) == (0 if message is None else 1), out
        if message is not None:
            assert lines[0].startswith(f"error: rank 1 ({socket.gethostname()}) {message}."), out
