"""An ordinary agent program: a loop around OpenAI's client that runs the code of the replies.

agent.kind = "program" runs it in a sandbox session for each rollout (example `program`).
"""

import contextlib
import io
import json
import os
import sys
from typing import Any

from openai import OpenAI

SYSTEM = "Solve the question with Python code."
SHOTS = (
    "Sue has 12 bags with 31 pens each and finds 14 more. How many pens does Sue have?",
    "<code>print(12*31+14)</code>", "386", "Answer: 386",
    "What is 20 * 11 - 7?", "<code>print(20*11-7)</code>", "213", "Answer: 213",
)  # fmt: skip
ROLES = ("user", "assistant", "user", "assistant")

client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
task = json.load(sys.stdin)
messages: list[Any] = [{"role": "system", "content": SYSTEM}]
messages += [{"role": ROLES[i % 4], "content": text} for i, text in enumerate(SHOTS)]
messages += [{"role": "user", "content": task["question"]}]
for _ in range(3):
    reply = client.chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=messages)
    text = reply.choices[0].message.content or ""
    code = text.partition("<code>")[2].partition("</code>")[0]
    if not code:
        print(text)
        break
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(code, {})
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
    messages += [reply.choices[0].message, {"role": "user", "content": out.getvalue().strip()}]
