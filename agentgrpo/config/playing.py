"""How tasks are played: engine, agent, environment, rollouts, sandbox, data."""

from __future__ import annotations

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import pydantic
from pydantic import Field

from agentgrpo.config.section import (
    NotNegative,
    NotNegativeNumber,
    PathOrName,
    Positive,
    PositiveNumber,
    Section,
    UserPath,
    is_set,
)
from agentgrpo.types import Status, Treatment


class EngineConfig(Section):
    """vLLM in this process (engine/engine.py)."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: float32 on CPU (bfloat16 is slower there), bfloat16 on CUDA."""
    max_model_len: Annotated[int, Field(ge=128, le=10**7)] = 1024
    """Tokens of a whole rollout: prompt, turns and observations."""
    max_num_seqs: Positive = 128
    """Rollouts decoded at once."""
    kv_cache_gib: PositiveNumber = 0.5
    """Memory of the KV cache in GiB, given back while the engine sleeps (CUDA)."""
    enforce_eager: bool = False
    """CUDA: decode without CUDA graphs. The CPU build always does."""
    weights: Literal["auto", "shared", "copy"] = "auto"
    """One replica shared with the learner, or an in-place copy after every step. auto: share, and
    say why where that cannot be."""
    tensor_parallel_size: Positive = 1
    """Ranks that hold one engine together, each a part of every weight, for models that one GPU
    cannot hold. torchrun must start a multiple of it (docs/gpu.md). 1: an engine for each."""
    sleep_level: Literal[1, 2] = 1
    """What happens to copied weights while the engine sleeps (CUDA): 1 keeps them in host memory, 2
    drops them, to be copied in again by the learner. Shared weights never sleep."""
    async_scheduling: bool | None = None
    """Let vLLM schedule a step while the GPU works on the one before, so that it does not wait for
    Python (CUDA). Tokens and log-probabilities are the same; nothing is under way when the engine
    falls asleep or its weights change. None: on CUDA where rollout.deterministic is not true."""
    agreement_threshold: PositiveNumber | None = None
    """Largest |delta logp| in nats between sampler and learner on the same tokens before the run
    stops; in bfloat16 one in a thousand sampled tokens may be further apart. None: 1e-3 in float32,
    1.0 in bfloat16 (measured spread: 5e-5 and 0.43)."""

    def schedules_ahead(self, device: str) -> bool:
        """What async_scheduling means on a device; on others than CUDA vLLM switches it off."""
        if self.async_scheduling and device != "cuda":
            raise ValueError(
                f"engine.async_scheduling must not be true on {device}: vLLM has it on CUDA"
            )
        return device == "cuda" if self.async_scheduling is None else self.async_scheduling

    @pydantic.model_validator(mode="after")
    def _may_drop(self) -> EngineConfig:
        if self.sleep_level == 2 and self.weights != "copy":
            raise ValueError(
                "engine.sleep_level 2 drops the weights: it needs engine.weights = 'copy', "
                f"got {self.weights!r}"
            )
        if self.tensor_parallel_size > 1 and self.weights == "shared":
            raise ValueError(
                "engine.weights 'shared' needs whole weights in the engine, and "
                f"engine.tensor_parallel_size {self.tensor_parallel_size} divides them: use 'copy'"
            )
        return self

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
    """How the policy acts (agents/, docs/agents.md)."""

    kind: str = "code"
    """The name of a shipped agent, or your own `module:Class` (agents/base.py has the protocol)."""
    options: dict[str, Any] = {}
    """Keyword arguments of the agent's class."""


class UserConfig(Section):
    """Whom the policy can talk with, in any environment (envs/dialogue.py, docs/agents.md)."""

    mode: str = "nobody"
    """nobody; scripted: says what the data's column `user` holds, text by text, then leaves; model:
    the engine plays who knows it; reference: it does without its adapter; endpoint:NAME: another
    model does; or your own `module:Class` or function, which makes a user (envs/customers.py: User)
    of a task's spec."""
    max_replies: Positive = 8
    """Of a rollout. What is said to the user after that ends it, as if they left."""

    @property
    def reads_column(self) -> bool:
        """Whether who plays is shipped; the user's own reads the task's spec."""
        return self.mode != "nobody" and self.mode.partition(":")[0] in (self.mode, "endpoint")


class EnvConfig(Section):
    """What answers the policy (envs/, docs/agents.md)."""

    kind: str = "auto"
    """The name of a shipped environment, or your own `module:Class` (envs/base.py has the
    protocol). auto: the one that the agent is made for."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's class."""
    user: UserConfig = UserConfig()


FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty")  # fmt: skip
"""What cuts or bends the sampled distribution, by vLLM's names: no settings of training."""


OWN_MODELS = ("policy", "reference")
"""Models that need no endpoint: the one that is trained, and the one that training began with."""
NO_REFERENCE = (
    "'reference' is the model without its adapter: it needs learner.lora.rank, or name an endpoint"
)


class EndpointConfig(Section):
    """A model or a search that is asked by its name (models/endpoints.py)."""

    kind: Literal["engine", "http", "script", "retriever"] = "engine"
    """engine: the run's own model, in this process; http: an OpenAI-compatible server, also for
    another local model (two vLLM engines in one process disturb each other); script: a function;
    retriever: a server that is posted {"query": ..., "top_n": ...} and answers a list of documents,
    {"id": ..., "contents": ...} (envs/search.py)."""
    model: str = ""
    """http: what the server calls the model."""
    url: str = ""
    """http: up to and with the version, http://localhost:8000/v1. retriever: the whole address,
    http://localhost:1243/search."""
    api_key_env: str = ""
    """http, retriever: name of the environment variable that holds the key."""
    timeout_s: PositiveNumber = 120.0
    """http, retriever: seconds that a try may wait for the server, before its answer and within."""
    retries: NotNegative = 3
    """http, retriever: further tries after a failure of the network or the server."""
    extra: dict[str, Any] = {}
    """http, retriever: more fields of every request (top_p, ...)."""
    function: str = ""
    """script: `module:function`, called with the messages, returns the reply."""

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> EndpointConfig:
        asked = ("http", "retriever")
        needs = {"url": asked, "model": ("http",), "function": ("script",)}
        for key, kinds in needs.items():
            if self.kind in kinds and not getattr(self, key):
                raise ValueError(f"an endpoint of kind {self.kind!r} needs {key}")
        read = {**needs, **dict.fromkeys(("api_key_env", "timeout_s", "retries", "extra"), asked)}
        for key, kinds in read.items():
            if self.kind not in kinds and is_set(self, key):
                raise ValueError(f"{key}: an endpoint of kind {self.kind!r} does not read it")
        if self.url:
            _require_url(self.url)
        return self


def _require_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # a port that is none
        raise ValueError(f"url: {error}, got {url!r}") from None
    if not fits:
        raise ValueError(f"url: expected http://HOST:PORT/v1, got {url!r}")


class BranchConfig(Section):
    """Branching where the policy was unsure after a tool's answer (rollout/branch.py)."""

    initial: NotNegative = 0
    """Rollouts that a group begins with; the others up to group_size branch off them, or begin
    alone where nothing branches. 0: no branching."""
    probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Of branching where the entropy is what it was in the rollout's first turn."""
    beam_size: Annotated[int, Field(ge=2, le=10**6)] = 2
    """Rollouts that may go on from one point, the one that came there included; each of the others
    branches off with the probability there, while the group has places left."""
    entropy_weight: NotNegativeNumber = 0.2
    """How much the probability grows with the entropy's growth, in units of ln(vocabulary)."""
    entropy_tokens: Positive = 20
    """Tokens of a turn over which the entropy is averaged."""
    top_logprobs: Annotated[int, Field(ge=1, le=20)] = 20
    """From how many of the likeliest tokens the entropy is computed; the others count as one."""
    consecutive_penalty: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Each branching in an unbroken row of them lowers the next one's probability by this share."""
    budget: Literal["fixed", "aepo"] = "fixed"
    """aepo: how many begin alone is decided when the first of a group has seen a tool's answer:
    group_size * sigmoid(aepo_beta * (entropy of its first turn - of its turns after tools))."""
    aepo_beta: NotNegativeNumber = 1.0
    """See budget."""


MOST_ROLLOUTS = 10**6
"""Of one step."""


