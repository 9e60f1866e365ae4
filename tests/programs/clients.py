"""Programs of other people's frameworks, as their manuals write them, around one tool.

Each is a coroutine function for `agent.options.call`; what is synchronous runs on a thread. The
names are those of their packages; NAMES says which module each needs.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from agentgrpo.programs.launch import NO_TELEMETRY

SYSTEM = "Be brief."
ENVIRONMENT = {
    **NO_TELEMETRY,
    "MSWEA_SILENT_STARTUP": "1",
    "MSWEA_GLOBAL_CONFIG_DIR": tempfile.gettempdir(),
}
"""What they are to find: they call nobody else, and write nothing at home."""


def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: one.
        b: the other.
    """
    return a + b


SCHEMA: dict[str, object] = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}


async def openai_sync(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
    from openai import OpenAI

    tool: Any = {"type": "function", "function": {"name": "add", "parameters": SCHEMA}}

    def work() -> Any:
        messages: list[Any] = [{"role": "user", "content": task["question"]}]
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(4):
                said = client.chat.completions.create(model=model, messages=messages, tools=[tool])
                message = said.choices[0].message
                messages.append(message)
                if not message.tool_calls:
                    return message.content
                messages += (
                    {"role": "tool", "tool_call_id": call.id, "content": "3"}
                    for call in message.tool_calls
                )
        return None

    return await asyncio.to_thread(work)


def langgraph(make: str, *, responses: bool, stream: bool = False) -> Callable[..., Any]:
    """An agent of LangGraph's, by one of its two functions."""

    async def play(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
        from langchain_openai import ChatOpenAI
        from openai import DefaultAsyncHttpxClient

        async with DefaultAsyncHttpxClient() as http:  # or one is kept for each URL, never closed
            chat = ChatOpenAI(
                model=model, base_url=base_url, api_key=api_key, use_responses_api=responses,
                streaming=stream, http_async_client=http,
            )  # fmt: skip
            if make == "create_agent":
                from langchain.agents import create_agent

                agent = create_agent(chat, [add], system_prompt=SYSTEM)
            else:
                from langgraph.prebuilt import create_react_agent

                agent = create_react_agent(chat, [add], prompt=SYSTEM)
            asked = {"messages": [("user", task["question"])]}
            ended = await agent.ainvoke(asked, {"recursion_limit": 9})
            return ended["messages"][-1].text

    return play


def openai_agents(*, responses: bool, stream: bool = False) -> Callable[..., Any]:
    """An agent of OpenAI's SDK, twice run, the second time with the first's history."""

    async def play(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
        from agents import (
            Agent,
            OpenAIChatCompletionsModel,
            OpenAIResponsesModel,
            Runner,
            function_tool,
        )
        from openai import AsyncOpenAI

        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            make: Any = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
            agent = Agent(
                name="A", instructions=SYSTEM, tools=[function_tool(add)],
                model=make(model=model, openai_client=client),
            )  # fmt: skip
            if stream:
                run: Any = Runner.run_streamed(agent, task["question"], max_turns=4)
                async for _ in run.stream_events():
                    pass
            else:
                run = await Runner.run(agent, task["question"], max_turns=4)
            asked = [*run.to_input_list(), {"role": "user", "content": "again"}]
            return (await Runner.run(agent, asked, max_turns=4)).final_output

    return play


def smolagents(kind: str) -> Callable[..., Any]:
    """One of its two agents."""

    async def play(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
        import smolagents as smol

        chat = smol.OpenAIServerModel(model_id=model, api_base=base_url, api_key=api_key)
        agent = getattr(smol, kind)(
            tools=[smol.tool(add)], model=chat, max_steps=4, verbosity_level=smol.LogLevel.OFF
        )
        agent.prompt_templates["system_prompt"] = SYSTEM  # its own has 10,000 characters
        return str(await asyncio.to_thread(agent.run, task["question"]))

    return play


async def mini_swe_agent(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    def work() -> Any:
        with tempfile.TemporaryDirectory() as folder:
            chat = LitellmModel(
                model_name=f"openai/{model}",
                model_kwargs={"api_base": base_url, "api_key": api_key, "drop_params": True},
                cost_tracking="ignore_errors",
            )
            agent = DefaultAgent(
                chat, LocalEnvironment(cwd=folder), system_template=SYSTEM,
                instance_template="{{task}}", step_limit=4,
            )  # fmt: skip
            return agent.run(task["question"])["submission"]

    return await asyncio.to_thread(work)


async def anthropic_runner(task: Any, *, base_url: str, api_key: str, model: str) -> Any:
    """Anthropic's runner of tools, which keeps its conversation as a thread."""
    from anthropic import AsyncAnthropic, beta_async_tool

    async def sum_of(a: float, b: float) -> str:
        return str(a + b)

    url = base_url.removesuffix("/v1")
    async with AsyncAnthropic(base_url=url, api_key=api_key) as client:
        runner = client.beta.messages.tool_runner(
            model=model, max_tokens=400, system=SYSTEM, max_iterations=4,
            messages=[{"role": "user", "content": task["question"]}],
            tools=[beta_async_tool(sum_of, name="add", description="Add.", input_schema=SCHEMA)],
        )  # fmt: skip
        last = await runner.until_done()
        return "".join(block.text for block in last.content if block.type == "text")


PROGRAMS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "openai": ("openai", openai_sync),
    "langgraph": ("langgraph", langgraph("create_react_agent", responses=False)),
    "langgraph responses": ("langgraph", langgraph("create_react_agent", responses=True)),
    "langchain": ("langchain", langgraph("create_agent", responses=False, stream=True)),
    "langchain responses": ("langchain", langgraph("create_agent", responses=True, stream=True)),
    "agents": ("agents", openai_agents(responses=True)),
    "agents streamed": ("agents", openai_agents(responses=True, stream=True)),
    "agents chat": ("agents", openai_agents(responses=False)),
    "smolagents tools": ("smolagents", smolagents("ToolCallingAgent")),
    "smolagents code": ("smolagents", smolagents("CodeAgent")),
    "mini-swe-agent": ("minisweagent", mini_swe_agent),
    "anthropic": ("anthropic", anthropic_runner),
}
"""By name: the module that it needs, and the program."""


async def any_of_them(task: Any, **given: Any) -> Any:
    """The program that the task names, which has asked for three turns more that are in no row."""
    _, play = PROGRAMS[task["question"].partition(":")[0]]
    import openai

    async with openai.AsyncOpenAI(base_url=given["base_url"], api_key=given["api_key"]) as client:
        asked: Any = {"messages": [{"role": "user", "content": "Q"}], "max_tokens": 4}
        await client.chat.completions.create(model=f"{given['model']}:frozen", **asked)
        async with await client.chat.completions.create(model=given["model"], stream=True, **asked):
            pass  # is closed before its end
        # inspect-ai's, by a name of its own; mostly cut at rollout.max_turn_tokens
        await client.responses.create(model="gpt-4o", input="Please say 'hello, world'")
    return await play(task, **given)
