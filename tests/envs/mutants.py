# ruff: noqa: E501 - a table of source pieces
"""Change environments, data and block masks in small ways and see that the tests notice it."""

from __future__ import annotations

from tests.mutation import Mutant

FOLDER = "agentgrpo"
TESTS = {
    "learn/packing.py": ["learn/test_flex_blocks.py"],
    "envs/customers.py": ["envs/test_tau_bench.py", "envs/test_tau2.py"],
    "envs/dialogue.py": ["envs/test_dialogue.py"],
    "agents/text.py": ["envs/test_dialogue.py"],
    "agents/repl.py": ["envs/test_dialogue.py", "agents/test_repl.py"],
    "registry.py": ["envs/test_dialogue.py"],
    "envs/tools.py": ["agents/test_tools.py", "envs/test_worlds.py"],
    "envs/search.py": ["envs/test_search.py"],
    "envs/cache.py": ["envs/test_search.py"],
    "envs/tagged.py": ["envs/test_search.py", "agents/test_tags.py"],
    "models/encoder.py": ["envs/test_search.py"],
    "engine/endpoints.py": ["envs/test_search.py"],
    "envs/factory.py": ["envs/test_worlds.py"],
    "envs/graded.py": ["envs/test_worlds.py"],
    "data/word_problems.py": ["data"],
}

