"""Several processes under torchrun, each with an engine of its own; everything is identity on one.

Ranks play different tasks and then exchange all rollouts of the step, which are small (tokens and
log-probabilities). From there on every rank knows the whole step: advantages, normalisers and
batches are computed alike everywhere, and rank r works on batches r, r + W, r + 2W, ... So the data
and the loss of a step are those of one rank, whatever W is. Weights, gradients and optimizer state
are sharded by FSDP2 (fully_shard). bench/results/README.md has the arithmetic.

Importing this loads no torch.
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

if TYPE_CHECKING:  # whoever imports this need not wait for torch
    from torch import Tensor, nn
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

T = TypeVar("T")

RANK_SEED = 1_000_000_007
"""How far the seeds of two ranks are apart."""

names: list[str] = []
"""Each rank with its host, for messages."""
_watch: _Watch | None = None

PATIENCE = timedelta(hours=12)
"""How long ranks that have played wait for one that still plays; a rank that dies ends them all."""

BEAT_S, SILENCE_S, GRACE_S = 1.0, 35.0, 3.0
"""Seconds: between two signs of life; of silence after which a rank counts as lost; that a rank has
to end by itself once another is lost."""


def world_size() -> int:
    """Processes of the run, as torchrun (or Slurm's equivalent) says."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """Which of them this is; rank 0 writes the records and checkpoints."""
    return int(os.environ.get("RANK", "0"))


class RanksDiffer(ValueError):
    """Ranks of one run would not do the same; raised on all of them, printed by rank 0."""


def is_first_of_node() -> bool:
    """Whether this is the first of the ranks that torchrun has started on this machine."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


class _Watch(threading.Thread):
    """Ends this process, with one line, if another rank fails, dies or loses its network.

    Collectives alone would notice it late: a rank that plays meets none for minutes, and a machine
    without power or network closes no connection. Each rank writes signs of life into torchrun's
    store, by a connection of its own.
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
        over = False
        while not over:
            over = self._ending.wait(BEAT_S)
            self._sign = self._sign if over else str(int(self._sign) + 1)
            try:
                self._store.set(f"sign/{rank()}", self._sign)
                latest = self._store.multi_get([f"sign/{r}" for r in range(world_size())])
            except RuntimeError:  # all of torch's errors of a store
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

    def _end(self, why: str) -> None:
        if self._ending.wait(GRACE_S):
            return
        line = f"error: {why}. The same command continues the run.\n"
        try:
            os.write(2, line.encode() if is_first_of_node() else b"")
        finally:
            os._exit(1)

    def end(self, error: BaseException | None) -> None:
        """Stop watching. If a connection has failed, wait first for the loss that explains it."""
        if _is_of_torch_distributed(error):
            self.join(SILENCE_S + 2 * GRACE_S)
        self._sign = "failed" if error else "ended"
        self._ending.set()
        self.join()


def _is_of_torch_distributed(error: BaseException | None) -> bool:
    """Whether a collective raised the error, or its cause.

    NCCL raises DistBackendError. Gloo has no class of its own: a plain RuntimeError (torch 2.11 to
    2.13), which only its traceback tells from others.
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
    """Join the other ranks. Call before the engine is built: vLLM would make a world of one."""
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
    gather(None)  # every rank has given its first sign
    _watch.start()


def stop() -> None:
    """Leave."""
    if world_size() > 1:
        import torch.distributed as dist

        if _watch is not None and _watch.is_alive():
            _watch.end(sys.exception())
        if dist.is_initialized():
            dist.destroy_process_group()


def gather(value: T, group: Any = None) -> list[T]:
    """Every rank's value, in rank order, on every rank. Pickled: of our own processes only."""
    if world_size() == 1:
        return [value]
    import torch.distributed as dist

    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values


def broadcast(value: T, source: int = 0, group: Any = None) -> T:
    """The value of one rank, on every rank. Pickled: of our own processes only."""
    import torch.distributed as dist

    values = [value]
    dist.broadcast_object_list(values, source, group)
    return values[0]


@dataclass(frozen=True, slots=True)
class Team:
    """Ranks next to each other that hold one engine together; the first of them leads."""

    size: int
    place: int
    """Of this rank, from 0."""
    group: Any
    """A process group over gloo."""

    def gather(self, value: T) -> list[T]:
        """Every member's value, in rank order, on every member. Pickled."""
        return gather(value, self.group)

    def tell(self, value: Any = None) -> Any:
        """The leader's value, on every member. Pickled."""
        return broadcast(value, rank() - self.place, self.group)


def require_teams_of(size: int) -> None:
    """Check that the ranks can be divided into teams."""
    if world_size() % size:
        raise ValueError(
            f"engine.tensor_parallel_size {size} needs a multiple of {size} processes, and there "
            f"are {world_size()}: start it with torchrun --nproc_per_node={size}"
        )


def team_of(size: int) -> Team:
    """This rank's team of `size`. All ranks must call it."""
    import torch.distributed as dist

    require_teams_of(size)
    every = [
        dist.new_group(range(first, first + size), timeout=PATIENCE, backend="gloo")
        for first in range(0, world_size(), size)
    ]
    return Team(size, rank() % size, every[rank() // size])


def total(value: float) -> float:
    """The sum over the ranks."""
    return sum(gather(value))


def largest(value: float) -> float:
    """The largest over the ranks; nan wins."""
    values = gather(value)
    return next((v for v in values if v != v), max(values))


def mine(items: Sequence[T]) -> list[T]:
    """This rank's share: items rank, rank + W, ..."""
    return list(items[rank() :: world_size()])


def interleave(shares: Iterable[Sequence[T]]) -> list[T]:
    """What mine() took apart, put together again."""
    rows = list(shares)
    longest = max(map(len, rows), default=0)
    return [row[i] for i in range(longest) for row in rows if i < len(row)]


def share(items: Sequence[T]) -> Iterator[tuple[int, T, bool]]:
    """This rank's items as (index, item, counts), equally many on every rank.

    A rank that has none left works on the first one again, with counts False, as sharded weights
    are gathered by all ranks together.
    """
    for first in range(0, len(items), world_size()):
        index = first + rank()
        yield (index, items[index], True) if index < len(items) else (0, items[0], False)


def shard(module: nn.Module, layers: Iterable[nn.Module]) -> None:
    """Shard a module's parameters over all ranks, layer by layer; the rest is one more group."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    kind = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = {"mesh": init_device_mesh(kind, (world_size(),))}
    if any(p.dtype in (torch.bfloat16, torch.float16) for p in module.parameters()):
        options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    for part in (*layers, module):
        fully_shard(part, **options)


def gather_anew(module: nn.Module) -> None:
    """Have the next pass see parameters that changed outside of an update.

    What is no layer's stays gathered after a forward pass, for the backward pass.
    """
    if world_size() > 1:
        cast("FSDPModule", module).reshard()


def _is_sharded(tensor: Any) -> TypeGuard[DTensor]:
    if world_size() == 1:
        return False  # and nothing is imported to find that out
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole(tensor: Tensor) -> Tensor:
    """All of a sharded tensor, detached; others as they are. All ranks must call it."""
    gathered: Tensor = tensor.full_tensor() if _is_sharded(tensor) else tensor
    return gathered.detach()


def on_first_host(tensor: Tensor, *, copy: bool = False) -> Tensor | None:
    """All of a tensor in the first rank's host memory, None on the others. All must call it."""
    full = whole(tensor)
    return full.to("cpu", copy=copy) if rank() == 0 else None


def mine_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its shard, or all of one that is not sharded."""
    own: Tensor = tensor.to_local() if _is_sharded(tensor) else tensor
    return own


def sharded_like(tensor: Tensor, example: Tensor) -> Tensor:
    """This rank's part of a whole tensor, sharded as the example is."""
    if not _is_sharded(example):
        return tensor
    from torch.distributed.tensor import distribute_tensor

    moved = tensor.to(example.device)
    return distribute_tensor(moved, example.device_mesh, example.placements, src_data_rank=None)
