"""The promised features and their tests, which must exist and may not be skipped.

A row of one of the four replaced systems is tested by the tests named after it, `test_S2_8_...`;
other promises by the tests named here. A machine that cannot isolate code or has no GPU may skip
tests that need it. Any other skip means a missing package, which `make` installs, and fails.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from tests import isolation

ROW = re.compile(r"test_(S\d_\d+)_")
ROWS = [f"S{system}_{1 + row}" for system, n in enumerate((15, 10, 14, 17)) for row in range(n)]
"""Rows of: code as action, REPL and sampler, tau-bench, ET-Agent and ARPO."""
PROMISES: dict[str, tuple[str, ...]] = {
    "delta packing by a kernel, where training reads": ("test_triton_expands_the_same_batches",),
    "sleep mode, in order, on both devices": (
        "test_step_wakes_publishes_resets_samples_and_sleeps",
        "test_dropped_weights_are_loaded_before_the_cache_wakes",
        "test_cuda_engine_starts_with_sleep_mode",
    ),
    "the kernels alone: a copied folder, a package": (
        "test_copied_kernels_folder_computes_the_loss",
        "test_kernels_are_their_own_distribution",
    ),
    "host tools": (
        "test_host_functions_are_called_like_python_functions",
        "test_host_calls_are_counted_and_limited_across_sessions",
    ),
    "what was used of the sandbox is counted and charged": (
        "test_resources_of_code_and_its_children_are_counted",
        "test_resource_use_is_charged",
    ),
    "a step ends within its limit and the grace": (
        "test_a_step_with_calls_ends_within_limit_and_grace",
        "test_step_ends_at_the_environments_limit",
    ),
    "a line's reward is its own": ("test_default_span_credit_depends_on_the_agent",),
    "stream tokens, match, inject": (
        "test_every_token_is_seen_as_it_is_decoded",
        "test_the_example_answers_calls_within_a_thought",
    ),
    "rollout.sampler in a config": ("test_custom_sampler_plays_the_training_rollouts",),
    "a user to talk with, for every kind of agent": (
        "test_agent_asks_user_replies_and_agent_calls_a_tool",
        "test_user_ends_the_dialogue_after_its_texts_or_the_budget",
    ),
    "retrieval as its users have it": (
        "test_retriever_gets_the_request_format",
        "test_page_request_has_no_key_and_returns_text",
        "test_model_summarizes_results_for_the_question",
        "test_concurrent_requests_get_the_same_result",
        "test_nearest_texts_come_first",
        "test_two_runs_of_a_config_share_the_cache",
    ),
    "beams, epochs, entropies of each rollout, sigmas that fall": (
        "test_a_beams_width_is_how_many_go_on_from_one_point",
        "test_epochs_are_passes_over_the_selected_tasks",
        "test_the_base_entropy_is_no_other_rollouts_of_the_call",
        "test_sigmas_decay_to_zero_at_the_last_step",
    ),
    "one function or none, said in the prompt": (
        "test_the_rule_of_one_call_is_in_the_prompt",
        "test_error_of_a_newcomer_is_on_the_debug_page",
    ),
    "customers and judges that training does not move": (
        "test_customer_model_is_the_requested_model",
        "test_another_model_speaks_in_the_second_role",
        "test_reference_is_the_model_without_adapter",
        "test_judge_may_be_the_engines_model",
    ),
    "each shipped config does what it says": ("test_shipped_config_does_what_its_header_says",),
}
_HELD = {name for names in PROMISES.values() for name in names}
_TEST = re.compile(r"^def (test_\w+)\(", re.M)


def tests_of(path: Path) -> list[str]:
    """The names of a file's tests."""
    return _TEST.findall(path.read_text())


def holds(test: str) -> bool:
    """Whether this test belongs to a row or a promise."""
    return ROW.match(test) is not None or test in _HELD


def refuse_skip(report: Any, *, needs_gpu: bool = False) -> None:
    """Turn a skip into a failure, unless the machine lacks isolation or a GPU."""
    if not report.skipped or needs_gpu or hasattr(report, "wasxfail"):
        return
    file, _, reason = report.longrepr
    if file != isolation.__file__:
        report.outcome = "failed"
        report.longrepr = f"a promised feature was not tested: {reason}"


def refuse_missing(report: Any) -> None:
    """Turn a skip for a missing package into a failure if all packages should be installed."""
    required = os.environ.get("AGENTGRPO_PACKAGES_REQUIRED")
    if not required or not report.skipped or hasattr(report, "wasxfail"):
        return
    *_, reason = report.longrepr
    if re.search(r"could not import|requirements-\w+\.txt", reason):
        report.outcome = "failed"
        report.longrepr = f"{reason}; make installs it again if .venv/.installed-dev is removed"
