"""How vLLM is started here: with which settings, and what of it is changed first, by measurement.

* vLLM's CPU backend packs every linear weight away and leaves an empty parameter behind. Here the
  plain weight stays, so that the learner's parameters can be views of it (engine/weights.py).
* A convolution's plain weight stays too, and gated delta nets are told that it is not packed.
* The rank of a sampled token is computed by a function that torch.compile builds in C++ on first
  use: 20 s on CPU for a number that nobody reads.
* vLLM's CPU worker lowers the thread count by one and then replaces torch.set_num_threads by a
  no-op, for the whole process: the learner too would work on half of two cores. On CUDA it serves
  on one thread, which stays so while the engine is awake.
* A request's own seed crashes vLLM on CPU when its prompt is computed in chunks (CPU generators
  have no offset to wind back). Here prompts are computed whole on CPU.
* Under torchrun vLLM's own launcher would put every rank's engine on the first GPU; as an external
  launcher's it takes the rank's own, and ranks may hold one engine together
  (rollout/tensor_parallel.py).
* On CPU those ranks' shared memory has the same name in every run (_shared_memory_of_this_run).
* vLLM's cache of what it compiled goes by the model's folder too, so that every checkpoint would be
  compiled anew. Here it goes by what is in config.json.
* CUDA graphs are captured for every number of rollouts that may decode at once. vLLM stops at 512,
  and captures more sizes for few.
* On CPU a request without an adapter got that of the last slot, index -1, where another request of
  the batch had one. Here its share of every adapter is zero (_without_adapter_none).
* Shared weights stay out of vLLM's sleeping memory pool on CUDA: the learner works on them while
  the engine sleeps, so only the KV cache may be unmapped.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import vllm.lora.ops.torch_ops.lora_ops as lora_ops
import vllm.lora.punica_wrapper.punica_cpu as punica_cpu
import vllm.model_executor.layers.utils as vllm_layers
import vllm.v1.sample.sampler as vllm_sampler
from vllm import LLM
from vllm.config import ModelConfig

from agentgrpo.config import EngineConfig, room_for_adapters
from agentgrpo.kernels.products import linear
from agentgrpo.models.architectures import kinds_of
from agentgrpo.models.multimodal_text import TEXT_PARTS, language_model, only_text
from agentgrpo.support import parallel
from agentgrpo.support.hardware import memory_bytes
from agentgrpo.support.memory import OutOfMemory, explained

pack_weight = vllm_layers.dispatch_cpu_unquantized_gemm
"""vLLM's own way with a linear layer on CPU; with remove_weight=False the plain weight stays."""


class EngineStartError(ValueError):
    """vLLM could not be started with this model and these settings; the message says why."""


def start(
    model: str | Path, config: EngineConfig, *, device: str, dtype: str, seed: int, lora_rank: int
) -> LLM:
    """Start vLLM in this process; the arguments are Engine's."""
    settings = _settings(config, device, dtype) | _lora_settings(lora_rank)
    if device == "cpu" and lora_rank:
        _without_adapter_none()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    # vLLM collects garbage four times as it starts, at 0.4 s each while the million objects that
    # the imports made are looked at; frozen they are not. At exit they must be looked at again, or
    # what Triton binds is said to leak; vLLM unfreezes as it shuts down, a failed start does not.
    atexit.register(gc.unfreeze)
    gc.collect()
    gc.freeze()
    try:
        kinds = kinds_of(str(model))
        of_text = bool(kinds.wrapped) and kinds.model_type in TEXT_PARTS
        if of_text:
            settings["hf_overrides"] = language_model
        if device == "cpu" and kinds.recurrent:
            # vLLM keeps states at the ends of blocks only, for which it computes prompts in chunks
            settings["enable_prefix_caching"] = False
            use_plain_convolutions()
        with (
            explained("starting vLLM", lambda: oom_hint_engine(config)),
            plain_cpu_weights(),
            _weights_outside_sleep_pool(config.weights != "copy"),
            _shared_memory_of_this_run(),
            _compiled_for_any_folder(),
            _keep_transformers_init(),
            _flatten_rope_heads(),
            _weights_of_text(of_text),
        ):
            llm = LLM(str(model), seed=seed, **settings)
        if device != "cpu":  # one, which it serves with: see Engine.sleep()
            num_threads = torch.get_num_threads()
    except OutOfMemory:
        raise
    except Exception as error:  # vLLM, the model's code and what both import: of any kind
        raise EngineStartError(_explain_start(error, model, config)) from error
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(num_threads)
    if device == "cpu":
        vars(vllm_sampler)["batched_count_greater_than"] = lambda x, values: (x >= values).sum(-1)
    return llm


