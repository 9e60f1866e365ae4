"""Settings of playing tasks: engine, agent, environment, rollouts, sandbox, data."""

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
    """Limit of a rollout's tokens: prompt, turns and observations."""
    max_num_seqs: Positive = 128
    """Maximum number of rollouts decoded at once."""
    kv_cache_gib: PositiveNumber = 0.5
    """Size of the KV cache in GiB; freed while the engine sleeps (CUDA)."""
    enforce_eager: bool = False
    """CUDA: decode without CUDA graphs, as the CPU build always does."""
    weights: Literal["auto", "shared", "copy"] = "auto"
    """One replica shared with the learner, or an in-place copy after every step. auto: share if
    possible; otherwise the reason is printed."""
    tensor_parallel_size: Positive = 1
    """Ranks per engine, each with a part of every weight, for models too large for one GPU.
    torchrun must start a multiple of it (docs/gpu.md). 1: one engine per rank."""
    sleep_level: Literal[1, 2] = 1
    """Copied weights while the engine sleeps (CUDA): 1 keeps them in host memory, 2 drops them, and
    the learner copies them again. Shared weights never sleep."""
    async_scheduling: bool | None = None
    """Let vLLM schedule a step while the GPU works on the previous one, so that it does not wait
    for Python (CUDA). Tokens and log-probabilities are the same; no step is under way when the
    engine falls asleep or its weights change. None: on CUDA unless rollout.deterministic is true.
    """
    agreement_threshold: PositiveNumber | None = None
    """Largest |delta logp| in nats between sampler and learner on the same tokens before the run
    stops; in bfloat16 one in a thousand sampled tokens may exceed it. None: 1e-3 in float32, 1.0 in
    bfloat16 (measured spread: 5e-5 and 0.43)."""

    def schedules_ahead(self, device: str) -> bool:
        """async_scheduling on a device; vLLM supports it on CUDA only."""
        if self.async_scheduling and device != "cuda":
            raise ValueError(
                f"engine.async_scheduling: expected false on {device}, got true: it requires CUDA"
            )
        return device == "cuda" if self.async_scheduling is None else self.async_scheduling

    def dtype_on(self, device: str) -> Literal["float32", "bfloat16"]:
        """The dtype on a device, with `auto` resolved."""
        if self.dtype == "auto":
            return "bfloat16" if device == "cuda" else "float32"
        return self.dtype

    def agreement_on(self, device: str) -> float:
        """The agreement threshold on a device, with None resolved."""
        if self.agreement_threshold is not None:
            return self.agreement_threshold
        return 1e-3 if self.dtype_on(device) == "float32" else 1.0


class AgentConfig(Section):
    """The agent: how the policy acts (agents/, docs/agents.md)."""

    kind: str = "code"
    """A shipped agent, or your own `module:Class` (protocol: agents/base.py)."""
    options: dict[str, Any] = {}
    """Keyword arguments of the agent's class."""


class UserConfig(Section):
    """A simulated user, in any environment (envs/dialogue.py, docs/agents.md)."""

    mode: str = "nobody"
    """nobody; scripted: sends the texts of the data's column `user` one by one, then leaves; model:
    the engine plays a user who knows that column; reference: the engine without its adapter does;
    endpoint:NAME: another model does; or your own `module:Class` or function, which makes a user
    (envs/customers.py: User) from a task's spec."""
    max_replies: Positive = 8
    """Replies per rollout. The next message to the user ends the rollout, as if the user had left.
    """

    @property
    def reads_column(self) -> bool:
        """Whether the user comes from the data's column `user`; a class of yours reads the spec."""
        return self.mode != "nobody" and self.mode.partition(":")[0] in (self.mode, "endpoint")


class EnvConfig(Section):
    """The environment, which carries out the policy's actions (envs/, docs/agents.md)."""

    kind: str = "auto"
    """A shipped environment, or your own `module:Class` (protocol: envs/base.py). auto: the one
    that the agent is made for."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's class."""
    user: UserConfig = UserConfig()


FILTERS = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
           "frequency_penalty")  # fmt: skip
"""vLLM's sampling parameters that change the distribution; training does not allow them."""


