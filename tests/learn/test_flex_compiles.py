"""Number of FlexAttention compilations, counted with a backend that runs nothing; needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from transformers import AttentionInterface

from agentgrpo.learn import flex
from agentgrpo.learn.attention import Tree, _attend_cuda
from agentgrpo.learn.batch import Deltas, PackedBatch
from agentgrpo.learn.policy import freeze_all_but
from agentgrpo.learn.preflight import one_row
from agentgrpo.types import Segment
from tests.learn.test_attention import make
from tests.learn.test_flex_blocks import tree_tout

AS_ON_CUDA = "agentgrpo_as_on_cuda"

LENGTHS = [130, 1, 384, 1000, 1025, 129, 128, 77, 1500, 640, 256, 257, 900, 2047, 512, 333,
           1152, 1793, 5]  # fmt: skip


def as_on_cuda(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    *, scaling: float | None = None, sliding_window: int | None = None,
    softcap: float | None = None, tree: Tree, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    return _attend_cuda(query, key, value, scaling, sliding_window, softcap, tree), None


AttentionInterface.register(AS_ON_CUDA, as_on_cuda)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The graphs that Dynamo handed over; in place of what they compute, their first operand."""
    graphs: list[Any] = []
    compile_ = torch.compile

    def backend(graph: Any, examples: Any) -> Any:
        graphs.append(graph)
        return lambda *args: (next(x for x in args if isinstance(x, Tensor)).clone(),)

    def counting(fn: Any, **options: Any) -> Any:
        return compile_(fn, backend=backend, **options)

    # a CPU has no backward pass for it, and none is run
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    monkeypatch.setattr(torch, "compile", counting)
    torch._dynamo.reset()
    flex.compiled_attend.cache_clear()
    yield graphs
    flex.compiled_attend.cache_clear()
    torch._dynamo.reset()


def tree_of(num_tokens: int) -> PackedBatch:
    """A random tree of runs of random lengths; positions are not depths, because only lengths
    matter.
    """
    rng = np.random.default_rng(num_tokens)
    cuts = np.unique(np.append(rng.integers(1, num_tokens + 1, 9), num_tokens))
    depths = [0, *rng.integers(1, 4, len(cuts) - 1).tolist()]
    starts = np.append(0, cuts[:-1])
    tout = tree_tout(np.diff(cuts, prepend=0).tolist(), depths)[starts]
    runs = np.stack([starts, starts, starts, tout]).astype(np.int32)
    deltas = Deltas([Segment(rng.integers(3, 61, num_tokens, dtype=np.int32))])
    return PackedBatch(deltas, runs, np.zeros((8, 0), np.int32), num_tokens, 0)


def pass_through(model: Any, batch: PackedBatch) -> None:
    batch = flex.pad_to_blocks(batch)
    tokens = batch.tokens(torch.device("cpu"))
    model.get_decoder()(
        input_ids=tokens.input_ids_T[None],
        position_ids=tokens.positions_T[None],
        use_cache=False,
        tree=Tree(batch, "cpu"),
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    ("name", "kinds", "first"),
    # lengths that Dynamo might take for others: 8 blocks, a head's columns, and 16, those of a key
    [("qwen3", 1, 1024), ("gemma2 with soft caps", 2, 2048)],
)
def test_twenty_lengths_share_the_kernels_of_one(
    compiles: list[Any], name: str, kinds: int, first: int
) -> None:
    """A kind of layers is compiled with and without a gradient: trained, frozen, scoring."""
    model = make(name).float()
    freeze_all_but(model, 2)  # of three: one full and one sliding, where there are such
    model.set_attn_implementation(AS_ON_CUDA)
    counts = []
    for length in [first, *LENGTHS]:
        pass_through(model, tree_of(length))
        with torch.no_grad():
            pass_through(model, tree_of(length))
        counts.append(len(compiles))
    assert counts == [2 * kinds] * (1 + len(LENGTHS))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("compiles")
def test_exceeding_the_compile_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not run eagerly, which writes all scores to memory."""
    monkeypatch.setattr(flex, "RECOMPILE_LIMIT", 1)
    model = make("qwen3").float()
    model.set_attn_implementation(AS_ON_CUDA)
    with torch.no_grad():
        pass_through(model, tree_of(300))
    with pytest.raises(FailOnRecompileLimitHit):
        pass_through(model, tree_of(300))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("width", "of_values"), [(256, 256), (192, 128), (320, 512), (576, 1024)])
def test_blocks_of_wide_heads_fit_shared_memory(
    compiles: list[Any], dtype: torch.dtype, width: int, of_values: int
) -> None:
    """Torch's own above 256, (64, 32) in 3 stages, ask for 263,168 bytes of 512 columns: the sum
    below, and 1 kB. An SM of an A100 has 166,912, of an H100 232,448.
    """
    total = 256
    tree = Tree(one_row(np.zeros(total, np.int32)), "cpu")
    query, key = torch.randn(2, 1, 2, total, width).to(dtype)
    value = torch.randn(1, 2, total, of_values).to(dtype)
    flex.attend(query, key, value, tree.block_mask(None), None, None)
    (graph,) = compiles
    (node,) = (n for n in graph.graph.nodes if "flex_attention" in str(n.target))
    (options,) = (x for x in node.args if isinstance(x, dict))

    def held(queries: int, keys: int, stages: int) -> int:
        columns, of_value = (1 << (n - 1).bit_length() for n in (width, of_values))
        return (queries * columns + stages * keys * (columns + of_value)) * dtype.itemsize

    if width <= 256:
        assert not {"BLOCK_M", "BLOCK_M1", "num_stages"} & options.keys()
        return
    assert options["BLOCK_M"] == options["BLOCK_N"] >= 16
    if (width, dtype) == (576, torch.float32):
        return  # nothing does
    forward = held(options["BLOCK_M"], options["BLOCK_N"], options["num_stages"])
    assert forward <= 96 << 10
    for half in "12":  # in the backward pass the output's gradient comes with the queries
        queries, keys = options[f"BLOCK_M{half}"], options[f"BLOCK_N{half}"]
        assert held(2 * queries, keys, options["num_stages"]) <= 128 << 10


@pytest.mark.parametrize("length", [1, 127, 128, 256, 257, 1000])
def test_padding_is_visible_to_no_token(length: int) -> None:
    batch = tree_of(length)
    padded = flex.pad_to_blocks(batch)
    total = padded.num_tokens
    assert total == max(256, -(-length // 128) * 128)
    for field in ("input_ids_T", "positions_T", "tout_T"):
        x = getattr(padded, field)
        assert len(x) == total
        np.testing.assert_array_equal(x[:length], getattr(batch, field))
    assert not padded.input_ids_T[length:].any()
    assert (padded.tout_T[length:] == total).all()
    np.testing.assert_array_equal(padded.positions_T[length:], np.arange(total - length))
    result = padded.tokens(torch.device("cpu"))
    np.testing.assert_array_equal(padded.tout_T, result.tout_T)
    np.testing.assert_array_equal(padded.positions_T, result.positions_T)
