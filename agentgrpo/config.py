"""Every setting of a run, and the strict reader that fills it from TOML.

A config file holds only what differs from the defaults below. Values on the command line are
`section.key=value`; a value is read as TOML where it is TOML and as a plain string otherwise.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import pydantic
from pydantic import Field

Positive = Annotated[int, Field(ge=1, strict=True)]
NotNegative = Annotated[int, Field(ge=0, lt=2**31, strict=True)]


class Section(pydantic.BaseModel):
    """A frozen group of settings that knows no other keys."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


def _is_set(section: Section, key: str) -> bool:
    """Whether a key has another value than its default."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


class Message(Section):
    """One message of a worked example."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class EngineConfig(Section):
    """vLLM in this process (engine.py)."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on CPU (bfloat16 is slower there), bfloat16 on CUDA."""
    max_model_len: Annotated[int, Field(ge=128, strict=True)] = 1024
    """Tokens of a whole rollout: prompt, turns and observations."""
    max_num_seqs: Positive = 128
    """Rollouts decoded at once."""
    kv_cache_gib: Annotated[float, Field(gt=0)] = 0.5
    """Memory of the KV cache in GiB, given back while the engine sleeps (CUDA)."""
    enforce_eager: bool = False
    """CUDA: decode without CUDA graphs. The CPU build always does."""
    weights: Literal["auto", "shared", "copy"] = "auto"
    """One replica shared with the learner, or an in-place copy after every step. auto: share, and
    say why where that cannot be."""
    agreement_threshold: Annotated[float, Field(gt=0)] | None = None
    """Largest |delta logp| in nats between sampler and learner on the same tokens before the run
    stops. None: 1e-3 in float32, 1.0 in bfloat16 (measured spread: 5e-5 and 0.43)."""

    def dtype_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """The dtype that `auto` means on a device."""
        if self.dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.dtype

    def agreement_on(self, device: str) -> float:
        """The threshold that None means on a device."""
        if self.agreement_threshold is not None:
            return self.agreement_threshold
        return 1e-3 if self.dtype_on(device) == "float32" else 1.0


class AgentConfig(Section):
    """How the policy acts (agents/, docs/agents.md). Keys that a kind does not read are refused."""

    kind: str = "code"
    """code, repl, inline, tools, or your own `module:Class` (agents/base.py has the protocol)."""
    options: dict[str, Any] = {}
    """Keyword arguments of your own class."""
    system_prompt: str | None = None
    """None: what the kind says of itself; "" says nothing."""
    shots: tuple[tuple[Message, ...], ...] = ()
    """Worked examples, each a list of messages, shown before the task."""
    open_tag: Annotated[str, Field(min_length=1)] | None = None
    """Begins an action. None: <code> (code), <fn> (inline)."""
    close_tag: Annotated[str, Field(min_length=1)] | None = None
    """Ends an action, and the turn. None: </code> (code), </fn> (inline)."""
    observation: Annotated[str, Field(pattern=r"\{output\}")] | None = None
    """How the world's answer is shown; {output} is replaced by it. None: {output} alone (code), in
    <fn_results> or <fn_error> tags (inline, where {tag} is replaced by the one or the other)."""
    observation_role: Literal["user", "tool", "assistant"] | None = None
    """Role of the message that carries an answer. assistant: no message, the text goes into the
    policy's own one, and its turn goes on (code only). None: user (code), tool (tools)."""
    answer_prefix: str | None = None
    """A reply that has this text and no action ends the rollout; what follows is the answer. "":
    the whole reply is. None: "Answer:" (code, inline), "" (tools)."""
    after_malformed: Literal["tell", "end"] = "tell"
    """What becomes of a turn that tried to act and got the form wrong: the policy is told and goes
    on, or the rollout ends there without an answer."""
    language: Literal["python", "bash", "node"] = "python"
    """What the policy writes between the tags (code)."""
    show_tools: Literal["source", "signatures", "no"] = "source"
    """What of sandbox.tools the system prompt shows: all, or def lines and docstrings (code)."""
    banner: str | None = None
    """What the terminal shows before its first prompt (repl). None: Python's own three lines."""
    call_form: str = "python"
    """How a call between the tags is written: python, `f("x", n=1)`; json, `{"name": "f",
    "arguments": {...}}`; or your own `module:function` (inline; agents/inline.py)."""
    parser: str = "hermes"
    """Which of vLLM's tool parsers reads the calls: hermes (Qwen2.5, Qwen3), qwen3_coder,
    llama3_json, mistral, pythonic ... (tools)."""
    parallel_calls: bool = False
    """Carry out all calls of a turn. False: the first; the others are answered with an error."""

    @pydantic.model_validator(mode="after")
    def _reads_its_keys(self) -> AgentConfig:
        known = _KEYS_OF_KIND.get(self.kind)
        if known is None and ":" not in self.kind:
            raise ValueError(
                f"agent.kind: expected {', '.join(_KEYS_OF_KIND)} or 'module:Class', "
                f"got {self.kind!r}"
            )
        unread = type(self).model_fields.keys() - {"kind", *(known or ("options",))}
        wrong = [key for key in sorted(unread) if _is_set(self, key)]
        if wrong:
            raise ValueError(f"agent.{wrong[0]}: an agent of kind {self.kind!r} does not read it")
        return self