OWN_MODELS = ("policy", "reference")
"""Models that need no endpoint: the trained one, and the one with which training began."""
NO_REFERENCE = (
    "'reference' is the model without its adapter: it requires learner.lora.rank. Or name an "
    "endpoint"
)


class EndpointConfig(Section):
    """A named model or search server (models/endpoints.py)."""

    kind: Literal["engine", "http", "script", "retriever"] = "engine"
    """engine: the run's own model, in this process; http: an OpenAI-compatible server, also for
    another local model (two vLLM engines in one process disturb each other); script: a function;
    retriever: a server that receives POST {"query": ..., "top_n": ...} and returns a list of
    documents, {"id": ..., "contents": ...} (envs/search.py)."""
    model: str = ""
    """http: the model's name on the server."""
    url: str = ""
    """http: base URL with the version, http://localhost:8000/v1. retriever: the full URL,
    http://localhost:1243/search."""
    api_key_env: str = ""
    """http, retriever: environment variable with the API key."""
    timeout_s: PositiveNumber = 120.0
    """http, retriever: seconds that an attempt may wait for the server's reply, and between its
    parts."""
    retries: NotNegative = 3
    """http, retriever: further attempts after a network or server error."""
    extra: dict[str, Any] = {}
    """http, retriever: additional fields of every request (top_p, ...)."""
    function: str = ""
    """script: `module:function`, called with the messages; returns the reply."""

    @pydantic.model_validator(mode="after")
    def _is_whole(self) -> EndpointConfig:
        remote = ("http", "retriever")
        required = {"url": remote, "model": ("http",), "function": ("script",)}
        for key, kinds in required.items():
            if self.kind in kinds and not getattr(self, key):
                raise ValueError(f"an endpoint of kind {self.kind!r} requires {key}")
        optional = dict.fromkeys(("api_key_env", "timeout_s", "retries", "extra"), remote)
        for key, kinds in {**required, **optional}.items():
            if self.kind not in kinds and is_set(self, key):
                raise ValueError(f"{key}: an endpoint of kind {self.kind!r} does not use it")
        if self.url:
            _require_url(self.url)
        return self


def _require_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError as error:  # an invalid port
        raise ValueError(f"url: {error}, got {url!r}") from None
    if not is_valid:
        raise ValueError(f"url: expected http://HOST:PORT/v1, got {url!r}")


