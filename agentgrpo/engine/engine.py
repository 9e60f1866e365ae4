"""vLLM inside this process, driven step by step on token ids.

Written against vLLM 0.24 to 0.33, which only this folder imports.
VLLM reads LoRA adapters from folders only. Here one is put into its manager under an id that the
requests name, so that nothing is written or read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

import torch
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.inputs import tokens_input
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from agentgrpo.config import NO_REFERENCE, EngineConfig
from agentgrpo.engine.requests import Request
from agentgrpo.engine.start import (
    keep_process_groups,
    oom_hint_engine,
    pack_weight,
    start,
    use_plain_weight,
)
from agentgrpo.support import parallel
from agentgrpo.support.memory import explained, memory
from agentgrpo.types import Completion, Int32, Metrics

_ADAPTER = LoRARequest("policy", 1, "in memory")


def device_of_engines() -> Literal["cpu", "cuda"]:
    """Where they run in this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class State(Enum):
    """What the engine can be asked for."""

    AWAKE = "awake"
    WEIGHTS_DISCARDED = "weights discarded"
    """Awake but for its weights, which level 2 dropped: load_weights() comes first."""
    ASLEEP = "asleep"


class Engine:
    """One vLLM engine holding one model, awake or asleep.

    `seed` seeds vLLM (and, through it, python, numpy and torch in this process). `lora_rank`: of
    the adapters that set_adapter() will be given; 0: none. EngineStartError: vLLM refused.
    """

    _running: ClassVar[set[int]] = set()
    """The engines of this process."""

    def __init__(
        self, model: str | Path, config: EngineConfig, *, seed: int = 0, lora_rank: int = 0
    ) -> None:
        parallel.require_teams_of(config.tensor_parallel_size)
        self.device = device_of_engines()
        if self.device == "cpu" and config.tensor_parallel_size > 2:
            raise ValueError(
                "engine.tensor_parallel_size must be at most 2 on CPU, got "
                f"{config.tensor_parallel_size}: each of more ranks adds the others' parts up in "
                "an order of its own there, and they would sample different tokens"
            )
        self.dtype = config.dtype_on(self.device)
        self.max_model_len = config.max_model_len
        self.state = State.AWAKE
        self.lora_rank = lora_rank
        self._adapter: LoRARequest | None = None
        self._config = config
        self._in_flight: dict[str, Request] = {}
        self._running_as: dict[str, Request] = {}
        """Those that vLLM works on, by its own ids."""
        self._ended: list[Request] = []
        """What step() has still to return: they ended as the engine was drained."""
        self._memory: Metrics = {}
        learning = torch.get_num_threads()
        self._llm = start(
            model, config, device=self.device, dtype=self.dtype, seed=seed, lora_rank=lora_rank
        )
        self._engine = self._llm.llm_engine
        self._threads = {State.ASLEEP: learning, State.AWAKE: torch.get_num_threads()}
        """Torch's on the CPU; vLLM serves a GPU on one, the learner may have all."""
        self._running.add(id(self))

    @property
    def llm(self) -> LLM:
        """VLLM's own object, for those who want `llm.chat(messages, tools=...)`.

        Ask it for logprobs=0 to get what the policy's tokens were sampled with, and where an
        adapter is trained for lora_request=engine.adapter: it is the policy.
        """
        self._require_awake()
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} requests in flight: llm would lose them")
        return self._llm

    @property
    def asleep(self) -> bool:
        """Whether the KV cache's memory is given back."""
        return self.state is State.ASLEEP

    @property
    def _core(self) -> Any:
        """VLLM's inner loop, which is in this process."""
        return vars(self._engine.engine_core)["engine_core"]

    @property
    def _runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> torch.nn.Module:
        """VLLM's own module, whose tensors the learner shares or writes to."""
        return self._runner.get_model()  # type: ignore[no-any-return]

    @property
    def adapter(self) -> LoRARequest | None:
        """What requests name to be answered by the adapter; None before set_adapter()."""
        return self._adapter

    def set_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Answer every request from now on through this LoRA adapter, instead of the last one.

        `tensors` are under peft's names, B is scaled in place; `config` is peft's
        adapter_config.json. ValueError: vLLM has no adapters of this kind, or for one of the
        layers.
        """
        if not self.lora_rank:
            raise ValueError("the engine was started without lora_rank: it has no adapters")
        manager = self._runner.lora_manager._adapter_manager
        names: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
        if hasattr(names, "get_rename_mapper"):  # newer ones also say what is fused
            names = names.get_rename_mapper()
        described = PEFTHelper.from_dict(dict(config))
        described.validate_legal(manager.lora_config)
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=_ADAPTER.lora_int_id,
            tensors=dict(tensors),
            peft_helper=described,
            device=self.device,
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=names,
        )
        parts = {part for fused in manager.packed_modules_mapping.values() for part in fused}
        known = {*manager.supported_lora_modules, *parts}
        if missed := sorted(n for n in adapter.loras if n.rpartition(".")[2] not in known):
            raise ValueError(
                f"vLLM has no adapters for {', '.join(missed[:3])}: learner.lora.target_modules "
                "must leave such layers out"
            )
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        self._adapter = _ADAPTER

    def prepack_frozen_linears(self, trained: Iterable[torch.Tensor]) -> int:
        """On CPU, let oneDNN pack the linear weights that no trained tensor shares memory with.

        Small batches decode up to four times faster on packed weights. A packed weight is a copy,
        so only what never changes may be packed; the plain tensors stay where they are. Returns how
        many were.
        """
        if self.device != "cpu":
            return 0
        # an embedding looks rows up and multiplies by nothing, unless it is the head too
        named = self.model.named_modules(remove_duplicate=False)
        heads = {id(module) for name, module in named if name.rpartition(".")[2] == "lm_head"}
        changing = {tensor.untyped_storage().data_ptr() for tensor in trained}
        packed = 0
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            # vars: a layer wrapped for adapters passes on what the one inside it has
            if "cpu_linear" not in vars(module) or not isinstance(weight, torch.Tensor):
                continue
            if isinstance(module, VocabParallelEmbedding) and id(module) not in heads:
                continue
            if weight.untyped_storage().data_ptr() in changing:
                use_plain_weight(module)
            else:
                pack_weight(module, remove_weight=False)
                packed += 1
        return packed

    def unpack(self) -> None:
        """Use the plain tensors everywhere: every weight may change from here on."""
        self.prepack_frozen_linears(self.model.parameters())

    def add_request(
        self,
        request_id: str,
        prompt_ids: Int32,
        *,
        max_tokens: int,
        temperature: float,
        seed: int | None = None,
        stop: Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        top_logprobs: int = 0,
        filters: Mapping[str, float] = MappingProxyType({}),
        on_token: Callable[[int], bool] | None = None,
        reference: bool = False,
    ) -> None:
        """Queue one continuation of prompt_ids; step() will return it when it is finished.

        ValueError: request_id is in flight already; prompt and max_tokens exceed max_model_len
        (vLLM would cut max_tokens silently); or vLLM refuses the temperature or the filters.

        `seed` is of this request's own random stream: what it samples depends on its seed and its
        logits, not on which other requests run; None: a stream shared by all such. `top_logprobs`:
        from how many of the likeliest tokens entropies are computed; 0: none. `filters`: vLLM's
        names of what cuts or bends the distribution, for evaluations alone (EvaluationConfig says
        why). `on_token` is told of each sampled token within step(); true ends the turn with it.
        `reference`: answered without the adapter, by the weights that nothing changes.
        """
        self._require_room(request_id, len(prompt_ids), max_tokens)
        if reference and not self.lora_rank:
            raise ValueError(f"request {request_id!r}: {NO_REFERENCE}")
        engine, inputs = self._engine, self._engine.input_processor
        with _filters_fault(filters):
            asked = inputs.process_inputs(
                request_id,
                tokens_input(prompt_ids.tolist()),
                SamplingParams(
                    temperature=temperature,
                    max_tokens=max_tokens,
                    stop=list(stop) or None,
                    stop_token_ids=list(stop_token_ids) or None,
                    seed=seed,
                    logprobs=top_logprobs,
                    detokenize=bool(stop),
                    skip_special_tokens=False,  # a stop string may be the name of one
                    **dict[str, Any](filters),
                ),
                supported_tasks=engine.get_supported_tasks(),
                lora_request=None if reference else self._adapter,
            )
        inputs.assign_request_id(asked)
        make_text = IncrementalDetokenizer.from_new_request
        text = make_text(engine.renderer.tokenizer, asked) if stop else None
        ids = asked.prompt_token_ids
        assert ids is not None, "vLLM was given ids"
        request = Request(request_id, asked.request_id, ids, text, top_logprobs, on_token)
        engine.engine_core.add_request(asked)
        self._in_flight[request_id] = self._running_as[asked.request_id] = request

    def _require_room(self, request_id: str, prompt: int, max_tokens: int) -> None:
        self._require_awake()
        if request_id in self._in_flight:
            raise ValueError(f"request {request_id!r} is in flight already")
        if prompt + max_tokens > self.max_model_len:
            raise ValueError(
                f"request {request_id!r}: {prompt} prompt tokens + max_tokens {max_tokens} exceed "
                f"engine.max_model_len {self.max_model_len}"
            )

    def step(self) -> list[Completion]:
        """Decode one token for every running request; return those that finished.

        With async_scheduling the next step is on the device by then: who is asked for now joins
        the one after it. FloatingPointError: a sampled token's log-probability is nan or infinite.
        """
        self._require_awake()
        self._advance()
        if not self._running_as:
            self._drain()
        ended, self._ended = self._ended, []
        for request in ended:
            del self._in_flight[request.request_id]
        return [request.completion() for request in ended]

    def _advance(self) -> None:
        """Let vLLM take a step, and sort out what it gave."""
        stopped = []
        with explained("generating", self._needs_less):
            outputs = self._engine.engine_core.get_output().outputs
        for output in outputs:
            request = self._running_as.get(output.request_id)
            if request is None or not request.take(output):
                continue  # aborted since it was scheduled, or it goes on
            del self._running_as[request.core_id]
            self._ended.append(request)
            if output.finish_reason is None:  # by a string, of which vLLM's core knows nothing
                stopped.append(request.core_id)
        self._engine.engine_core.abort_requests(stopped)

    def _drain(self) -> None:
        """Wait for what vLLM has scheduled ahead, so that nothing is under way on the device.

        It is before its memory or its weights change, and whenever no request is left.
        """
        core = self._core
        if not core.batch_queue:
            return
        core.pause_scheduler("keep", clear_cache=False)
        try:
            while core.batch_queue:
                self._advance()
        finally:
            core.resume_scheduler()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; step() will not return them."""
        gone = [self._in_flight.pop(name) for name in request_ids if name in self._in_flight]
        self._ended = [request for request in self._ended if request not in gone]
        running = [r.core_id for r in gone if self._running_as.pop(r.core_id, None) is not None]
        self._engine.engine_core.abort_requests(running)
        if not self._running_as and not self.asleep:
            self._drain()

    def abort_all(self) -> None:
        self.abort(list(self._in_flight))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def sleep(self) -> None:
        """Give the KV cache's memory back; with copied weights, theirs too (EngineConfig).

        On CPU vLLM has no memory to give back: its scheduler pauses, its prefix cache is reset and
        the states are the same.
        """
        if self.asleep:
            return
        if self._in_flight:
            raise RuntimeError(
                f"engine asked to sleep with {len(self._in_flight)} requests in flight"
            )
        self._drain()
        before = memory(self.device)
        self._engine.sleep(self._config.sleep_level, mode="keep")
        after = memory(self.device)
        self._memory = {f"{name}_before_sleep": value for name, value in before.items()}
        self._memory |= {f"{name}_asleep": value for name, value in after.items()}
        self.state = State.ASLEEP
        self._use_threads(State.ASLEEP)

    def wake(self) -> Metrics:
        """Make the engine usable again after sleep(); after level 2, once it has weights again.

        Returns memory in GiB before and after the last sleep and now; empty if it was awake.
        """
        if not self.asleep:
            return {}
        if self.device == "cuda":
            torch.cuda.empty_cache()
        discarded = self._config.sleep_level == 2
        with explained("waking the engine", self._needs_less):
            self._engine.wake_up(["weights"] if discarded else None)
        self.state = State.WEIGHTS_DISCARDED if discarded else State.AWAKE
        self._use_threads(State.AWAKE)
        awake = {f"{name}_awake": value for name, value in memory(self.device).items()}
        return self._memory | awake

    def reset_prefix_cache(self) -> None:
        """Forget every cached key and value: they belong to the weights before an update."""
        self._drain()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM did not reset its prefix cache ({len(self._in_flight)} requests in flight); "
                "rollouts would mix two policies"
            )

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy Hugging Face named tensors into vLLM's, in place, by vLLM's own loader."""
        self._drain()
        self.model.load_weights(named)  # type: ignore[operator]

    def weights_loaded(self) -> None:
        """Say that the weights are all there again: the cache wakes too."""
        if self.state is State.WEIGHTS_DISCARDED:
            with explained("waking the engine", self._needs_less):
                self._engine.wake_up(["kv_cache"])
            self.state = State.AWAKE

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Completion]:
        """Sample num_tokens greedily after each prompt, through the same path as rollouts."""
        if self._in_flight:
            raise RuntimeError(
                f"{len(self._in_flight)} requests in flight: a probe would lose them"
            )
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
            self.abort_all()
        return sorted(done, key=lambda completion: int(completion.request_id.rsplit(".", 1)[1]))

    def shutdown(self) -> None:
        """Free vLLM's resources; the engine cannot be used afterwards. Others here can be."""
        self._running.discard(id(self))
        with keep_process_groups() if self._running else contextlib.nullcontext():
            self._engine.engine_core.shutdown()

    def describe(self) -> dict[str, Any]:
        """What vLLM chose, in its own words, for the record: it says so at a level that is off."""
        config, runner = self._engine.vllm_config, type(self._runner)
        compilation = config.compilation_config
        backends = {
            layer.get_attn_backend().get_name()
            for layer in compilation.static_forward_context.values()
            if hasattr(layer, "get_attn_backend")
        }
        graphs = compilation.cudagraph_capture_sizes or ()
        return {
            "device": self.device,
            "dtype": self.dtype,
            "model_runner": f"{runner.__module__}.{runner.__qualname__}",
            "attention_backend": sorted(backends),
            "async_scheduling": config.scheduler_config.async_scheduling,
            "sleep_mode": config.model_config.enable_sleep_mode,
            "compilation": compilation.mode.name,
            "cuda_graphs": compilation.cudagraph_mode.name,
            "cuda_graph_sizes": len(graphs),
            "largest_cuda_graph": max(graphs, default=0),
            "block_size": config.cache_config.block_size,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "torch_threads": self._threads[State.AWAKE],
        }

    def _use_threads(self, state: State) -> None:
        if len(set(self._threads.values())) > 1:
            torch.set_num_threads(self._threads[state])

    def _needs_less(self) -> str:
        return oom_hint_engine(self._config)

    def _require_awake(self) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps: call wake() first")
        if self.state is State.WEIGHTS_DISCARDED:
            raise RuntimeError("sleep level 2 dropped the weights: publish them first")


@contextlib.contextmanager
def _filters_fault(filters: Mapping[str, Any]) -> Iterator[None]:
    """What vLLM refuses of a request is a ValueError; its own errors are none."""
    try:
        yield
    except VLLMValidationError as error:
        raise ValueError(f"filters: {error}" if filters else str(error)) from error
    except Exception as error:
        if not filters:
            raise
        raise ValueError(f"filters: {error}") from error