_PROMPTS = ("system_prompt", "shots")
_TAGS = ("open_tag", "close_tag", "observation", "answer_prefix", "after_malformed")
_KEYS_OF_KIND: dict[str, tuple[str, ...]] = {
    "code": (*_PROMPTS, *_TAGS, "observation_role", "language", "show_tools"),
    "repl": (*_PROMPTS, "banner"),
    "inline": (*_PROMPTS, *_TAGS, "call_form"),
    "tools": (
        *_PROMPTS,
        *("observation_role", "answer_prefix", "after_malformed", "parser", "parallel_calls"),
    ),
}


class EnvConfig(Section):
    """What answers the policy (envs/, docs/agents.md)."""

    kind: str = "auto"
    """python, console, tools, factory, mcp, math, unit_tests, search, gymnasium, reasoning_gym,
    verifiers, tau2, or your own `module:Class`. auto: console for the repl agent, python else."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's class; an unknown one is refused by name."""


class RolloutConfig(Section):
    """How groups of rollouts are played (rollout/sampler.py)."""

    tasks_per_step: Positive = 12
    """Groups sampled before any refill."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts per task, at least 2: one alone has nothing to be compared with."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of sampling in training; evaluations are greedy."""
    max_turns: Positive = 3
    """Turns of the policy in one rollout."""
    max_turn_tokens: Positive = 64
    """Tokens the policy may sample in one turn."""
    max_observation_tokens: Positive = 64
    """Longer observations keep their head and tail."""
    refill_below: NotNegative = 0
    """Sample more tasks while fewer groups than this carry a gradient (DAPO's dynamic sampling,
    arXiv:2503.14476, 3.2); 0 never refills."""
    max_refills: NotNegative = 1
    """Extra rounds of sampling per step at most."""
    deterministic: pydantic.StrictBool = False
    """Wait for every running tool before the next engine step, so that a run repeats bit by bit.
    Costs the slowest tool call of each engine step."""

    @property
    def max_sampled_tokens(self) -> int:
        """What one rollout may sample in all."""
        return self.max_turns * self.max_turn_tokens


class SandboxConfig(Section):
    """Where the policy's code runs (sandbox/)."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Wall-clock seconds of one code step."""
    memory_mib: Annotated[int, Field(ge=32)] = 256
    """Memory of one session."""
    max_live: Positive = 128
    """Sessions alive at once."""
    template: str | None = None
    """A template built by `python -m agentgrpo.sandbox template build`; None: plain Python."""
    site_dirs: tuple[str, ...] = ()
    """Directories of packages that sessions may import from, besides the template's."""
    env: dict[str, str] = {}
    """Environment variables of all code."""
    tools: Path | None = None
    """A Python script that every session runs first: its functions need no import. The code agent
    shows it in its prompt (agent.show_tools)."""


