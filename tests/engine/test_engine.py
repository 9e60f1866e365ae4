"""vLLM with a tiny model: its samples against transformers on the same files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from agentgrpo.config import EngineConfig
from agentgrpo.engine.engine import Engine
from agentgrpo.engine.requests import Request
from agentgrpo.types import Completion, Float32, Int32
from tests.tiny import VOCAB

Score = Callable[[Int32, float], Any]


@pytest.fixture(scope="module")
def oracle(tiny_model: Path) -> Score:
    """Log-probabilities of every next token, at a temperature, by plain transformers; [T, V]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()

    def score(ids: Int32, temperature: float = 1.0) -> Any:
        with torch.no_grad():
            logits = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]
        return torch.log_softmax(logits / temperature, -1).numpy()

    return score


def prompt(length: int, seed: int = 0) -> Int32:
    return np.random.default_rng(seed).integers(VOCAB, size=length, dtype=np.int32)


def finish(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.num_in_flight:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


def ask(
    engine: Engine,
    *prompts: Int32,
    seed: int | None = None,
    request_seed: int | None = None,
    **options: Any,
) -> list[Completion]:
    options = {"max_tokens": 24, "temperature": 1.0, **options}
    for index, ids in enumerate(prompts):
        own = request_seed if seed is None else 10_000 * seed + index
        engine.add_request(str(index), ids, seed=own, **options)
    done = finish(engine)
    return [done[str(index)] for index in range(len(prompts))]


def picked(table: Any, prompt_ids: Int32, token_ids: Int32) -> Float32:
    """The oracle's log-probabilities of the tokens that were sampled after a prompt."""
    rows = np.arange(len(prompt_ids) - 1, len(prompt_ids) - 1 + len(token_ids))
    return np.asarray(table[rows, token_ids], np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.6])
def test_logprobs_include_the_temperature(
    engine: Engine, oracle: Score, temperature: float
) -> None:
    prompts = [prompt(length, seed=length) for length in (1, 7, 32, 33, 100)] * 2
    for ids, turn in zip(
        prompts, ask(engine, *prompts, temperature=temperature, seed=1), strict=True
    ):
        table = oracle(np.concatenate([ids, turn.token_ids]), temperature)
        assert turn.logprobs.dtype == np.float32
        np.testing.assert_allclose(turn.logprobs, picked(table, ids, turn.token_ids), atol=1e-5)


def test_greedy_takes_the_most_likely_token(engine: Engine, oracle: Score) -> None:
    prompts = [prompt(40, seed=seed) for seed in range(6)]
    for ids, turn in zip(prompts, ask(engine, *prompts, temperature=0.0), strict=True):
        table = oracle(np.concatenate([ids, turn.token_ids]), 1.0)
        best = table[len(ids) - 1 : -1].argmax(-1)
        assert turn.token_ids.tolist() == best.tolist()
        # the greedy policy's log-probability is reported at temperature 1, as the learner scores it
        np.testing.assert_allclose(turn.logprobs, picked(table, ids, turn.token_ids), atol=1e-5)


def test_samples_follow_the_distribution(engine: Engine, oracle: Score) -> None:
    """Frequencies of the first token over many samples: chi-squared over its likely values."""
    ids, count = prompt(3), 1200
    first = [t.token_ids[0] for t in ask(engine, *[ids] * count, max_tokens=1, seed=0)]
    probability = np.exp(oracle(ids, 1.0)[-1])
    likely = np.argsort(-probability)[:20]
    counts = np.bincount(first, minlength=VOCAB)
    expected = count * probability
    chi2 = float((((counts - expected) ** 2) / expected)[likely].sum())
    assert chi2 < 20 + 5 * math.sqrt(2 * 20)


def test_same_seed_repeats_bits_another_does_not(engine: Engine) -> None:
    prompts = [prompt(50)] * 4 + [prompt(20, seed=1)]
    runs = []
    for seed in (3, 3, 4):
        engine.reset_prefix_cache()
        runs.append(ask(engine, *prompts, seed=seed))
    first, again, other = ([(t.token_ids.tobytes(), t.logprobs.tobytes()) for t in r] for r in runs)
    assert first == again
    assert first != other
    assert len({ids for ids, _ in first[:4]}) == 4, "a group must not be one rollout"


def test_stop_token_is_part_of_the_turn(engine: Engine) -> None:
    (free,) = ask(engine, prompt(30), seed=5)
    assert free.finish_reason == "length"
    stop = int(free.token_ids[6])
    (turn,) = ask(engine, prompt(30), seed=5, stop_token_ids=[stop])
    end = free.token_ids.tolist().index(stop) + 1
    assert turn.token_ids.tolist() == free.token_ids[:end].tolist()
    assert (turn.finish_reason, turn.stop_reason) == ("stop", stop)
    assert len(turn.logprobs) == end


