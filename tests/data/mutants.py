# ruff: noqa: E501, T201 - a table of source pieces
"""Change the recipe's modules in small ways and see that the tests notice every one.

    python tests/data/mutants.py [WORD ...]      only mutants whose name or file has a WORD

As tests/kernels/mutants.py, for agentgrpo/. Each mutant replaces one piece of source in a copy of
the tree, in which the tests named beside the file are run to their first failure. A mutant that
survives is printed and sets the exit status; a piece that is not there is an error.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy: tiny arrays

ROOT = Path(__file__).resolve().parents[2]


class Mutant(NamedTuple):
    """Replace the `nth` occurrence of `old` by `new` in agentgrpo/`file`."""

    file: str
    old: str
    new: str
    nth: int = 0


TESTS = {
    "data/pareto.py": ["data/test_pareto.py"],
    "data/curriculum.py": ["data/test_curriculum.py"],
    "data/difficulty.py": ["data/test_difficulty.py"],
    "data/flywheel.py": ["data/test_flywheel.py"],
    "data/operators.py": ["data/test_flywheel.py"],
    "data/trajectories.py": ["data/test_flywheel.py"],
    "data/errands.py": ["data/test_errands.py"],
    "measures.py": ["test_measures.py", "test_evaluate.py"],
    "rewards_efficiency.py": ["test_rewards_efficiency.py", "test_scoring.py"],
    "endpoints.py": ["test_endpoints.py", "data/test_flywheel.py"],
    "recipe.py": ["test_recipe.py"],
}

MUTANTS = [
    # pareto
    Mutant("data/pareto.py", "if rollout.status is not Status.INFRA_ERROR]", "]"),
    Mutant("data/pareto.py", "tools=pvariance([", "tools=sum(["),
    Mutant("data/pareto.py", "correctness=pvariance(outcomes)", "correctness=max(outcomes)"),
    Mutant("data/pareto.py", "min(outcomes) < solved_at <= max(outcomes)", "min(outcomes) < solved_at < max(outcomes)"),
    Mutant("data/pareto.py", "min(outcomes) < solved_at <= max(outcomes)", "min(outcomes) <= solved_at <= max(outcomes)"),
    Mutant("data/pareto.py", "min(outcomes) < solved_at <= max(outcomes)", "min(outcomes) < max(outcomes)"),
    Mutant("data/pareto.py", "if not valid:", "if False:"),
    Mutant("data/pareto.py", "if count < 1:", "if count < 0:"),
    Mutant("data/pareto.py", "solved_at=solved_at) for group in groups]", "solved_at=0.5) for group in groups]"),
    Mutant("data/pareto.py", "if point.mixed:", "if True:"),
    Mutant("data/pareto.py", "kind(groups[index])", '""'),
    Mutant("data/pareto.py", "return sorted(chosen)", "return chosen"),
    Mutant("data/pareto.py", "members[position]", "position"),
    Mutant("data/pareto.py", "front_N < cut", "front_N <= cut"),
    Mutant("data/pareto.py", "np.argsort(-crowding(", "np.argsort(crowding("),
    Mutant("data/pareto.py", "return np.sort(chosen)", "return (chosen)"),
    Mutant("data/pareto.py", "if count >= len(by_front):", "if count > len(by_front):"),
    Mutant("data/pareto.py", "or not np.isfinite(points_N2).all()", ""),
    Mutant("data/pareto.py", "second = -float(distinct[index, 1])", "second = float(distinct[index, 1])"),
    Mutant("data/pareto.py", "np.nextafter(value, np.inf)", "value"),
    Mutant("data/pareto.py", "range(len(distinct) - 1, -1, -1)", "range(len(distinct))"),
    Mutant("data/pareto.py", "or ordered[0] == ordered[-1]", ""),
    Mutant("data/pareto.py", "total_F[order[[0, -1]]] = np.inf", "total_F[order[0]] = np.inf"),
    Mutant("data/pareto.py", " / (ordered[-1] - ordered[0])", ""),
    Mutant("data/pareto.py", "ordered[2:] - ordered[:-2]", "ordered[1:-1] - ordered[:-2]"),
    Mutant("data/pareto.py", "total_F[order[1:-1]] +=", "total_F[order[1:-1]] ="),
    Mutant("data/pareto.py", "key=lambda i: -(count * sizes[i] % total)", "key=lambda i: count * sizes[i] % total"),
    # difficulty
    Mutant("data/difficulty.py", "rate >= EASY_AT", "rate > EASY_AT"),
    Mutant("data/difficulty.py", "rate <= HARD_AT", "rate < HARD_AT"),
    Mutant("data/difficulty.py", "self._rate.get(name, 0.5)", "self._rate.get(name, 1.0)"),
    Mutant("data/difficulty.py", "easy_share + hard_share > 1", "easy_share + hard_share > 2"),
    Mutant("data/difficulty.py", "min(easy_share, hard_share) < 0", "easy_share < 0"),
    Mutant("data/difficulty.py", 'r.rewards.get("solved", r.rewards.get("answer", 0.0)) > 0', 'r.rewards.get("answer", 0.0) > 0'),
    Mutant("data/difficulty.py", "if r.status is not Status.INFRA_ERROR", "if True"),
    Mutant("data/difficulty.py", "self._smoothing * (", "("),
    Mutant("data/difficulty.py", "self._rate.get(group.task.id, fmean(outcomes))", "self._rate.get(group.task.id, 0.5)"),
    Mutant("data/difficulty.py", "luck < easy + hard", "luck < hard"),
    Mutant("data/difficulty.py", 'pools[wanted] or pools["normal"]', 'pools["normal"]'),
    Mutant("data/difficulty.py", 'pools["normal"] or pools["hard"] or pools["easy"]', 'pools["normal"] or pools["hard"]'),
    Mutant("data/difficulty.py", "if self._last[name] == oldest]", "]"),
    Mutant("data/difficulty.py", "self._last[name] = self._drawn", "pass"),
    Mutant("data/difficulty.py", "self._drawn += 1", "pass"),
    Mutant("data/difficulty.py", '{self._seed}/draw', '/draw'),
    Mutant("data/difficulty.py", 'self._rate = dict(state["rate"])', "pass"),
    Mutant("data/difficulty.py", 'self._drawn = state["drawn"]', "pass"),
    Mutant("data/difficulty.py", 'self._last = dict(state["last"])', "pass"),
    Mutant("data/difficulty.py", 'or state["last"].keys() != self._last.keys()', ""),
    Mutant("data/difficulty.py", 'state["source"] != self.source or', ""),
    # curriculum
    Mutant("data/curriculum.py", 'if stage == 0 and recipe.curriculum.start == "model":', "if stage == 0:"),
    Mutant("data/curriculum.py", 'recipe.out_dir / "sft" if stage == 0 else', ""),
    Mutant("data/curriculum.py", "folder_of(recipe, stage - 1) / \"rl\"", "folder_of(recipe, 0) / \"rl\""),
    Mutant("data/curriculum.py", 'recipe.data.heldout == "split"', "False"),
    Mutant("data/curriculum.py", "steps=recipe.curriculum.steps_of(stage)", "steps=recipe.curriculum.steps_of(0)"),
    Mutant("data/curriculum.py", "seed=recipe.seed + stage", "seed=recipe.seed"),
    Mutant("data/curriculum.py", '"promote_at", "question"', '"question"'),
    Mutant("data/curriculum.py", 'stream.load_state_dict(done["stream"])', "pass"),
    Mutant("data/curriculum.py", "stream.feedback(group_chunk)", "pass"),
    Mutant("data/curriculum.py", 'if c.by_kind else (lambda group: "")', 'if False else (lambda group: "")'),
    Mutant("data/curriculum.py", "if not chosen:", "if False:"),
    Mutant("data/curriculum.py", "for index in chosen])", "for index in chosen[:1]])"),
    Mutant("data/curriculum.py", "sum(point.mixed for point in seen)", "len(seen)"),
    Mutant("data/curriculum.py", "min(c.chunk, c.candidates - start)", "c.chunk"),
    Mutant("data/curriculum.py", "if task.id != group.task.id:", "if False:"),
    Mutant("data/curriculum.py", "stage * 1000 + start // c.chunk", "stage * 1000"),
    Mutant("data/curriculum.py", "1_000_000 + stage * 1000", "1_000_000"),
    Mutant("data/curriculum.py", "score_all(groups, player.reward)", "pass"),
    Mutant("data/curriculum.py", "append_lines(path, [rollout", "list([rollout"),
    Mutant("data/curriculum.py", "if kept + size > len(lines):", "if kept + size > len(lines) + 1:"),
    Mutant("data/curriculum.py", "os.truncate(path, sum(len(line) + 1 for line in lines[:kept]))", "pass"),
    Mutant("data/curriculum.py", 'if c.sampling == "shuffle":', "if True:"),
    Mutant("data/curriculum.py", "easy_share=c.easy_share", "easy_share=c.hard_share"),
    Mutant("data/curriculum.py", 'if not (folder / "select.json").exists():', "if True:"),
    Mutant("data/curriculum.py", "< recipe.curriculum.steps_of(stage):", "< 1:"),
    Mutant("data/curriculum.py", "        if status:\n", "        if False:\n"),
    Mutant("data/curriculum.py", "            finish_stage(recipe, stage)", "            pass"),
    Mutant("data/curriculum.py", "start_model(recipe, recipe.curriculum.stages))", "start_model(recipe, 1))"),
    Mutant("data/curriculum.py", "settings, MAY_CHANGE)", "settings)"),
    Mutant("data/curriculum.py", "    require_same_settings(", "    str("),
    # efficiency reward
    Mutant("rewards_efficiency.py", "rollout.status is Status.COMPLETED and", ""),
    Mutant("rewards_efficiency.py", "and rollout.answer is not None", ""),
    Mutant("rewards_efficiency.py", 'and not rollout.stats.get("malformed", 0.0)', ""),
    Mutant("rewards_efficiency.py", "if not sigma >= 0:", "if sigma < -9:"),
    Mutant("rewards_efficiency.py", "if r.status is not Status.INFRA_ERROR]", "]"),
    Mutant("rewards_efficiency.py", "if not rollouts:", "if False:"),
    Mutant("rewards_efficiency.py", "rollout.num_sampled for rollout", "len(rollout.token_ids) for rollout"),
    Mutant("rewards_efficiency.py", "(rollout.num_sampled - mean_length) / deviation", "(rollout.num_sampled - mean_length)"),
    Mutant("rewards_efficiency.py", " if deviation else 0.0", ""),
    Mutant("rewards_efficiency.py", '(rollout.stats["tool_calls"] - mean_calls)', 'rollout.stats["tool_calls"]'),
    Mutant("rewards_efficiency.py", "factor *= _factor(sigma_length * z)", "pass"),
    Mutant("rewards_efficiency.py", "(factor - 1.0)", "factor"),
    Mutant("rewards_efficiency.py", "0.0 if valid(rollout) else -1.0", "0.0"),
    Mutant("rewards_efficiency.py", "(steps - 1 - step) / (steps - 1)", "(steps - step) / steps"),
    Mutant("rewards_efficiency.py", " if steps > 1 else 1.0", " if steps > 1 else 0.0"),
    Mutant("rewards_efficiency.py", "max(0.0, (steps", "(0.0 + (steps"),
    Mutant("rewards_efficiency.py", "2.0 * small / (1.0 + small)", "2.0 * small"),
    Mutant("rewards_efficiency.py", "if excess > 0:", "if False:"),
    Mutant("rewards_efficiency.py", '"answer" not in rollout.rewards', "False"),
    # measures
    Mutant("measures.py", "text.lower()", "text"),
    Mutant("measures.py", r"\b(a|an|the)\b", "(a|an|the)"),
    Mutant("measures.py", "if not accepted or any(one is None for one in accepted):", "if not accepted:"),
    Mutant("measures.py", "return max(_f1(normalize", "return min(_f1(normalize"),
    Mutant("measures.py", "2 * common / (len(said) + len(wanted)) if common", "common / len(said) if common"),
    Mutant("measures.py", "Counter(said) & Counter(wanted)", "Counter(set(said)) & Counter(set(wanted))"),
    Mutant("measures.py", "number is not None and expected is not None", "False"),
    Mutant("measures.py", 'replace(",", "")', 'replace(".", "")'),
    Mutant("measures.py", r"incorrect|wrong|not\s+correct", "incorrect|wrong"),
    Mutant("measures.py", r"incorrect|wrong|not\s+correct", r"wrong|not\s+correct"),
    Mutant("measures.py", r"incorrect|wrong|not\s+correct", r"incorrect|not\s+correct"),
    Mutant("measures.py", 'True if "correct" in said else None', "True"),
    Mutant("measures.py", 'True if "correct" in said else None', 'True if "correct" in said else False'),
    Mutant("measures.py", "None if found is None else", "False if found is None else"),
    Mutant("measures.py", "if rollout.answer is None:\n            return 0.0", "if False:\n            return 0.0"),
    Mutant("measures.py", "exact_match(rollout.answer, accepted) or math_equal", "math_equal"),
    Mutant("measures.py", "or math_equal(rollout.answer, accepted):", ":"),
    Mutant("measures.py", "0.6 if attempt else 0.0", "0.6"),
    Mutant("measures.py", "n=votes, temperature=0.6", "n=1, temperature=0.6"),
    Mutant("measures.py", "2 * sum(cast) <= len(cast)", "2 * sum(cast) < len(cast)"),
    Mutant("measures.py", "2 * sum(cast) <= len(cast)", "2 * sum(cast) <= votes"),
    Mutant("measures.py", "if not cast:", "if False:"),
    Mutant("measures.py", 'reversed(task.messages) if m["role"] == "user"', "reversed(task.messages)"),
    Mutant("measures.py", "reversed(task.messages)", "list(task.messages)"),
    Mutant("measures.py", "min(1.0, max(0.0, _judged_answer(rollout, weight)))", "_judged_answer(rollout, weight)"),
    Mutant("measures.py", 'rollout.rewards.get("answer", 0.0) / weight', 'rollout.rewards.get("answer", 0.0)'),
    Mutant("measures.py", 'if "solved" in rollout.rewards:', "if False:"),
    Mutant("measures.py", "0.0 if rollout.answer is None else compare", "compare"),
    Mutant("measures.py", "math.comb(attempts - solved, k) / math.comb(attempts, k)", "((attempts - solved) / attempts) ** k"),
    Mutant("measures.py", "math.comb(solved, k) / math.comb(attempts, k)", "(solved / attempts) ** k"),
    Mutant("measures.py", "1 <= k <= attempts and 0 <= solved <= attempts", "k <= attempts and 0 <= solved <= attempts"),
    Mutant("measures.py", "float(q >= SOLVED_AT)", "float(q > SOLVED_AT)"),
    Mutant("measures.py", 'q / max(1.0, r.stats["tool_calls"])', 'q / (1.0 + r.stats["tool_calls"])'),
    Mutant("measures.py", 'r.stats["tool_calls"] - r.stats["tool_errors"]', 'r.stats["tool_calls"]'),
    Mutant("measures.py", "float(r.num_sampled)", "float(len(r.token_ids))"),
    Mutant("measures.py", "out=np.full_like(calls, np.nan)", "out=np.full_like(calls, 0.0)"),
    Mutant("measures.py", '(mean["tool_calls"] + 0.1)', 'mean["tool_calls"]'),
    Mutant("measures.py", "valid = [r for r in group.rollouts if r.status is not Status.INFRA_ERROR]", "valid = list(group.rollouts)"),
    Mutant("measures.py", "        if not valid:\n            continue", "        pass"),
    Mutant("measures.py", "sum(value >= SOLVED_AT for value in qualities)", "sum(value > 0 for value in qualities)"),
    Mutant("measures.py", "pass_hat_k(len(valid), solved, k)", "pass_at_k(len(valid), solved, k)"),
    Mutant("measures.py", 'if "kind" in task.spec:', "if False:"),
    Mutant("measures.py", "np.isin(values, (0.0, 1.0)).all()", "False"),
    Mutant("measures.py", "odd = by_id.keys() ^ {row.id for row in before}", "odd = None"),
    Mutant("measures.py", "paired = [by_id[row.id] for row in before]", "paired = list(after)"),
    Mutant("measures.py", "now[name](_means(paired, drawn)) - then", "now[name](_means(paired, _resample(len(before), resamples)[:, ::-1])) - then"),
    Mutant("measures.py", "share + z2 / (2 * trials)", "share"),
    Mutant("measures.py", "z2 / (4 * trials**2)", "0"),
    Mutant("measures.py", "max(0.0, middle - half)", "middle - half"),
    Mutant("measures.py", "if trials == 0:", "if False:"),
    Mutant("measures.py", "if name not in COLUMNS]", "]"),
    Mutant("measures.py", "[2.5, 97.5]", "[5, 95]"),
    Mutant("measures.py", "number if math.isfinite(number) else None", "number"),
    Mutant("measures.py", "before, *_, after = reports.values()", "after, *_, before = reports.values()"),
    # flywheel
    Mutant("data/flywheel.py", "self.quality >= SOLVED_AT", "self.quality > 0.99"),
    Mutant("data/flywheel.py", "(-min(self.quality, SOLVED_AT), self.trajectory.calls)", "(-self.quality, self.trajectory.calls)"),
    Mutant("data/flywheel.py", "(-min(self.quality, SOLVED_AT), self.trajectory.calls)", "(-min(self.quality, SOLVED_AT), 0)"),
    Mutant("data/flywheel.py", "(-min(self.quality, SOLVED_AT), self.trajectory.calls)", "(0.0, self.trajectory.calls)"),
    Mutant("data/flywheel.py", "if not one.used]", "]"),
    Mutant("data/flywheel.py", "range(self._config.rounds)", "range(1)"),
    Mutant("data/flywheel.py", "FOR_RIGHT if source.right else FOR_WRONG", "FOR_RIGHT"),
    Mutant("data/flywheel.py", "for name in self._config.operators if name in table", "for name in table"),
    Mutant("data/flywheel.py", '"parent": index, "seconds"', '"parent": 0, "seconds"'),
    Mutant("data/flywheel.py", "index=index,", "index=0,"),
    Mutant("data/flywheel.py", "except InfrastructureError as error:\n            return None, f\"the machine", "except ZeroDivisionError as error:\n            return None, f\"the machine"),
    Mutant("data/flywheel.py", 'r["flywheel"]["right"] and r["flywheel"]["valid"]', 'r["flywheel"]["right"]'),
    Mutant("data/flywheel.py", 'r["flywheel"]["right"] and r["flywheel"]["valid"]', 'r["flywheel"]["valid"]'),
    Mutant("data/flywheel.py", "if _learned(record) not in said:", "if True:"),
    Mutant("data/flywheel.py", "return chosen[:keep]", "return chosen"),
    Mutant("data/flywheel.py", 'return (record["stats"]["tool_calls"], sum(', 'return (0, sum('),
    Mutant("data/flywheel.py", "sum(map(len, _learned(record))))", "0)"),
    Mutant("data/flywheel.py", "if author is not None]", "]"),
    Mutant("data/flywheel.py", "if len({task.id for task in tasks}) != len(tasks):", "if False:"),
    Mutant("data/flywheel.py", "if task.id not in set(buffer.done)]", "]"),
    Mutant("data/flywheel.py", "    require_same_settings(", "    str("),
    Mutant("data/flywheel.py", "settings, MAY_CHANGE)", "settings)"),
    Mutant("data/flywheel.py", "buffer.append(question.record())", "pass"),
    Mutant("data/flywheel.py", "        return 1\n    buffer", "        return 0\n    buffer"),
    Mutant("data/flywheel.py", '"failed_by_the_machine": failed', '"failed_by_the_machine": 0'),
    Mutant("data/flywheel.py", '"right": sum(one["operator"] == name and one["right"] for one in made)', '"right": sum(one["operator"] == name for one in made)'),
    Mutant("data/flywheel.py", 'if "why" in entry', "if True"),
    Mutant("data/flywheel.py", "c.max_turns + config.extra_turns", "c.max_turns"),
    Mutant("data/flywheel.py", "temperature=config.temperature", "temperature=1.0"),
    Mutant("data/flywheel.py", "self._seed}/{self._task.id}/{number}/{name}", "self._seed}"),
    # operators
    Mutant("data/operators.py", "temperature=self.critic_temperature", "temperature=0.7"),
    Mutant("data/operators.py", "max_tokens=self.max_reply_tokens", "max_tokens=9999"),
    Mutant("data/operators.py", "[*chosen.trajectory.turns[:number], new])", "[*chosen.trajectory.turns[: number + 1], new])"),
    Mutant("data/operators.py", "said.keys() != wanted", "said.keys() > wanted"),
    Mutant("data/operators.py", "any(mark in text for text in said.values() for mark in shop.marks)", "False"),
    Mutant("data/operators.py", "rewards=dict(old.rewards)", "rewards=old.rewards"),
    Mutant("data/operators.py", "stats=dict(old.stats)", "stats={}"),
    Mutant("data/operators.py", "seen = _steps(turns[: number + 1])", "seen = _steps(turns[:number])"),
    Mutant("data/operators.py", "if not analysis.strip():", "if False:"),
    Mutant("data/operators.py", '"reflection", [*turns[:number], new])', '"reflection", [*turns[: number + 1], new])'),
    Mutant("data/operators.py", "kept = chosen.trajectory.turns[: number + 1]", "kept = chosen.trajectory.turns"),
    Mutant("data/operators.py", "if kept[-1].told is None:", "if False:"),
    Mutant("data/operators.py", "if last.told is not None:", "if False:"),
    Mutant("data/operators.py", 'f"{thought.rstrip()} {hint}" if thought.strip() else hint', "hint"),
    Mutant("data/operators.py", 'f"{thought.rstrip()} {hint}" if thought.strip() else hint', 'f"{thought.rstrip()} {hint}"'),
    Mutant("data/operators.py", "parent=chosen.index", "parent=None"),
    Mutant("data/operators.py", "1 <= int(found[1]) <= count", "int(found[1]) <= count"),
    Mutant("data/operators.py", "1 <= int(found[1]) <= count", "1 <= int(found[1])"),
    Mutant("data/operators.py", "return int(found[1]) - 1", "return int(found[1])"),
    Mutant("data/operators.py", 'author="hint" if begin else ""', 'author=""'),
    Mutant("data/operators.py", "at = min(starts, default=len(text))", "at = max(starts, default=len(text))"),
    Mutant("data/operators.py", "if end in chat.stop_token_ids:", "if False:"),
    Mutant("data/operators.py", "if end in chat.stop_token_ids:", "if True:"),
    Mutant("data/operators.py", 'f"{lead}{thought}{trail}{action}"', 'f"{thought}{action}"'),
    # trajectories
    Mutant("data/trajectories.py", "text = head + found", "text = head"),
    Mutant("data/trajectories.py", "if not text.strip():", "if False:"),
    Mutant("data/trajectories.py", "if isinstance(action, Malformed):\n            raise", "if False:\n            raise"),
    Mutant("data/trajectories.py", "ids = np.append(ids, np.int32(self.chat.end_of_turn_id))", "pass"),
    Mutant("data/trajectories.py", "self._worlds.close(attempt.episode).result()", "pass"),
    Mutant("data/trajectories.py", "turn if turn.told else self._answered(turn, action, observation)", "self._answered(turn, action, observation)"),
    Mutant("data/trajectories.py", "if len(self.turns) >= limits.max_turns:", "if False:"),
    Mutant("data/trajectories.py", 'if done.finish_reason == "length":', "if False:"),
    Mutant("data/trajectories.py", "text = begin + chat.decode", "text = chat.decode"),
    Mutant("data/trajectories.py", '            begin = ""\n', "            pass\n"),
    Mutant("data/trajectories.py", "if room < 1:", "if False:"),
    Mutant("data/trajectories.py", "min(limits.max_turn_tokens, room)", "limits.max_turn_tokens"),
    Mutant("data/trajectories.py", "text=chat.clip(observation.text, limit)", "text=observation.text"),
    Mutant("data/trajectories.py", "sum(t.failed for t in self.turns if not t.malformed)", "sum(t.failed for t in self.turns)"),
    Mutant("data/trajectories.py", "0 if isinstance(action, Malformed) else 1", "1"),
    # endpoints
    Mutant("endpoints.py", "error.code in (408, 429) or", "error.code == 408 or"),
    Mutant("endpoints.py", "error.code >= 500", "error.code > 500"),
    Mutant("endpoints.py", "if final or attempt == self.retries:", "if attempt == self.retries:"),
    Mutant("endpoints.py", "range(self.retries + 1)", "range(self.retries + 2)"),
    Mutant("endpoints.py", "http.client.HTTPException, BadAnswer)", "BadAnswer)"),
    Mutant("endpoints.py", "if not all(isinstance(reply, str) for reply in replies):", "if False:"),
    Mutant("endpoints.py", "if len(replies) != n:", "if False:"),
    Mutant("endpoints.py", "**self.extra,", ""),
    Mutant("endpoints.py", "text[: min(ends)] if ends else text", "text[: max(ends)] if ends else text"),
    Mutant("endpoints.py", "timeout=self.timeout_s", "timeout=60"),
    Mutant("endpoints.py", "LOG.warning(", "str.format("),
    Mutant("endpoints.py", "max_tokens=min(max_tokens, room)", "max_tokens=max_tokens"),
    Mutant("endpoints.py", "if room < 1:", "if False:"),
    Mutant("endpoints.py", "self._refuse_all()\n            raise", "raise"),
    # the shipped mix and the command
    Mutant("data/errands.py", "min(behind + 1, len(steps))", "behind + 1"),
    Mutant("data/errands.py", "if behind > 1:", "if behind > 2:"),
    Mutant("data/errands.py", "behind + 1 < len(steps)", "behind < len(steps)"),
    Mutant("data/errands.py", "for text in steps[:-1])", "for text in steps)"),
    Mutant("data/errands.py", r'rf"(?<!\w){re.escape(answer)}(?!\w)"', "answer"),
    Mutant("recipe.py", "if part not in seconds:", "if True:"),
    Mutant("recipe.py", "    if status:", "    if False:"),
    Mutant("recipe.py", '0 if part == "tuned" else recipe.curriculum.stages', "0"),
    Mutant("recipe.py", 'r["split"] == "train"', "True"),
]  # fmt: skip


def replace_nth(text: str, mutant: Mutant) -> str:
    parts = text.split(mutant.old)
    if len(parts) < mutant.nth + 2:
        raise SystemExit(f"{mutant.file} has no occurrence {mutant.nth} of {mutant.old!r}")
    before, after = parts[: mutant.nth + 1], parts[mutant.nth + 1 :]
    return mutant.old.join(before) + mutant.new + mutant.old.join(after)


def survives(mutant: Mutant, tree: Path) -> bool:
    """Runs the tests in a fork, which inherits what they import of others already imported."""
    path = tree / "agentgrpo" / mutant.file
    original = path.read_text()
    path.write_text(replace_nth(original, mutant))
    log = tree / "log.txt"
    child = os.fork()
    if child == 0:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        try:
            os._exit(run_tests(TESTS[mutant.file], tree))
        finally:  # an error must not unwind into the parent's work
            traceback.print_exc()
            os._exit(9)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    path.write_text(original)
    if code not in (0, 1, 2):  # 2: it does not even import
        raise SystemExit(f"pytest itself failed on {mutant}:\n{log.read_text()}")
    return code == 0


def run_tests(names: list[str], tree: Path) -> int:
    import pytest

    os.chdir(tree)
    sys.path.insert(0, str(tree))
    sys.dont_write_bytecode = True
    paths = [str(tree / "tests" / name) for name in names]
    options = ["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(tree), "--timeout", "60"]
    imported = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    return int(pytest.main([*options, *imported, *paths]))


def main(words: list[str]) -> int:
    import pytest  # noqa: F401 - what every fork would import again
    import transformers  # noqa: F401

    chosen = [m for m in MUTANTS if not words or any(w in m.file + m.old for w in words)]
    alive = []
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        ignore = shutil.ignore_patterns(".*", "__pycache__", "build", "models", "runs")
        shutil.copytree(ROOT, tree, symlinks=True, ignore=ignore)
        for number, mutant in enumerate(chosen, 1):
            lives = survives(mutant, tree)
            alive += [mutant] * lives
            state = "SURVIVED" if lives else "caught"
            change = f"{mutant.file}: {mutant.old!r} -> {mutant.new!r}"
            print(f"{number}/{len(chosen)} {state:8} {change}", flush=True)
    print(f"{len(chosen) - len(alive)} of {len(chosen)} caught")
    return len(alive) > 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