class RolloutConfig(Section):
    """How groups of rollouts are played (rollout/sampler.py)."""

    tasks_per_step: Positive = 12
    """Groups sampled before any refill."""
    group_size: Annotated[int, Field(ge=2, le=10**6)] = 8
    """Rollouts per task, at least 2: one alone has nothing to be compared with."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Of sampling in training; evaluations have their own (EvaluationConfig). vLLM knows none
    between 0 and 0.01."""
    max_turns: Positive = 3
    """Turns of the policy in one rollout."""
    max_turn_tokens: Positive = 64
    """Tokens the policy may sample in one turn."""
    max_response_tokens: Positive | None = None
    """Tokens after the prompt, turns and observations together. None: engine.max_model_len."""
    max_observation_tokens: NotNegative = 64
    """Tokens of one tool's answer at most, the note that it was cut included."""
    keep_observation: Literal["ends", "head", "tail"] = "ends"
    """What is kept of an answer that is too long."""
    history: Literal["append", "render"] = "append"
    """"append": each turn's tokens stay as they were sampled, and what is said is appended.
    "render": the chat template renders the conversation again for every turn, as chat servers do;
    where it rewrites what was (drops thoughts), rows are realigned or forked
    (rollout/transcript.py). For policies that will be served so."""
    template_options: dict[str, Any] = {}
    """What the model's chat template is given besides messages and tools: { enable_thinking =
    false }."""
    max_tool_calls: NotNegative | None = None
    """Tool calls of a rollout. One too many is refused, the policy is told once; the next ends it.
    None: no limit but that of turns."""
    max_calls_of: dict[str, NotNegative] = {}
    """The same by tool; code runs under the name of its language: { python = 3 }."""
    max_malformed: Positive | None = None
    """Actions in a row whose form was wrong before the rollout ends. None: no limit."""
    max_seconds: PositiveNumber | None = None
    """Wall-clock seconds of a rollout. A tool that runs is not interrupted: it has its own."""
    call_timeout_s: PositiveNumber | None = 300.0
    """Seconds that one call of an environment, an agent or a reward may take. After
    a `step` or `finish` the rollout is one that the machine broke: played again, or left out. All
    others, `reset` and `close` too, end the run.
    After 30 s a line says what is waited for. Above sandbox.timeout_s. None: no limit, as for a
    sampler of your own, which plays a whole step in one call."""
    max_retries: NotNegative = 1
    """Times that a rollout is played again whose treatment is "retry"."""
    treatment: dict[Status, Treatment] = {}
    """By status, what training makes of such rollouts where it is to be another than
    rollout/limits.py says: { truncated_length = "mask" }."""
    sampler: str = ""
    """`module:Class` instead of rollout/sampler.py (see rollout/custom.py)."""
    branching: BranchConfig = BranchConfig()
    refill_below: NotNegative = 0
    """Sample more tasks while fewer groups than this carry a gradient (DAPO's dynamic sampling,
    arXiv:2503.14476, 3.2); 0 never refills."""
    max_refills: NotNegative = 1
    """Extra rounds of sampling per step at most."""
    deterministic: bool | Literal["cpu"] = False
    """Wait for every running tool before the next engine step, so that a run repeats bit by bit.
    Costs the slowest tool call of each engine step, during which a GPU idles: "cpu" is true on CPU
    and false on CUDA. Without it each request's seed repeats, and
    with it its tokens, but for rounding that differs with the batch it is computed in."""

    @property
    def max_sampled_tokens(self) -> int:
        """What one rollout may sample in all."""
        return self.max_turns * self.max_turn_tokens

    @pydantic.model_validator(mode="after")
    def _can_be_trained_on(self) -> RolloutConfig:
        if self.treatment.get(Status.INFRA_ERROR) in (Treatment.TRAIN, Treatment.MASK):
            raise ValueError(
                "rollout.treatment.infra_error must be 'drop' or 'retry', got "
                f"{str(self.treatment[Status.INFRA_ERROR])!r}: the machine failed, not the policy"
            )
        if self.tasks_per_step * self.group_size > MOST_ROLLOUTS:
            raise ValueError(
                f"rollout.tasks_per_step {self.tasks_per_step} x rollout.group_size "
                f"{self.group_size}: a step may have {MOST_ROLLOUTS:,} rollouts at most"
            )
        if self.history == "render" and self.branching.initial:
            raise ValueError(
                "rollout.history 'render' and rollout.branching.initial "
                f"{self.branching.initial} exclude each other: branches share what was appended"
            )
        if self.branching.initial >= self.group_size:
            raise ValueError(
                f"rollout.branching.initial must be below rollout.group_size {self.group_size}, "
                f"got {self.branching.initial}"
            )
        return self


