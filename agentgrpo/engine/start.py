"""Start vLLM with the settings and patches that this project needs, each with its reason.

Most are functions below. The others:

* vLLM computes the rank of a sampled token with a function that torch.compile builds in C++ on
  first use: 20 s on CPU for a number that nobody reads. It is replaced.
* vLLM's CPU worker lowers the thread count by one and then replaces torch.set_num_threads by a
  no-op for the whole process: the learner would use half of two cores too. On CUDA vLLM uses one
  thread, which stays so while the engine is awake.
* On CPU a request with its own seed crashes vLLM if its prompt is computed in chunks (CPU
  generators have no offset to rewind). So prompts are computed whole on CPU.
* Under torchrun vLLM's default launcher would put every rank's engine on the first GPU; with the
  external launcher it uses the rank's own, and several ranks may form one engine
  (rollout/tensor_parallel.py).
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
from agentgrpo.models.architectures import read_architecture
from agentgrpo.models.multimodal_text import TEXT_PARTS, language_model, only_text
from agentgrpo.support import parallel
from agentgrpo.support.hardware import memory_bytes
from agentgrpo.support.memory import OutOfMemory, explain_out_of_memory

pack_weight = vllm_layers.dispatch_cpu_unquantized_gemm
"""vLLM's CPU setup of a linear layer; with remove_weight=False the plain weight remains."""


class EngineStartError(ValueError):
    """vLLM could not be started with this model and these settings; the message says why."""


def start(
    model: str | Path, config: EngineConfig, *, device: str, dtype: str, seed: int, lora_rank: int
) -> LLM:
    """Start vLLM in this process; the arguments are Engine's."""
    settings = _settings(config, device, dtype)
    if lora_rank:
        room = room_for_adapters(lora_rank)
        settings |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": room}
        if device == "cpu":
            _zero_missing_adapters()
    set_num_threads, num_threads = torch.set_num_threads, torch.get_num_threads()
    # vLLM runs the garbage collector four times as it starts, 0.4 s each for the million objects
    # of the imports; frozen objects are skipped. They must be unfrozen at exit, or Triton's
    # bindings are reported as leaks; vLLM does so in its shutdown, but not after a failed start.
    atexit.register(gc.unfreeze)
    gc.collect()
    gc.freeze()
    try:
        architecture = read_architecture(str(model))
        text_only = bool(architecture.wrapped) and architecture.model_type in TEXT_PARTS
        if text_only:
            settings["hf_overrides"] = language_model
        if device == "cpu" and architecture.recurrent:
            # vLLM caches recurrent states at block ends only, and computes prompts in chunks for it
            settings["enable_prefix_caching"] = False
            use_plain_convolutions()
        with (
            explain_out_of_memory("starting vLLM", lambda: oom_hint_engine(config)),
            plain_cpu_weights(),
            _weights_outside_sleep_pool(config.weights != "copy"),
            _shared_memory_of_this_run(),
            _compiled_for_any_folder(),
            _keep_transformers_init(),
            _flatten_rope_heads(),
            _weights_of_text(text_only),
        ):
            llm = LLM(str(model), seed=seed, **settings)
        if device != "cpu":  # vLLM has set one thread; Engine.sleep() restores the learner's
            num_threads = torch.get_num_threads()
    except OutOfMemory:
        raise
    except Exception as error:  # any type: from vLLM, the model's code and their imports
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
        "config_format": "hf",  # Mistral's checkpoints also contain files in their own format
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
        # vLLM refuses to start unless this share of the GPU is free, even with a given cache size,
        # where it is used for nothing else (vllm/v1/worker/utils.py, request_memory)
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
    """Batch sizes, in tokens, for which CUDA graphs are captured; vLLM pads others to the next
    size.

    Up to the largest decode-only batch, and up to vLLM's own limit for decode tokens plus prompt
    tokens. Steps of 8 up to 128, then eight sizes per octave: above 64 at most one token in nine is
    padding, and 1,024 rollouts need 43 sizes instead of the 83 of steps of 16.
    """
    largest = max(max_num_seqs, min(2 * max_num_seqs, 512))
    sizes, size = {1, 2, 4, max_num_seqs, largest}, 8
    while size < largest:
        sizes.add(size)
        size += max(8, 1 << size.bit_length() - 4)
    return sorted(size for size in sizes if size <= largest)


