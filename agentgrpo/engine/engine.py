"""vLLM in this process, driven step by step with token ids.

Written against vLLM 0.24 to 0.33; only this folder imports vLLM. vLLM loads LoRA adapters only from
folders. Here the adapter is put into vLLM's manager under an id that requests name, so that nothing
is written to disk or read.
"""

from __future__ import annotations

import contextlib
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
from agentgrpo.support.memory import explain_out_of_memory, memory
from agentgrpo.types import Completion, Int32, Metrics

_ADAPTER = LoRARequest("policy", 1, "in memory")


def engine_device() -> Literal["cpu", "cuda"]:
    """The device of the engines in this process."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class State(Enum):
    """Which calls the engine accepts."""

    AWAKE = "awake"
    WEIGHTS_DISCARDED = "weights discarded"
    """Awake without weights, which level 2 dropped; load_weights() must come next."""
    ASLEEP = "asleep"


class Engine:
    """One vLLM engine with one model, awake or asleep.

    `seed` seeds vLLM (and thereby python, numpy and torch in this process). `lora_rank`: rank of
    the adapters for set_adapter(); 0: none. EngineStartError: vLLM did not start.
    """

    _running: ClassVar[set[int]] = set()
    """The engines of this process, by id()."""

    def __init__(
        self, model: str | Path, config: EngineConfig, *, seed: int = 0, lora_rank: int = 0
    ) -> None:
        parallel.require_teams_of(config.tensor_parallel_size)
        self.device = engine_device()
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
        self._unfinished: dict[str, Request] = {}
        """Unfinished requests by vLLM's own ids."""
        self._ended: list[Request] = []
        """Finished while the engine was drained; the next step() returns them."""
        self._memory: Metrics = {}
        learner_threads = torch.get_num_threads()
        self._llm = start(
            model, config, device=self.device, dtype=self.dtype, seed=seed, lora_rank=lora_rank
        )
        self._engine = self._llm.llm_engine
        self._threads = {State.ASLEEP: learner_threads, State.AWAKE: torch.get_num_threads()}
        """CPU threads of torch: with a GPU vLLM uses one, and the learner may use all."""
        self._running.add(id(self))

    @property
    def llm(self) -> LLM:
        """The vLLM object, for direct use such as `llm.chat(messages, tools=...)`.

        Pass logprobs=0 to get the log-probabilities of the sampled tokens and, where an adapter is
        trained, lora_request=engine.adapter: the policy is base plus adapter.
        """
        self._require_awake()
        if self._in_flight:
            raise RuntimeError(f"{len(self._in_flight)} requests in flight: llm would lose them")
        return self._llm

    @property
    def asleep(self) -> bool:
        return self.state is State.ASLEEP

    @property
    def _core(self) -> Any:
        return vars(self._engine.engine_core)["engine_core"]

    @property
    def _runner(self) -> Any:
        return self._engine.model_executor.driver_worker.worker.model_runner

    @property
    def model(self) -> torch.nn.Module:
        """The module in vLLM whose tensors the learner shares or writes."""
        return self._runner.get_model()  # type: ignore[no-any-return]

    @property
    def adapter(self) -> LoRARequest | None:
        """The request field that selects the adapter; None before set_adapter()."""
        return self._adapter

    def set_adapter(self, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        """Use this LoRA adapter for all requests from now on, in place of the previous one.

        `tensors` have peft's names, and B is scaled in place; `config` is peft's
        adapter_config.json. ValueError: vLLM does not support this kind of adapter, or one of its
        layers.
        """
        if not self.lora_rank:
            raise ValueError("the engine was started without lora_rank: it accepts no adapter")
        manager = self._runner.lora_manager._adapter_manager
        names: Any = getattr(manager.model, "hf_to_vllm_mapper", None)
        if hasattr(names, "get_rename_mapper"):  # newer vLLM: the mapper also describes fusions
            names = names.get_rename_mapper()
        peft_helper = PEFTHelper.from_dict(dict(config))
        peft_helper.validate_legal(manager.lora_config)
        adapter = LoRAModel.from_lora_tensors(
            lora_model_id=_ADAPTER.lora_int_id,
            tensors=dict(tensors),
            peft_helper=peft_helper,
            device=self.device,
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=names,
        )
        parts = {part for fused in manager.packed_modules_mapping.values() for part in fused}
        supported = {*manager.supported_lora_modules, *parts}
        if unsupported := sorted(n for n in adapter.loras if n.rpartition(".")[2] not in supported):
            raise ValueError(
                f"learner.lora.target_modules: vLLM supports no adapters for "
                f"{', '.join(unsupported[:3])}. Leave these layers out"
            )
        manager.remove_adapter(adapter.id)
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
        self._adapter = _ADAPTER

    def prepack_frozen_linears(self, trained: Iterable[torch.Tensor]) -> int:
        """On CPU, let oneDNN pack the linear weights that share no memory with a trained tensor.

        Small batches decode up to four times faster with packed weights. A packed weight is a copy,
        so only constant weights may be packed; the plain tensors remain. Returns the number of
        packed layers.
        """
        if self.device != "cpu":
            return 0
        # an embedding only looks up rows, unless it is also the head
        named = self.model.named_modules(remove_duplicate=False)
        heads = {id(module) for name, module in named if name.rpartition(".")[2] == "lm_head"}
        trained_storages = {tensor.untyped_storage().data_ptr() for tensor in trained}
        packed = 0
        for module in self.model.modules():
            weight = getattr(module, "weight", None)
            # vars(): a layer wrapped for adapters forwards attribute access to the inner layer
            if "cpu_linear" not in vars(module) or not isinstance(weight, torch.Tensor):
                continue
            if isinstance(module, VocabParallelEmbedding) and id(module) not in heads:
                continue
            if weight.untyped_storage().data_ptr() in trained_storages:
                use_plain_weight(module)
            else:
                pack_weight(module, remove_weight=False)
                packed += 1
        return packed

    def unpack(self) -> None:
        """Use the plain tensors everywhere, because every weight may change from now on."""
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
        """Queue one completion of prompt_ids; step() returns it when it has finished.

        `seed` starts the request's own random stream: its samples depend on its seed and its
        logits, not on which other requests run (None: one stream shared by all such requests).
        `top_logprobs`: number of likeliest tokens from which entropies are computed; 0: none.
        `filters`: vLLM's parameters that truncate or reshape the distribution, for evaluations only
        (EvaluationConfig explains why). `on_token` is called with each sampled token within step();
        true ends the turn with that token. `reference`: sample without the adapter, from the
        unchanged base weights.

        ValueError: request_id is in flight; prompt and max_tokens exceed max_model_len (vLLM would
        reduce max_tokens silently); or vLLM rejects the temperature or the filters.
        """
        self._require_room(request_id, len(prompt_ids), max_tokens)
        if reference and not self.lora_rank:
            raise ValueError(f"request {request_id!r}: {NO_REFERENCE}")
        engine, inputs = self._engine, self._engine.input_processor
        with _rejections_as_value_errors(filters):
            core_request = inputs.process_inputs(
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
                    skip_special_tokens=False,  # a stop string may be a special token's text
                    **dict[str, Any](filters),
                ),
                supported_tasks=engine.get_supported_tasks(),
                lora_request=None if reference else self._adapter,
            )
        inputs.assign_request_id(core_request)
        new_detokenizer = IncrementalDetokenizer.from_new_request
        detokenizer = new_detokenizer(engine.renderer.tokenizer, core_request) if stop else None
        ids = core_request.prompt_token_ids
        assert ids is not None, "vLLM was given ids"
        request = Request(
            request_id, core_request.request_id, ids, detokenizer, top_logprobs, on_token
        )
        engine.engine_core.add_request(core_request)
        self._in_flight[request_id] = self._unfinished[core_request.request_id] = request

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
        """Decode one token for every running request; returns the finished ones.

        With async_scheduling the next step is already on the device: a request added now joins the
        one after it. FloatingPointError: a sampled token's log-probability is NaN or infinite.
        """
        self._require_awake()
        self._advance()
        if not self._unfinished:
            self._drain()
        ended, self._ended = self._ended, []
        for request in ended:
            del self._in_flight[request.request_id]
        return [request.completion() for request in ended]

    def _advance(self) -> None:
        ended_here = []
        with explain_out_of_memory("generating", self._oom_hint):
            outputs = self._engine.engine_core.get_output().outputs
        for output in outputs:
            request = self._unfinished.get(output.request_id)
            if request is None or not request.append(output):
                continue  # aborted after it was scheduled, or not finished
            del self._unfinished[request.core_id]
            self._ended.append(request)
            if output.finish_reason is None:  # ended here (stop string), unknown to vLLM's core
                ended_here.append(request.core_id)
        self._engine.engine_core.abort_requests(ended_here)

    def _drain(self) -> None:
        """Wait for the steps that vLLM has scheduled ahead, so that nothing runs on the device.

        Needed before its memory or weights change, and whenever no request is left.
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
        aborted = [self._in_flight.pop(name) for name in request_ids if name in self._in_flight]
        self._ended = [request for request in self._ended if request not in aborted]
        running = [r.core_id for r in aborted if self._unfinished.pop(r.core_id, None) is not None]
        self._engine.engine_core.abort_requests(running)
        if not self._unfinished and not self.asleep:
            self._drain()

    def abort_all(self) -> None:
        self.abort(list(self._in_flight))

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def sleep(self) -> None:
        """Release the memory of the KV cache and, with copied weights, of the weights
        (EngineConfig).

        On CPU vLLM cannot release memory: its scheduler pauses, its prefix cache is reset, and the
        states are the same.
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
        """Make the engine usable after sleep(); after level 2, it still needs weights.

        Returns memory in GiB before and after the last sleep and now; empty if it was awake.
        """
        if not self.asleep:
            return {}
        if self.device == "cuda":
            torch.cuda.empty_cache()
        discarded = self._config.sleep_level == 2
        with explain_out_of_memory("waking the engine", self._oom_hint):
            self._engine.wake_up(["weights"] if discarded else None)
        self.state = State.WEIGHTS_DISCARDED if discarded else State.AWAKE
        self._use_threads(State.AWAKE)
        awake = {f"{name}_awake": value for name, value in memory(self.device).items()}
        return self._memory | awake

    def reset_prefix_cache(self) -> None:
        """Drop all cached keys and values, which belong to the weights before an update."""
        self._drain()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                f"vLLM did not reset its prefix cache ({len(self._in_flight)} requests in flight); "
                "rollouts would mix two policies"
            )

    def load_weights(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy tensors with Hugging Face names into vLLM's tensors in place, with vLLM's loader."""
        self._drain()
        self.model.load_weights(named)  # type: ignore[operator]

    def weights_loaded(self) -> None:
        """Mark the weights as complete; after level 2 this also wakes the KV cache."""
        if self.state is State.WEIGHTS_DISCARDED:
            with explain_out_of_memory("waking the engine", self._oom_hint):
                self._engine.wake_up(["kv_cache"])
            self.state = State.AWAKE

    def probe(self, prompts: Sequence[Int32], num_tokens: int) -> list[Completion]:
        """Sample num_tokens greedily after each prompt, on the same path as rollouts."""
        if self._in_flight:
            raise RuntimeError(
                f"{len(self._in_flight)} requests in flight: a probe would lose them"
            )
        for index, prompt in enumerate(prompts):
            self.add_request(f"probe.{index}", prompt, max_tokens=num_tokens, temperature=0.0)
        completions: list[Completion] = []
        try:
            while self._in_flight:
                completions += self.step()
        finally:
            self.abort_all()
        return sorted(completions, key=lambda c: int(c.request_id.removeprefix("probe.")))

    def shutdown(self) -> None:
        """Free vLLM's resources; this engine cannot be used afterwards, others can."""
        self._running.discard(id(self))
        with keep_process_groups() if self._running else contextlib.nullcontext():
            self._engine.engine_core.shutdown()

    def describe(self) -> dict[str, Any]:
        """The choices that vLLM made, for the record (it logs them at a level that is off)."""
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

    def _oom_hint(self) -> str:
        return oom_hint_engine(self._config)

    def _require_awake(self) -> None:
        if self.asleep:
            raise RuntimeError("the engine sleeps: call wake() first")
        if self.state is State.WEIGHTS_DISCARDED:
            raise RuntimeError("sleep level 2 dropped the weights: publish them first")


@contextlib.contextmanager
def _rejections_as_value_errors(filters: Mapping[str, Any]) -> Iterator[None]:
    """Raise ValueError for a request that vLLM rejects; its other errors pass through."""
    try:
        yield
    except VLLMValidationError as error:
        raise ValueError(f"filters: {error}" if filters else str(error)) from error
    except Exception as error:
        if not filters:
            raise
        raise ValueError(f"filters: {error}") from error
