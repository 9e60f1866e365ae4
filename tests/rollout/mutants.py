# ruff: noqa: E501 - a table of source pieces
"""Change what keeps token truth in small ways and see that the tests notice every one.

python -m tests.rollout.mutants [WORD ...]      only mutants whose name or file has a WORD
"""

from __future__ import annotations

import os
import sys

from agentgrpo.runtime import prepare_environment

prepare_environment()
os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import hypothesis  # noqa: E402, F401 - what every fork would import again
import transformers  # noqa: E402, F401

from tests.mutation import Mutant, hunt  # noqa: E402

TESTS = {
    "rollout/transcript.py": ["rollout/test_transcript.py"],
    "rollout/play.py": [
        "rollout/test_sampler.py",
        "rollout/test_transcript.py",
        "rollout/test_limits.py",
        "rollout/test_episodes.py",
        "agents/test_inline.py",
    ],
    "rollout/delta.py": ["rollout/test_delta.py", "rollout/test_templates.py"],
    "rollout/encoding.py": ["rollout/test_delta.py", "rollout/test_templates.py"],
    "scoring.py": ["test_scoring.py"],
    "updates.py": ["learning/test_mismatch.py", "learning/test_plans.py"],
    "verify.py": ["test_verify.py"],
}

MUTANTS = [
    # rows that grow
    Mutant("rollout/transcript.py", "drift = len(held) - shared", "drift = len(prompt) - shared"),
    Mutant("rollout/transcript.py", "shared >= turn_start and", ""),
    Mutant("rollout/transcript.py", "shared >= turn_start and", "shared > turn_start and"),
    Mutant("rollout/transcript.py", "drift < fork_threshold", "drift <= fork_threshold"),
    Mutant("rollout/transcript.py", "self.closed_rows.append(self.segments)", "pass"),
    Mutant("rollout/transcript.py", "            self.replaced = []\n            self._begin", "            self._begin"),
    Mutant("rollout/transcript.py", "ids[mask == 1].tolist()", "ids.tolist()"),
    Mutant("rollout/transcript.py", "self.replaced = ids[mask == 1].tolist()", "pass"),
    Mutant("rollout/transcript.py", "if len(prompt) > shared:", "if True:"),
    Mutant("rollout/transcript.py", "self.give(prompt[shared:])", "self.give(prompt)"),
    Mutant("rollout/transcript.py", "self._cut(shared)", "pass"),
    Mutant("rollout/transcript.py", "last.logprobs[:kept]", "last.logprobs[-kept:]"),
    Mutant("rollout/transcript.py", "last.token_ids[:kept]", "last.token_ids[-kept:]"),
    Mutant("rollout/transcript.py", "kept > 0 or (kept == 0 and last.sampled)", "kept > 0"),
    Mutant("rollout/transcript.py", "        self.turn_start = self._length\n        self._append(Segment(token_ids, logprobs))", "        self._append(Segment(token_ids, logprobs))"),
    Mutant("rollout/transcript.py", "            if segment.sampled:\n", "            if not segment.sampled:\n"),
    Mutant("rollout/transcript.py", "max(end, 2 * len(self._ids), 1024)", "max(2 * len(self._ids), 1024)"),
    Mutant("rollout/transcript.py", "self._mask[start:end] = segment.sampled", "self._mask[start:end] = 1"),
    Mutant("rollout/transcript.py", "0.0 if segment.logprobs is None else segment.logprobs", "0.0"),
    Mutant("rollout/transcript.py", "np.concatenate([self._ids, np.empty", "np.concatenate([0 * self._ids, np.empty"),
    # the player's part
    Mutant("rollout/play.py", "row=len(live.rollout.closed_rows)", "row=0"),
    Mutant("rollout/play.py", "start = closed + live.transcript.turn_start", "start = live.transcript.turn_start"),
    Mutant("rollout/play.py", "end = closed + len(live.transcript)", "end = len(live.transcript)"),
    Mutant("rollout/play.py", "for row in rollout.closed_rows for s in row)", "for row in rollout.rows for s in row)"),
    Mutant("rollout/play.py", "closed = int(live.transcript.ids[-1]) in self._chat.stop_token_ids", "closed = True"),
    Mutant("rollout/play.py", "closed = int(live.transcript.ids[-1]) in self._chat.stop_token_ids", "closed = False"),
    Mutant("rollout/play.py", "len(live.transcript) + len(ids)", "len(live.transcript)"),
    Mutant("rollout/play.py", "rollout.segments = live.transcript.segments", "pass"),
    Mutant("rollout/play.py", "if live.transcript.replaced:", "if False:"),
    Mutant("rollout/play.py", "live.transcript.give(ids)", "live.transcript.sample(ids, np.zeros(len(ids), np.float32))"),
    Mutant("rollout/play.py", 'live.took("queue_s")\n        self._ask', "self._ask"),
    Mutant("rollout/play.py", 'live.took("generate_s")\n        if turn', "if turn"),
    Mutant("rollout/play.py", 'live.took("tools_s")\n        if self', "if self"),
    Mutant("rollout/play.py", 'live.took("finish_s")', "pass"),
    Mutant("rollout/play.py", "timings.get(name, 0.0) + now - self.since", "now - self.since"),
    Mutant("rollout/play.py", "        self.since = now\n", ""),
    # templates
    Mutant("rollout/delta.py", "last or inner", "inner"),
    Mutant("rollout/delta.py", "+ ([] if eos is None else [eos])", ""),
    Mutant("rollout/delta.py", "*filter(None, called)]", "]"),
    Mutant("rollout/delta.py", "{*stops, inner}", "{inner}"),
    Mutant("rollout/delta.py", "if shown != contents:", "if not shown:"),
    Mutant("rollout/delta.py", "text + begun", "text"),
    Mutant("rollout/delta.py", "text = self._end_of_turn + gap + text", "text = self._end_of_turn + text"),
    Mutant("rollout/delta.py", "if not turn_closed:", "if turn_closed:"),
    Mutant("rollout/delta.py", "return self._encoder.encode(text, mark)[1:]", "return self._encoder.encode(text, mark)"),
    Mutant("rollout/delta.py", "self._encoder.encode(self._end_of_turn + plain, mark)[1:]", "self._encoder.encode(plain, mark)"),
    Mutant("rollout/delta.py", "if total <= max_tokens:", "if total < max_tokens:"),
    Mutant("rollout/delta.py", "2 * room >= max_tokens", "room >= max_tokens"),
    Mutant("rollout/delta.py", "room if keep == \"tail\" else room // 2", "room // 2"),
    Mutant("rollout/delta.py", "if tail else \"\")", "if True else \"\")"),
    Mutant("rollout/delta.py", "room -= excess", "room -= 1 + excess"),
    Mutant("rollout/delta.py", "while ids and ids[-1] in", "if ids and ids[-1] in"),
    Mutant("rollout/delta.py", "mark += _MARK[0]", "break"),
    Mutant("rollout/delta.py", "return gap if gap.isspace() else \"\"", "return \"\""),
    Mutant("rollout/delta.py", "if text.count(_MARK) != 1:", "if text.count(_MARK) == 0:"),
    Mutant("rollout/delta.py", "if text.count(_MARK) != 1:", "if text.count(_MARK) > 1:"),
    Mutant("rollout/delta.py", "text.lstrip()", "text"),
    Mutant("rollout/delta.py", '{"name": "tool", "tool_call_id": f"call{index:05d}", **message}', "dict(message)"),
    Mutant("rollout/delta.py", '({"x": mark}, mark) if results', '({"x": mark},) if results'),
    Mutant("rollout/delta.py", '({"x": mark}, mark) if results', '(mark,) if results'),
    Mutant("rollout/delta.py", "    yield _turn(mark)", "    return"),
    Mutant("rollout/delta.py", "**self._options,", ""),
    # text
    Mutant("rollout/encoding.py", "m[0][0] + mark + m[0][1:]", "m[0]"),
    Mutant("rollout/encoding.py", "if chr(code) not in used), \"\")", "), \"\")"),
    Mutant("rollout/encoding.py", ".replace(mark, \"\")", ""),
    Mutant("rollout/encoding.py", "self.control.sub(lambda m: aliases[m[0]], text)", "text"),
    Mutant("rollout/encoding.py", "if token.special or _CONTROL_SPELLING.fullmatch(token.content)", "if token.special"),
    Mutant("rollout/encoding.py", "if token.special or _CONTROL_SPELLING.fullmatch(token.content)", "if _CONTROL_SPELLING.fullmatch(token.content)"),
    Mutant("rollout/encoding.py", "key=len, reverse=True", "key=len"),
    Mutant("rollout/encoding.py", "            yield from _strings(key)\n", ""),
    Mutant("rollout/encoding.py", "{_mapped(key, fn): ", "{key: "),
    Mutant("rollout/encoding.py", "if _joined(pair) not in aliases", ""),
    Mutant("rollout/encoding.py", "aliases.get(model[\"unk_token\"], model[\"unk_token\"])", "model[\"unk_token\"]"),
    Mutant("rollout/encoding.py", "if len(spelling) < 2", "if len(spelling) < 1"),
    Mutant("rollout/encoding.py", "if tokenizer.token_to_id(aliases[spelling]) != index:", "if False:"),
    Mutant("rollout/encoding.py", "self._renamed[1] if spelled else", "self._renamed[1] if False else"),
    # spans
    Mutant("scoring.py", "0 <= span.start < span.end <= total", "0 <= span.start <= span.end <= total"),
    Mutant("scoring.py", "0 <= span.start < span.end <= total", "0 <= span.start < span.end"),
    Mutant("scoring.py", "weight * span.value", "span.value"),
    # what the learner saw
    Mutant("updates.py", "np.lexsort((turn_N, sample_N))", "np.argsort(sample_N, kind='stable')"),
    Mutant("updates.py", "np.lexsort((turn_N, sample_N))", "np.lexsort((sample_N, turn_N))"),
    Mutant("updates.py", "rollout.entropies[segment] = entropy_N[own]", "rollout.entropies[segment] = logp_N[own]"),
    Mutant("updates.py", "enumerate(trained) if s.sampled]", "enumerate(trained)]"),
    Mutant("updates.py", ").any(0)) + 1", ").all(0)) + 1"),
    # the proof
    Mutant("verify.py", "if turn.row not in turns:", "if False:"),
    Mutant("verify.py", "0 <= span.start < span.end <= total", "0 <= span.start < span.end"),
    Mutant("verify.py", "0 <= span.start < span.end <= total", "span.start < span.end <= total"),
    Mutant("verify.py", "if not row or row[0].sampled:", "if not row:"),
    Mutant("verify.py", "if not row or row[0].sampled:", "if row[0].sampled:"),
    Mutant("verify.py", "segment.token_ids.min() < 0", "segment.token_ids.min() < -1"),
    Mutant("verify.py", "not (segment.logprobs <= WEIGHT_TOLERANCE).all()", "(segment.logprobs > WEIGHT_TOLERANCE).any()"),
    Mutant("verify.py", "if number and not segment.sampled and not row[number - 1].sampled:", "if False:"),
    Mutant("verify.py", "if len(sampled) != len(turns):", "if len(sampled) < len(turns):"),
    Mutant("verify.py", "if starts[at] != turn.prompt_tokens:", "if starts[at] < turn.prompt_tokens:"),
    Mutant("verify.py", "token_hash(ids[: starts[at]]) != turn.prompt_hash", "False"),
    Mutant("verify.py", "np.array(turn.replaced, np.int32))", "np.array([], np.int32))"),
    Mutant("verify.py", "if len(whole) != turn.sampled_tokens:", "if False:"),
    Mutant("verify.py", "token_hash(whole) != turn.sampled_hash", "False"),
    Mutant("verify.py", "if wrong:", "if False:"),
    Mutant("verify.py", "config.loss.beta != 0 or", ""),
    Mutant("verify.py", "or config.loss.entropy_coef != 0", ""),
    Mutant("verify.py", "if learned and wrong:", "if wrong:"),
    Mutant("verify.py", "if learned and wrong:", "if False:"),
    Mutant("verify.py", "if number == 0 and not gap <= limit:", "if not gap <= limit:"),
    Mutant("verify.py", "if number == 0 and not gap <= limit:", "if False:"),
    Mutant("verify.py", 'if split != "train" and rollout.learner_logprobs', 'if False and rollout.learner_logprobs'),
    Mutant("verify.py", '(views["learner_logprobs"] is None) != (views["entropies"] is None)', "False"),
    Mutant("verify.py", "np.isfinite(flat) & (flat >= least)", "(flat >= least)"),
    Mutant("verify.py", "(flat >= least) & (flat <= most)", "(flat <= most)"),
    Mutant("verify.py", "(flat >= least) & (flat <= most)", "(flat >= least)"),
    Mutant("verify.py", "(batch.tout_T > size).any()", "False"),
    Mutant("verify.py", "np.cumsum(opened), batch.positions_T + 1", "np.cumsum(opened), np.cumsum(opened)"),
    Mutant("verify.py", "if not 0 <= sample < len(rollouts):", "if False:"),
    Mutant("verify.py", "if len(terms) not in (0, len(advantages)):", "if False:"),
    Mutant("verify.py", "packed[i] != wanted[i]", "(i in packed) != (i in wanted)"),
    Mutant("verify.py", "packed[i] != learned[i]", "(i in packed) != (i in learned)"),
    Mutant("verify.py", "if all_move or a.any()", ""),
    Mutant("verify.py", "first, turn = turn, turn + sum(", "first, turn = 0, turn + sum("),
    Mutant("verify.py", "batch.advantage_N[terms], advantages)", "advantages, advantages)"),
    Mutant("verify.py", "weights[sample], rtol=WEIGHT_TOLERANCE", "batch.weight_N[mine], rtol=WEIGHT_TOLERANCE"),
    Mutant("verify.py", "batch.target_N[terms], ids[positions]", "ids[positions], ids[positions]"),
    Mutant("verify.py", "batch.old_logp_N[terms], logprobs[positions]", "logprobs[positions], logprobs[positions]"),
    Mutant("verify.py", "batch.input_ids_T[seen], ids[: positions[-1]]", "ids[: positions[-1]], ids[: positions[-1]]"),
    Mutant("verify.py", "seen[positions - 1], batch.row_N[terms]", "seen[positions - 1], seen[positions - 1]"),
    Mutant("verify.py", "return 1 / lengths / len(lengths)", "return 1 / lengths"),
    Mutant("verify.py", "1 / len(lengths) / config.rollout.max_sampled_tokens", "1 / len(lengths)"),
    Mutant("verify.py", "return 1 if report.faults else 0", "return 0"),
]  # fmt: skip


if __name__ == "__main__":
    sys.exit(hunt(MUTANTS, "agentgrpo", TESTS, sys.argv[1:]))