@functools.cache
def _zero_missing_adapters() -> None:
    """On CPU, let vLLM's adapters add nothing to rows without one. Not tried on CUDA.

    vLLM reads the adapter of the last slot, index -1, for them if another row has an adapter.
    """
    shrink = lora_ops.bgmv_shrink

    def bgmv_shrink(
        inputs: Any, weights: Any, output: Any, indices: Any, scaling: float = 1.0
    ) -> None:
        shrink(inputs, weights, output, indices, scaling)
        output[indices < 0] = 0.0

    for module in (lora_ops, punica_cpu):
        setattr(module, "bgmv_shrink", bgmv_shrink)  # noqa: B010 - vLLM declares it otherwise


def _explain_start(error: Exception, model: str | Path, config: EngineConfig) -> str:
    """The error of vLLM with the settings' values and their names here."""
    message = " ".join(str(error).replace("gpu_memory_utilization", "engine.kv_cache_gib").split())
    return (
        f"vLLM cannot start on {str(model)!r} with engine.max_model_len {config.max_model_len}, "
        f"engine.max_num_seqs {config.max_num_seqs}, engine.kv_cache_gib {config.kv_cache_gib:g}, "
        f"engine.dtype {config.dtype!r}, engine.tensor_parallel_size "
        f"{config.tensor_parallel_size}: {type(error).__name__}: {message[:600] or '?'}"
    )


def oom_hint_engine(config: EngineConfig) -> str:
    """Which settings to lower when vLLM ran out of memory."""
    total, free = (size / 2**30 for size in memory_bytes())
    return (
        f"a lower engine.kv_cache_gib (it is {config.kv_cache_gib:g}) or engine.max_num_seqs "
        f"({config.max_num_seqs}), or a smaller model; {free:.1f} of the host's {total:.1f} GiB "
        "are free now, and `agentgrpo train CONFIG --dry-run` adds up what is needed"
    )


def use_plain_weight(layer: torch.nn.Module) -> None:
    """Let a linear layer multiply by its plain tensor, which may change."""
    layer.cpu_linear = linear  # type: ignore[assignment]


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


def plain_cpu_weights() -> contextlib.AbstractContextManager[None]:
    """Keep the plain weights of vLLM's CPU linear layers while a model is loaded.

    vLLM packs each and leaves an empty parameter; the learner's would have nothing to be a view of.
    """

    def keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        use_plain_weight(layer)

    return _replaced(vllm_layers, "dispatch_cpu_unquantized_gemm", keep)


def use_plain_convolutions() -> None:
    """Let gated delta nets on CPU use plain convolution weights.

    On CPUs with AVX-512 BF16 vLLM assumes packed weights, and log-probabilities are off by 4 nats.
    Its torch fallback reads plain ones, and also accepts prompts of one token, which the kernel
    rejects.
    """
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    def with_plain_weight(convolve: Any, state: str) -> Any:
        def call(*, weight: Any, conv_states: Any, silu_activation: bool, **kwargs: Any) -> Any:
            del kwargs["is_weight_packed"]
            activation = "silu" if silu_activation else None
            kwargs |= {"weight": weight.flatten(1), "activation": activation, state: conv_states}
            return convolve(**kwargs)

        return call

    module_vars = vars(gdn_attention)
    module_vars["_causal_conv1d_fwd_cpu"] = with_plain_weight(
        module_vars["causal_conv1d_torch"], "conv_states"
    )
    module_vars["_causal_conv1d_update_cpu"] = with_plain_weight(
        module_vars["causal_conv1d_update_cpu"], "conv_state"
    )