class BranchConfig(Section):
    """Branch where the policy is uncertain after a tool's result (rollout/branch.py)."""

    initial: NotNegative = 0
    """Rollouts of a group that start from the prompt; the others up to group_size branch off them,
    or start from the prompt too if nothing branches. 0: no branching."""
    probability: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Probability of branching if the entropy equals that of the rollout's first turn."""
    beam_size: Annotated[int, Field(ge=2, le=10**6)] = 2
    """Rollouts that may continue from one point, including the original; each of the others
    branches off with the probability at that point, while the group has places left."""
    entropy_weight: NotNegativeNumber = 0.2
    """Increase of the probability per increase of the entropy, in units of ln(vocabulary)."""
    entropy_tokens: Positive = 20
    """Tokens of a turn over which the entropy is averaged."""
    top_logprobs: Annotated[int, Field(ge=1, le=20)] = 20
    """Number of most likely tokens from which the entropy is computed; the others count as one."""
    consecutive_penalty: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Each branching in an unbroken row lowers the probability of the next one by this share."""
    budget: Literal["fixed", "aepo"] = "fixed"
    """aepo: the number of rollouts that start from the prompt is decided when the first of a group
    has received a tool's result: group_size * sigmoid(aepo_beta * (entropy of its first turn -
    entropy of its turns after tools))."""
    aepo_beta: NotNegativeNumber = 1.0
    """See budget."""


class RolloutConfig(Section):
    """How groups of rollouts are played (rollout/sampler.py)."""

    tasks_per_step: Positive = 12
    """Groups per step before any refill."""
    group_size: Annotated[int, Field(ge=2, le=10**6)] = 8
    """Rollouts per task, at least 2, since each is compared with the others."""
    temperature: Annotated[float, Field(ge=0.01, le=2)] = 1.0
    """Sampling temperature in training; evaluations have their own. vLLM supports none between 0
    and 0.01."""
    max_turns: Positive = 3
    """Turns of the policy per rollout."""
    max_turn_tokens: Positive = 64
    """Sampled tokens per turn."""
    max_response_tokens: Positive | None = None
    """Tokens after the prompt, turns and observations together. None: engine.max_model_len."""
    max_observation_tokens: NotNegative = 64
    """Tokens of one tool's result, including the note that it was cut."""
    keep_observation: Literal["ends", "head", "tail"] = "ends"
    """The part of a too long result that is kept."""
    history: Literal["append", "render"] = "append"
    """"append": each turn's tokens stay as they were sampled, and observations are appended.
    "render": the chat template renders the conversation again for every turn, as chat servers do;
    if it rewrites history (drops thoughts), rows are realigned or forked (rollout/transcript.py).
    For policies that will be served this way."""
    template_options: dict[str, Any] = {}
    """Additional arguments of the model's chat template: { enable_thinking = false }."""
    max_tool_calls: NotNegative | None = None
    """Tool calls per rollout. The first excess call is refused with a message to the policy, the
    next ends the rollout. None: limited only by the turns."""
    max_calls_of: dict[str, NotNegative] = {}
    """The same for single tools; code counts under the name of its language: { python = 3 }."""
    max_malformed: Positive | None = None
    """Malformed actions in a row after which the rollout ends. None: no limit."""
    max_seconds: PositiveNumber | None = None
    """Wall-clock seconds per rollout. A running tool is not interrupted: it has its own limit."""
    call_timeout_s: PositiveNumber | None = 300.0
    """Time limit in seconds of one call of an environment, an agent or a reward. If a `step` or
    `finish` exceeds it, the rollout counts as broken by the machine: it is played again or left
    out. Any other call, also `reset` and `close`, ends the run. A call of over 30 s is reported in
    a line. Must be above sandbox.timeout_s. None: no limit, as for a sampler of your own, which
    plays a whole step in one call."""
    max_retries: NotNegative = 1
    """How often a rollout with treatment "retry" is played again."""
    treatment: dict[Status, Treatment] = {}
    """By status, how training treats such rollouts, if different from rollout/limits.py:
    { truncated_length = "mask" }."""
    sampler: str = ""
    """Your own `module:Class` instead of rollout/sampler.py (see rollout/custom.py)."""
    branching: BranchConfig = BranchConfig()
    refill_below: NotNegative = 0
    """Sample more tasks while fewer groups than this carry a gradient (DAPO's dynamic sampling,
    arXiv:2503.14476, 3.2); 0 never refills."""
    max_refills: NotNegative = 1
    """Maximum number of additional rounds per step."""
    deterministic: bool | Literal["cpu"] = False
    """Wait for all running tools before the next engine step, so that a run repeats bit by bit.
    Costs the slowest tool call of each engine step, during which a GPU is idle: "cpu" is true on
    CPU and false on CUDA. Without it the seeds of requests repeat, and so do the tokens, except for
    rounding that depends on the batch."""

    @property
    def max_sampled_tokens(self) -> int:
        """Limit of the sampled tokens of one rollout."""
        return self.max_turns * self.max_turn_tokens


class EvaluationConfig(Section):
    """How held-out tasks are played (train/evaluate.py). They are never trained on.

    top_p and top_k exist only here: with them a sampled token's log-probability is that of a
    renormalised distribution and differs by up to -log(top_p) from the learner's.
    """

    temperature: Annotated[float, Field(ge=0, le=2)] = 0.0
    """0: greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""
    top_k: NotNegative = 0
    """0: all tokens."""

    @property
    def filters(self) -> dict[str, float]:
        """The filters that are set, by vLLM's names."""
        values = {"top_p": self.top_p, "top_k": self.top_k}
        return {name: value for name, value in values.items() if is_set(self, name)}


