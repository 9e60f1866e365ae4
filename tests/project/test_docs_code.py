"""The docs' Python code runs as printed, with what a reader has at that point.

Each test takes a block as its argument `code`; the last test checks that every block has a test.
The commands of your-task.md use its files: test_docs_commands.py.
"""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from agentgrpo import cli, testing
from agentgrpo.config import RewardConfig
from agentgrpo.config.read import load_config
from agentgrpo.config.recipe import RecipeConfig
from agentgrpo.data.sources import training_tasks
from agentgrpo.kernels.grpo_loss import grpo_loss
from agentgrpo.kernels.objective import LossType, Objective
from agentgrpo.kernels.reduce import term_weights
from agentgrpo.rewards.rollout_view import BUILT_IN
from agentgrpo.rewards.scoring import Scoring
from agentgrpo.rewards.shipped import score
from agentgrpo.sandbox import Sandbox, SandboxPool
from agentgrpo.train.plugins import make_reward
from agentgrpo.train.prepare import make_agent, make_env
from agentgrpo.train.resolve import resolve
from agentgrpo.types import Group, SpanReward, Task
from tests import tiny
from tests.given import TASK, a_config, a_rollout
from tests.playing import play, shown
from tests.project.test_docs import PAGES, ROOT, blocks, lines, words
from tests.sandbox.isolation.tiny_image import add_tiny_image

RUN: set[tuple[str, str]] = set()
"""Page and text of every block that a test runs."""
YOUR_TASK = ROOT / "docs" / "your-task.md"


def of_page(page: str, after: str) -> pytest.MarkDecorator:
    """Pass the first Python block of a page after (or with) a text to a test as `code`."""
    text = (ROOT / page).read_text()
    matches = [code for code in blocks(ROOT / page, "python")
             if text.index(after) < text.index(code) + len(code)]  # fmt: skip
    assert matches, f"{page}: no block after {after!r}"
    RUN.add((page, matches[0]))
    return pytest.mark.parametrize("code", [matches[0]], ids=[f"{page} {after}"])


EXAMPLES = [p for p in sorted((ROOT / "agentgrpo").rglob("*.py")) if "    >>> " in p.read_text()]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstring_examples_pass(path: Path) -> None:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    ran = doctest.testmod(importlib.import_module(name))
    assert ran.attempted > 0
    assert ran.failed == 0


@of_page("docs/sandbox.md", after="# The sandbox")
@pytest.mark.nsjail
def test_sandbox_example(code: str) -> None:
    names: dict[str, Any] = {}
    exec(code, names)
    result = names["result"]
    assert (str(result.status), result.value, result.stdout) == ("ok", "42", "hi\n")


@of_page("docs/sandbox.md", after="## Host functions")
@pytest.mark.nsjail
def test_code_calls_host_function(code: str) -> None:
    code = code.replace("    ...  #", '    return [f"{query}: " + "web " * 99] * top_n  #')
    code = code.replace("    sandbox.run_code", "    said = sandbox.run_code")
    names: dict[str, Any] = {"Sandbox": Sandbox}
    exec(code, names)
    assert names["said"] == ("otters: " + "web " * 99)[:200]


@of_page("docs/sandbox.md", after="Code written for E2B")
@pytest.mark.nsjail
def test_e2b_example(code: str) -> None:
    """Each line returns what its comment says."""
    code = re.sub(r"^    (sandbox\..*?)(?:  #.*)?$", r"    seen.append(\1)", code, flags=re.M)
    seen: list[Any] = []
    exec(code, {"seen": seen})
    text, stdout, listing, *_ = seen
    assert text == "2"
    assert "".join(stdout) == "value\n"
    assert "home" in listing


@pytest.fixture
def loop() -> dict[str, Any]:
    """The variables of a training loop before the loss."""
    torch.manual_seed(0)
    input_ids = torch.randint(5, 200, (3, 12))
    sampled = torch.zeros(3, 12, dtype=torch.bool)
    sampled[:, 4:] = True
    sampled[1, 7:] = False
    model = tiny.make_model().float()
    advantages = torch.tensor([1.0, -1.0, 0.5])
    return {"model": model, "input_ids": input_ids, "sampled": sampled, "advantages": advantages}


