"""Drop each check of the proof and see that the corruption test notices."""

from __future__ import annotations

from tests.mutation import Mutant

FOLDER = "agentgrpo"
CORRUPTED = ["proof/test_corruptions.py", "test_verify.py"]
TESTS = {
    "verify.py": CORRUPTED,
    "proof/chain.py": CORRUPTED,
    "proof/form.py": CORRUPTED,
    "proof/credit.py": [
        *("proof/test_definitions.py", "rewards/test_trl_form.py", "test_verify.py"),
        *CORRUPTED[:1],
    ],
    "proof/ends.py": ["proof/test_definitions.py", *CORRUPTED],
    "proof/sums.py": ["proof/test_definitions.py", *CORRUPTED],
    "proof/tokens.py": ["proof/test_definitions.py", *CORRUPTED],
    "run/metrics.py": ["run/test_metrics.py", "proof/test_corruptions.py"],
}

MUTANTS = [
    # the chain
    Mutant("proof/chain.py", 'if row.get("previous_hash") != before:', "if False:"),
    Mutant(
        "proof/chain.py", 'if at_seal.get(self._seal["bytes"]) != self._seal["hash"]:', "if False:"
    ),
    Mutant("proof/chain.py", 'if not line.endswith(b"\\n"):', "if False:"),
    Mutant("verify.py", 'wrong = row.get("rollouts_hash") != last.hash', "wrong = False"),
    Mutant("run/metrics.py", 'if head_of(path, kept["bytes"]) != kept:', "if False:"),
    Mutant("run/metrics.py", "self._heads[name] = kept", "pass"),
    Mutant("run/metrics.py", "        self._seal()\n", "        pass\n"),
    # what is there
    Mutant("verify.py", "if step != self._step:", "if False:"),
    Mutant("verify.py", "                if not evaluated:\n", "                if False:\n"),
    Mutant("verify.py", "if self._step in evaluated:", "if False:"),
    Mutant("verify.py", 'elif areas != {"preflight"}:', "elif False:"),
    Mutant("verify.py", "if not {0, config.steps} <= evaluated:", "if False:"),
    Mutant("verify.py", "if not self._due and not last.sealed:", "if not self._due:"),
    Mutant("verify.py", "if self._heldout is not None and tasks != self._heldout:", "if False:"),
    Mutant("verify.py", "    told.close()\n", ""),
    Mutant(
        "verify.py",
        "if places != [(g, i) for g in range(len(groups)) for i in range(size)]:",
        "if False:",
    ),
    Mutant("verify.py", "if rollout.task != first:", "if False:"),
    Mutant("verify.py", "if rollout.forked_at is not None:", "if False:"),
    Mutant("verify.py", "if badly := list(_form_faults(lines, chain)):", "if badly := []:"),
    Mutant("proof/form.py", "for key in sorted(hints.keys() ^ value.keys()):", "for key in ():"),
    Mutant("proof/form.py", "if not set(map(type, value)) <= NUMBERS[kind]:", "if False:"),
    Mutant("verify.py", "if rollout.weights.get(name) != again.weights[name]:", "if False:"),
    # credit
    Mutant("proof/credit.py", "if not _close(rollout.advantage, whole):", "if False:"),
    Mutant("proof/credit.py", "if (recorded is None) != (each is None):", "if False:"),
    Mutant("proof/credit.py", "if not is_trained(rollout):", "if False:"),
    Mutant("proof/credit.py", 'if loss.baseline == "leave_one_out":', "if False:"),
    Mutant("proof/credit.py", "std(ddof=1)", "std()"),
    Mutant("proof/credit.py", "np.where(flat, 0.0, table - mean)", "table - mean"),
    Mutant("proof/credit.py", "if x.end > start", "if x.end >= start"),
    Mutant(
        "proof/credit.py", "* _centred(values, loss) * _scale(values)", "* _centred(values, loss)"
    ),
    Mutant("proof/credit.py", "values = values / weight", "pass"),
    Mutant("proof/credit.py", 'if loss.branch_credit == "hard":', "if False:"),
    Mutant("proof/credit.py", "samples * lengths", "lengths"),
    Mutant("proof/credit.py", "samples * budget", "samples"),
    # ends
    Mutant("verify.py", "faults += treatment_faults(rollout, config)", "pass"),
    Mutant("verify.py", "faults += end_faults(rollout, config)", "pass"),
    Mutant(
        "verify.py",
        'faults += _reward_faults(rollout, run, compared=where.endswith("train"))',
        "pass",
    ),
    Mutant(
        "proof/ends.py",
        "if (rollout.error is not None) != (status is Status.INFRA_ERROR):",
        "if False:",
    ),
    Mutant("proof/ends.py", "yield from _length_faults(rollout, config)", "pass"),
    Mutant(
        "proof/ends.py",
        "if turn.sampled_tokens > budget or (cut and turn.sampled_tokens < budget):",
        "if False:",
    ),
    Mutant(
        "proof/ends.py",
        "if not (span.end == end if whole else span.end <= max(end, span.start + 1)):",
        "if False:",
    ),
    Mutant(
        "proof/ends.py", "if broken and (rollout.rewards or rollout.span_rewards):", "if False:"
    ),
    # sums
    Mutant("verify.py", 'faults += sums.line_faults(row, "rollout", wanted)', "pass"),
    Mutant(
        "verify.py",
        'faults = sums.line_faults(row, "eval", sums.played(groups))',
        "faults = iter(())",
    ),
    Mutant("verify.py", "faults += sums.engine_faults(row, groups, run.config)", "pass"),
    Mutant("proof/tokens.py", "elif not _can_have(", "elif False and _can_have("),
    Mutant("verify.py", "if rollout.learner_logprobs is not None:", "if False:"),
    Mutant("proof/sums.py", "if type(value) not in kinds.get(", "if False and kinds.get("),
    Mutant(
        "proof/sums.py",
        "if not (_is_number(mean) and _is_number(most) and 0 <= mean <= most <= limit):",
        "if False:",
    ),
    Mutant("proof/sums.py", '        yield from line_faults(row, "rollout", sums)\n', ""),
    Mutant("proof/sums.py", '        yield from line_faults(row, "learner", number)\n', ""),
    Mutant("proof/sums.py", 'wanted["entropy_mean"] = float(seen[2].mean())', "pass"),
    Mutant("proof/sums.py", 'wanted["sampler_gap_max"] = float(np.abs(seen[1]).max())', "pass"),
    Mutant(
        "proof/sums.py", "wanted = _mismatch(seen, config) if seen.shape[1] else {}", "wanted = {}"
    ),
]
