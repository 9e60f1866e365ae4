"""The documents' Python runs as it is printed, on what a reader would have at that point."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.objective import Objective
from agentgrpo.kernels.reduce import term_weights
from agentgrpo.sandbox import SandboxPool, SandboxUnavailable
from tests import tiny
from tests.test_docs import ROOT, blocks


def block(page: str, *, after: str) -> str:
    """The first Python block below a heading or a line of a page."""
    text = (ROOT / "docs" / page).read_text()
    found = re.search(r"^```python\n(.*?)^```", text[text.index(after) :], re.M | re.S)
    assert found, f"{page}: no block after {after!r}"
    return found[1]


@pytest.fixture
def isolated() -> None:
    try:
        SandboxPool(max_live=1).close()
    except SandboxUnavailable as reason:
        pytest.skip(f"this machine cannot isolate: {reason}")


@pytest.mark.nsjail
def test_the_sandbox_alone(isolated: None) -> None:
    names: dict[str, Any] = {}
    exec(block("sandbox.md", after="# The sandbox"), names)
    result = names["result"]
    assert (str(result.status), result.value, result.stdout) == ("ok", "42", "hi\n")


@pytest.mark.nsjail
def test_code_written_for_e2b(isolated: None) -> None:
    """What each line gives, the comment behind the first of them included."""
    code = block("sandbox.md", after="Code written for E2B")
    code = re.sub(r"^    (sandbox\..*?)(?:  #.*)?$", r"    seen.append(\1)", code, flags=re.M)
    seen: list[Any] = []
    exec(code, {"seen": seen})
    text, stdout, listing, *_ = seen
    assert text == "2"
    assert "".join(stdout) == "value\n"
    assert "home" in listing


@pytest.fixture(scope="module")
def loop() -> dict[str, Any]:
    """What a training loop has when it comes to the loss."""
    torch.manual_seed(0)
    input_ids = torch.randint(5, 200, (3, 12))
    sampled = torch.zeros(3, 12, dtype=torch.bool)
    sampled[:, 4:] = True
    model = tiny.make_model().float()
    advantages = torch.tensor([1.0, -1.0, 0.5])
    return {"model": model, "input_ids": input_ids, "sampled": sampled, "advantages": advantages}


def test_the_loss_in_a_plain_loop(loop: dict[str, Any]) -> None:
    """Against log_softmax: with one update a batch dapo's gradient is that of -mean(A logp)."""
    exec(block("kernels.md", after="## Plain torch"), loop)
    model, ids, mask = loop["model"], loop["input_ids"], loop["sampled"][:, 1:]
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    logp = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (-(loop["advantages"][:, None] * logp)[mask].mean()).backward()
    for ours, p in zip(grads, model.parameters(), strict=True):
        torch.testing.assert_close(ours, p.grad, rtol=1e-4, atol=1e-6)


def test_verls_tensors() -> None:
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    log_prob = torch.full((2, 3), -1.0, requires_grad=True)
    of = torch.arange(2).repeat_interleave(3)
    names = {
        "grpo_loss": grpo_loss,
        "Objective": Objective,
        "log_prob": log_prob,
        "old_log_prob": torch.full((2, 3), -1.0),
        "advantages": torch.tensor([[1.0] * 3, [-2.0] * 3]),
        "weights": term_weights("dapo", of, 2, mask_N=mask.reshape(-1).bool()),
        "response_mask": mask,
    }
    exec(block("kernels.md", after="## verl"), names)
    loss: Any = names["loss"]
    assert loss.item() == pytest.approx((-1.0 * 2 + 2.0 * 3) / 5)  # token-mean, ratio 1


def test_a_typed_function_is_a_tool() -> None:
    from agentgrpo.envs.tools import Tool, Toolset

    names: dict[str, Any] = {}
    exec(
        block("agents.md", after="## Typed functions as tools").rstrip() + "\n    return city\n",
        names,
    )
    (schema,) = Toolset([Tool(names["weather"])]).schemas
    said = schema["function"]
    assert said["description"].startswith("The weather of a city.")
    assert said["parameters"]["properties"]["city"]["description"] == "its name."
    assert said["parameters"]["required"] == ["city"]


def test_every_import_of_the_documents_exists() -> None:
    for page in sorted((ROOT / "docs").glob("*.md")):
        for text in blocks(Path(page), "python"):
            for line in re.findall(r"^from agentgrpo\S* import .*$", text, re.M):
                exec(line.split("  #")[0], {})
