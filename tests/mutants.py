# ruff: noqa: E501 - a table of source pieces
"""Change the learner's arithmetic in small ways and see that the tests notice every one.

python -m tests.mutants [WORD ...]      only mutants whose name or file has a WORD
"""

from __future__ import annotations

import os
import sys

from agentgrpo.runtime import prepare_environment

prepare_environment()
os.environ["OMP_NUM_THREADS"] = "1"  # before torch

import torch  # noqa: E402
import transformers  # noqa: E402, F401 - what every fork would import again

from tests.mutation import Mutant, hunt  # noqa: E402

TESTS = {
    "advantages.py": ["test_advantages.py"],
    "losses.py": ["test_losses.py", "learning"],
    "updates.py": ["learning", "test_train.py"],
    "learner.py": ["learning", "parallel/test_parallel.py"],
    "optimizer.py": [
        *("test_optimizer.py", "learning/test_machinery.py", "parallel/test_parallel.py"),
    ],
    "step_record.py": ["learning"],
    "checkpoint.py": ["test_checkpoint.py"],
    "footprint.py": ["test_footprint.py"],
    "lora.py": ["learning/test_adapters.py"],
    "preflight.py": ["test_preflight.py"],
    "parallel.py": ["parallel/test_parallel.py"],
    "attention.py": ["test_attention.py"],
    "rollout/team.py": ["rollout/test_team.py"],
}

