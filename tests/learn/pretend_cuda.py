"""A pretended GPU: tensors keep their values in host memory and report a CUDA device.

It refuses what a CUDA build refuses: two devices in one operation, numpy access to a CUDA tensor,
host memory passed to a kernel. So code for CUDA runs here, and mix-ups of host and device are
found. A TorchFunctionMode changes what a tensor reports; a TorchDispatchMode, which also sees the
backward pass, changes what operations return. In the backward pass tensors report the host, so
gradient checkpointing, which runs layers again there, is not supported. Triton's kernels run in its
interpreter.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

CARD, HOST = torch.device("cuda:0"), torch.device("cpu")
_COPIES = {"aten::copy_", "aten::_foreach_copy_"}
_INDEXING = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}
_WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::unique_dim",
    "aten::masked_select", "aten::equal",
}  # fmt: skip
"""What has the host wait for the numbers, or for how many there will be."""
_NUMPY: tuple[Any, ...] = (Tensor.numpy, Tensor.__array__)


def _chooses(args: Any) -> bool:
    return any(isinstance(x, Tensor) and x.dtype == torch.bool for x in args[1] if x is not None)


class _Card:
    """Tracks the storages on the pretended GPU."""

    def __init__(self) -> None:
        self.waits: list[str] = []
        """Where the host waited for the card."""
        self._on: set[int] = set()
        self._kept: list[Any] = []  # so that no address is used twice
        self._locked: dict[int, int] = {}

    def has(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._on

    def keep(self, x: Tensor) -> Any:
        self._kept.append(x.untyped_storage())
        return self._kept[-1]

    def lock(self, x: Tensor) -> Tensor:
        """Page-locked host memory: what is copied from there is not waited for."""
        self._locked[x.data_ptr()] = x.numel() * x.element_size()
        self.keep(x)
        return x

    def is_locked(self, x: Tensor) -> bool:
        at, size = x.data_ptr(), x.numel() * x.element_size()
        return any(a <= at and at + size <= a + whole for a, whole in self._locked.items())

    def put(self, x: Tensor, *, on: bool = True) -> Tensor:
        storage = self.keep(x)
        (self._on.add if on else self._on.discard)(storage._cdata)
        return x


class _Operations(TorchDispatchMode):
    def __init__(self, card: _Card) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunction():
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            on = [x for x in given if self._card.has(x)]
            name = func._schema.name
            self._check(name, given, on)
            if on and (name in _WAITS or (name in _INDEXING and _chooses(args))):
                self._card.waits.append(name)
            out = func(*args, **(kwargs or {}))
            known = {x.untyped_storage()._cdata for x in given}
            for x in tree_leaves(out):
                if on and isinstance(x, Tensor) and x.untyped_storage()._cdata not in known:
                    self._card.put(x)
            return out

    def _check(self, name: str, given: list[Tensor], on: list[Tensor]) -> None:
        off = [x for x in given if x.ndim and not self._card.has(x)]
        if not on or not off or name in _COPIES:
            return
        if name in _INDEXING and self._card.has(given[0]):
            off = [] if name == "aten::index" else [x for x in off if x is given[-1]]
        if off:
            raise RuntimeError(f"{name}: expected all tensors to be on the same device")


class _Properties(TorchFunctionMode):
    def __init__(self, card: _Card) -> None:
        super().__init__()
        self._card = card

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args and isinstance(args[0], Tensor) else None
        on = first is not None and self._card.has(first)
        if func == Tensor.device.__get__:
            return CARD if on else func(*args)
        if func == Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return on
        if func is Tensor.get_device:
            return 0 if on else -1
        if func in _NUMPY and on:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        if func == Tensor.pin_memory:
            return self._card.lock(args[0].clone())
        if func in (Tensor.to, Tensor.cpu, Tensor.cuda):
            wanted = {Tensor.cpu: HOST, Tensor.cuda: CARD}.get(func)
            return self._moved(args[0], list(args[1:]), kwargs, wanted)
        if func in (torch.mm, torch.addmm) and "out_dtype" in kwargs:
            return self._product(*args, **kwargs)
        if func == Tensor.tolist and on:
            self._card.waits.append("tolist")
        if func is Tensor.new_tensor and on and "device" not in kwargs:
            return self._card.put(func(*args, **kwargs))
        device = kwargs.get("device")
        if device is None or torch.device(device).type != "cuda":
            return func(*args, **kwargs)
        kwargs["device"] = HOST
        if func in (torch.tensor, torch.as_tensor):
            self._card.waits.append("tensor")
        return self._card.put(func(*args, **kwargs))

    def _product(
        self, *factors: Tensor, out_dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """CUDA's mm and addmm that are rounded once, to out_dtype; the rules are torch 2.10's."""
        *total, a, b = factors
        assert self._card.has(a)
        assert a.dtype == b.dtype
        assert out_dtype == a.dtype or (out_dtype, a.itemsize) == (torch.float32, 2)
        assert all(x.dtype in (out_dtype, a.dtype) for x in total)
        assert out is None or out.dtype == out_dtype
        product = a.double() @ b.double()
        for x in total:
            product = x.double() + product
        return product.to(out_dtype) if out is None else out.copy_(product)

    def _moved(self, x: Tensor, args: list[Any], kwargs: Any, wanted: Any) -> Tensor:
        """Tensor.to(), however it is called; non_blocking does not matter here."""
        dtype, flags = x.dtype, [value for value in args if isinstance(value, bool)]
        for value in (*args, *kwargs.values()):
            if isinstance(value, (str, torch.device)):
                wanted = torch.device(value)
            elif isinstance(value, Tensor):
                wanted, dtype = CARD if self._card.has(value) else HOST, value.dtype
            elif isinstance(value, torch.dtype):
                dtype = value
        if wanted is not None and wanted.type == "meta":
            return x.to("meta", dtype)
        was = self._card.has(x)
        now = was if wanted is None else wanted.type == "cuda"
        if now != was and not (now and kwargs.get("non_blocking") and self._card.is_locked(x)):
            self._card.waits.append("to")
        out = x.to(dtype, copy=now != was or kwargs.get("copy", False) or flags[1:] == [True])
        return self._card.put(out, on=now) if now != was else out


def _whole_card_kernels(card: _Card, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes(), torch._C.DisableTorchFunction():
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor) and not card.has(x):
                    raise ValueError("Pointer argument cannot be accessed from Triton (cpu tensor)")
            return launch(self, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", checked)


@contextlib.contextmanager
def pretend_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Code inside finds a CUDA device. Attention's own kernels for it must be replaced.

    Yields where the host has waited for it, operation by operation.
    """
    card = _Card()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        # in a CUDA build of torch AdamW asks its stream, and there may be no driver to answer;
        # torch 2.11 does not ask for the accelerator first
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        patch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)
        for name in ("synchronize", "empty_cache"):
            patch.setattr(torch.cuda, name, lambda *_: None)
        for name in ("_exchange_device", "_maybe_exchange_device"):
            patch.setattr(torch.cuda, name, lambda index: 0)
        _whole_card_kernels(card, patch)
        with _Properties(card), _Operations(card):
            yield card.waits
