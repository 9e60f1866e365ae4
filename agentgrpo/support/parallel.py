"""Several processes under torchrun, each with its own engine; with one process all is the identity.

Ranks play different tasks and then exchange all rollouts of the step, which are small (tokens and
log-probabilities). Then every rank knows the whole step: advantages, normalisers and batches are
computed identically everywhere, and rank r processes batches r, r + W, r + 2W, ... So the data and
the loss of a step are those of a single rank, for every W. Weights, gradients and optimizer state
are sharded by FSDP2 (fully_shard). bench/results/README.md has the arithmetic.

Importing this module does not import torch.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

if TYPE_CHECKING:  # importing torch takes seconds
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

RANK_SEED = 1_000_000_007
"""Difference between the seeds of two ranks."""

names: list[str] = []
""""rank N (host)" of each rank, for messages."""
_watch: _Watch | None = None

PATIENCE = timedelta(hours=12)
"""How long ranks that have finished playing wait for others; a dead rank ends them all."""

BEAT_S, SILENCE_S, GRACE_S = 1.0, 35.0, 3.0
"""Seconds: between two heartbeats; without a heartbeat, until a rank counts as lost; until a rank
that has not ended by itself is killed after the loss of another."""


def world_size() -> int:
    """Number of processes, as set by torchrun (or Slurm's equivalent)."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Index of this process; rank 0 writes the records and checkpoints."""
    return int(os.environ.get("RANK", "0"))


class RanksDiffer(ValueError):
    """Ranks of one run have different inputs; raised on all of them, printed by rank 0."""


def is_first_of_node() -> bool:
    """Whether this is torchrun's first rank on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class _Watch(threading.Thread):
    """Ends this process, with one line, if another rank fails, dies or loses its network.

    Collectives alone would notice it late: a rank that plays calls none for minutes, and a machine
    without power or network closes no connection. Each rank writes heartbeats into torchrun's
    store, over its own connection.
    """

    def __init__(self) -> None:
        super().__init__(name="ranks", daemon=True)
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        self._host = os.environ["MASTER_ADDR"]
        port, patience = int(os.environ["MASTER_PORT"]), timedelta(seconds=SILENCE_S)
        self._store = TCPStore(self._host, port, is_master=False, timeout=patience)
        self._ending = threading.Event()
        self._sign = "0"
        self._store.set(f"sign/{rank()}", self._sign)

    def run(self) -> None:
        signs, sign_times = [b""] * world_size(), [time.monotonic()] * world_size()
        ending = False
        while not ending:
            ending = self._ending.wait(BEAT_S)
            self._sign = self._sign if ending else str(int(self._sign) + 1)
            try:
                self._store.set(f"sign/{rank()}", self._sign)
                latest = self._store.multi_get([f"sign/{r}" for r in range(world_size())])
            except RuntimeError:  # torch raises it for all errors of a store
                self._end(f"the connection to {self._host} is lost")
                return
            now = time.monotonic()
            for other, sign in enumerate(latest):
                if sign != signs[other] or sign == b"ended":
                    signs[other], sign_times[other] = sign, now
                if sign == b"failed" or now - sign_times[other] > SILENCE_S:
                    how = "has failed" if sign == b"failed" else "has died or lost its network"
                    self._end(f"{names[other]} {how}")
                    return

    def _end(self, reason: str) -> None:
        if self._ending.wait(GRACE_S):
            return
        line = f"error: {reason}. The same command continues the run.\n"
        try:
            if is_first_of_node():
                os.write(2, line.encode())
            else:  # when one rank exits, torchrun ends the node: the first must have printed
                time.sleep(2 * GRACE_S)
        finally:
            os._exit(1)

    def end(self, error: BaseException | None) -> None:
        """Stop watching; after a connection error, first wait for the lost rank behind it."""
        if _raised_by_torch_distributed(error):
            self.join(SILENCE_S + 4 * GRACE_S)
        self._sign = "failed" if error else "ended"
        self._ending.set()
        self.join()


def _raised_by_torch_distributed(error: BaseException | None) -> bool:
    """Whether a collective raised the error, or its cause.

    NCCL raises DistBackendError, but gloo a plain RuntimeError (torch 2.11 to 2.13), which only its
    traceback distinguishes from others.
    """
    while error is not None:
        if isinstance(error, RuntimeError) and any(
            frame.f_globals.get("__name__", "").startswith("torch.distributed")
            for frame, _ in traceback.walk_tb(error.__traceback__)
        ):
            return True
        error = error.__cause__
    return False


def start() -> None:
    """Join the other ranks. Must precede the engine: vLLM would create a world of one."""
    if world_size() == 1:
        return
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=PATIENCE)
    else:
        dist.init_process_group("gloo", timeout=PATIENCE)
    names[:] = [f"rank {r} ({host})" for r, host in enumerate(gather(socket.gethostname()))]
    global _watch
    _watch = _Watch()
    gather(None)  # every rank has written its first heartbeat
    _watch.start()


def stop() -> None:
    """Leave the process group."""
    if world_size() > 1:
        import torch.distributed as dist

        if _watch is not None and _watch.is_alive():
            _watch.end(sys.exception())
        if dist.is_initialized():
            dist.destroy_process_group()


def gather(value: T, group: Any = None) -> list[T]:
    """All ranks' values in rank order, on every rank. Pickled: trusted processes only."""
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def broadcast(value: T, source: int = 0, group: Any = None) -> T:
    """The value of one rank, on every rank. Pickled: only between processes of the run."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, source, group)
    return values[0]


@dataclass(frozen=True, slots=True)
class Team:
    """Adjacent ranks that form one engine (tensor parallel); the first one leads."""

    size: int
    place: int
    """Index of this rank in the team."""
    group: Any
    """A gloo process group."""

    def gather(self, value: T) -> list[T]:
        """All members' values in rank order, on every member. Pickled."""
        return gather(value, self.group)

    def tell(self, value: Any = None) -> Any:
        """The leader's value, on every member. Pickled."""
        return broadcast(value, rank() - self.place, self.group)


def require_teams_of(size: int) -> None:
    """Raise ValueError unless the ranks can be divided into teams of this size."""
    if world_size() % size:
        raise ValueError(
            f"engine.tensor_parallel_size {size} needs a multiple of {size} processes, got "
            f"{world_size()}. Start with torchrun --nproc_per_node={size}"
        )


def team_of(size: int) -> Team:
    """This rank's team of `size` ranks. All ranks must call it."""
    import torch.distributed as dist

    require_teams_of(size)
    groups = [
        dist.new_group(range(first, first + size), timeout=PATIENCE, backend="gloo")
        for first in range(0, world_size(), size)
    ]
    return Team(size, rank() % size, groups[rank() // size])


def total(value: float) -> float:
    """The sum over the ranks."""
    return sum(gather(value))


def largest(value: float) -> float:
    """The maximum over the ranks; NaN if any is NaN."""
    values = gather(value)
    return next((v for v in values if v != v), max(values))


def own_items(items: Sequence[T]) -> list[T]:
    """This rank's items: rank, rank + W, ..."""
    return list(items[rank() :: world_size()])


def interleave(shares: Iterable[Sequence[T]]) -> list[T]:
    """The inverse of own_items(): the items of all ranks in their original order."""
    rows = list(shares)
    longest = max(map(len, rows), default=0)
    return [row[i] for i in range(longest) for row in rows if i < len(row)]


def share(items: Sequence[T]) -> Iterator[tuple[int, T, bool]]:
    """Yield this rank's items as (index, item, counts), the same number on every rank.

    A rank without further items processes the first item again, with counts False, because all
    ranks must gather sharded weights together.
    """
    for first in range(0, len(items), world_size()):
        index = first + rank()
        yield (index, items[index], True) if index < len(items) else (0, items[0], False)


def shard(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shard a module's parameters over all ranks: one group per layer, one for the rest."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"mesh": init_device_mesh(kind, (world_size(),))}
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters()):
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (*layers, module):
        fully_shard(part, **options)


def reshard(module: nn.Module) -> None:
    """Make the next pass read parameters that were changed outside of an optimizer update.

    Parameters outside the layers stay gathered after a forward pass, for the backward pass.
    """
    if world_size() > 1:
        cast("FSDPModule", module).reshard()


def _is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    if world_size() == 1:
        return False  # without importing torch.distributed.tensor
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a sharded one, detached; others unchanged. All ranks must call it."""
    gathered: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor
    return gathered.detach()


def on_first_host(tensor: Tensor, *, copy: bool = False) -> Tensor | None:
    """The full tensor in host memory of the first rank, None on the others. All must call it."""
    full = full_tensor(tensor)
    return full.to("cpu", copy=copy) if rank() == 0 else None


def local_part(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor, or the tensor itself if it is not sharded."""
    local: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return local


def sharded_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's part of a full tensor, sharded like the example."""
    if not _is_sharded(example):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.to(example.device)
    return distribute_tensor(moved, example.device_mesh, example.placements, src_data_rank=None)
