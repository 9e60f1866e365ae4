"""A taskset with a harness of its own, which runs in the process that it is in."""

from __future__ import annotations

from typing import Any

import openai
import verifiers.v1 as vf
from vf_sums import Sums


class Own(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = EXECUTES_CODE = False
    APPENDS_SYSTEM_PROMPT = True

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any,
        data: vf.TaskData,
    ) -> vf.ProgramResult:  # fmt: skip
        async with openai.AsyncOpenAI(base_url=endpoint, api_key=secret) as client:
            for asked in (f"{data.prompt}?", "Sure?"):
                messages: Any = [{"role": "user", "content": asked}]
                made = await client.chat.completions.create(model=ctx.model, messages=messages)
                if made.choices[0].message.content == "stop":
                    raise ValueError("a harness that does not bear this")
        return vf.ProgramResult(0, "", "")


class OwnSums(Sums):
    pass


__all__ = ["Own", "OwnSums"]
