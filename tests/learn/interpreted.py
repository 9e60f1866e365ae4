"""Features that Liger's kernels need and Triton's interpreter lacks: float scalars, libdevice."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import pytest
import triton.language as tl


def let_liger_be_interpreted(patch: pytest.MonkeyPatch) -> None:
    """Arguments of float are float32 tensors, as a launch makes them; rsqrt and tanh are tl's."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    plain = interpreter._implicit_cvt

    def convert(arg: Any) -> Any:
        if isinstance(arg, float):
            handle = interpreter.TensorHandle(np.array([arg], np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return plain(arg)

    patch.setattr(interpreter, "_implicit_cvt", convert)
    ops = "liger_kernel.ops"
    patch.setattr(import_module(f"{ops}.rms_norm"), "rsqrt", lambda x: tl.rsqrt(x))
    patch.setattr(import_module(f"{ops}.geglu"), "tanh", lambda x: 1 - 2 / (tl.exp(2 * x) + 1))
