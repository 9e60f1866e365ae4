"""Kernel tests: fresh memory contains NaN instead of zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch


def _poisoning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        out = make(*args, **kwargs)
        if out.is_floating_point() and out.numel() < 1 << 24:
            out.detach().fill_(float("nan"))
        return out

    return poisoned


@pytest.fixture(autouse=True)
def _fresh_memory_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that leaves an element unwritten is caught, whatever the allocator returned."""
    monkeypatch.setattr(torch, "empty", _poisoning(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoning(torch.empty_like))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These tensors are small: on a busy machine threads wait for one another for seconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
