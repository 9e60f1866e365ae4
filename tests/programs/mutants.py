# ruff: noqa: E501 - a table of source pieces
"""Change what programs' turns become in small ways and see that the tests notice every one."""

from __future__ import annotations

from tests.mutation import Mutant

FOLDER = "agentgrpo/programs"
TESTS = {
    "conversations.py": [
        *("programs/test_conversations.py", "programs/test_play.py", "programs/test_apis.py")
    ],
    "messages.py": ["programs/test_conversations.py"],
    "responses.py": ["programs/test_apis.py", "programs/test_recorded.py"],
    "anthropic.py": ["programs/test_apis.py", "programs/test_recorded.py"],
    "completions.py": ["programs/test_apis.py"],
    "requests.py": ["programs/test_apis.py", "programs/test_sampling.py"],
    "session.py": [
        *("programs/test_apis.py", "programs/test_sampling.py", "programs/test_bad_input.py"),
        "programs/test_play.py",
    ],
    "endpoint.py": [
        *("programs/test_apis.py", "programs/test_bad_input.py", "programs/test_play.py")
    ],
    "play.py": [
        "programs/test_sampling.py",
        "programs/test_play.py",
        "programs/test_starts.py",
        "programs/test_sandboxed.py",
    ],
    "launch.py": ["programs/test_play.py", "programs/test_sandboxed.py"],
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
    Mutant("conversations.py", "if text.startswith(t)]", "if True]"),
    Mutant("conversations.py", "self._texts.append((prompt.text + raw, answer))", "pass"),
    Mutant(
        "responses.py",
        'if goes_on and (kind == "function_call" or rank < RANKS[kind]):',
        "if False:",
    ),
    Mutant("responses.py", "last.reasoning if one.reasoning is None else one.reasoning", "None"),
    Mutant("responses.py", 'None if body.get("store") is False else len(first)', "len(first)"),
    Mutant("responses.py", "*first, *before, *_messages", "*first, *_messages"),
    Mutant("responses.py", "if message.content or not message.calls:", "if message.content:"),
    Mutant("anthropic.py", "if message.content or not message.calls:", "if message.content:"),
    Mutant("anthropic.py", "objects=True, alone=0", "alone=0"),
    Mutant(
        "anthropic.py",
        'last = replace(last, reasoning=(last.reasoning or "") + thought)',
        "last = replace(last, reasoning=thought + '!')",
    ),
    Mutant("anthropic.py", '        before = (Message("system", told), *kept)\n', ""),
    Mutant("anthropic.py", 'stopped if reason == "stop_sequence" else None', "None"),
    Mutant("completions.py", '"max_tokens": MAX_TOKENS, **chat', "**chat"),
    Mutant(
        "requests.py",
        "raise BadRequest(other + told[len(name) :], error.code, other)",
        "raise error",
    ),
    Mutant("session.py", "if asked.alone is not None:", "if False:"),
    Mutant(
        "endpoint.py",
        "return answered(api.error(error, code), code, headers)",
        "return answered(CHAT.error(error, code), code, headers)",
    ),
    Mutant("messages.py", "return type(value) is bool, value", "return value"),
    Mutant("messages.py", "if len(made) < len(pairs):", "if False:"),
    Mutant("session.py", "not old.waiting and not old.given", "retried"),
    Mutant("session.py", "not old.waiting and not old.given", "True"),
    Mutant("session.py", "and not frozen):", "):"),
    Mutant("endpoint.py", "with _waiting(pending):  # from now on", "if True:  #"),
    Mutant("session.py", "if cut and most >= pending.budget:", "if cut:"),
    Mutant(
        "session.py",
        "        if isinstance(stopped, str) and stopped in text:\n            text = text[: text.index(stopped)]\n",
        "",
    ),
    Mutant(
        "session.py",
        "given, dropped = (calls[:1], calls[1:]) if asked.one_call else (calls, ())",
        "given, dropped = calls, ()",
    ),
    Mutant(
        "endpoint.py",
        "if not await _is_whole(pending.turn, request):",
        "if not await _is_whole(pending.turn, request) and False:",
    ),
    Mutant(
        "play.py",
        "if sum(outcome.own for outcome in self.failures) >= len(self.groups.played) > 1:",
        "if False:",
    ),
    Mutant("play.py", "sum(outcome.own for outcome in self.failures)", "len(self.failures)"),
    Mutant("launch.py", "own=code.isdecimal() and bool(own)", "own=True"),
    Mutant("launch.py", " and not last.startswith(NO_ROOM)", ""),
    Mutant("launch.py", "if os.access(path, os.X_OK)", "if False"),
    Mutant(
        "launch.py",
        'text.replace("\\r", "\\n").rstrip().rpartition("\\n")[2]',
        "text.splitlines()[-1]",
    ),
    Mutant("endpoint.py", "if self._between:", "if False:"),
    Mutant("play.py", "told = session.told and", 'told = "" and'),
    Mutant("play.py", "stop=wanted.stop,", "stop=(),"),
    Mutant(
        "play.py", "        self.endpoint.end(live.session)\n        rollout =", "        rollout ="
    ),
    Mutant(
        "play.py", "filters = {**self.filters, **wanted.sampling}", "filters = {**wanted.sampling}"
    ),
    Mutant("play.py", "            if not wanted.sampling:\n", "            if True:\n"),
    Mutant("play.py", "elif wanted.sampling:", "elif False:"),
    Mutant(
        "requests.py", "if not number or not least <= value <= most or", "if not number or False or"
    ),
    Mutant(
        "requests.py", 'if all(tool["function"]["name"] != name for tool in tools):', "if False:"
    ),
    Mutant("endpoint.py", "except Exception as error:", "except ZeroDivisionError as error:"),
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
    Mutant("endpoint.py", "len(self.connections) > self._most()", "False"),
    Mutant("endpoint.py", "descriptors() // max(1, len(self._sessions))", "descriptors()"),
    Mutant("endpoint.py", "        session.receiving -= len(raw)", "        pass"),
    Mutant(
        "endpoint.py",
        "        yield bytes(raw)\n",
        "        session.receiving -= len(raw)\n        yield bytes(raw)\n        session.receiving += len(raw)\n",
    ),
    Mutant("endpoint.py", "        await asyncio.sleep(0)  #", "        pass  #"),
    Mutant("conversations.py", "_ = message.key  #", "pass  #"),
    Mutant("messages.py", 'self.__dict__["_key"] = self', "self"),
    Mutant("endpoint.py", "    pending.given = True  # who cuts", "    pass  # who cuts"),
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