def test_stop_string_includes_its_last_token(engine: Engine, tokenizer: Any) -> None:
    for seed in range(50):
        (free,) = ask(engine, prompt(30), seed=seed)
        texts = [tokenizer.decode([i]) for i in free.token_ids]
        pairs = [i for i in range(23) if (texts[i] + texts[i + 1]).isascii()]
        if pairs and all(free.token_ids != 2):
            break
    stop = texts[pairs[0]] + texts[pairs[0] + 1]
    (turn,) = ask(engine, prompt(30), seed=seed, stop=[stop])
    assert (turn.finish_reason, turn.stop_reason) == ("stop", stop)
    assert tokenizer.decode(turn.token_ids).endswith(stop)
    assert turn.token_ids.tolist() == free.token_ids[: len(turn.token_ids)].tolist()
    assert len(turn.logprobs) == len(turn.token_ids) <= pairs[0] + 2


def test_on_token_sees_each_token_and_may_end_the_turn(engine: Engine) -> None:
    (free,) = ask(engine, prompt(30), seed=5)
    recorded: list[int] = []

    def told(token: int) -> bool:
        recorded.append(token)
        return len(recorded) == 7

    (turn,) = ask(engine, prompt(30), seed=5, on_token=told)
    assert recorded == turn.token_ids.tolist() == free.token_ids[:7].tolist()
    assert (turn.finish_reason, turn.stop_reason, len(turn.logprobs)) == ("stop", None, 7)
    assert engine.num_in_flight == 0


def test_stop_string_may_be_a_special_token(engine: Engine, tokenizer: Any) -> None:
    """Such as an agent's tag for which the model has a token."""
    (free,) = ask(engine, prompt(30), temperature=0.0)
    often = int(free.token_ids[0])
    embedding = engine.model.get_parameter("model.embed_tokens.weight")
    engine.unpack()
    with torch.no_grad():  # what is likeliest is now named <|im_start|>
        embedding[[1, often]] = embedding[[often, 1]]
    engine.reset_prefix_cache()
    ids = prompt(30)
    ids[ids == often] = 1
    (turn,) = ask(engine, ids, temperature=0.0, stop=[tokenizer.decode([1])])
    assert turn.token_ids.tolist() == [1]
    assert (turn.finish_reason, turn.stop_reason) == ("stop", "<|im_start|>")


def test_requests_join_and_leave_while_others_decode(engine: Engine, oracle: Score) -> None:
    engine.add_request("long", prompt(20), max_tokens=30, temperature=1.0)
    for _ in range(5):
        assert engine.step() == []
    engine.add_request("short", prompt(21, seed=1), max_tokens=3, temperature=1.0)
    engine.add_request("gone", prompt(22, seed=2), max_tokens=50, temperature=1.0)
    engine.step()
    engine.abort(["gone", "never was"])
    assert engine.num_in_flight == 2
    done = finish(engine)
    assert {name: len(turn.token_ids) for name, turn in done.items()} == {"long": 30, "short": 3}
    for name, ids in (("long", prompt(20)), ("short", prompt(21, seed=1))):
        table = oracle(np.concatenate([ids, done[name].token_ids]), 1.0)
        np.testing.assert_allclose(
            done[name].logprobs, picked(table, ids, done[name].token_ids), atol=1e-5
        )


def test_prefix_cache_is_used_until_reset(engine: Engine) -> None:
    ids = prompt(100)
    cached = [ask(engine, ids, max_tokens=2, seed=0)[0].num_cached_tokens for _ in range(2)]
    assert cached == [0, 96]
    engine.reset_prefix_cache()
    assert ask(engine, ids, max_tokens=2, seed=0)[0].num_cached_tokens == 0


@pytest.mark.parametrize(("length", "max_tokens", "fits"), [(250, 6, True), (250, 7, False)])
def test_context_can_be_filled_but_not_exceeded(
    engine: Engine, length: int, max_tokens: int, fits: bool
) -> None:
    if fits:
        (turn,) = ask(engine, prompt(length), max_tokens=max_tokens)
        assert (len(turn.token_ids), turn.finish_reason) == (max_tokens, "length")
        return
    with pytest.raises(ValueError, match=r"'0': 250 prompt tokens .* 7 exceed .*max_model_len 256"):
        ask(engine, prompt(length), max_tokens=max_tokens)
    assert engine.num_in_flight == 0