class EvaluationConfig(Section):
    """How held-out tasks are played (evaluate.py). Nothing here is trained on.

    top_p and top_k change the distribution in ways that the loss does not
    account for: a sampled token's log-probability is then one of a renormalised distribution, off
    by up to -log(top_p) from what the learner computes. So they are for evaluation only.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens that have this much probability together."""
    top_k: NotNegative = 0
    """0: all tokens."""

    @property
    def filters(self) -> dict[str, float]:
        """Those that do something, by vLLM's names."""
        values = {"top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in values.items() if is_set(self, name)}


class HostBudgetConfig(Section):
    """What calls of functions of the host may use (sandbox/session/host_tools.py)."""

    calls: Positive = 100
    """Of a rollout."""
    calls_per_step: Positive = 20
    """Of one code step."""
    call_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Wall-clock seconds of one call. The step's own sandbox.timeout_s goes on meanwhile, and ends
    it too."""


class SandboxConfig(Section):
    """Where the policy's code runs (sandbox/)."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Wall-clock seconds of one code step."""
    memory_mib: Annotated[int, Field(ge=32, le=2**24)] = 256
    """Memory of one session."""
    max_live: Positive = 128
    """Sessions alive at once."""
    template: str | None = None
    """A template built by `agentgrpo sandbox template build`; None: plain Python. Of its
    limits, timeout_s and memory_mib are replaced by those above."""
    site_dirs: tuple[PathOrName, ...] = ()
    """Directories of packages that sessions may import from, besides the template's. "own": those
    of the Python that runs agentgrpo, read-only."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once and that all sessions have from their start, besides the
    template's: what takes a second to import costs them nothing. They must not start threads."""
    env: dict[str, str] = {}
    """Environment variables of all code."""
    tools: UserPath | None = None
    """A Python script that every session runs first: its functions need no import. The code agent
    shows it in its prompt (agent.options.show_tools)."""
    host_tools: tuple[str, ...] = ()
    """Functions of this process, as `module:function`, that the policy's Python calls by their
    names: a search with a key, a database (docs/sandbox.md). Arguments and answers are JSON,
    checked; agents show the def line and the docstring."""
    host_cache: Literal["no", "rollout", "run"] = "rollout"
    """Whether the same arguments have the same answer without another call: within a rollout, or
    within the whole run. With rollout.deterministic, functions that read what changes need
    "run"."""
    host_budget: HostBudgetConfig = HostBudgetConfig()
    all_cpus: NotNegativeNumber = 0.0
    """Processors that rollouts' sessions may keep busy, all together, where a control group can
    bound it (0: half of the machine's). Gradings may keep as many busy besides."""
    stateless: bool = False
    """Every code step starts from the beginning: no variables and no files of the step before."""
    allow_degraded: bool = False
    """Where this machine cannot isolate code, run it without namespaces rather than not at all."""


class DataConfig(Section):
    """What is trained and evaluated on (data/tasks.py)."""

    train: PathOrName = "word_problems"
    """word_problems (generated); env (the environment's own tasks); a .jsonl or .parquet file; a
    directory that Hugging Face's `save_to_disk` wrote; or `owner/name`, a dataset of the hub, from
    its cache where it is there (HF_HOME, HF_HUB_OFFLINE). What looks like a path is none."""
    heldout: PathOrName = "auto"
    """As `train`; or `split`: num_heldout rows of the training file (or of `env`), always the same;
    no row that asks what one of them does is trained on. auto: a `split` of a training file or
    dataset, else the same source as `train`."""
    split: str = "train"
    """Of a hub's dataset that is trained on, as `datasets` reads it: train, train[:1000]."""
    heldout_split: str = "test"
    """The same of the dataset that `heldout` names."""
    subset: str | None = None
    """Which of a hub's dataset's subsets; None: the one that it has."""
    num_heldout: Positive = 64
    """Held-out tasks per evaluation, always the same ones."""
    question: str = "question"
    """Column of a file that holds the question: text, or a list of chat messages. `column.field` is
    a field of an object, `column.0` of a list; `{context} {question}` makes one text of several."""
    answer: str = "answer"
    """Column of a file that holds the expected answer, or `column.field`: text, a number, true or
    false, or a list of which any is right."""
    drop_last_message: bool = False
    """Leave out the assistant's message that ends a question, as in data for fine-tuning."""
    id: str | None = None
    """Column of a file that holds a unique id; None: the row's place in the file."""
    columns: tuple[str, ...] | None = None
    """Columns that are kept besides these three, for environment and rewards; None: all."""
    max_prompt_tokens: Positive | None = None
    """Leave longer prompts out, and say how many there were. None: a prompt that leaves no room in
    engine.max_model_len is an error."""

    @pydantic.model_validator(mode="after")
    def _can_be_split(self) -> DataConfig:
        if self.heldout == "split" and self.train == "word_problems":
            raise ValueError("data.heldout: 'word_problems' has no end, so it cannot be split")
        return self

    @property
    def heldout_source(self) -> str:
        """What `heldout` says, or `auto` stands for."""
        if self.heldout != "auto":
            return self.heldout
        return self.train if self.train in ("word_problems", "env") else "split"
