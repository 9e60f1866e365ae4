"""delta_pack against a Python loop and against its PyTorch reference; it compiles for real GPUs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgrpo.kernels.delta_pack import DeltaBatch, delta_pack, delta_pack_reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Run = tuple[int, int, bool]  # start in the delta buffers, size, sampled
ROLLOUTS = st.lists(
    st.lists(st.tuples(st.integers(0, 20), st.integers(0, 6), st.booleans()), max_size=5),
    max_size=6,
)


def make(rollouts: list[list[Run]], num_delta: int) -> dict[str, Any]:
    """Descriptors of the rollouts over random deltas; logp is nan outside of sampled segments."""
    gen = torch.Generator().manual_seed(0)
    runs = [(*run, r) for r, segments in enumerate(rollouts) for run in segments]
    logp = torch.full((num_delta,), float("nan"))
    for start, size, sampled, _ in runs:
        if sampled:
            logp[start : start + size] = -torch.rand(size, generator=gen)
    arrays = {
        "ids_D": torch.randint(0, 150_000, (num_delta,), generator=gen, dtype=torch.int32),
        "logp_D": logp,
        "start_S": torch.tensor([run[0] for run in runs], dtype=torch.int64),
        "size_S": torch.tensor([run[1] for run in runs], dtype=torch.int64),
        "sampled_S": torch.tensor([run[2] for run in runs], dtype=torch.bool),
        "rollout_S": torch.tensor([run[3] for run in runs], dtype=torch.int64),
        "advantage_R": torch.randn(len(rollouts), generator=gen),
        "weight_R": torch.rand(len(rollouts), generator=gen),
    }
    return {name: x.to(DEVICE) for name, x in arrays.items()}


def slow_pack(rollouts: list[list[Run]], arrays: dict[str, Any]) -> dict[str, list[float]]:
    """One token at a time, in the words of the module's docstring."""
    ids, logp = arrays["ids_D"].tolist(), arrays["logp_D"].tolist()
    out: dict[str, list[float]] = {name: [] for name in DeltaBatch._fields}
    for r, segments in enumerate(rollouts):
        tokens = [
            (ids[i], logp[i], sampled)
            for start, size, sampled in segments
            for i in range(start, start + size)
        ]
        for position, (token, _, _) in enumerate(tokens):
            following = tokens[position + 1] if position + 1 < len(tokens) else (0, 0.0, False)
            learned = following[2]
            values = (
                token, position, following[0] * learned, learned,
                following[1] if learned else 0.0,
                arrays["advantage_R"][r].item() * learned, arrays["weight_R"][r].item() * learned,
            )  # fmt: skip
            for name, value in zip(DeltaBatch._fields, values, strict=True):
                out[name].append(value)
    return out


def check(batch: DeltaBatch, want: dict[str, list[float]]) -> None:
    for name, got in zip(DeltaBatch._fields, batch, strict=True):
        assert got.tolist() == want[name], name
    assert batch.mask_T.dtype == torch.bool
    assert {x.dtype for x in batch[:3]} == {torch.int64}
    assert {x.dtype for x in batch[4:]} == {torch.float32}


@settings(max_examples=40, deadline=None)
@given(ROLLOUTS)
def test_matches_a_loop_over_tokens(rollouts: list[list[Run]]) -> None:
    arrays = make(rollouts, 26)
    want = slow_pack(rollouts, arrays)
    check(delta_pack(**arrays), want)
    check(delta_pack_reference(**arrays), want)


def test_worked_example() -> None:
    """One prompt 7 8 shared by two rollouts; the first calls a tool that answers 9."""
    t = torch.tensor
    batch = delta_pack(
        t([7, 8, 1, 9, 2, 3], dtype=torch.int32, device=DEVICE),
        t([float("nan")] * 2 + [-0.5, float("nan"), -0.25, -1.0], device=DEVICE),
        t([0, 2, 3, 4, 0, 5], device=DEVICE),
        t([2, 1, 1, 1, 2, 1], device=DEVICE),
        t([False, True, False, True, False, True], device=DEVICE),
        t([0, 0, 0, 0, 1, 1], device=DEVICE),
        t([1.0, -1.0], device=DEVICE),
        t([0.5, 0.25], device=DEVICE),
        num_tokens=8,
    )
    assert batch.input_ids_T.tolist() == [7, 8, 1, 9, 2, 7, 8, 3]
    assert batch.positions_T.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.target_T.tolist() == [0, 1, 0, 2, 0, 0, 3, 0]
    assert batch.mask_T.tolist() == [False, True, False, True, False, False, True, False]
    assert batch.old_logp_T.tolist() == [0, -0.5, 0, -0.25, 0, 0, -1, 0]
    assert batch.advantage_T.tolist() == [0, 1, 0, 1, 0, 0, -1, 0]
    assert batch.weight_T.tolist() == [0, 0.5, 0, 0.5, 0, 0, 0.25, 0]


def test_a_rollout_is_not_predicted_by_the_one_before() -> None:
    batch = delta_pack(**make([[(0, 2, False)], [(2, 2, True)]], 4))
    assert batch.mask_T.tolist() == [False, False, True, False]


@pytest.mark.parametrize("num_tokens", [255, 256, 257, 1000])
def test_matches_reference_across_program_boundaries(num_tokens: int) -> None:
    runs: list[Run] = [(0, 100, False), (100, num_tokens - 200, True), (50, 100, False)]
    arrays = make([runs[:2], runs[2:]], num_tokens)
    ours, want = delta_pack(**arrays), delta_pack_reference(**arrays)
    assert len(ours.mask_T) == num_tokens
    for name, a, b in zip(DeltaBatch._fields, ours, want, strict=True):
        assert torch.equal(a, b), name


def test_bad_arguments_are_named() -> None:
    arrays = make([[(0, 3, False), (3, 2, True)]], 5)
    for name, bad, message in [
        ("ids_D", arrays["ids_D"].long(), "ids_D: expected torch.int32"),
        ("logp_D", arrays["logp_D"][:4], r"logp_D: expected torch.float32 of shape \(5,\)"),
        ("weight_R", arrays["weight_R"][:0], r"weight_R: expected torch.float32 of shape \(1,\)"),
        ("size_S", torch.ones(4, dtype=torch.int64, device=DEVICE)[::2], "size_S: .* contiguous"),
    ]:
        with pytest.raises(ValueError, match=message):
            delta_pack(**{**arrays, name: bad})


PROGRAM = """
import json, sys
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from agentgrpo.kernels import delta_pack as m

P32, P64, PF, PB = "*i32", "*i64", "*fp32", "*i1"
signature = dict(
    ids=P32, logp=PF, start=P64, bounds=P64, sampled=PB, rollout=P64, first=P64, advantage=PF,
    weight=PF, input_ids=P64, positions=P64, target=P64, mask=PB, old_logp=PF, advantage_out=PF,
    weight_out=PF, T="i32", S="i32")
constants = dict(STEPS=12, BLOCK_T=m._BLOCK_T)
source = ASTSource(m._delta_pack_kernel, {**signature, **dict.fromkeys(constants, "constexpr")},
                   constants)
kernel = compile(source, target=GPUTarget("cuda", int(sys.argv[1]), 32))
print(json.dumps({"bytes": len(kernel.asm["cubin"])}))
"""


@pytest.mark.parametrize("capability", [80, 90])
def test_compiles(capability: int) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, str(capability)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bytes"] > 0