def test_invalid_calls_are_refused_without_side_effects(engine: Engine) -> None:
    def more(name: str = "b") -> None:
        engine.add_request(name, prompt(6), max_tokens=2, temperature=1.0)

    engine.add_request("a", prompt(40), max_tokens=9, temperature=1.0)
    engine.step()
    under_way: dict[str, Callable[[], object]] = {
        r"did not reset its prefix cache \(1 requests": engine.reset_prefix_cache,
        "request 'a' is in flight already": lambda: more("a"),
        "asked to sleep with 1 requests in flight": engine.sleep,
        "1 requests in flight: a probe would lose them": lambda: engine.probe([prompt(4)], 1),
    }
    for message, use in under_way.items():
        with pytest.raises((RuntimeError, ValueError), match=message):
            use()
    assert not engine.asleep
    assert list(finish(engine)) == ["a"]
    engine.sleep()
    engine.sleep()
    for use in (engine.step, more, lambda: engine.probe([prompt(5)], 2)):
        with pytest.raises(RuntimeError, match=r"the engine sleeps: call wake\(\) first"):
            use()
    engine.wake()
    more("a")
    assert len(finish(engine)["a"].token_ids) == 2


def test_probes_return_in_order(engine: Engine, oracle: Score) -> None:
    prompts = [prompt(length, seed=length) for length in (90, 3, 40)]
    for ids, turn in zip(prompts, engine.probe(prompts, 3), strict=True):
        table = oracle(np.concatenate([ids, turn.token_ids]), 1.0)
        assert turn.token_ids[0] == table[len(ids) - 1].argmax()
        assert len(turn.token_ids) == 3


def test_torch_threads_can_still_be_set(the_engine: Engine) -> None:
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(before)


def test_seeded_request_repeats_in_any_batch(engine: Engine) -> None:
    alone = ask(engine, prompt(40), request_seed=7)[0]
    engine.reset_prefix_cache()
    for index in range(6):
        engine.add_request(f"other{index}", prompt(30, seed=index), max_tokens=20, temperature=1.0)
    engine.step()
    engine.add_request("mine", prompt(40), max_tokens=24, temperature=1.0, seed=7)
    engine.add_request("next", prompt(40), max_tokens=24, temperature=1.0, seed=8)
    done = finish(engine)
    assert done["mine"].token_ids.tolist() == alone.token_ids.tolist()
    assert done["next"].token_ids.tolist() != alone.token_ids.tolist()


def test_seeded_requests_work_with_more_prompts_than_a_batch(engine: Engine) -> None:
    """Prompts in chunks would crash vLLM's CPU backend: its generators have no offset."""
    turns = ask(engine, *[prompt(200, seed=s) for s in range(60)], max_tokens=3, request_seed=1)
    assert [len(turn.token_ids) for turn in turns] == [3] * 60


def test_filters_truncate_the_distribution_and_logprobs(engine: Engine, oracle: Score) -> None:
    prompts = [prompt(20, seed=seed) for seed in range(8)]
    for ids, turn in zip(prompts, ask(engine, *prompts, seed=1, filters={"top_k": 3}), strict=True):
        table = oracle(np.concatenate([ids, turn.token_ids]), 1.0)[len(ids) - 1 : -1]
        best = np.sort(table, axis=-1)[:, -3:]
        plain = picked(oracle(np.concatenate([ids, turn.token_ids]), 1.0), ids, turn.token_ids)
        assert (plain >= best[:, 0] - 1e-5).all(), "not one of the three likeliest"
        # renormalised over the three: why what is trained on must not be cut
        np.testing.assert_allclose(turn.logprobs, plain - np.log(np.exp(best).sum(-1)), atol=1e-4)


def test_sampling_values_that_vllm_rejects_are_refused(engine: Engine) -> None:
    with pytest.raises(ValueError, match=r"temperature must be in \[0, 2\]"):
        ask(engine, prompt(5), temperature=2.5)
    assert not engine.num_in_flight


def test_nan_logprob_of_a_request_raises() -> None:
    request = Request("0", "0-1", [1], None, 0)
    message = SimpleNamespace(logprobs=np.array([[math.nan]], np.float32))
    output = SimpleNamespace(
        new_token_ids=[7], new_logprobs=message, prefill_stats=None, finish_reason=None
    )
    assert not request.append(output)
    with pytest.raises(FloatingPointError, match="its token 0"):
        request.completion()