def _settings(config: EngineConfig, device: str, dtype: str) -> dict[str, Any]:
    on_cpu = device == "cpu"
    settings = {
        "dtype": dtype,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "enforce_eager": on_cpu or config.enforce_eager,
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        "config_format": "hf",  # Mistral's have files of another format beside
        "load_format": "hf",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "async_scheduling": config.schedules_ahead(device),
        "enable_prefix_caching": True,
        "enable_sleep_mode": not on_cpu,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }
    if not on_cpu:
        # vLLM refuses to start unless this share of the card is free, also where the cache's size
        # is given and the share read for nothing else (vllm/v1/worker/utils.py, request_memory)
        settings["gpu_memory_utilization"] = 0.01
        if not config.enforce_eager:
            settings["cudagraph_capture_sizes"] = graph_sizes(config.max_num_seqs)
    if parallel.world_size() > 1:
        settings |= {
            "distributed_executor_backend": "external_launcher",
            "tensor_parallel_size": config.tensor_parallel_size,
        }
    if on_cpu:
        settings |= {
            "block_size": 32,
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(4096, config.max_model_len, config.max_num_seqs),
        }
    return settings


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes, in tokens, for which CUDA graphs are captured; others are padded to the next.

    All that decoding alone comes to, and as much as vLLM would capture for the tokens of prompts
    beside it. By eights up to 128 and then eight to an octave: above 64 at most one token in
    nine is padding, and 1,024 rollouts take 43 sizes where one in 16 would be 83.
    """
    most = max(max_num_seqs, min(2 * max_num_seqs, 512))
    sizes, size = {1, 2, 4, max_num_seqs, most}, 8
    while size < most:
        sizes.add(size)
        size += max(8, 1 << size.bit_length() - 4)
    return sorted(size for size in sizes if size <= most)


def _lora_settings(rank: int) -> dict[str, Any]:
    if not rank:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": room_for_adapters(rank)}


@functools.cache
def _without_adapter_none() -> None:
    """Have vLLM's adapters on CPU add nothing to rows that have none. CUDA's are not tried."""
    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0.0

    for module in (lora_ops, punica_cpu):
        setattr(module, "bgmv_shrink", bgmv_shrink)  # noqa: B010 - vLLM declares it otherwise


def _explain_start(error: Exception, model: str | Path, config: EngineConfig) -> str:
    """What vLLM said, with our name for its only setting that is not one here, and the values."""
    said = " ".join(str(error).replace("gpu_memory_utilization", "engine.kv_cache_gib").split())
    return (
        f"vLLM cannot start on {str(model)!r} with engine.max_model_len {config.max_model_len}, "
        f"engine.max_num_seqs {config.max_num_seqs}, engine.kv_cache_gib {config.kv_cache_gib:g}, "
        f"engine.dtype {config.dtype!r}, engine.tensor_parallel_size "
        f"{config.tensor_parallel_size}: {type(error).__name__}: {said[:600] or '?'}"
    )


def oom_hint_engine(config: EngineConfig) -> str:
    """What to set lower when memory ran out for vLLM."""
    total, free = (size / 2**30 for size in memory_bytes())
    return (
        f"a lower engine.kv_cache_gib (it is {config.kv_cache_gib:g}) or engine.max_num_seqs "
        f"({config.max_num_seqs}), or a smaller model; {free:.1f} of the host's {total:.1f} GiB "
        "are free now, and `agentgrpo train CONFIG --dry-run` adds up what is needed"
    )


def use_plain_weight(layer: torch.nn.Module) -> None:
    """Let a linear layer multiply by its own tensor, which may change."""
    layer.cpu_linear = linear  # type: ignore[assignment]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another value for an attribute, until the context ends."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def plain_cpu_weights() -> contextlib.AbstractContextManager[None]:
    """Keep vLLM's CPU linear layers on their plain weight tensors while a model is loaded."""

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        use_plain_weight(layer)

    return _replaced(vllm_layers, "dispatch_cpu_unquantized_gemm", keep)


