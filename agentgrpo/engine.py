"""vLLM inside this process, driven step by step on token ids. The only file that imports vllm.

Written against vLLM 0.20 to 0.33. What it works around, each found by measuring:

* vLLM's CPU backend packs every linear weight away and leaves an empty parameter behind. Here the
  plain weight stays, so that the learner's parameters can be views of it (weights.py).
* The rank of a sampled token is computed by a function that torch.compile builds in C++ on first
  use: 20 s on CPU for a number that nobody reads.
* vLLM's CPU worker lowers the thread count by one and then replaces torch.set_num_threads by a
  no-op, for the whole process: the learner too would work on half of two cores.
* On CUDA the weights stay out of vLLM's sleeping memory pool: the learner works on them while the
  engine sleeps, so only the KV cache may be unmapped. (Read, not yet run on a GPU.)
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import vllm.model_executor.layers.utils as vllm_layers
import vllm.v1.sample.sampler as vllm_sampler
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from agentgrpo.agents.base import Schema
from agentgrpo.agents.tools import ReadCalls, Reading
from agentgrpo.config import EngineConfig
from agentgrpo.types import Float32, Int32

_pack_cpu_weight = vllm_layers.dispatch_cpu_unquantized_gemm


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """What the policy sampled for one request."""

    request_id: str
    token_ids: Int32
    """The sampled ids, the stop token (or the whole token a stop string ended in) included."""
    logprobs: Float32
    """Log-probability of each sampled token under the tempered distribution, in nats."""
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    """The stop string or stop token id; None for the end-of-sequence token and for "length"."""
    num_cached_tokens: int
    """How many prompt tokens the prefix cache served."""


class Engine:
    """One vLLM engine holding one model, awake or asleep.

    Args:
        model: a Hugging Face model directory or hub name.
        config: see EngineConfig.
        seed: seeds vLLM (and, through it, python, numpy and torch in this process).

    Raises:
        RuntimeError: add_request() or step() while asleep; sleep() with requests in flight.
    """

    def __init__(self, model: str | Path, config: EngineConfig, *, seed: int = 0) -> None:
        self.device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = config.dtype_on(self.device)
        self.max_model_len = config.max_model_len
        self.asleep = False
        self._in_flight: set[str] = set()
        set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
        with _plain_cpu_weights(), _weights_stay_awake():
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(
                    model=str(model),
                    dtype=self.dtype,
                    seed=seed,
                    max_model_len=config.max_model_len,
                    max_num_seqs=config.max_num_seqs,
                    enforce_eager=self.device == "cpu" or config.enforce_eager,
                    block_size=32 if self.device == "cpu" else None,
                    kv_cache_memory_bytes=int(config.kv_cache_gib * 2**30),
                    logprobs_mode="processed_logprobs",
                    generation_config="vllm",
                    async_scheduling=False,
                    enable_prefix_caching=True,
                    enable_sleep_mode=self.device == "cuda",
                    disable_log_stats=True,
                    use_tqdm_on_load=False,
                )
            )
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)  # vLLM keeps one core for a process we do not have
        if self.device == "cpu":
            vars(vllm_sampler)["batched_count_greater_than"] = lambda x, values: (x >= values).sum(
                -1
            )

    @property
    def model(self) -> torch.nn.Module:
        """VLLM's own module, whose tensors the learner shares or writes to."""
        runner = self._engine.model_executor.driver_worker.worker.model_runner
        return runner.get_model()  # type: ignore[no-any-return]

    def seed(self, seed: int) -> None:
        """Seed everything sampled from here on.

        vLLM draws from torch's global generator. Its per-request seeds are not used: on CPU they
        crash under chunked prefill, and one seed for a whole group would make it one rollout.
        """
        torch.manual_seed(seed)

    def pack_frozen(self, trained: Iterable[torch.Tensor]) -> int:
        """On CPU, let oneDNN pack the linear weights that no trained tensor shares memory with.

        Small batches decode up to four times faster on packed weights. A packed weight is a copy,
        so only what never changes may be packed; the plain tensors stay where they are.

        Returns:
            How many layers were packed; 0 on CUDA.
        """
        if self.device != "cpu":
            return 0
        changing = {tensor.untyped_storage().data_ptr() for tensor in trained}
        packed = 0
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            if not hasattr(module, "cpu_linear") or not isinstance(weight, torch.Tensor):
                continue
            if weight.untyped_storage().data_ptr() in changing:
                _use_plain_weight(module)
            else:
                _pack_cpu_weight(module, remove_weight=False)
                packed += 1
        return packed

    def unpack(self) -> None:
        """Use the plain tensors everywhere: every weight may change from here on."""
        self.pack_frozen(self.model.parameters())

    def add_request(
        self,
        request_id: str,
        prompt_ids: Int32,
        *,
        max_tokens: int,
        temperature: float,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
    ) -> None:
        """Queue one continuation of prompt_ids; step() will return it when it is finished.

        Raises:
            ValueError: request_id is in flight already, or prompt and max_tokens exceed
                max_model_len (vLLM would cut max_tokens silently).
        """
        self._require_awake()
        if request_id in self._in_flight:
            raise ValueError(f"request {request_id!r} is in flight already")
        if len(prompt_ids) + max_tokens > self.max_model_len:
            raise ValueError(
                f"request {request_id!r}: {len(prompt_ids)} prompt tokens + max_tokens "
                f"{max_tokens} exceed engine.max_model_len {self.max_model_len}"
            )
        self._engine.add_request(
            request_id,
            tokens_input(prompt_ids.tolist()),
            SamplingParams(
                temperature=temperature,
                max_tokens=max_tokens,
                stop=list(stop) or None,
                stop_token_ids=list(stop_token_ids) or None,
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        self._in_flight.add(request_id)

    def step(self) -> list[Completion]:
        """Decode one token for every running request; return those that finished."""
        self._require_awake()
        done = [_completion(output) for output in self._engine.step() if output.finished]
        self._in_flight.difference_update(completion.request_id for completion in done)
        return done

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; step() will not return them."""
        ids = [request_id for request_id in request_ids if request_id in self._in_flight]
        self._engine.abort_request(ids)
        self._in_flight.difference_update(ids)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def sleep(self) -> None:
        """Give the KV cache's memory back (CUDA); on CPU only the state changes.

        Raises:
            RuntimeError: requests are in flight; vLLM would drop them and then wait for them.
        """
        if self._in_flight:
            raise RuntimeError(
                f"engine asked to sleep with {len(self._in_flight)} requests in flight"
            )
        if not self.asleep and self.device == "cuda":
            self._engine.sleep(1)
            torch.cuda.empty_cache()
        self.asleep = True

    def wake(self) -> None:
        """Make the engine usable again after sleep()."""
        if self.asleep and self.device == "cuda":
            torch.cuda.empty_cache()
            self._engine.wake_up()
        self.asleep = False

    def reset_prefix_cache(self) -> None:
        """Forget every cached key and value: they belong to the weights before an update.

        Raises:
            RuntimeError: vLLM refused, which it does while requests run.
        """
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM did not reset its prefix cache ({len(self._in_flight)} requests in flight); "
                "rollouts would mix two policies"
            )

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy Hugging Face named tensors into vLLM's, in place (where they cannot be shared)."""
        self.model.load_weights(named)  # type: ignore[operator]

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Completion]:
        """Sample num_tokens greedily after each prompt, through the same path as rollouts."""
        started = time.monotonic_ns()
        for index, prompt in enumerate(prompts):
            self.add_request(
                f"probe.{started}.{index}", prompt, max_tokens=num_tokens, temperature=0.0
            )
        done: list[Completion] = []
        try:
            while self._in_flight:
                done += self.step()
        finally:
            self.abort(list(self._in_flight))
        return sorted(done, key=lambda completion: int(completion.request_id.rsplit(".", 1)[1]))

    def shutdown(self) -> None:
        """Free vLLM's resources; the engine cannot be used afterwards."""
        self._engine.engine_core.shutdown()

    def _require_awake(self) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps: call wake() first")


def _completion(output: Any) -> Completion:
    sampled = output.outputs[0]
    flat = sampled.logprobs
    return Completion(
        request_id=output.request_id,
        token_ids=np.array(sampled.token_ids, dtype=np.int32),
        logprobs=np.array([flat.logprobs[i] for i in flat.start_indices], dtype=np.float32),
        finish_reason=sampled.finish_reason,
        stop_reason=sampled.stop_reason,
        num_cached_tokens=output.num_cached_tokens or 0,
    )


def _use_plain_weight(layer: torch.nn.Module) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


@contextlib.contextmanager
def _plain_cpu_weights() -> Any:
    """Keep vLLM's CPU linear layers on their plain weight tensors while a model is loaded."""

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        _use_plain_weight(layer)

    vllm_layers.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        vllm_layers.dispatch_cpu_unquantized_gemm = _pack_cpu_weight


@contextlib.contextmanager
def _weights_stay_awake() -> Any:
    """Load weights outside vLLM's sleeping pool, so that sleep(1) unmaps the KV cache only."""
    if not torch.cuda.is_available():
        yield
        return
    from vllm.v1.worker.gpu_worker import Worker

    pool = Worker._maybe_get_memory_pool_context

    def without_weights(self: Any, tag: str) -> Any:
        return contextlib.nullcontext() if tag == "weights" else pool(self, tag)

    Worker._maybe_get_memory_pool_context = without_weights  # type: ignore[method-assign]
    try:
        yield
    finally:
        Worker._maybe_get_memory_pool_context = pool  # type: ignore[method-assign]


def tool_call_reader(parser: str, tokenizer: Any) -> ReadCalls:
    """VLLM's own tool parser of a model family, for agents/tools.py.

    Args:
        parser: its name in vLLM, such as hermes, qwen3_coder, llama3_json, mistral, pythonic.
        tokenizer: the model's, as transformers loads it.

    Raises:
        ValueError: vLLM has no parser of that name, or the parser refuses the tokenizer.
    """
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.tool_parsers import ToolParserManager

    # what the policy gets wrong is data, counted as malformed, and not a traceback on the terminal
    logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
    logging.getLogger("vllm.parser").setLevel(logging.CRITICAL)
    try:
        make = ToolParserManager.get_tool_parser(parser)
    except KeyError:
        known = {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
        raise ValueError(
            f"agent.parser: expected one of {', '.join(sorted(known))}, got {parser!r}"
        ) from None

    def read(text: str, tools: Sequence[Schema]) -> Reading:
        given: dict[str, Any] = {"model": "", "messages": [], "tools": [*tools] or None}
        request = ChatCompletionRequest(**given)
        shown: list[Any] | None = request.tools
        reader = make(tokenizer, shown)  # a parser may keep state of the text it has read
        found = reader.extract_tool_calls(text, request)
        calls = tuple((c.function.name, c.function.arguments) for c in found.tool_calls or ())
        content = (found.content or "") if calls else text
        return Reading(content, calls, attempted=_is_marked(reader, text))

    try:
        read("", [])
    except RuntimeError as error:  # a family's special tokens are not in this vocabulary
        raise ValueError(f"agent.parser: {parser!r} does not fit the model: {error}") from error
    return read


_CALL_MARKS = (
    "<tool_call>",
    "<function=",
    "[TOOL_CALLS]",
    "<|python_tag|>",
    "<\uff5ctool\u2581call",
)
"""Marks that begin a call in some family, whichever parser is chosen."""


def _is_marked(reader: Any, text: str) -> bool:
    own = [
        value
        for name, value in vars(reader).items() | vars(type(reader)).items()
        if isinstance(value, str) and value and name.endswith(("start_token", "bot_token"))
    ]
    return any(mark in text for mark in (*_CALL_MARKS, *own))