MUTANTS = [
    # what a rollout is worth beside its siblings
    Mutant("advantages.py", "EQUAL_WITHIN = 1e-6", "EQUAL_WITHIN = 1e-5"),
    Mutant("advantages.py", "EQUAL_WITHIN = 1e-6", "EQUAL_WITHIN = 0.0"),
    Mutant("advantages.py", "EPS = 1e-4", "EPS = 1e-3"),
    Mutant("advantages.py", "len(rewards) / (len(rewards) - 1)", "1.0"),
    Mutant("advantages.py", "len(rewards) / (len(rewards) - 1)", "(len(rewards) - 1) / len(rewards)"),
    Mutant("advantages.py", "(reward - mean) * factor for", "(mean - reward) * factor for"),
    Mutant("advantages.py", "(reward - mean) * factor for", "reward * factor for"),
    Mutant("advantages.py", "if not has_contrast(rewards):\n        return [0.0]", "if False:\n        return [0.0]"),
    Mutant("advantages.py", "len(rewards) > 1 and max(rewards)", "max(rewards)"),
    Mutant("advantages.py", "math.isfinite(reward) for", "not math.isnan(reward) for"),
    Mutant("advantages.py", "math.isfinite(reward) for", "not math.isinf(reward) for"),
    Mutant("advantages.py", "[r for r in group.rollouts if is_sound(r)] for group", "list(group.rollouts) for group"),
    Mutant("advantages.py", "rollout.advantage, rollout.segment_advantages = 0.0, None\n    if", "pass\n    if"),
    Mutant("advantages.py", '"group": own, "batch": every', '"group": every, "batch": every'),
    Mutant("advantages.py", '"group": own, "batch": every', '"group": own, "batch": own'),
    Mutant("advantages.py", '"none": []', '"none": own'),
    Mutant("advantages.py", "for r in rollouts if not r.trained", "for r in rollouts if False"),
    Mutant("advantages.py", "return rollout.scored", "return rollout.trained"),
    Mutant("advantages.py", "1.0 / (stdev(rewards) + EPS)", "1.0 / (stdev(rewards) ** 2 + EPS)"),
    Mutant("advantages.py", "1.0 / (stdev(rewards) + EPS)", "1.0 / stdev(rewards)"),
    Mutant("advantages.py", "(stdev(rewards) + EPS) if len(rewards) > 1 else 1.0", "(stdev(rewards) + EPS)"),
    # of what
    Mutant("advantages.py", "weights.get(name, 1.0) * _one", "_one"),
    Mutant("advantages.py", "part.get(name, 0.0) for part", "part.get(name, 1.0) for part"),
    Mutant("advantages.py", "_checked(group, values, baseline), strict=True):\n                rollout.advantage +=", "_checked(group, values, baseline), strict=True):\n                rollout.advantage ="),
    Mutant("advantages.py", "if not has_contrast(summed):\n        return", "if False:\n        return"),
    Mutant("advantages.py", "rollout.advantage = (rollout.advantage - mean) * factor", "rollout.advantage = rollout.advantage * factor"),
    Mutant("advantages.py", "rollout.advantage = (rollout.advantage - mean) * factor", "rollout.advantage = rollout.advantage - mean"),
    Mutant("advantages.py", "if any(rollout.advantage for rollout in rollouts):", "if True:"),
    Mutant("advantages.py", "parts.get(span.name, 0.0) + span.value", "span.value"),
    # spans
    Mutant("advantages.py", "if span.end > start)", "if span.end >= start)"),
    Mutant("advantages.py", "if span.end > start)", "if span.start > start)"),
    Mutant("advantages.py", "if span.end > start)", ")"),
    Mutant("advantages.py", "found.append(total + later)", "found.append(later)"),
    Mutant("advantages.py", "        start += len(segment.token_ids)\n    return found", "            start += len(segment.token_ids)\n    return found"),
    Mutant("advantages.py", "[row[-1]] * (longest", "[0.0] * (longest"),
    Mutant("advantages.py", "or [rollout.reward] for", "or [0.0] for"),
    Mutant("advantages.py", "not by_turn or not any", "not by_turn and not any"),
    Mutant("advantages.py", "next(turn)[i] * factor if", "next(turn)[i] if"),
    Mutant("advantages.py", "by_turn[0][i] * factor", "by_turn[-1][i] * factor"),
    # branches
    Mutant("advantages.py", "fmean(owners[id(segment)]) if", "sum(owners[id(segment)]) if"),
    Mutant("advantages.py", "fmean(owners[id(segment)]) if", "owners[id(segment)][0] if"),
    Mutant("advantages.py", 'config.branch_credit == "hard"', "False"),
    Mutant("advantages.py", 'config.branch_credit == "hard"', "True"),
    # dead groups
    Mutant("advantages.py", "if segment.sampled and len(segment.token_ids)]", "if segment.sampled]"),
    Mutant("advantages.py", "if segment.sampled and len(segment.token_ids)]", "if len(segment.token_ids)]"),
    Mutant("advantages.py", "if len(sound) < 2:", "if len(sound) < 1:"),
    Mutant("advantages.py", "if len(sound) < 2:", "if len(sound) < 3:"),
    Mutant("advantages.py", 'get(part, 0.0) > 0 for', 'get(part, 0.0) >= 0 for'),
    Mutant("advantages.py", "if all(rollout.solved", "if any(rollout.solved"),
    Mutant("advantages.py", "if not any(rollout.num_sampled", "if any(rollout.num_sampled"),
    # normalisers
    Mutant("losses.py", "return rollout.trained and rollout.num_sampled > 0", "return rollout.trained"),
    Mutant("losses.py", "return rollout.trained and rollout.num_sampled > 0", "return rollout.num_sampled > 0"),
    Mutant("losses.py", "sum(length > 0 for length in lengths)", "len(lengths)"),
    Mutant("losses.py", "return 1.0 / num_tokens", "return 1.0 / num_rollouts"),
    Mutant("losses.py", "1.0 / (num_rollouts * length)", "1.0 / length"),
    Mutant("losses.py", "1.0 / (num_rollouts * max_sampled_tokens)", "1.0 / max_sampled_tokens"),
    Mutant("losses.py", "if length else 0.0 for", "for"),
    # what is logged of the mismatch
    Mutant("losses.py", "np.where(np.isfinite(gap_N), gap_N, 0.0)", "np.where(np.isfinite(gap_N), gap_N, 1.0)"),
    Mutant("losses.py", "np.maximum(np.bincount(sample_N), 1)", "1"),
    Mutant("losses.py", "level = total[sample_N]", "level = total[turn_N]"),
    Mutant("losses.py", "np.clip(level, -20, 20)", "np.clip(level, -1, 1)"),
    Mutant("losses.py", "np.expm1(np.minimum(gap, 20)) - gap", "np.expm1(np.minimum(gap, 20)) + gap"),
    Mutant("losses.py", "np.minimum(turn_N, TURNS_SHOWN - 1)", "turn_N"),
    Mutant("losses.py", "(ratio < low) | (ratio > high)", "ratio > high"),
    Mutant("losses.py", "(ratio < low) | (ratio > high)", "ratio < low"),
    Mutant("losses.py", " & objective.vllm_importance_sampling_correction", ""),
    Mutant("losses.py", "columns, turn == k)", "columns, turn >= k)"),
    Mutant("losses.py", "float(ratio.min())", "float(ratio.max())"),
    Mutant("losses.py", 'columns["modified"][chosen_N]', 'columns["modified"]'),
    Mutant("losses.py", 'columns["ratio"][chosen_N]', 'columns["ratio"]'),
    Mutant("losses.py", 'columns["kl"][chosen_N]', 'columns["kl"]'),
    # what an update trains on
    Mutant("updates.py", "shuffle(order)", "permutation(order)"),
    Mutant("updates.py", "(config.seed, step)", "config.seed"),
    Mutant("updates.py", "(config.seed, step)", "step"),
    Mutant("updates.py", "list(filter(is_trained, groups[i].rollouts))", "list(groups[i].rollouts)"),
    Mutant("updates.py", "config.rollout.max_sampled_tokens", "config.rollout.max_turn_tokens"),
    Mutant("updates.py", "not (loss.beta or loss.entropy_coef)", "not loss.beta"),
    Mutant("updates.py", "not (loss.beta or loss.entropy_coef)", "not loss.entropy_coef"),
    Mutant("updates.py", "not (loss.beta or loss.entropy_coef)", "False"),
    Mutant("updates.py", "max_tokens=config.learner.max_tokens", "max_tokens=1 << 20"),
    Mutant("updates.py", "share_prefixes=share_prefixes,", "share_prefixes=True,"),
    Mutant("updates.py", "num_samples=len(rollouts)", "num_samples=len(trained)"),
    # a step
    Mutant("learner.py", "loss * (parallel.world_size() if counts else 0.0)", "loss * (1 if counts else 0.0)"),
    Mutant("learner.py", "loss * (parallel.world_size() if counts else 0.0)", "loss * parallel.world_size()"),
    Mutant("learner.py", "if counts:\n                loss_sum", "if True:\n                loss_sum"),
    Mutant("learner.py", "parallel.total(loss_sum)", "loss_sum"),
    Mutant("learner.py", "        self._optimizer.zero_grad()\n        loss_sum", "        loss_sum"),
    Mutant("learner.py", "max_grad_norm=self._config.max_grad_norm", "max_grad_norm=1e9"),
    Mutant("learner.py", "first_pass and not run.looked:\n                    run.saw", "not run.looked:\n                    run.saw"),
    Mutant("learner.py", "if first_pass and index == 0 and not run.looked:", "if False:"),
    Mutant("learner.py", "self._require_agreement(run)\n            run.looked", "run.looked"),
    Mutant("learner.py", "more_than_one = len(updates) * self._loss.num_iterations > 1", "more_than_one = len(updates) > 1"),
    Mutant("learner.py", "more_than_one = len(updates) * self._loss.num_iterations > 1", "more_than_one = self._loss.num_iterations > 1"),
    Mutant("learner.py", "1 - self._loss.top_entropy_quantile)", "self._loss.top_entropy_quantile)"),
    Mutant("learner.py", "            old = sampler\n", "            old = detached\n"),
    Mutant("learner.py", "detached if before.old_logp is None else before.old_logp", "detached"),
    Mutant("learner.py", "ref_logp_N=before.ref_logp", "ref_logp_N=detached if before.ref_logp is not None else None"),
    Mutant("learner.py", "with self._adapter.off():\n                return", "if True:\n                return"),
    Mutant("learner.py", "self.step_count += 1", "self.step_count += 2"),
    Mutant("learner.py", "set_lr(self.learning_rate)", "set_lr(self._config.learning_rate)"),
    Mutant("learner.py", "for epoch in range(self._loss.num_iterations)", "for epoch in range(1)"),
    Mutant("learner.py", "live = [update for update in updates if update.batches]", "live = list(updates)"),
    Mutant("learner.py", "self._scorer(batch, self._temperature)\n\n        def", "self._scorer(batch, 1.0)\n\n        def"),
    Mutant("learner.py", "scored = self._scorer(_whole(token_ids), 1.0)", "scored = self._scorer(_whole(token_ids), self._temperature)"),
    Mutant("learner.py", "self._optimizer.to(\"cpu\")", "pass"),
    Mutant("learner.py", "self._optimizer.zero_grad()  # the", "pass  # the"),
    Mutant("learner.py", "to_come = self._optimizer.bytes_to_come", "to_come = 0"),
    Mutant("learner.py", "self._optimizer.to(self.device)", "pass"),
    Mutant("learner.py", 'self.step_count = state["step"]\n', 'pass\n'),
    Mutant("learner.py", "load_frozen(reference or model, engine)", "load_frozen(model, engine)"),
    Mutant("learner.py", "return self._adapter.merged()", "return []"),
    Mutant("learner.py", "tokens = sum(len(batch.input_ids_T)", "tokens = sum(len(batch.row_N)"),
    # what is kept of it
    Mutant("optimizer.py", "if self._adamw.state:\n            return 0", "if False:\n            return 0"),
    Mutant("optimizer.py", "parallel.mine_of(p).numel()", "p.numel()"),
    Mutant("optimizer.py", "if name not in _MOMENTS:", "if name == 'step':"),
    Mutant("optimizer.py", "value.shape != self._masters[index].shape", "False"),
    Mutant("optimizer.py", "if not norm < float(\"inf\"):", "if norm != norm:"),
    Mutant("optimizer.py", "if not norm < float(\"inf\"):", "if norm == float('inf'):"),
    Mutant("step_record.py", "np.abs(np.concatenate(self.gaps)).max(initial=0.0)", "np.concatenate(self.gaps).max(initial=0.0)"),
    Mutant("step_record.py", "offset += int(sample.max(initial=-1)) + 1", "offset += int(sample.max(initial=-1))"),
    Mutant("checkpoint.py", "if size != 8 + length + end:", "if False:"),
    Mutant("checkpoint.py", "state.keys() >= set(keys)", "set(keys)"),
    Mutant("checkpoint.py", "partial.rename(final)\n", "partial.rename(final); (final / 'config.json').touch()\n"),
    Mutant("checkpoint.py", "    _remove(final)\n    partial", "    shutil.rmtree(final, ignore_errors=True)\n    partial"),
    Mutant("checkpoint.py", "_complete(out_dir)[:-keep]", "_complete(out_dir)[:-keep - 1]"),
    Mutant("checkpoint.py", "key=step_of", "key=lambda p: p.name"),
    Mutant("lora.py", "if not found or head in found:", "if not found:"),
    Mutant("lora.py", "if not found or head in found:", "if head in found:"),
    Mutant("lora.py", 'name.endswith(f".{target}")', "name.endswith(target)"),
    Mutant("lora.py", '* layer.scaling["default"]', ""),
    Mutant("lora.py", "(config.rank, config.alpha):", "(config.rank, then.lora_alpha):"),
    Mutant("preflight.py", "if parallel.world_size() > 1:", "if False:"),
    Mutant("preflight.py", "(middle, fails) if _fits", "(middle, middle) if _fits"),
    # what it takes
    Mutant("footprint.py", "(adapted and not served)", "adapted"),
    Mutant("footprint.py", "(adapted and not served)", "False"),
    Mutant("footprint.py", "copied = ranks > 1 or", "copied ="),
    Mutant("footprint.py", "weights * copied // ranks + weights * reference", "weights * (copied + reference)"),
    Mutant("footprint.py", "weights * copied // ranks + weights * reference", "weights * (copied + reference) // ranks"),
    Mutant("footprint.py", "adapter // ranks + width", "adapter + width"),
    Mutant("footprint.py", "+ width * _served_count(shapes, served)", ""),
    Mutant("footprint.py", "room = room_for_adapters(rank)", "room = rank"),
    Mutant("footprint.py", "+ 2 * room * sum(", "+ room * sum("),
    Mutant("footprint.py", "optimizer=optimizer // ranks", "optimizer=optimizer"),
    Mutant("footprint.py", "else width + 4) // ranks", "else width + 4)"),
    Mutant("footprint.py", "weights // config.engine.tensor_parallel_size", "weights"),
    Mutant("footprint.py", "(adapter if adapted else weights) + optimizer", "weights + optimizer"),
    Mutant("footprint.py", "reference = config.loss.beta > 0 and not adapted", "reference = config.loss.beta > 0"),
    Mutant("footprint.py", 'layer.endswith(f".{target}")', "layer.endswith(target)"),
    # ranks
    Mutant("parallel.py", "if rank() == 0 else None", ""),
    Mutant("parallel.py", "else (0, items[0], False)", "else (0, items[0], True)"),
    Mutant("parallel.py", "next((v for v in values if v != v), max(values))", "max(values)"),
    Mutant("parallel.py", "if i < len(row)]", "if i < len(row)][::-1]"),
    # what sees what
    Mutant("attention.py", "tout_T[above[-1][0]] <= start", "tout_T[above[-1][0]] < start"),
    Mutant("attention.py", "if path and path[-1][1] == first:", "if False:"),
    Mutant("attention.py", "window >= total:", "window > total:"),
    Mutant("attention.py", "query - at < window", "query - at <= window"),
    Mutant("attention.py", "window > int(self.positions_T.max())", "window >= int(self.positions_T.max())"),
    Mutant("attention.py", "position[query] - position[key] < window", "query - key < window"),
    Mutant("attention.py", "key = (length, total, window)", "key = (length, total, None)"),
    Mutant("attention.py", "softcap * torch.tanh(scores / softcap)", "scores"),
    Mutant("attention.py", "scale=scaling\n", "scale=None\n"),
    Mutant("attention.py", "if not run.path and window is None:", "if window is None:"),
    Mutant("attention.py", "-1 if window is None else window - 1", "-1 if window is None else window"),
    Mutant("attention.py", "or query.dtype not in FLASH", ""),
    Mutant("attention.py", "scale=scaling, enable_gqa", "scale=None, enable_gqa"),
    # who repeats what
    Mutant("rollout/team.py", "if seen != leader_saw:", "if False:"),
    Mutant("rollout/team.py", "self._seen = digest(done)", "pass"),
    Mutant("rollout/team.py", "        self._calls = []\n\n\ndef", "\n\ndef"),
    Mutant("rollout/team.py", "self._leader.finish()", "pass"),
    Mutant("rollout/team.py", "groups[first : first + len(tasks)]", "groups"),
    Mutant("rollout/team.py", "groups[first : first + len(tasks)]", "groups[: len(tasks)]"),
    Mutant("rollout/team.py", "completion.request_id.encode(), crc", "b'', crc"),
    Mutant("rollout/team.py", "completion.token_ids.tobytes(), crc", "b'', crc"),
    Mutant("rollout/team.py", "self._tell(goes_on=True)", "pass"),
]  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(hunt(MUTANTS, "agentgrpo", TESTS, sys.argv[1:]))