class DataConfig(Section):
    """What is trained and evaluated on (data/tasks.py)."""

    train: str = "word_problems"
    """word_problems (generated); env (the environment's own tasks); a .jsonl or .parquet file; or a
    directory that Hugging Face's `save_to_disk` wrote."""
    heldout: str = "word_problems"
    """As `train`; or `split`: num_heldout rows of the training file, chosen by split_seed, which
    are then not trained on."""
    num_heldout: Positive = 64
    """Held-out tasks per evaluation, always the same ones."""
    split_seed: NotNegative = 0
    """Another seed, another held-out `split`."""
    question: str = "question"
    """Column of a file that holds the question: text, or a list of chat messages."""
    answer: str = "answer"
    """Column of a file that holds the expected answer."""
    id: str | None = None
    """Column of a file that holds a unique id; None: the row's place in the file."""
    max_prompt_tokens: Positive | None = None
    """Leave longer prompts out, and say how many there were. None: a prompt that leaves no room in
    engine.max_model_len is an error."""
    levels: Annotated[tuple[Annotated[int, Field(ge=1, le=4)], ...], Field(min_length=1)] = (1, 2)
    """Difficulty of the training tasks, easier ones first; for word_problems only."""
    promote_at: float = 0.7
    """Mean reward of the newest level's last 32 groups at which the next level joins."""
    heldout_levels: Annotated[
        tuple[Annotated[int, Field(ge=1, le=4)], ...], Field(min_length=1)
    ] = (1, 2)
    """Difficulty of the generated held-out tasks."""

    @pydantic.model_validator(mode="after")
    def _reads_its_keys(self) -> DataConfig:
        for source, keys in (("train", ("levels", "promote_at")), ("heldout", ("heldout_levels",))):
            for key in keys:
                if getattr(self, source) != "word_problems" and _is_set(self, key):
                    raise ValueError(
                        f"data.{key}: only data.{source} = 'word_problems' reads it, "
                        f"and it is {getattr(self, source)!r}"
                    )
        if self.heldout == "split" and self.train in ("word_problems", "env"):
            raise ValueError(f"data.heldout: {self.train!r} cannot be split; only a file can")
        return self


class RewardConfig(Section):
    """What a rollout is worth besides what its environment gives it, in parts (rewards.py)."""

    kind: str = "auto"
    """numeric (the answer's last number), math (equality of formulas, math-verify), text (exact
    match and token F1), none, or your own `module:function`. auto: numeric, or none where the
    environment judges by itself."""
    answer: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Weight of a right final answer."""
    format: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.1
    """Weight of having acted without an error and then answered in the asked form."""
    tool_cost: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Taken off for every call of a tool and every run of code."""


class LearnerConfig(Section):
    """The optimizer and what it may change (learner.py)."""

    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1e-6
    """At the first step."""
    decay: Literal["constant", "linear"] = "constant"
    """linear: from learning_rate at the first step to final_learning_rate at the last."""
    final_learning_rate: Annotated[float, Field(ge=0)] = 0.0
    """At the last step, if it decays."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled, as AdamW has it."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Longer gradients are scaled down to this norm."""
    trained_layers: Positive | None = None
    """Train the last so many transformer layers and nothing else; None trains everything."""
    max_tokens: Positive = 2048
    """Packed tokens of one forward and backward pass."""


class LossConfig(Section):
    """The GRPO objective (kernels/grpo_loss.py has the formula).

    Each batch of rollouts gets one optimizer step, so the ratio is 1 and nothing is clipped.
    """

    loss_type: Literal["grpo", "dr_grpo", "dapo"] = "dapo"
    """The normaliser: per rollout and then over rollouts (grpo), a constant per rollout (dr_grpo),
    all trained tokens of the step (dapo)."""
    scale_rewards: bool = True
    """Divide a group's centred rewards by their standard deviation (DeepSeekMath); Dr. GRPO does
    not."""
    mismatch_cap: Annotated[float, Field(gt=0)] | None = 2.0
    """Truncate the sampler/learner importance weight of a token here (TIS); None: no correction."""

    @property
    def estimator(self) -> Literal["grpo", "dr_grpo"]:
        """The name advantages.py knows scale_rewards by."""
        return "grpo" if self.scale_rewards else "dr_grpo"


