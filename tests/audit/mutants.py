"""Drop what an audit looks for, and see that a test notices."""

from __future__ import annotations

from tests.mutation import Mutant

FOLDER = "agentgrpo"
READ = ["foreign/test_read.py", "audit/test_claims.py"]
TESTS = {
    "audit/fit.py": ["audit/test_step.py"],
    "audit/step.py": ["audit/test_step.py"],
    "audit/score.py": ["audit/test_step.py"],
    "audit/trl.py": ["audit/test_trl.py"],
    "audit/claims.py": ["audit/test_claims.py"],
    "foreign/read.py": READ,
    "foreign/trajectory.py": READ,
}

MUTANTS = [
    # settings that fit
    Mutant("audit/fit.py", "if min_p > 0:", "if False:"),
    Mutant("audit/fit.py", "        if top_k:\n", "        if False:\n"),
    Mutant("audit/fit.py", "if top_p < 1:", "if False:"),
    Mutant("audit/fit.py", "self._mass(num_N) + torch.tensor(top_p)", "torch.tensor(top_p)"),
    Mutant("audit/fit.py", "torch.minimum(num_N, first_N + 1)", "torch.minimum(num_N, first_N)"),
    Mutant("audit/fit.py", "found = [self._judged(how) for how in hints]", "found = []"),
    Mutant("audit/fit.py", "key=lambda judged: judged[0])]", "key=lambda judged: -judged[0])]"),
    Mutant("audit/fit.py", "found += self._filters(best.temperature, BOTH_K)", "pass"),
    # steps
    Mutant("audit/step.py", "mean / (spread / math.sqrt(len(gain_N)))", "0.0"),
    Mutant("audit/step.py", "    if mean <= 0:\n", "    if False:\n"),
    Mutant("audit/step.py", "with model.disable_adapter():", "if True:"),
    Mutant("audit/step.py", 'weight.detach().to("cpu", copy=True)', "weight.detach()"),
    Mutant("audit/step.py", "[snapshot(self._model), *self._earlier]", "[*self._earlier]"),
    Mutant("audit/step.py", 'weights["the start"] = self._initial', "pass"),
    Mutant(
        "audit/score.py",
        "out = functional_call(model, dict(place), (), given) if place else",
        "out =",
    ),
    Mutant("audit/step.py", "sought and least > QUIET and", "False and"),
    Mutant("audit/step.py", "sought and least > QUIET and", "least > QUIET and"),
    Mutant("audit/step.py", "and whole(_left(gaps))", ""),
    Mutant("audit/step.py", "not whole(left := _left(others[name].gaps_N))", "False"),
    Mutant("audit/score.py", "if torch.is_autocast_enabled(device):", "if False:"),
    Mutant("audit/score.py", "weight.data = kept.pop(weight)", "pass"),
    Mutant("audit/step.py", "with in_float32(model, device):", "if True:"),
    Mutant("audit/step.py", '[gaps], outliers_of("bfloat16")) <= HALF', "[gaps], 0.0) >= 0"),
    Mutant("audit/step.py", "gaps_N[at:].median() > 3 * noise", "True"),
    Mutant("audit/score.py", "for part in places.split(CHUNK):", "for part in [places]:"),
    Mutant("audit/step.py", "if min(sizes) >= ENOUGH else", "if False else"),
    Mutant("audit/score.py", "if not keeps or trunk is base:", "if not keeps:"),
    Mutant("audit/step.py", "if alone[0] <= 1.2 * loss + QUIET:", "if True:"),
    Mutant("audit/step.py", "if odd:", "if False:"),
    Mutant("audit/step.py", "if max(ids) >= size or min(ids) < 0:", "if False:"),
    Mutant("audit/step.py", "if missing or above or never or not said:", "if above or never:"),
    Mutant("audit/step.py", "if missing or above or never or not said:", "if missing or never:"),
    Mutant("audit/step.py", "if missing or above or never or not said:", "if missing or above:"),
    Mutant("audit/step.py", "elif len(said) > 1 and not any(said):", "elif False:"),
    Mutant("audit/score.py", "values = torch.where(own, values, math.nan)", "pass"),
    Mutant("audit/step.py", "if own.gaps_N.abs().mean() > noise():", "if False:"),
    Mutant("audit/step.py", "or (excuse and threshold is None)", ""),
    Mutant("audit/step.py", "or (excuse and threshold is None)", "or excuse"),
    Mutant("audit/step.py", "gaps.abs().median() < 0.1 * own", "gaps.abs().median() < 0 * own"),
    Mutant("audit/score.py", "model.train(training)", "model.train(True)"),
    # TRL
    Mutant("audit/trl.py", "if at - at % every >= taken[0][0]]", "]"),
    Mutant("audit/trl.py", 'mask * batch.get("tool_mask", mask)', "mask"),
    Mutant("audit/trl.py", "if self._compute_loss is not None:  #", "if False:  #"),
    Mutant("audit/trl.py", "if self._stop and not audit.ok:", "if False:"),
    Mutant("audit/trl.py", 'if "sampling_per_token_logps" not in batch:', "if False:"),
    # claims
    Mutant(
        "audit/claims.py",
        "if isinstance(verdict, str) and not own:",
        "if isinstance(verdict, str):",
    ),
    Mutant(
        "audit/claims.py",
        "if ids is not None and count is not None and len(ids) != count",
        "if False",
    ),
    Mutant("audit/claims.py", "if np.array_equal(there, whole):", "if True:"),
    Mutant("audit/claims.py", "if not call.derived and", "if"),
    Mutant("audit/claims.py", "if filled.any():", "if False:"),
    Mutant("audit/claims.py", "if ends and int(piece.ids[at]) in ends", "if False"),
    Mutant("audit/claims.py", "if not faults and not gap <= WIDEST:", "if False:"),
    Mutant("audit/claims.py", "if not np.isfinite(total):", "if False:"),
    Mutant("audit/claims.py", "elif flat and most > 1e-4:", "elif False:"),
    Mutant("audit/claims.py", "elif not flat and total", "elif False and total"),
    Mutant("audit/claims.py", "if faults and len(sizes) > 1 and group", "if faults and group"),
    Mutant("audit/claims.py", 'group[0].where.endswith(".parquet:1")', "True"),
    Mutant("audit/claims.py", "if text not in shown and", "if False and"),
    Mutant("audit/claims.py", "if any(tally.held for tally in self.tallies.values()) else 3", ""),
    # readers
    Mutant(
        "foreign/trajectory.py",
        "if mask is not None and len(mask) != len(completion):",
        "if False:",
    ),
    Mutant("foreign/trajectory.py", "np.array_equal(prompt[: len(whole)], whole)", "False"),
    Mutant(
        "foreign/trajectory.py",
        "np.ones(len(ids), bool) if mask is None else",
        "np.ones(len(ids), bool) if True else",
    ),
    Mutant("foreign/read.py", "return [line for line in said if line]", "return []"),
    Mutant("foreign/read.py", 'if any(tokens["prompt_mask"]):', "if False:"),
    Mutant("foreign/read.py", 'if any(mask) and not node.get("sampled"):', "if False:"),
    Mutant("foreign/read.py", "if len(logprobs) != sum(mask):", "if False:"),
    Mutant("foreign/read.py", '+ (usage.get("cached_input_tokens") or 0)', ""),
    Mutant(
        "foreign/read.py", 'parents = {node.get("parent") for node in nodes}', "parents = set()"
    ),
    Mutant("foreign/read.py", "logprobs is not None and len(ids) != len(logprobs)", "False"),
    Mutant("foreign/read.py", 'yield from _of_atif(below, f"{where} subagent {number}")', "pass"),
]
