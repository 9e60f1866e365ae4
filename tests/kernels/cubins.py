"""Compile the Triton kernels for a GPU that need not exist, and read the machine code.

    python tests/kernels/cubins.py CAPABILITY [CASE ...]    -> one JSON object, case -> facts

Run without TRITON_INTERPRET. Signatures are those of the launches in kernels/: pointers and strides
that are multiples of 16 are marked as such, as Triton's launcher does.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from agentgrpo.kernels import delta_pack, grpo_loss, rows
from agentgrpo.kernels.objective import LOSSES

I64, F32, F32S = "i64", "fp32", "*fp32"


class Case(NamedTuple):
    """A kernel as launched: argument types, constants, arguments that are multiples of 16."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    num_warps: int
    unaligned: tuple[str, ...] = ()


def _stats(dtype: str, unaligned: tuple[str, ...] = (), **flags: bool) -> Case:
    types = {
        "logits": dtype, "mask": "*i1", "peak_out": F32S, "rest_out": F32S, "gap_out": F32S,
        "V": "i32", "num_cols": "i32", "stride_b": "i32", "stride_l": "i32", "inv_temperature": F32,
        "softcap": F32,
    }  # fmt: skip
    constants = {
        "stride_v": 1,
        "STAGES": rows.FORWARD_STAGES,
        "HAS_MASK": False,
        "HAS_SOFTCAP": False,
        **flags,
    }
    constants["BLOCK_V"] = rows.FORWARD_BLOCK_V
    constants["LANES"] = rows.FORWARD_WARPS * rows.LANES_A_WARP
    return Case(rows.stats_kernel, types, constants, rows.FORWARD_WARPS, unaligned)


def _grad(out: str, logits: str, unaligned: tuple[str, ...] = (), **flags: bool) -> Case:
    pointers = ("peak_in", "log_mass_in", "mean_gap_in", "grad_in", "grad_entropy_in")
    ints = ("V", "num_cols", "stride_b", "stride_l", "out_b", "out_l")
    types = {
        "out": out, "logits": logits, "mask": "*i1", **dict.fromkeys(pointers, F32S),
        **dict.fromkeys(ints, "i32"), "inv_temperature": F32, "softcap": F32,
    }  # fmt: skip
    flags = {
        "HAS_MASK": False,
        "HAS_ENTROPY": False,
        "HAS_SOFTCAP": False,
        "NARROWS": False,
        **flags,
    }
    constants = {"stride_v": 1, "out_v": 1, **flags, "BLOCK_V": rows.BACKWARD_BLOCK_V}
    return Case(rows.grad_kernel, types, constants, rows.BACKWARD_WARPS, unaligned)


def _loss(**flags: Any) -> Case:
    pointers = ("logp", "old_logp", "advantage", "weight", "ref_logp", "factor", "slope_out",
                "sums_out", "ratio_max_out")  # fmt: skip
    floats = ("clip_low", "clip_high", "delta", "clip_ratio_c", "tau_pos", "tau_neg", "beta")
    types = {
        **dict.fromkeys(pointers, F32S),
        "mask": "*i1",
        "N": "i32",
        **dict.fromkeys(floats, F32),
    }
    constants = {
        "KIND": "clipped", "KL": "k3", "BIAS_CORRECTED": True, "HAS_FACTOR": True,
        "HAS_DELTA": True, "HAS_DUAL": True, "BLOCK_N": grpo_loss._BLOCK_N, **flags,
    }  # fmt: skip
    return Case(grpo_loss.loss_kernel, types, constants, grpo_loss._WARPS)


def _pick(dtype: str, **flags: bool) -> Case:
    types = {
        "out": F32S, "logits": dtype, "rows": "*i64", "targets": "*i64", "num_cols": "i32",
        "stride_b": "i32", "stride_l": "i32", "softcap": F32,
    }  # fmt: skip
    return Case(rows.pick_kernel, types, {"stride_v": 1, "HAS_SOFTCAP": False, **flags}, 1)


def _runs(kernel: Any, **pointers: str) -> Case:
    counts = {name: "i32" for name in kernel.arg_names if name in ("T", "R", "N", "Q", "steps")}
    types = {"runs": "*i32", "ids": "*i32", **pointers, **counts}
    return Case(kernel, types, {"BLOCK": delta_pack._BLOCK}, 4, tuple(counts))


CASES = {
    "stats-bf16": _stats("*bf16"),
    "stats-fp32": _stats("*fp32"),
    "stats-masked-capped": _stats("*bf16", HAS_MASK=True, HAS_SOFTCAP=True),
    "stats-odd-vocabulary": _stats("*bf16", ("V",)),
    "grad-bf16": _grad("*bf16", "*bf16"),
    "grad-fp32": _grad("*fp32", "*fp32"),
    "grad-narrows": _grad("*bf16", "*fp32", NARROWS=True),
    "grad-all": _grad("*bf16", "*bf16", HAS_MASK=True, HAS_ENTROPY=True, HAS_SOFTCAP=True),
    "grad-odd-vocabulary": _grad("*bf16", "*bf16", ("V",)),
    "pick-bf16": _pick("*bf16"),
    "pick-fp32-capped": _pick("*fp32", HAS_SOFTCAP=True),
    "delta-tokens": _runs(
        delta_pack._tokens_kernel, input_ids="*i64", positions="*i64", tout="*i32"
    ),
    "delta-terms": _runs(
        delta_pack._terms_kernel,
        row="*i64",
        target="*i64",
        sample="*i64",
        **dict.fromkeys(("floats", "logp", "old_logp", "advantage", "weight"), F32S),
    ),
    **{
        f"loss-{kernel}": _loss(KIND=kernel)
        for kernel in sorted({loss.kernel for loss in LOSSES.values() if loss.kernel})
    },
}


def build(case: Case, capability: int) -> Any:
    names = case.kernel.arg_names
    kinds = {name: case.types.get(name, "constexpr") for name in names}
    aligned = [
        i for i, name in enumerate(names)
        if (kinds[name].startswith("*") or kinds[name] == "i32")
        and name not in ("num_cols", "N", *case.unaligned)
    ]  # fmt: skip
    source = ASTSource(
        fn=case.kernel,
        signature=kinds,
        constexprs={(names.index(name),): value for name, value in case.constants.items()},
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    return triton.compile(source, target=target, options={"num_warps": case.num_warps})


def facts(cubin: bytes) -> dict[str, int]:
    """Registers, bytes of stack and local memory, counts of loads and stores by width."""
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.cubin")
        Path(path).write_bytes(cubin)
        usage = _output([str(tools / "cuobjdump"), "--dump-resource-usage", path])
        code = _output([str(tools / "nvdisasm"), "--print-code", path])
    sizes = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", usage)
    assert sizes is not None, usage
    out = dict(
        zip(("registers", "stack", "shared", "local"), map(int, sizes.groups()), strict=True)
    )
    out["spills"] = len(re.findall(r"\b(?:STL|LDL)\b", code))
    for name in ("LDG", "STG", "LDGSTS"):
        widths = re.findall(rf"\b{name}\.E(?:\.\w+)*", code)
        out[f"{name}.128"] = sum(".128" in x for x in widths)
        out[f"{name}.16"] = sum(".U16" in x or ".U8" in x for x in widths)
        out[f"{name}.all"] = len(widths)
    return out


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    wanted = sys.argv[2:] or list(CASES)
    capability = int(sys.argv[1])
    found = {name: facts(build(CASES[name], capability).asm["cubin"]) for name in wanted}
    print(json.dumps(found))  # noqa: T201
