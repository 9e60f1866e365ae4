# ruff: noqa: E501 - a table of source pieces
"""Change what programs' turns become in small ways and see that the tests notice every one."""

from __future__ import annotations

from tests.mutation import Mutant

FOLDER = "agentgrpo/programs"
TESTS = {
    "conversations.py": ["programs/test_conversations.py", "programs/test_play.py"],
    "messages.py": ["programs/test_conversations.py"],
    "session.py": [
        *("programs/test_sampling.py", "programs/test_bad_input.py", "programs/test_play.py")
    ],
    "endpoint.py": ["programs/test_bad_input.py", "programs/test_play.py"],
    "play.py": ["programs/test_sampling.py", "programs/test_play.py"],
    "launch.py": ["programs/test_play.py"],
}
MUTANTS = [
    Mutant(
        "conversations.py",
        "if node.answer is None or message.is_of(node.answer.message):",
        "if True:",
    ),
    Mutant(
        "conversations.py",
        "if after is not None and len(after.row.transcript) == after.end:",
        "if after is not None:",
    ),
    Mutant(
        "conversations.py",
        'if after is not None and new and all(m.role != "assistant" for m in new):',
        "if after is not None and new:",
    ),
    Mutant("conversations.py", "root = json_key(json.dumps(list(tools)))", "root = None"),
    Mutant("conversations.py", "        told[answered:answered] = [", "        told[0:0] = ["),
    Mutant("messages.py", "return type(value) is bool, value", "return value"),
    Mutant("messages.py", "if len(made) < len(pairs):", "if False:"),
    Mutant("session.py", "(retried or (old.reply is None and not old.waiting))", "retried"),
    Mutant("session.py", "if cut and most >= pending.budget:", "if cut:"),
    Mutant(
        "session.py",
        "        if isinstance(stopped, str) and stopped in text:\n            text = text[: text.index(stopped)]\n",
        "",
    ),
    Mutant(
        "session.py",
        "given, dropped = (made[:1], made[1:]) if asked.one_call else (made, ())",
        "given, dropped = made, ()",
    ),
    Mutant(
        "endpoint.py",
        "if not await _is_whole(pending.turn, request):",
        "if not await _is_whole(pending.turn, request) and False:",
    ),
    Mutant(
        "play.py",
        "if len(self.failures) >= len(self.played) and len(self.played) > 1:",
        "if False:",
    ),
    Mutant("play.py", "stop=wanted.stop,", "stop=(),"),
    Mutant(
        "play.py", "        self.endpoint.end(live.session)\n        rollout =", "        rollout ="
    ),
    Mutant(
        "play.py", "filters = {**self.filters, **wanted.sampling}", "filters = {**wanted.sampling}"
    ),
    Mutant("play.py", "            if not wanted.sampling:\n", "            if True:\n"),
    Mutant("play.py", 'elif "structured_outputs" in wanted.sampling:', "elif False:"),
    Mutant("session.py", "if self.obeys or asked.frozen:", "if True:"),
    Mutant("session.py", "if self.obeys or asked.frozen:", "if self.obeys:"),
    Mutant(
        "session.py",
        "        if asked.frozen:\n            self.stats",
        "        if False:\n            self.stats",
    ),
    Mutant("session.py", "        if size <= HERE:", "        if True:"),
    Mutant("endpoint.py", "asyncio.timeout(BODY_S)", "asyncio.timeout(None)"),
    Mutant("endpoint.py", "self.loop.call_later(HEAD_S, self.transport.abort)", "None"),
    Mutant("endpoint.py", "for connection in [*self.state.connections]:", "for connection in []:"),
    Mutant("endpoint.py", "len(self.connections) > (self._most or descriptors())", "False"),
    Mutant("launch.py", "(threading._shutdown, atexit._run_exitfuncs, ", "("),
    Mutant(
        "launch.py",
        "        kept = {k: v for k, v in os.environ.items() if k.lower() not in PROXIES}",
        "        kept = dict(os.environ)",
    ),
    Mutant(
        "launch.py", "            self.stop()  # and what it has left behind", "            pass"
    ),
]