def use_plain_convolutions() -> None:
    """Let gated delta nets on CPU multiply by plain convolution weights.

    Where the CPU has AVX-512 BF16, vLLM's take them for packed, and 4 nats go by. Its fallback in
    torch reads plain ones, and takes prompts of one token too, which that kernel refuses.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def plain(convolve: Any, state: str) -> Any:
        def call(*, weight: Any, conv_states: Any, silu_activation: bool, **more: Any) -> Any:
            del more["is_weight_packed"]
            activation = "silu" if silu_activation else None
            more |= {"weight": weight.flatten(1), "activation": activation, state: conv_states}
            return convolve(**more)

        return call

    ours = vars(gdn_attention)
    ours["_causal_conv1d_fwd_cpu"] = plain(ours["causal_conv1d_torch"], "conv_states")
    ours["_causal_conv1d_update_cpu"] = plain(ours["causal_conv1d_update_cpu"], "conv_state")


def _shared_memory_of_this_run() -> contextlib.AbstractContextManager[None]:
    """Name what ranks on CPU share after this run. VLLM has one name for all runs of a machine, so
    that two of them meet there, and what a killed one leaves behind stops the next.
    """
    if parallel.world_size() == 1 or torch.cuda.is_available():
        return contextlib.nullcontext()
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launcher

    (name, *_), arguments = parallel.gather(uuid.uuid4().hex), Launcher._distributed_args

    def named(self: Any) -> tuple[str, int, int]:
        method, rank, local_rank = arguments(self)
        return f"{method}:{name}", rank, local_rank  # what is after the last colon is the name

    return _replaced(Launcher, "_distributed_args", named)


def _compiled_for_any_folder() -> contextlib.AbstractContextManager[None]:
    """Let vLLM find what it has compiled for this architecture, wherever the weights lie."""
    by_folder = ModelConfig.compute_hash

    def by_content(self: Any) -> str:
        folder, self.model = self.model, ""
        try:
            return by_folder(self)
        finally:
            self.model = folder

    return _replaced(ModelConfig, "compute_hash", by_content)


def keep_process_groups() -> contextlib.AbstractContextManager[None]:
    """VLLM's engines tear down the process groups of all of a process when they end."""
    from vllm.v1.engine import core

    return _replaced(core, "cleanup_dist_env_and_memory", lambda: None)


def _flatten_rope_heads() -> contextlib.AbstractContextManager[None]:
    """On CPU vLLM's rotary kernel reads [tokens, heads, size], which LFM2 hands it, as one head."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    turn = RotaryEmbedding.forward_cpu

    def turn_flat(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        flat: Any = (None if x is None else x.flatten(1) for x in (query, key))
        turned = zip(turn(self, positions, *flat), (query, key), strict=True)
        return tuple(None if x is None else x.view(like.shape) for x, like in turned)

    return _replaced(RotaryEmbedding, "forward_cpu", turn_flat)


def _weights_of_text(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Read of a checkpoint with parts for images or sound the language model's tensors only."""
    if not wanted:
        return contextlib.nullcontext()
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as Loader

    read = Loader.get_all_weights
    return _replaced(Loader, "get_all_weights", lambda *given: only_text(read(*given)))


def _keep_transformers_init() -> contextlib.AbstractContextManager[None]:
    """Let the learner make models of the classes that vLLM has changed for itself.

    What vLLM has no code of its own for (SmolLM3, OLMo 3) it runs as transformers' model, whose
    class it decorates: from then on it can be made inside of vLLM only, and is compiled by it.
    """
    from vllm.compilation import decorators
    from vllm.config import get_current_vllm_config_or_none

    decorate = decorators._support_torch_compile

    def decorated(cls: Any, *options: Any, **more: Any) -> Any:
        plain = cls.__init__
        decorate(cls, *options, **more)
        theirs = cls.__init__
        if cls.__module__.startswith("transformers.") and theirs is not plain:

            def make(self: Any, *args: Any, **kwargs: Any) -> None:
                inside = get_current_vllm_config_or_none() is not None
                (theirs if inside else plain)(self, *args, **kwargs)
                if not inside:
                    self.do_not_compile = True

            cls.__init__ = make
        return cls

    return _replaced(decorators, "_support_torch_compile", decorated)


def _weights_outside_sleep_pool(shared: bool) -> contextlib.AbstractContextManager[None]:
    """Load shared weights outside vLLM's sleeping pool, so that sleep unmaps the KV cache only."""
    if not shared or not torch.cuda.is_available():
        return contextlib.nullcontext()
    from vllm.v1.worker.gpu_worker import Worker

    pool = Worker._maybe_get_memory_pool_context

    def without_weights(self: Any, tag: str) -> Any:
        return contextlib.nullcontext() if tag == "weights" else pool(self, tag)

    return _replaced(Worker, "_maybe_get_memory_pool_context", without_weights)
