"""`agentgrpo push` against a stand-in of the hub: what is sent, what never is, what is refused.

The stand-in answers the requests that huggingface_hub makes, checks what the hub checks (token,
hashes, that large files came before the commit), and keeps what was committed.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
import tomllib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import load, save_file

from agentgrpo import push
from agentgrpo.config.read import load_config
from agentgrpo.models.models import ADAPTER_CONFIG, ADAPTER_TENSORS
from agentgrpo.run import checkpoint
from agentgrpo.run.folder import locked
from agentgrpo.run.metrics import RunLog
from tests.given import a_config, a_group

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=")  # huggingface_hub's own
TOKEN = "hf_a_token_that_may_write"
WEIGHTS = {"lm_head.weight": np.arange(6000, dtype=np.float32).reshape(20, 300)}


class Hub(http.server.ThreadingHTTPServer):
    """Repositories by name: whether private, and the files of the last commit."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits = 0
        self.refuses: dict[str, int] = {}
        """A part of a path: the status that it is answered with."""


class Answers(http.server.BaseHTTPRequestHandler):
    """The hub's HTTP API, as far as a push uses it."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def send(self, status: int, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_GET(self) -> None:
        self.send(404, {"error": "not here"})

    def do_PUT(self) -> None:
        content = self.body()
        assert self.path == f"/objects/{hashlib.sha256(content).hexdigest()}"
        self.server.objects[self.path.rpartition("/")[2]] = content
        self.send(200, {})

    def do_POST(self) -> None:
        self.send(*self.answer(self.body()))

    def answer(self, sent: bytes) -> tuple[int, Any]:
        for part, status in self.server.refuses.items():
            if part in self.path:
                return status, {"error": f"refused\n{status}"}
        if self.path == "/api/validate-yaml":
            assert json.loads(sent)["content"].startswith("---\n")
            return 200, {"warnings": []}
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid username or password."}
        if self.path == "/api/repos/create":
            return self.create(**json.loads(sent))
        if re.fullmatch(r"/api/models/(.+)/preupload/main", self.path):
            paths = [file["path"] for file in json.loads(sent)["files"]]
            mode = {True: "lfs", False: "regular"}
            files = [{"path": path, "uploadMode": mode[path.endswith(".safetensors")],
                      "shouldIgnore": False} for path in paths]  # fmt: skip
            return 200, {"files": files}
        if self.path.endswith(".git/info/lfs/objects/batch"):
            place = f"{self.server.address}/objects"
            objects = [{**one, "actions": {"upload": {"href": f"{place}/{one['oid']}"}}}
                       for one in json.loads(sent)["objects"]]  # fmt: skip
            return 200, {"objects": objects}
        if found := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            return self.commit(found[1], [json.loads(line) for line in sent.splitlines()])
        return 404, {"error": self.path}

    def create(
        self, name: str, organization: str | None, visibility: str, **_: Any
    ) -> tuple[int, Any]:
        repo = f"{organization or 'me'}/{name}"
        url = {"url": f"{self.server.address}/{repo}", "name": repo}
        if repo in self.server.files:
            return 409, {**url, "error": "You already created this model repo"}
        self.server.files[repo], self.server.private[repo] = {}, visibility == "private"
        return 200, url

    def commit(self, repo: str, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        made = {}
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "lfsFile":
                made[value["path"]] = self.server.objects[value["oid"]]
            else:
                assert (line["key"], value["encoding"]) == ("file", "base64")
                made[value["path"]] = base64.b64decode(value["content"])
        self.server.files[repo] |= made
        self.server.commits += 1
        url = f"{self.server.address}/{repo}/commit/{40 * '0'}"
        return 200, {"commitUrl": url, "commitOid": 40 * "0", "pullRequestUrl": None}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", server.address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def write_run(folder: Path, *overrides: str, steps: int = 4, adapter: bool = False) -> Path:
    """A run of 4 steps with checkpoints at 2 and 4, evaluated before, between and after."""
    config = a_config("steps=4", "data.heldout=rows.jsonl",
                      f"out_dir={folder}", *overrides)  # fmt: skip
    log = RunLog(folder)
    log.describe(
        config=config.model_dump(mode="json"),
        base=config.model,
        model=str(folder / "cache" / "m"),
        engine={"device": "cpu", "dtype": "float32"},
        learner={"weights": "shared", "trained_parameters": 6000},
        versions={"agentgrpo": "0.1.0", "torch": "2.13.0"},
    )

    def save(place: Path) -> None:
        name = {"base_model_name_or_path": str(folder / "cache" / "m"), "r": 8}
        told = {ADAPTER_CONFIG: name} if adapter else {"config.json": {"_name_or_path": "/x/m"}}
        for file, value in {**told, "tokenizer_config.json": {}}.items():
            (place / file).write_text(json.dumps(value))
        save_file(WEIGHTS, place / (ADAPTER_TENSORS if adapter else "model.safetensors"))
        (place / checkpoint.STATE).write_bytes(b"the optimizer's")
        (place / "notes.md").write_text("mine")

    solved = {0: 0.25, 2: 0.75, 4: 0.5}
    for step in range(steps + 1):
        if step in solved:
            log.write(step, eval={"reward": solved[step] + 0.1, "solved": solved[step],
                                  "rollouts": 8.0})  # fmt: skip
        if step in (2, 4):
            checkpoint.save(folder, step, save, keep=2)
        if step < steps:
            log.rollouts(step, [a_group([1, 2])])
            log.write(step, rollout={"reward": step / 10}, learner={"loss": 0.5})
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "one")


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the error."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_checkpoint_is_published_whole_and_private(hub: Hub, run: Path) -> None:
    assert push.main([str(run), "me/model"]) == 0
    files = hub.files["me/model"]
    assert files.keys() == {
        *("README.md", "agentgrpo_config.toml", "curve.svg"),
        *("config.json", "tokenizer_config.json", "model.safetensors"),
    }
    np.testing.assert_array_equal(load(files["model.safetensors"])["lm_head.weight"],
                                  WEIGHTS["lm_head.weight"])  # fmt: skip
    assert (hub.private, hub.commits) == ({"me/model": True}, 1)


def test_visibility_and_existing_repositories_are_asked_for(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push.main([str(run), "model", "--public"]) == 0
    assert hub.private == {"me/model": False}
    assert capsys.readouterr().out.endswith(f"{hub.address}/me/model/commit/{40 * '0'}\n")
    assert push.main([str(run), "me/model"]) == 2
    assert said(capsys) == "error: me/model is there already: --exist-ok adds a commit to it"
    assert hub.commits == 1
    assert push.main([str(run), "me/model", "--exist-ok", "--checkpoint", "2"]) == 0
    assert hub.commits == 2
    assert "step 2 of 4" in hub.files["me/model"]["README.md"].decode()


def card_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert push.main([*map(str, arguments), "--dry-run"]) == 0
    return capsys.readouterr().out


def test_the_card_says_data_config_results_and_versions(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    card = card_of(capsys, run, "me/model")
    assert card.endswith("nothing was sent\n")
    assert re.search(r"^ +24,\d\d\d model\.safetensors$", card, re.M)
    for line in ("| 0 | 0.250 | 0.350 | 8 |", "| 4 | 0.500 | 0.600 | 8 |", "| torch | 2.13.0 |",
                 "| trained on | word_problems |", "| rollouts of a task | 8 |",
                 'library_name: "transformers"', "![Reward by step](curve.svg)"):  # fmt: skip
        assert line in card.splitlines(), card
    (config,) = re.findall(r"```toml\n(.*?)```", card, re.S)
    assert tomllib.loads(config) == {"model": "m", "steps": 4, "data": {"heldout": "rows.jsonl"}}
    assert "| 4 |" not in card_of(capsys, run, "me/model", "--checkpoint", "best"), "later"
    assert "step 2 of 4" in card_of(capsys, run, "me/model", "--checkpoint", "best")


def test_the_published_config_trains_the_same_again(run: Path, tmp_path: Path) -> None:
    """All that differs from the defaults, nested or not; TOML that our reader takes."""
    options = 'agent.options={ system_prompt = "say `x`\\n```", shots = [[{ role = "user" }]] }'
    changed = ["learner.lora.rank=8", "loss.epsilon_high=0.3", "reward.kind=none", options,
               "rollout.call_timeout_s=none"]  # fmt: skip
    run = write_run(tmp_path / "two", *changed, adapter=True)
    ready = push.prepared(run, "me/model")
    config = ready.files["agentgrpo_config.toml"]
    assert isinstance(config, bytes)
    (tmp_path / "again.toml").write_bytes(config)
    again = load_config(tmp_path / "again.toml", [f"out_dir={run}"])
    assert again == a_config("steps=4", "data.heldout=rows.jsonl",
                             f"out_dir={run}", *changed)  # fmt: skip
    card = ready.files["README.md"]
    assert isinstance(card, bytes)
    (block,) = re.findall(r"^(`{3,})toml\n(.*?)^\1$", card.decode(), re.S | re.M)
    assert len(block[0]) > 3, "the text does not end its own block"
    assert block[1] in config.decode()


def test_a_curve_is_a_picture_of_the_rewards(run: Path) -> None:
    picture = push.prepared(run, "me/model", "2").files["curve.svg"]
    assert isinstance(picture, bytes)
    root = ET.fromstring(picture)
    svg = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{svg}circle")) == 3, "an evaluation each"
    lines = [p.get("d", "") for p in root.findall(f"{svg}path") if p.get("stroke-width") == "2"]
    assert [line.count("L") for line in lines] == [3, 2]
    (mark,) = (p for p in root.findall(f"{svg}path") if p.get("stroke-dasharray"))
    assert mark.get("d", "").startswith("M315.0,"), "halfway: 2 of 4 steps"


def test_nothing_of_this_machine_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths, addresses with passwords, keys by their names, what the sandbox's code may see."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    run = write_run(
        tmp_path / "one", f"model={tmp_path}/models/base", f"data.train={tmp_path}/rows.jsonl",
        "env.kind=mcp", 'sandbox.env={ WHO = "nobody-knows" }',
        f'env.options={{ command = ["python", "{tmp_path}/serve.py"], api_key = "nobody-knows", '
        f'url = "https://me:nobody-knows@host/x?k=nobody-knows", env = {{ A = "nobody-knows" }}, '
        f'text = "look into {tmp_path}/work", max_tokens = 7 }}',
    )  # fmt: skip
    ready = push.prepared(run, "me/model")
    made = {name: content.decode() for name, content in ready.files.items()
            if isinstance(content, bytes)}  # fmt: skip
    assert made.keys() == {"README.md", "agentgrpo_config.toml", "curve.svg", "config.json",
                           "tokenizer_config.json"}  # fmt: skip
    for name, text in made.items():
        assert str(tmp_path) not in text, name
        assert "nobody-knows" not in text, name
    config = tomllib.loads(made["agentgrpo_config.toml"])
    assert config["model"] == "base"
    assert config["data"]["train"] == "rows.jsonl"
    assert config["env"]["options"] == {
        "command": ["python", "serve.py"], "url": "https://host/x", "text": "look into ./work",
        "max_tokens": 7,
    }  # fmt: skip
    assert "Left out: `env.options.api_key`, `env.options.env`, `sandbox.env`." in made["README.md"]
    assert json.loads(made["config.json"])["_name_or_path"] == "base"
    monkeypatch.setenv("A_SECRET", "look into ./work")
    assert push.main([str(run), "me/model", "--dry-run"]) == 2
    line = said(capsys)
    assert line == "error: README.md would tell the value of $A_SECRET: nothing was uploaded"


def test_an_adapter_names_its_base_as_the_hub_does(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", "model=org/base", "learner.lora.rank=8", adapter=True)
    files = push.prepared(run, "me/model").files
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps({k: v for k, v in about.items() if k != "base"}))
    assert push.prepared(run, "me/model").files == files  # as a run of an earlier version has it
    table = files[ADAPTER_CONFIG]
    card = files["README.md"]
    assert isinstance(table, bytes)
    assert isinstance(card, bytes)
    assert json.loads(table) == {"base_model_name_or_path": "org/base", "r": 8}
    assert 'base_model: "org/base"' in card.decode()
    assert "AutoPeftModelForCausalLM" in card.decode()


def broken(run: Path, how: str) -> None:
    newest = run / "checkpoints" / "step_000004"
    metrics = run / "metrics.jsonl"
    if how == "edited":
        metrics.write_text(metrics.read_text().replace("0.75", "0.99"))
    elif how == "nan":
        log = RunLog(run)
        log.write(3, learner={"loss": float("nan")})
    elif how == "short":
        (newest / "model.safetensors").write_bytes(b"\0" * 100)
    elif how == "flipped":
        whole = bytearray((newest / "model.safetensors").read_bytes())
        whole[len(whole) // 2] ^= 1
        (newest / "model.safetensors").write_bytes(whole)
    elif how == "ahead":
        newest.rename(newest.with_name("step_000009"))
    elif how == "none":
        for folder in (run / "checkpoints").iterdir():
            folder.rename(run / f"gone_{folder.name}")
    elif how == "no run":
        (run / "run.json").unlink()
    else:
        (run / "run.json").write_text("{}")


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("edited", "metrics.jsonl:5: does not follow the line before it"),
        ("nan", "step 3: learner/loss is nan: the run is broken"),
        ("short", "--checkpoint STEP chooses another"),
        ("flipped", "model.safetensors: is not as it was written"),
        ("ahead", "metrics.jsonl ends before step 9"),
        ("none", "no checkpoint was saved"),
        ("no run", "no run.json, so this is not a run's folder"),
        ("empty", "run.json: not the description of a run"),
    ],
)
def test_broken_runs_are_refused(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    broken(run, how)
    assert push.main([str(run), "me/model"]) == 2
    assert message in said(capsys)
    assert not hub.files


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["me/model", "--checkpoint", "3"], "expected last, best or a step, got '3'; "),
        (["a/b/c"], "Repo id must be in the form"),
        (["me/mo del"], "Repo id must"),
    ],
)
def test_a_call_that_cannot_work_is_refused(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert push.main([str(run), *arguments]) == 2
    assert message in said(capsys)
    assert push.main([str(run / "nowhere"), "me/model"]) == 2
    assert said(capsys).endswith("nowhere: no such folder")
    assert not (run / "nowhere").exists()


@pytest.mark.parametrize(
    ("at", "status", "message"),
    [
        ("create", 401, "does not let this token write me/model (401): `hf auth login` or "),
        ("create", 403, "does not let this token write me/model (403): `hf auth login` or "),
        ("create", 500, " answered 500 to /api/repos/create: "),
        ("commit", 403, "(403): `hf auth login` or HF_TOKEN, with a token that may write; "
                        "the repository was made and is empty: --exist-ok goes on"),
        ("batch", 413, " answered 413 to /me/model.git/info/lfs/objects/batch: "),
    ],
)  # fmt: skip
def test_what_the_hub_refuses_is_one_line(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], at: str, status: int, message: str
) -> None:
    hub.refuses[at] = status
    assert push.main([str(run), "me/model"]) == 2
    line = said(capsys)
    assert line.startswith("error: ")
    assert message in line
    assert TOKEN not in line
    assert hub.commits == 0


def test_no_token_and_no_network_are_one_line(
    hub: Hub, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:  # fmt: skip
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    assert push.main([str(run), "me/model"]) == 2
    assert "does not let this token write me/model (401): `hf auth login`" in said(capsys)
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push.main([str(run), "me/model"]) == 2
    assert said(capsys).startswith("error: http://127.0.0.1:9 cannot be reached: ")


def test_a_run_that_is_under_way_is_not_published(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with locked(run):
        assert push.main([str(run), "me/model", "--dry-run"]) == 2
    assert said(capsys).endswith("is in use by another run")