MUTANTS = [
    # the blocks that FlexAttention visits
    Mutant("learn/packing.py", "whole = (query > key)", "whole = (query >= key)"),
    Mutant("learn/packing.py", "touched = (query >= key)", "touched = (query > key)"),
    Mutant("learn/packing.py", "if block_size == 1:", "if False:"),
    Mutant("learn/packing.py", "np.where(seen, block", "np.where(~seen, block"),
    Mutant("learn/packing.py", "partial.T, whole.T", "whole.T, partial.T"),
    Mutant("learn/packing.py", "-(-np.maximum.reduceat(tout_T, starts) // block_size)", "np.maximum.reduceat(tout_T, starts) // block_size"),
    Mutant("learn/packing.py", "(tout_T > num_tokens)", "(tout_T > num_tokens + 1)"),
    # customers' cases
    Mutant("envs/customers.py", "call.name in self.ends or", "False or"),
    Mutant("envs/customers.py", "call.name == DONE and self.talk.user is None", "call.name == DONE"),
    Mutant("envs/customers.py", "return all(any(text.lower() in one", "return any(any(text.lower() in one"),
    Mutant("envs/customers.py", '.replace(",", "")', ""),
    Mutant("envs/customers.py", "if self._done or self.talk.over else 0.0", "if True else 0.0"),
    Mutant("envs/customers.py", "*(() if self.talks else (DONE_SCHEMA,))", ""),
    Mutant("envs/customers.py", "errors += failed", "errors += 0"),
    Mutant("envs/customers.py", "if key not in self._gold:", "if True:"),
    # users beside any environment
    Mutant("registry.py", "with_user(cast(Environment, made), config.env, models)", "cast(Environment, made)"),
    Mutant("registry.py", 'if getattr(env, "talks", False):', "if False:"),
    Mutant("envs/dialogue.py", "if self._left == 0:", "if False:"),
    Mutant("envs/dialogue.py", "self._left -= 1", "pass"),
    Mutant("envs/dialogue.py", "answer=said.answer", "answer=None"),
    Mutant("envs/dialogue.py", "patience=0", "patience=8"),
    Mutant("envs/dialogue.py", " and self._said is not None", ""),
    Mutant("envs/dialogue.py", "said, self._said = self._said, None", "said = self._said"),
    Mutant("envs/dialogue.py", "AsyncDialogueEpisode if waits else DialogueEpisode", "DialogueEpisode"),
    Mutant("envs/dialogue.py", "return getattr(self._episode, name)", "return getattr(self._talk, name)"),
    Mutant("agents/text.py", "if not self.talks:", "if True:"),
    Mutant("agents/text.py", "THOUGHTS.sub(\"\", text, count=1)", "text"),
    Mutant("agents/text.py", "bool(prefix) and answer is not None", "answer is not None"),
    Mutant("agents/text.py", '"role": "user", "content": observation', '"role": "tool", "content": observation'),
    Mutant("agents/text.py", "return said if self.talks else", "return"),
    Mutant("agents/repl.py", "return text if isinstance(text, str) else None", "return str(text)"),
    Mutant("agents/repl.py", "observation.text}, prompt]", "observation.text}]"),
    Mutant("agents/repl.py", "PROMPT + TALK if self.talks else PROMPT", "PROMPT"),
    # calls of tools
    Mutant("envs/tools.py", "if isinstance(error, InfrastructureError):", "if False:"),
    Mutant("envs/tools.py", '_Refused("unknown_tool"', '_Refused("bad_arguments"'),
    Mutant("envs/tools.py", "for answer in answers if answer.error)", "for answer in answers)"),
    Mutant("envs/tools.py", '("title", "$schema")', "()"),
    Mutant("envs/factory.py", "return replace(observation, done=True", "return replace(observation, done=False"),
    Mutant("envs/factory.py", "        self._begin()\n        return self._rewards(waited(self._call", "        return self._rewards(waited(self._call"),
    # retrieval
    Mutant("envs/search.py", '"documents", self._retriever.identity, query, count]', '"documents", query, count]'),
    Mutant("envs/search.py", '"documents", self._retriever.identity, query, count]', '"documents", self._retriever.identity, query]'),
    Mutant("envs/search.py", "self._summarizer.identity, messages, sampling]", "self._summarizer.identity, messages]"),
    Mutant("envs/search.py", "self._summarizer.identity, messages, sampling]", "self._summarizer.identity, sampling]"),
    Mutant("envs/search.py", '"question": _step.get().question', '"question": ""'),
    Mutant("envs/search.py", "memory=told)", "memory=None)"),
    Mutant("envs/search.py", "json.dumps([encoder.checksum, shown])", "json.dumps([shown])"),
    Mutant("envs/search.py", "[self._prefix + query]", "[query]"),
    Mutant("envs/search.py", "if len(query) > MAX_QUERY:", "if False:"),
    Mutant("envs/cache.py", "INSERT OR IGNORE", "INSERT OR REPLACE"),
    Mutant("envs/cache.py", 'told = self._told(key) or new', "told = new"),
    Mutant("envs/tagged.py", "does.recall(memory)", "pass"),
    Mutant("models/encoder.py", "(hidden * mask[..., None]).sum(1)", "hidden.sum(1)"),
    Mutant("models/encoder.py", "mask.sum(1) - 1]", "-1]"),
    Mutant("engine/endpoints.py", '"extra"})', '"model"})'),
    Mutant("engine/endpoints.py", '{"Authorization": openai.omit, "Accept"', '{"Accept"'),
    Mutant("engine/endpoints.py", "follow_redirects=True)", "follow_redirects=False)"),
    Mutant("engine/endpoints.py", "return found[:top_n]", "return found"),
    # generated tasks
    Mutant("data/word_problems.py", 'WORDS[split]["things"]', 'WORDS["train"]["things"]'),
    Mutant("data/word_problems.py", '"abc", (10, 99)', '"abc", (10, 98)'),
    # the program of an answer
    Mutant("envs/graded.py", "left = _open(line, doc) if docs and language in KNOWN else \"\"", "left = \"\""),
    Mutant("envs/graded.py", "docs and language in KNOWN", "docs"),
    Mutant("envs/graded.py", "docs and language in KNOWN", "language in KNOWN"),
    Mutant("envs/graded.py", "and not _open(before, doc)", "and not doc"),
    Mutant("envs/graded.py", "if text in (\"#\", ", "if text in ("),
    Mutant("envs/graded.py", "[*lines, before] if code else lines", "lines"),
    Mutant("envs/graded.py", "begins = not code and len(words) == 1 and words[0].isalnum()", "begins = False"),
    Mutant("envs/graded.py", "len(words) == 1 and words", "words and words"),
    Mutant("envs/graded.py", """and "`" not in behind""", ""),
    Mutant("envs/graded.py", "in KNOWN and text.strip()", "in KNOWN"),
]  # fmt: skip
