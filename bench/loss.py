"""Time LM head, log-probabilities and GRPO loss on a CPU against plain torch and TRL.

python -m bench.loss [--trl PATH] [--positions N] [--repeats N]
    PATH: a folder with TRL 1.16.0 (pip download trl==1.16.0 --no-deps, unpacked)

A step is hidden states -> log-probability and entropy -> dapo loss -> gradients of the hidden
states (and of the head unless frozen). Plain torch and TRL score every position (TRL does so on
CPUs and masks afterwards), ours only the sampled ones. All use the same tensors and one thread. CPU
time is measured, which a busy machine distorts little. Gradients are compared before timing.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from agentgrpo.kernels.masked_grpo import masked_grpo_loss
from agentgrpo.kernels.objective import Objective
from bench.harness import append_row, cpu_seconds

VOCAB, HIDDEN = 49_152, 576  # SmolLM2-135M
TRL_CHUNK = 32_768
SHARES = (1.0, 0.33, 0.125)
Score = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


class Batch:
    """Positions of one packed batch, a share of them sampled."""

    def __init__(self, positions: int, share: float, *, frozen: bool) -> None:
        gen = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(positions, HIDDEN, generator=gen).requires_grad_()
        self.head = (torch.randn(VOCAB, HIDDEN, generator=gen) * 0.05).requires_grad_(not frozen)
        self.targets = torch.randint(VOCAB, (positions,), generator=gen)
        self.mask = torch.zeros(positions, dtype=torch.bool)
        self.mask[torch.randperm(positions, generator=gen)[: round(positions * share)]] = True
        self.advantage = torch.randn(positions, generator=gen)
        self.sequence = torch.zeros_like(self.targets)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        leaves = [x for x in (self.hidden, self.head) if x.requires_grad]
        return list(torch.autograd.grad(loss, leaves))


def ours(batch: Batch) -> list[Tensor]:
    loss, _ = masked_grpo_loss(
        batch.hidden, batch.head, batch.targets, batch.mask, batch.advantage, Objective(),
        sequence=batch.sequence, num_sequences=1,
    )  # fmt: skip
    return batch.gradients(loss)


def every_position(batch: Batch, score: Score) -> list[Tensor]:
    """What a trainer does that has log-probabilities of all positions and masks them afterwards."""
    logp, _ = score(batch.hidden, batch.head, batch.targets)
    ratio = torch.exp(logp - logp.detach())
    surrogate = torch.min(ratio * batch.advantage, ratio.clamp(0.8, 1.2) * batch.advantage)
    return batch.gradients(-(surrogate * batch.mask).sum() / batch.mask.sum())


def plain_score(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = torch.log_softmax(hidden @ head.T, -1)
    with torch.no_grad():
        entropy = -(log_p.exp() * log_p).sum(-1)
    return log_p.gather(-1, targets[:, None])[:, 0], entropy


def trl_score(folder: Path) -> Score:
    """TRL's chunked projection; of its trainer package, only a context that does nothing here."""
    sys.path.insert(0, str(folder))
    for name in ("trl.trainer", "trl.trainer.utils"):
        sys.modules[name] = ModuleType(name)
    gather = {"maybe_gather_lm_head_ctx": lambda *_: nullcontext()}  # DeepSpeed ZeRO-3 only
    sys.modules["trl.trainer.utils"].__dict__.update(gather)
    function = importlib.import_module("trl.kernels.chunked_logprob").ChunkedLogProbFunction

    def score(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        out = function.apply(hidden, head, None, targets, 1.0, TRL_CHUNK, None, 1.0, ("entropy",))
        return out[0], out[1]

    return score


def measure(
    name: str, run: Callable[[Batch], list[Tensor]], batch: Batch, share: float, repeats: int
) -> None:
    for got, want in zip(run(batch), every_position(batch, plain_score), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    frozen = not batch.head.requires_grad
    shape = {
        "positions": len(batch.mask),
        "sampled": int(batch.mask.sum()),
        "V": VOCAB,
        "H": HIDDEN,
    }
    variant = f"{name}, {'frozen' if frozen else 'trained'} head, {share:.1%} sampled"
    seconds = cpu_seconds(lambda: run(batch), repeats=repeats, warmup=1)
    append_row("loss", variant, seconds, unit="s", shape=shape, note="CPU time of one thread")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trl", type=Path, help="folder that holds the package trl")
    parser.add_argument("--positions", type=int, default=384)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    peers: dict[str, Score] = {"plain torch": plain_score}
    if arguments.trl:
        peers["TRL 1.16 chunked"] = trl_score(arguments.trl)
    else:
        print("TRL: absent (give --trl)")
    for frozen in (True, False):
        for share in SHARES:
            batch = Batch(arguments.positions, share, frozen=frozen)
            measure("ours", ours, batch, share, arguments.repeats)
        for name, score in peers.items():  # their cost does not depend on the share
            batch = Batch(arguments.positions, 1.0, frozen=frozen)
            run = partial(every_position, score=score)
            measure(name, run, batch, 1.0, arguments.repeats)


if __name__ == "__main__":
    main()