def test_entropies_match_the_policy(engine: Engine, oracle: Score) -> None:
    (turn,) = ask(engine, prompt(20), max_tokens=6, seed=1, top_logprobs=20)
    logp = oracle(np.concatenate([prompt(20), turn.token_ids]), 1.0)[19:-1]
    top = np.sort(logp, axis=-1)[:, -20:]
    exact = -(np.exp(logp) * logp).sum(-1)
    assert len(turn.entropies) == 6
    rest = 1 - np.exp(top).sum(-1)
    assert (turn.entropies <= exact + 1e-4).all()
    assert (exact - turn.entropies <= rest * np.log(VOCAB) + 1e-4).all()
    assert len(ask(engine, prompt(20), max_tokens=2)[0].entropies) == 0


def test_non_finite_logprob_stops_the_run(engine: Engine) -> None:
    with torch.no_grad():
        next(iter(engine.model.parameters()))[:] = torch.nan
    with pytest.raises(
        FloatingPointError, match=r"request '0': the sampler gave its token 0 .* nan"
    ):
        ask(engine, prompt(20))


def test_llm_chat_works_unless_requests_are_in_flight(engine: Engine) -> None:
    from vllm import SamplingParams

    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    params = SamplingParams(max_tokens=4, temperature=0.0, logprobs=0)
    (response,) = engine.llm.chat(
        cast(Any, [{"role": "user", "content": "hi"}]), params, tools=tools, use_tqdm=False
    )
    assert len(response.outputs[0].token_ids) == 4
    assert response.outputs[0].logprobs is not None
    engine.add_request("a", prompt(5), max_tokens=2, temperature=1.0)
    with pytest.raises(RuntimeError, match="1 requests in flight: llm would lose them"):
        _ = engine.llm
    assert list(finish(engine)) == ["a"]


def test_dropped_weights_must_be_loaded_before_requests(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {name: p.detach().clone() for name, p in engine.model.named_parameters()}
    expected = ask(engine, prompt(30), temperature=0.0)[0].token_ids.tolist()
    monkeypatch.setattr(engine, "_config", EngineConfig(sleep_level=2, weights="copy"))
    engine.sleep()
    engine.wake()
    with pytest.raises(RuntimeError, match="sleep level 2 dropped the weights: publish them first"):
        ask(engine, prompt(30))
    engine.load_weights(
        (name, value[:VOCAB] if "embed" in name else value)
        for name, value in weights.items()
        if "qkv" not in name and "gate_up" not in name
    )
    engine.weights_loaded()
    assert ask(engine, prompt(30), temperature=0.0)[0].token_ids.tolist() == expected


def test_fifty_sleeps_leak_nothing(engine: Engine) -> None:
    """Memory stays flat, and the last step samples the same as the first."""
    rss: list[float] = []
    for _ in range(50):
        turns = ask(engine, prompt(100), prompt(50, seed=1), temperature=0.0, max_tokens=8)
        engine.sleep()
        rss.append(engine.wake()["rss_gib_asleep"])
        assert engine._core.scheduler.get_num_unfinished_requests() == 0
    first = ask(engine, prompt(100), prompt(50, seed=1), temperature=0.0, max_tokens=8)
    assert [t.token_ids.tolist() for t in first] == [t.token_ids.tolist() for t in turns]
    assert max(rss[25:]) - max(rss[5:25]) < 0.01, "it grew by over 10 MiB in 25 nights"


@pytest.mark.slow
def test_start_error_contains_vllm_message_and_settings(tmp_path: Path) -> None:
    from agentgrpo.config import EngineConfig
    from agentgrpo.engine.start import EngineStartError

    (tmp_path / "config.json").write_text("{}")
    threads = torch.get_num_threads()
    with pytest.raises(
        EngineStartError, match=r"cannot start on .* engine.max_model_len 128, .*: "
    ):
        Engine(tmp_path, EngineConfig(max_model_len=128))
    assert torch.get_num_threads() == threads


def test_engine_without_lora_rank_refuses_adapters(engine: Engine) -> None:
    assert engine.adapter is None
    with pytest.raises(ValueError, match="started without lora_rank"):
        engine.set_adapter({}, {})


def test_describe_reports_what_vllm_chose(engine: Engine) -> None:
    description = engine.describe()
    assert json.loads(json.dumps(description)) == description
    assert description["model_runner"] == "vllm.v1.worker.cpu_model_runner.CPUModelRunner"
    assert description["attention_backend"] == ["CPU_ATTN"]
    keys = ("device", "dtype", "block_size", "cuda_graphs")
    assert {key: description[key] for key in keys} == {
        "device": "cpu", "dtype": "float32", "block_size": 32, "cuda_graphs": "NONE",
    }  # fmt: skip
    assert (description["async_scheduling"], description["sleep_mode"]) == (False, False)