def dapo_gradient(loop: dict[str, Any]) -> list[torch.Tensor]:
    """With one update per batch dapo's gradient is that of -mean(A logp), by log_softmax."""
    model, ids, mask = loop["model"], loop["input_ids"], loop["sampled"][:, 1:]
    model.zero_grad()
    logp = model(ids).logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    (-(loop["advantages"][:, None] * logp)[mask].mean()).backward()
    return [p.grad.clone() for p in model.parameters()]


@pytest.fixture(autouse=True)
def _kernels_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A copy of the folder, under the name of its wheel."""
    skipped = shutil.ignore_patterns("__pycache__", "build")
    shutil.copytree(ROOT / "kernels", tmp_path / "lib" / "agentgrpo_kernels", ignore=skipped)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    yield
    for name in [name for name in sys.modules if name.startswith("agentgrpo_kernels")]:
        del sys.modules[name]


@of_page("docs/python.md", after="## Learning as a test")
def test_testing_example_matches_the_signatures(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the arguments only; tests/testing has the behaviour."""
    called = []
    for name in testing.__all__:
        signature = inspect.signature(getattr(testing, name))

        def call(*args: Any, bound: Any = signature.bind, name: str = name, **given: Any) -> None:
            called.append((name, bound(*args, **given).arguments["config"]))

        monkeypatch.setattr(testing, name, call, raising=False)
    names: dict[str, Any] = {}
    exec(code, names)
    for test in [value for name, value in names.items() if name.startswith("test_")]:
        test(*inspect.signature(test).parameters)
    assert sorted(called) == [(name, "letters.toml") for name in sorted(testing.__all__)]


@of_page("docs/kernels.md", after="## Plain torch")
def test_loss_example_in_plain_loop(code: str, loop: dict[str, Any]) -> None:
    exec(code, loop)
    grads = [p.grad.clone() for p in loop["model"].parameters()]
    torch.testing.assert_close(grads, dapo_gradient(loop), rtol=1e-4, atol=1e-6)


@of_page("docs/kernels.md", after="Several micro-batches")
def test_micro_batches_add_up_to_the_step(code: str, loop: dict[str, Any]) -> None:
    before, *_ = blocks(ROOT / "docs/kernels.md", "python")
    exec(before, loop)
    parameters = list(loop["model"].parameters())
    loop["model"].zero_grad()
    exec(code, loop)
    grads = [p.grad.clone() for p in parameters]
    torch.testing.assert_close(grads, dapo_gradient(loop), rtol=1e-4, atol=1e-6)
    assert loop["metrics"]["num_tokens"] == loop["sampled"][:, 1:].sum()


@of_page("docs/losses.md", after="# my_losses.py")
def test_custom_loss(code: str) -> None:
    """The example is cispo, with the bound as a distance from 1."""
    names: dict[str, Any] = {}
    exec(code, names)
    logp = torch.tensor([-1.0, -2.0, -0.5, -1.5], requires_grad=True)
    old, advantage = logp.detach() + torch.tensor([0.3, -0.3, 0.1, -0.1]), torch.ones(4)
    found = []
    own = LossType(term=names["reinforce_capped"])
    for objective in (Objective(loss_type=own), Objective(loss_type="cispo", epsilon_high=1.2)):
        loss, _ = grpo_loss(logp, old, advantage, torch.ones(4), objective)
        found += [loss.detach(), *torch.autograd.grad(loss, logp)]
    torch.testing.assert_close(found[:2], found[2:])


