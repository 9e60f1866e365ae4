"""The learner on a pretended GPU: host and device are never mixed, results equal the CPU's."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from agentgrpo.config import LearnerConfig, LoraConfig, LossConfig
from agentgrpo.kernels import checks
from agentgrpo.kernels.checks import upload
from agentgrpo.kernels.linear_logp import _add_product
from agentgrpo.learn import attention, flex
from agentgrpo.learn.attention import Run, runs_of
from agentgrpo.learn.batch import PADDING, PackedBatch
from agentgrpo.learn.learner import Learner
from agentgrpo.learn.minibatches import plan_updates
from agentgrpo.learn.optimizer import MasterAdamW
from agentgrpo.types import Group
from tests.learn import conftest as learning
from tests.learn.given import TEMPERATURE, Holder, learner_on, run_config
from tests.learn.interpreted import let_liger_be_interpreted
from tests.learn.pretend_cuda import CARD, HOST, pretend_cuda

if torch.cuda.is_available():
    pytest.skip("there is a card", allow_module_level=True)


PLAIN = LearnerConfig(use_liger_kernel=False)
"""Interpreted, Liger's layers take minutes: one pass of them is below."""
groups = learning.groups
"""The fixture of tests/learning."""


pytestmark = pytest.mark.slow


@pytest.fixture
def _cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    monkeypatch.setattr(flex, "compiled_attend", lambda: flex_by_definition)
    monkeypatch.setattr(flex, "shared_memory", lambda device: flex.A100_SHARED_MEMORY)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_by_definition)
    with pretend_cuda(monkeypatch) as waits:
        yield waits


def flex_by_definition(
    query: Tensor, key: Tensor, value: Tensor, block_mask: BlockMask, scale: float | None,
    softcap: float | None, memory: int,
) -> Tensor:  # fmt: skip
    assert softcap is None
    assert memory == flex.A100_SHARED_MEMORY
    assert query.shape[2] % flex.BLOCK == 0
    for name, x in vars(block_mask).items():
        assert not isinstance(x, Tensor) or x.device == CARD, name
    at = torch.arange(query.shape[2], device=query.device)
    zero = torch.zeros((), dtype=torch.int64, device=query.device)
    visible = block_mask.mask_mod(zero, zero, at[:, None], at[None, :])
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or query.shape[-1] ** -0.5)
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return weights @ value


def varlen_by_definition(
    q: Tensor, k: Tensor, v: Tensor, bounds_q: Tensor, bounds_k: Tensor, max_q: int, max_k: int,
    *, scale: float | None, enable_gqa: bool, window_size: tuple[int, int],
) -> Tensor:  # fmt: skip
    assert bounds_q.device == bounds_k.device == CARD
    out = []
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    with torch._C.DisableTorchFunction():
        bounds = bounds_q.tolist()
    for start, end in pairwise(bounds):
        part = [x[start:end].transpose(0, 1) for x in (q, k, v)]
        scores = part[0] @ part[1].transpose(1, 2) * (scale or q.shape[-1] ** -0.5)
        visible = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).tril()
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        out.append((weights @ part[2]).transpose(0, 1))
    return torch.cat(out)


copied = partial(learner_on, temperature=TEMPERATURE, weights="copy", dlogp_limit=9.0)


class CardHolder(Holder):
    device = "cuda"
    dtype = "float32"


def steps(
    folder: Path, played: Sequence[Group], engine: Any, loss: LossConfig, *, share: bool = True,
    state: Path | None = None, **config: Any,
) -> tuple[Learner, list[dict[str, float]]]:  # fmt: skip
    options = {"use_liger_kernel": False, "learning_rate": 1e-2, "max_grad_norm": 1.0, **config}
    learner = copied(engine, folder, LearnerConfig(**options), loss)
    learner.dry_pass(30)
    recorded = []
    for step in range(2):
        updates = plan_updates(played, run_config(loss), step=step, share_prefixes=share)
        recorded.append(learner.step(updates))
        learner.publish()
    if state is not None:
        learner.save_state(state)
        learner.load_state(state)
    learner.score(np.arange(20, dtype=np.int32))
    return learner, recorded