def _shared_memory_of_this_run() -> contextlib.AbstractContextManager[None]:
    """Name the ranks' shared memory on CPU after this run.

    vLLM uses one name per machine: two runs would share memory, and the leftover of a killed run
    would stop the next.
    """
    if parallel.world_size() == 1 or torch.cuda.is_available():
        return contextlib.nullcontext()
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launcher

    (name, *_), arguments = parallel.gather(uuid.uuid4().hex), Launcher._distributed_args

    def named(self: Any) -> tuple[str, int, int]:
        method, rank, local_rank = arguments(self)
        return f"{method}:{name}", rank, local_rank  # the name follows the last colon

    return _replaced(Launcher, "_distributed_args", named)


def _compiled_for_any_folder() -> contextlib.AbstractContextManager[None]:
    """Let vLLM reuse compiled code of the same config.json from any folder: of every checkpoint."""
    by_folder = ModelConfig.compute_hash

    def by_content(self: Any) -> str:
        folder, self.model = self.model, ""
        try:
            return by_folder(self)
        finally:
            self.model = folder

    return _replaced(ModelConfig, "compute_hash", by_content)


def keep_process_groups() -> contextlib.AbstractContextManager[None]:
    """Keep the process groups of other engines: vLLM's shutdown destroys all of a process."""
    from vllm.v1.engine import core

    return _replaced(core, "cleanup_dist_env_and_memory", lambda: None)


def _flatten_rope_heads() -> contextlib.AbstractContextManager[None]:
    """On CPU, pass 2-d tensors to vLLM's rotary kernel.

    It treats the [tokens, heads, size] of LFM2 as one head.
    """
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    forward = RotaryEmbedding.forward_cpu

    def forward_flat(self: Any, positions: Any, query: Any, key: Any = None) -> Any:
        flat: Any = (None if x is None else x.flatten(1) for x in (query, key))
        rotated = zip(forward(self, positions, *flat), (query, key), strict=True)
        return tuple(None if x is None else x.view(like.shape) for x, like in rotated)

    return _replaced(RotaryEmbedding, "forward_cpu", forward_flat)


def _weights_of_text(text_only: bool) -> contextlib.AbstractContextManager[None]:
    """Load only the language model's tensors of a multimodal checkpoint."""
    if not text_only:
        return contextlib.nullcontext()
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader as Loader

    read = Loader.get_all_weights
    return _replaced(Loader, "get_all_weights", lambda *args: only_text(read(*args)))


def _keep_transformers_init() -> contextlib.AbstractContextManager[None]:
    """Keep transformers' classes usable by the learner after vLLM has decorated them.

    vLLM runs models without an implementation of its own (SmolLM3, OLMo 3) as transformers' model
    and decorates its class, which afterwards can only be instantiated within vLLM and is compiled
    by it.
    """
    from vllm.compilation import decorators
    from vllm.config import get_current_vllm_config_or_none

    decorate = decorators._support_torch_compile

    def decorated(cls: Any, *options: Any, **kwargs: Any) -> Any:
        original = cls.__init__
        decorate(cls, *options, **kwargs)
        decorated_init = cls.__init__
        if cls.__module__.startswith("transformers.") and decorated_init is not original:

            def make(self: Any, *args: Any, **kwargs: Any) -> None:
                in_vllm = get_current_vllm_config_or_none() is not None
                (decorated_init if in_vllm else original)(self, *args, **kwargs)
                if not in_vllm:
                    self.do_not_compile = True

            cls.__init__ = make
        return cls

    return _replaced(decorators, "_support_torch_compile", decorated)


def _weights_outside_sleep_pool(shared: bool) -> contextlib.AbstractContextManager[None]:
    """Load shared weights outside vLLM's sleeping pool, so that sleep unmaps the KV cache only.

    The learner uses them while the engine sleeps.
    """
    if not shared or not torch.cuda.is_available():
        return contextlib.nullcontext()
    from vllm.v1.worker.gpu_worker import Worker

    pool = Worker._maybe_get_memory_pool_context

    def without_weights(self: Any, tag: str) -> Any:
        return contextlib.nullcontext() if tag == "weights" else pool(self, tag)

    return _replaced(Worker, "_maybe_get_memory_pool_context", without_weights)