@of_page("docs/kernels.md", after="## TRL")
@pytest.mark.parametrize("kind", ["float32", "bf16", "lora"])
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's, about versions
def test_example_for_trl(code: str, kind: str, tmp_path: Path) -> None:
    """Loss and gradient equal TRL's, for an evaluation and two steps prepared by TRL."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    names: dict[str, Any] = {}
    exec(code, names)
    ours: Any = names["Trainer"]
    pairs: list[tuple[Any, Any]] = []

    class Both(ours):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
            inputs["tool_mask"] = (inputs["completion_ids"] % 5 != 0).long()
            wrapped = torch.nn.DataParallel(model)  # accelerate takes it off; on a CPU it calls
            both = (ours, trl.GRPOTrainer)
            pair: list[torch.Tensor] = [c._compute_loss(self, wrapped, inputs) for c in both]
            of = [p for p in model.parameters() if p.requires_grad]
            if model.training:
                mine, theirs = ((x, torch.autograd.grad(x, of, retain_graph=True)) for x in pair)
                pairs.append((mine, theirs))
            else:
                pairs.append((pair[0], pair[1]))
            return pair[0]

    settings = trl.GRPOConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=kind == "bf16", max_steps=4, num_iterations=2,
        per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=2,
        per_device_eval_batch_size=4, max_completion_length=8, learning_rate=1e-2,
        epsilon_high=0.28, loss_type="dapo", report_to=[], save_strategy="no",
    )  # fmt: skip
    prompts = Dataset.from_dict({"prompt": ["a", "b", "c", "d"]})
    lora = pytest.importorskip("peft").LoraConfig if kind == "lora" else None
    trainer = Both(
        model=str(tiny.make_model_dir(tmp_path / "model")),
        reward_funcs=lambda completions, **_: [sum(map(ord, text)) % 7 for text in completions],
        args=settings, train_dataset=prompts, eval_dataset=prompts,
        peft_config=lora and lora(target_modules=["q_proj", "down_proj"]),
    )  # fmt: skip
    trainer.evaluate()
    trainer.train()
    assert len(pairs) > 8
    assert any(float(theirs[0].abs()) > 1e-3 for _, theirs in pairs[-8:])
    # TRL multiplies the head in bf16 too
    rtol, atol = (0.1, 1e-2) if kind == "bf16" else (1e-4, 1e-6)
    for both in pairs:
        torch.testing.assert_close(*both, rtol=rtol, atol=atol)


@of_page("docs/kernels.md", after="## verl")
def test_example_for_verl(code: str) -> None:
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
    exec(code, names)
    loss: Any = names["loss"]
    assert loss.item() == pytest.approx((-1.0 * 2 + 2.0 * 3) / 5)  # token-mean, ratio 1


@of_page("docs/coming-from.md", after="## Audit your own trainer")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # TRL's, about versions
def test_trl_audit_example(code: str, tmp_path: Path) -> None:
    """The error on the page is the real one, except for the numbers."""
    pytest.importorskip("trl")
    from agentgrpo.inspect.audit_trl import AuditError
    from tests.inspect.audited_loops import make_trainer, trl_5312

    with pytest.raises(AuditError) as stopped:
        exec(code, {"trainer": make_trainer(tmp_path, trl_5312)})
    page = (ROOT / "docs" / "coming-from.md").read_text()
    quoted = page[page.index("AuditError: ") + len("AuditError: ") :].split("\n\n")[0]
    numbers = r"\d+(?:\.\d+)?(?:e-\d+)?"
    texts = [re.sub(numbers, "N", text).split() for text in (quoted, str(stopped.value))]
    assert texts[0] == texts[1]


@of_page("docs/coming-from.md", after="auditor = Auditor(")
def test_audit_example_for_any_loop(code: str) -> None:
    from tests.inspect.audited_sampling import sample

    model, prompts = tiny.make_model(), [[5, 6], [7, 8]]
    names = {"model": model, "prompt_ids": prompts}
    for seed, message in ((0, None), (5, "no cause found")):
        ids, logprobs = sample(tiny.make_model(seed=seed), prompts)
        names |= {"completion_ids": ids, "logprobs": logprobs}
        if message is None:
            exec(code, names)
        else:
            with pytest.raises(RuntimeError, match=message):
                exec(code, names)


TOURIST = """
class Tourist:
    def __init__(self, spec):
        self.city = spec["city"]

    def reply(self, text, *, satisfied):
        return self.city if "where" in text.lower() else None