LOSSES = {
    "default": LossConfig(),
    "two epochs": LossConfig(num_iterations=2),
    "reference and entropy": LossConfig(beta=0.1, entropy_coef=0.01, top_entropy_quantile=0.5),
    "vespo": LossConfig(loss_type="vespo", vllm_importance_sampling_mode="token_truncate"),
}


@pytest.mark.parametrize("name", LOSSES)
def test_cuda_learner_equals_cpu_learner(
    tiny_model: Path, groups: list[Group], name: str, monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path, request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    cpu = CardHolder()
    cpu.device = "cpu"
    _, expected = steps(tiny_model, groups, cpu, LOSSES[name])
    request.getfixturevalue("_cuda")
    got, recorded = steps(tiny_model, groups, CardHolder(), LOSSES[name], state=tmp_path / "s.pt")
    assert got.describe()["kernels"] == "triton"
    assert all(p.device == CARD for p in got.model.parameters())
    for a, b in zip(recorded, expected, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3, abs=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-3)


def test_cuda_layers_are_fused_by_liger(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("liger_kernel", reason="liger-kernel is in requirements-dev.txt")
    let_liger_be_interpreted(monkeypatch)
    cpu = CardHolder()
    cpu.device = "cpu"
    expected = copied(cpu, tiny_model)
    assert expected.describe()["layers"] == "plain (Liger's kernels need an NVIDIA GPU)"
    request.getfixturevalue("_cuda")
    # Liger's backward pass asks tensors where they lie, and in it they say: on the host
    monkeypatch.setattr(torch.autograd, "grad", lambda *gone: None)
    got = copied(CardHolder(), tiny_model)
    assert re.match(r"liger-kernel [\d.]+: 11 norms and MLPs, 2 rot", got.describe()["layers"])
    assert "forward" in vars(got.model.get_decoder().layers[0].self_attn)
    ids = np.arange(6, dtype=np.int32)
    np.testing.assert_allclose(got.score(ids), expected.score(ids), atol=1e-5)


@pytest.mark.parametrize(
    ("config", "share"), [({"offload_optimizer": True}, True), ({"trained_layers": 1}, False)]
)
@pytest.mark.usefixtures("_cuda")
def test_bfloat16_tensors_stay_on_the_gpu(
    tiny_model: Path, groups: list[Group], config: dict[str, Any], share: bool, tmp_path: Path
) -> None:  # fmt: skip
    engine = CardHolder()
    engine.dtype = "bfloat16"
    loss = LossConfig()
    learner, _ = steps(
        tiny_model, groups, engine, loss, share=share, state=tmp_path / "s.pt", **config
    )
    moved = "cpu" if config.get("offload_optimizer") else "cuda"
    held = [learner._optimizer._local_state(i) for i, _ in learner._optimizer._low_precision()]
    assert held
    assert {(name, x.device.type) for state in held for name, x in state.items()} == {
        (name, moved) for name in ("master", "exp_avg", "exp_avg_sq")
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("_cuda")
def test_offloaded_state_visits_the_gpu_one_parameter_at_a_time(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Page-locked, of one parameter at once, and to the bits of a state that stays."""
    sizes = [(5, 7), (11,), (50,), (3, 3)]

    def made(offload: bool) -> tuple[list[Tensor], MasterAdamW]:
        torch.manual_seed(0)
        params = [torch.randn(size).to("cuda", dtype).requires_grad_() for size in sizes]
        return params, MasterAdamW(params, lr=0.1, weight_decay=0.1, offload=offload)

    def learn(params: list[Tensor], optimizer: MasterAdamW, steps: Iterable[int]) -> None:
        for step in steps:
            torch.manual_seed(step)
            for p in params:
                (p * torch.randn(p.shape).to("cuda", dtype)).sum().backward()
            optimizer.step(max_grad_norm=1.0)

    params, optimizer = made(offload=True)
    recorded: list[int] = []
    step = optimizer._adamw.step

    def watched() -> None:
        (now,) = [i for i, master in enumerate(optimizer._masters) if master.grad is not None]
        recorded.append(now)
        for i in range(len(params)):
            assert {x.device for x in optimizer._local_state(i).values()} <= {
                CARD if i == now else HOST
            }
        step()

    monkeypatch.setattr(optimizer._adamw, "step", watched)
    learn(params, optimizer, range(2))
    others, resumed = made(offload=True)
    with torch.no_grad():
        for a, b in zip(others, params, strict=True):
            a.copy_(b)
    saved = tmp_path / "saved.pt"  # a file: its tensors are nobody's, and not page-locked
    torch.save(optimizer.state_dict(), saved)
    resumed.load_state_dict(torch.load(saved))
    learn(others, resumed, range(2, 4))
    expected, stays = made(offload=False)
    learn(expected, stays, range(4))
    assert recorded == 2 * [0, 1, 2, 3]
    for i, (a, b) in enumerate(zip(others, expected, strict=True)):
        assert torch.equal(a, b)
        for name, x in stays._local_state(i).items():
            assert x.device == CARD
            waits = resumed._local_state(i)[name]
            assert waits.data_ptr() == resumed._host[i, name].data_ptr()
            assert torch.equal(waits, x.cpu())
    width = 12 if dtype == torch.bfloat16 else 8  # moments, and a master
    assert (resumed.offload_peak_bytes, stays.offload_peak_bytes) == (width * 50, 0)
    assert (resumed.bytes_to_allocate, stays.bytes_to_allocate) == (0, 0)


@pytest.mark.usefixtures("_cuda")
def test_head_gradient_accumulates_in_float32_in_place() -> None:
    """linear_logp() on a GPU with more logits than it keeps, chunk by chunk."""
    torch.manual_seed(0)
    parts = [(torch.randn(30, 4).bfloat16(), torch.randn(4, 16).bfloat16()) for _ in range(9)]
    expected, total = torch.zeros(30, 16), None
    places = set()
    for a, b in parts:
        expected += a.double() @ b.double()
        total = _add_product(total, a.to("cuda"), b.to("cuda"), torch.float32)
        assert total.dtype == torch.float32
        places.add(total.data_ptr())
    assert total is not None
    assert torch.equal(total.cpu(), expected)
    assert len(places) == 1


@pytest.mark.parametrize(("share", "name"), [(True, "two epochs"), (False, "default")])
def test_host_does_not_wait_between_batches(
    tiny_model: Path, groups: list[Group], name: str, share: bool, request: pytest.FixtureRequest
) -> None:
    """Otherwise the GPU would idle until the next batch is packed, uploaded and started.

    In its own process: after other files' tests it once counted 257 copies instead of 10, each
    upload as a blocking one; the cause is unknown.
    """
    if "AGENTGRPO_ALONE" not in os.environ:
        env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", request.node.nodeid],
            env=env | {"AGENTGRPO_ALONE": "1"}, cwd=request.config.rootpath, check=False,
            capture_output=True, text=True,
        )  # fmt: skip
        assert "1 passed" in ran.stdout, ran.stdout
        return
    waits: list[str] = request.getfixturevalue("_cuda")
    engine = CardHolder()
    engine.dtype = "float32" if share else "bfloat16"  # FlashAttention's
    learner = copied(engine, tiny_model, PLAIN, LOSSES[name])
    counts = []
    for max_tokens in (1000, 24):
        config = run_config(LOSSES[name], max_tokens=max_tokens)
        updates = plan_updates(groups, config, step=0, share_prefixes=share)
        reads = sum(len(update.batches) for update in updates)
        waits.clear()
        learner.step(updates)
        counts.append((reads, Counter(waits)))
    (one, few), (many, more) = counts
    assert many >= one + 4
    # read at the end: what the learner made of each batch's terms, and its loss each pass
    passes = LOSSES[name].num_iterations
    assert more - few == {"to": many - one, "aten::_local_scalar_dense": passes * (many - one)}


@pytest.mark.usefixtures("_cuda")
def test_tokens_of_a_step_are_uploaded_once(
    tiny_model: Path, groups: list[Group], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids and log-probabilities of the step, then of each batch its runs and its block masks."""
    sent: list[Tensor] = []
    masks: list[Tensor] = []
    for module, recorded in ((checks, sent), (attention, masks)):
        monkeypatch.setattr(
            module,
            "upload",
            lambda x, device, recorded=recorded: (recorded.append(x), upload(x, device))[1],
        )
    learner = copied(CardHolder(), tiny_model, PLAIN, LossConfig(num_iterations=2))
    del sent[:], masks[:]  # those of the trial
    config = run_config(LossConfig(num_iterations=2), max_tokens=24)
    (update,) = plan_updates(groups, config, step=0)
    batches = list(update.batches)
    assert len(batches) >= 5
    learner.step([replace(update, batches=batches)])
    segments = {id(s): s for r in update.rollouts for s in r.all_segments}.values()
    distinct = sum(len(s.token_ids) for s in segments)
    sampled = sum(len(s.token_ids) for s in segments if s.sampled)
    on_card = [(x.dtype, *x.shape) for x in sent]
    assert Counter(on_card) == Counter(
        [(torch.int32, distinct + PADDING), (torch.float32, sampled)]
        + [(torch.int32, *batch.runs_8Q.shape) for batch in batches]
        # of each pass, with a run of padding: one looks ahead
        + 3 * [(torch.int32, 4, batch.runs_4R.shape[1] + 1) for batch in batches]
    )
    assert masks
    assert max(x.numel() for x in masks) < 24, "no token of a batch travels"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_dry_pass_tries_a_fork_and_both_cuda_kernels(
    tiny_model: Path, device: str, request: pytest.FixtureRequest
) -> None:
    if device == "cuda":
        request.getfixturevalue("_cuda")
    engine = CardHolder()
    engine.device = device
    learner = copied(engine, tiny_model, PLAIN)
    recorded: list[PackedBatch] = []
    learner._scorer.register_forward_pre_hook(lambda _, args: recorded.append(args[0]))
    learner.dry_pass(40)
    assert [(b.num_tokens, b.num_terms) for b in recorded] == [(40, 39)] * len(recorded)
    runs = [runs_of(batch.tout_T) for batch in recorded]
    assert runs[0] == [Run(0, 20, ()), Run(20, 30, ((0, 20),)), Run(30, 40, ((0, 20),))]
    assert runs[1:] == [[Run(0, 40, ())]] * (device == "cuda")
    forked = recorded[0]
    depth, place = forked.positions_T, np.arange(39)
    assert (depth[1:] == depth[forked.row_N] + 1).all(), "each token follows the one it is told by"
    assert (place + 1 < forked.tout_T[forked.row_N]).all(), "and sees it"


@pytest.mark.usefixtures("_cuda")
def test_adapter_trains_on_cuda(tiny_model: Path, groups: list[Group], tmp_path: Path) -> None:
    loss = LossConfig(beta=0.1)
    learner, _ = steps(tiny_model, groups, CardHolder(), loss, lora=LoraConfig(rank=4))
    assert learner.policy.adapter is not None
    learner.policy.adapter.save(tmp_path)


@pytest.mark.parametrize(
    "slip",
    [
        lambda x: x + torch.ones(3),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: torch.ones(3)[x.long()],
        lambda x: x.masked_fill(torch.ones(3, dtype=torch.bool), 0.0),
        lambda x: x.index_add_(0, torch.arange(3), x),
        lambda x: (x.requires_grad_() * 2).sum().cpu().numpy(),
    ],
)
@pytest.mark.usefixtures("_cuda")
def test_pretend_gpu_refuses_what_cuda_refuses(slip: Callable[[Tensor], Any]) -> None:
    x = torch.ones(3).to("cuda")
    assert x.is_cuda
    assert (x + 1).device == (x * torch.tensor(2.0)).device == x[torch.arange(2)].device == CARD
    assert x.cpu().numpy().sum() == 3
    with pytest.raises((RuntimeError, TypeError)):
        slip(x)