class HostBudgetConfig(Section):
    """Limits of calls of sandbox.host_tools (sandbox/session/host_tools.py)."""

    calls: Positive = 100
    """Calls per rollout."""
    calls_per_step: Positive = 20
    """Calls per code step."""
    call_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Wall-clock seconds per call. The step's own sandbox.timeout_s continues to count and ends the
    call too."""


class SandboxConfig(Section):
    """The sandbox, in which the policy's code runs (sandbox/)."""

    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 5.0
    """Wall-clock seconds per code step."""
    memory_mib: Annotated[int, Field(ge=32, le=2**24)] = 256
    """Memory of one session."""
    max_live: Positive = 128
    """Maximum number of live sessions."""
    template: str | None = None
    """A template built by `agentgrpo sandbox template build`; None: plain Python. timeout_s and
    memory_mib above replace the template's limits."""
    site_dirs: tuple[PathOrName, ...] = ()
    """Package directories for sessions, in addition to the template's. "own": those of the Python
    that runs agentgrpo, read-only."""
    preload: tuple[str, ...] = ()
    """Modules that are imported once, before sessions start, in addition to the template's: a slow
    import then costs sessions nothing. They must not start threads."""
    env: dict[str, str] = {}
    """Environment variables of all code."""
    tools: UserPath | None = None
    """A Python script that every session runs first; its functions need no import. The code agent
    shows it in its prompt (agent.options.show_tools)."""
    host_tools: tuple[str, ...] = ()
    """Functions of this process, `module:function`, that the policy's Python code can call by name:
    a search with a key, a database (docs/sandbox.md). Arguments and results are checked JSON;
    agents show signatures and docstrings."""
    host_cache: Literal["no", "rollout", "run"] = "rollout"
    """Reuse the result of a call with the same arguments within a rollout, or within the whole run.
    With rollout.deterministic, functions whose data changes require "run"."""
    host_budget: HostBudgetConfig = HostBudgetConfig()
    all_cpus: NotNegativeNumber = 0.0
    """Processors that all sessions of rollouts together may use, where a control group can limit it
    (0: half of the machine's). Grading may use as many in addition."""
    stateless: bool = False
    """Each code step starts anew, without variables and files of the previous step."""
    allow_degraded: bool = False
    """If this machine cannot isolate code, run it without namespaces instead of stopping."""


class DataConfig(Section):
    """The tasks for training and evaluation (data/tasks.py)."""

    train: PathOrName = "word_problems"
    """word_problems (generated); env (the environment's own tasks); a .jsonl or .parquet file; a
    directory written by Hugging Face's `save_to_disk`; or `owner/name`, a dataset on the Hub, from
    the local cache if present (HF_HOME, HF_HUB_OFFLINE). A name that looks like a path is never
    taken for a dataset."""
    heldout: PathOrName = "auto"
    """Like `train`; or `split`: num_heldout rows of the training file (or of `env`), always the
    same ones; rows that repeat one of their questions are not trained on. auto: a `split` of a
    training file or dataset, else the same source as `train`."""
    split: str = "train"
    """Split of a Hub dataset for training, in the syntax of `datasets`: train, train[:1000]."""
    heldout_split: str = "test"
    """Split of the Hub dataset that `heldout` names."""
    subset: str | None = None
    """Subset of a Hub dataset; None: the only one."""
    num_heldout: Positive = 64
    """Held-out tasks per evaluation, always the same ones."""
    question: str = "question"
    """Column with the question: text, or a list of chat messages. `column.field` is a field of an
    object, `column.0` of a list; `{context} {question}` joins several columns to one text."""
    answer: str = "answer"
    """Column with the expected answer, or `column.field`: text, a number, true or false, or a list
    of correct answers."""
    drop_last_message: bool = False
    """Drop an assistant message at the end of a question, as in data for fine-tuning."""
    id: str | None = None
    """Column with a unique id; None: the row's position in the file."""
    columns: tuple[str, ...] | None = None
    """Columns to keep for environment and rewards, in addition to these three; None: all."""
    max_prompt_tokens: Positive | None = None
    """Leave out tasks with longer prompts and print their number. None: a prompt that leaves no
    room in engine.max_model_len is an error."""

    @property
    def heldout_source(self) -> str:
        """`heldout` with `auto` resolved."""
        if self.heldout != "auto":
            return self.heldout
        return self.train if self.train in ("word_problems", "env") else "split"