"""


def test_custom_simulated_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docs/agents.md describes it: a class with reply()."""
    (tmp_path / "docs_users.py").write_text(TOURIST)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = a_config(
        "agent.kind=inline", "env.kind=tools", "env.user.mode=docs_users:Tourist",
        'env.options.tools=["agentgrpo.envs.calculator:calculate"]',
    )  # fmt: skip
    world = make_env(resolve(made), None)
    given = Task(id="t", messages=({"role": "user", "content": "?"},), spec={"city": "Oslo"})
    turns = ["Where are you?<|im_end|>", "Thanks.<|im_end|>"]
    played = play(make_agent(resolve(made), world), world, *turns, given=given)
    assert "<|im_start|>user\nOslo<|im_end|>" in shown(played)


def weather(city: str, days: int = 1) -> str:
    """The weather of a city.

    Args:
        city: its name.
        days: from today on.
    """
    return city * days


def test_typed_function_is_a_tool() -> None:
    """As docs/agents.md describes it: by its annotations and its docstring."""
    from agentgrpo.envs.tools import Tool, Toolset

    (schema,) = Toolset([Tool(weather)]).schemas
    said = schema["function"]
    assert said["description"].startswith("The weather of a city.")
    assert said["parameters"]["properties"]["city"]["description"] == "its name."
    assert said["parameters"]["required"] == ["city"]