class TrainConfig(Section):
    """A whole run."""

    model: str
    """Model directory, hub name, or package:NAME for a model inside an installed package."""
    out_dir: Path
    """Where checkpoints/, metrics.jsonl and rollouts.jsonl go. Created if missing."""
    steps: Positive = 200
    """Optimizer steps."""
    seed: NotNegative = 0
    """Of the data's order and of what is sampled."""
    save_every: Positive = 50
    """Steps between checkpoints; the last step is always saved."""
    keep_checkpoints: Positive = 2
    """Older ones are removed."""
    eval_every: NotNegative = 25
    """Steps between held-out evaluations besides the first and the last; 0: only those two."""
    trackers: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where the numbers of metrics.jsonl go too, each by its own library (trackers.py)."""

    engine: EngineConfig = EngineConfig()
    agent: AgentConfig = AgentConfig()
    env: EnvConfig = EnvConfig()
    rollout: RolloutConfig = RolloutConfig()
    sandbox: SandboxConfig = SandboxConfig()
    data: DataConfig = DataConfig()
    reward: RewardConfig = RewardConfig()
    learner: LearnerConfig = LearnerConfig()
    loss: LossConfig = LossConfig()

    def seed_of(self, step: int, refill: int) -> int:
        """The seed of what is sampled in a step: another in each, the same in every repetition."""
        return (self.seed * 1_000_003 + step) * 101 + refill

    @pydantic.model_validator(mode="after")
    def _fits(self) -> TrainConfig:
        if self.rollout.max_turn_tokens >= self.engine.max_model_len:
            raise ValueError(
                f"rollout.max_turn_tokens must be below engine.max_model_len "
                f"{self.engine.max_model_len}, got {self.rollout.max_turn_tokens}"
            )
        if self.learner.max_tokens < self.engine.max_model_len:
            raise ValueError(
                f"learner.max_tokens must hold the longest rollout, engine.max_model_len "
                f"{self.engine.max_model_len}, got {self.learner.max_tokens}"
            )
        return self


def load_config(name_or_path: str | Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file (or a shipped config by its name), then apply `section.key=value` overrides.

    Raises:
        ValueError: no such file, not TOML, a key that does not exist (the nearest is named), a
            value of the wrong type or out of range.
    """
    table = _read(name_or_path)
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals:
            raise ValueError(f"override {override!r}: expected section.key=value")
        *parents, leaf = dotted.strip().split(".")
        section = table
        for parent in parents:
            section = section.setdefault(parent, {})
            if not isinstance(section, dict):
                raise ValueError(f"override {override!r}: {parent} is not a section")
        section[leaf] = _value(text)
    try:
        return TrainConfig.model_validate(table)
    except pydantic.ValidationError as error:
        raise ValueError("\n".join(_explain(dict(e)) for e in error.errors())) from None


def shipped_configs() -> dict[str, Path]:
    """The configs that come with the package, by name."""
    folder = Path(str(resources.files("agentgrpo"))) / "configs"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def _read(name_or_path: str | Path) -> dict[str, Any]:
    path = Path(name_or_path)
    shipped = shipped_configs()
    if not path.is_file():
        if str(name_or_path) not in shipped:
            raise ValueError(
                f"config {str(name_or_path)!r} is neither a file nor one of the shipped configs: "
                f"{', '.join(shipped)}"
            )
        path = shipped[str(name_or_path)]
    try:
        return tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"x = {text}")["x"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def _explain(error: dict[str, Any]) -> str:
    where = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(where, _all_keys(TrainConfig), n=1, cutoff=0.4)
        return f"unknown config key {where}" + (f"; did you mean {near[0]}?" if near else "")
    if error["type"] == "missing":
        return f"config key {where} is required"
    if error["type"] == "value_error":  # one of ours: it names its keys
        return str(error["msg"]).removeprefix("Value error, ")
    return f"config key {where}: {error['msg']}, got {error['input']!r}"


def _all_keys(section: type[Section], prefix: str = "") -> list[str]:
    keys = []
    for name, field in section.model_fields.items():
        keys.append(prefix + name)
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Section):
            keys += _all_keys(inner, f"{prefix}{name}.")
        assert not get_args(inner) or not any(
            isinstance(arg, type) and issubclass(arg, Section) for arg in get_args(inner)
        ), "sections may not be optional"
    return keys