@of_page("docs/agents.md", after="# my_rewards.py")
def test_custom_rewards(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the config values in their comments; the page lists all built-in rewards."""
    (tmp_path / "my_rewards.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = re.findall(r"# (reward\.\w+ = .+)", code)
    config = RewardConfig(**tomllib.loads("\n".join(settings))["reward"])
    texts = {0: "please: 6?", 10: "42"}
    played = a_rollout([[-1.0], [-1.0]], task=TASK, answer=42)
    Scoring(make_reward(config), config, lambda ids: texts[ids[0]]).score(
        [Group(task=TASK, rollouts=[played])]
    )
    sys.modules.pop("my_rewards", None)
    assert played.rewards == pytest.approx(
        {"answer": 1.0, "asked": 0.1, "brief": -0.4, "length": -0.0002}
    )
    assert played.span_rewards == [SpanReward(2, 3, "polite", 0.5)]
    page = (ROOT / "docs/agents.md").read_text()
    assert [name for name in BUILT_IN if f"`{name}` " not in page] == []


@of_page("README.md", after="# guess.py")
def test_readme_environment_runs_by_its_config(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one file and the command in README.md only."""
    assert len(code.splitlines()) <= 30
    (tmp_path / "guess.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    (command,) = [line for line in lines(ROOT / "README.md") if "agentgrpo init" in line]
    assert cli.main(["owner/name" if w == "MODEL" else w for w in words(command)[1:]]) == 0
    config = load_config("guess.toml")
    env: Any = make_env(resolve(config), None)
    agent = make_agent(resolve(config), env)
    five = training_tasks(config.data, 0, env, answers=False).next(9)
    (secret,) = [task for task in five if task.spec["secret"] == 5]
    turns = ["<fn>guess(3)</fn>", "<fn>guess(8)</fn>", "<fn>guess(5)</fn>", "Answer: 5<|im_end|>"]
    played = play(agent, env, *turns, given=secret)
    assert [word in shown(played) for word in ("higher", "lower", "right")] == [True] * 3
    score(Group(task=secret, rollouts=[played]), make_reward(RewardConfig(format=0), judges=True))
    assert played.rewards == {"solved": 1.0}
    lazy = play(agent, env, "Answer: 5<|im_end|>", given=secret)
    assert lazy.rewards == {"solved": 0.0}


@of_page("docs/agents.md", after="# lines.py")
@pytest.mark.nsjail
def test_agent_example_runs_by_its_config(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(code.splitlines()) <= 32
    (tmp_path / "lines.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["agent.kind=lines:LineAgent", 'agent.options={system_prompt="P"}']
    config = a_config(*settings)
    with SandboxPool(max_live=2) as pool:
        env = make_env(resolve(config), pool)
        played = play(make_agent(resolve(config), env), env, "x = 6\n", "x * 7\n", "= 42\n")
    assert shown(played).endswith("x = 6\n(no output)\nx * 7\n42\n= 42\n")
    assert played.answer == "42"


@of_page("docs/agents.md", after="# doors.py")
def test_environment_example_runs_with_agent_example(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = next(b for b in blocks(ROOT / "docs/agents.md", "python") if "# lines.py" in b)
    (tmp_path / "lines.py").write_text(lines)
    (tmp_path / "doors.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    settings = ["agent.kind=lines:LineAgent", "env.kind=doors:Doors", "data.train=env"]
    config = a_config(*settings)
    env: Any = make_env(resolve(config), None)
    given = next(task for task in env.tasks("train") if task.spec["right"] == "c")
    agent = make_agent(resolve(config), env)
    played = play(agent, env, "a\n", "\n", "c\n", given=given)
    assert shown(played).endswith("a\na goat\n\na goat\nc\n")
    assert played.rewards == {"solved": 1.0}
    assert [span.value for span in played.span_rewards] == [-0.1] * 3
    assert (played.stats["goats"], played.stats["tool_errors"]) == (2, 1)
    assert play(agent, env, "= c\n", given=given).rewards == {"solved": 0.0}
    for name in ("lines", "doors"):
        sys.modules.pop(name, None)


IMAGES = ROOT / "docs" / "environments.md"
SHOWN = re.compile(r"^( +)(\S.*\.(?:stdout|text))(?:  #.*)?$", re.M)
"""Expressions whose value a notebook would show."""
RUN |= {("docs/environments.md", code) for code in blocks(IMAGES, "python")}


@pytest.mark.nsjail
def test_image_and_snapshot_sessions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With an image of this machine's programs under the name on the page."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add_tiny_image("debian:12")
    seen: list[str] = []
    for code in blocks(IMAGES, "python"):
        code = SHOWN.sub(r"\1seen.append(\2)", code)
        exec(code, {"seen": seen})
    assert "root:" in seen[1]
    assert "".join(seen[2]).split() == ["in.txt"]
    assert seen[3:] == ["2", "2\n", "1\n"]


RUN |= {("docs/your-task.md", code) for code in blocks(YOUR_TASK, "python")}
# end_to_end/test_trainer.py runs these, except the block of tests, which is above
RUN |= {("docs/python.md", code) for code in blocks(ROOT / "docs" / "python.md", "python")}


def test_reward_example() -> None:
    """For right, wrong and missing answers, with and without a successful code run."""
    (code,) = [text for text in blocks(YOUR_TASK, "python") if "def reward" in text]
    names: dict[str, Any] = {}
    exec(code, names)
    task = Task(id="t", messages=(), spec={"answer": "2"})

    def worth(answer: str | None, calls: int, errors: int) -> dict[str, float]:
        stats = {"turns": 2.0, "tool_calls": float(calls), "tool_errors": float(errors)}
        parts: dict[str, float] = names["reward"](a_rollout(task=task, answer=answer, stats=stats))
        return parts

    assert worth(" 2\n", 1, 0) == {"answer": 1.0, "counted": 0.1}
    assert worth("3", 2, 1) == {"answer": 0.0, "counted": 0.1}
    assert worth(None, 1, 1) == {"answer": 0.0, "counted": 0.0}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_in_toml_blocks_are_accepted(page: Path) -> None:
    for text in blocks(page, "toml"):
        table = {"model": "m", "out_dir": "o", **tomllib.loads(text)}
        RecipeConfig.model_validate(table)


def test_every_code_block_has_a_test() -> None:
    printed = {
        (str(page.relative_to(ROOT)), text) for page in PAGES for text in blocks(page, "python")
    }
    untested = printed - RUN
    assert not untested, "\n".join(f"{page}: no test runs\n{text}" for page, text in untested)
    assert not RUN - printed
