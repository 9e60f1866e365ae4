"""`agentgrpo push` against a fake hub: uploaded files, excluded settings, refusals.

The fake hub answers the requests of huggingface_hub, checks the token, the hashes and that large
files arrive before the commit, and stores the committed files.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import re
import threading
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import numpy as np
import pytest
from safetensors.numpy import load, save_file

from agentgrpo.inspect import push
from agentgrpo.models.models import ADAPTER_CONFIG, ADAPTER_TENSORS
from agentgrpo.records import checkpoint
from agentgrpo.records.metrics import RunLog
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
    """The part of the hub's HTTP API that a push uses."""

    server: Hub

    def log_message(self, *_: Any) -> None:
        """No log on stderr."""

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
        if match := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            return self.commit(match[1], [json.loads(line) for line in sent.splitlines()])
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
    log.write_run_json(
        config=config.model_dump(mode="json"),
        base=config.model,
        model=str(folder / "cache" / "m"),
        engine={"device": "cpu", "dtype": "float32"},
        learner={"weights": "shared", "trained_parameters": 6000},
        versions={"agentgrpo": "0.1.0", "torch": "2.13.0"},
    )

    def save(place: Path) -> None:
        name = {"base_model_name_or_path": str(folder / "cache" / "m"), "r": 8}
        configs = {ADAPTER_CONFIG: name} if adapter else {"config.json": {"_name_or_path": "/x/m"}}
        for file, value in {**configs, "tokenizer_config.json": {}}.items():
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


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of the error."""
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_push_uploads_all_files_to_private_repository(hub: Hub, run: Path) -> None:
    assert push.main([str(run), "me/model"]) == 0
    files = hub.files["me/model"]
    assert files.keys() == {
        "README.md", "config.json", "tokenizer_config.json", "model.safetensors"
    }  # fmt: skip
    np.testing.assert_array_equal(load(files["model.safetensors"])["lm_head.weight"],
                                  WEIGHTS["lm_head.weight"])  # fmt: skip
    assert (hub.private, hub.commits) == ({"me/model": True}, 1)


def test_public_and_exist_ok_flags(hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert push.main([str(run), "model", "--public"]) == 0
    assert hub.private == {"me/model": False}
    assert capsys.readouterr().out.endswith(f"{hub.address}/me/model/commit/{40 * '0'}\n")
    assert push.main([str(run), "me/model"]) == 2
    assert error_line(capsys).endswith("for an existing repository: --exist-ok")
    assert hub.commits == 1
    assert push.main([str(run), "me/model", "--exist-ok", "--checkpoint", "2"]) == 0
    assert hub.commits == 2
    assert "step 2 of 4" in hub.files["me/model"]["README.md"].decode()


def test_card_has_results_settings_and_versions(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert push.main([str(run), "me/model", "--dry-run"]) == 0
    card = capsys.readouterr().out
    assert card.endswith("nothing was uploaded\n")
    assert not hub.files
    for line in ("| 0 | 0.25 | 0.35 |", "| 4 | 0.5 | 0.6 |", "library_name: transformers"):
        assert line in card.splitlines(), card
    assert "torch 2.13.0" in card
    settings = tomllib.loads(card.split("````toml\n")[1].split("````")[0])
    assert settings == {"steps": 4, "seed": 0, "data": {"heldout": "rows.jsonl"}}
    assert push.main([str(run), "me/model", "--dry-run", "--checkpoint", "best"]) == 0
    best = capsys.readouterr().out
    assert "step 2 of 4" in best
    assert "| 4 |" not in best, "later"


def test_card_omits_paths_and_secrets(tmp_path: Path) -> None:
    """Addresses, keys and values of environment variables may hold secrets."""
    run = write_run(
        tmp_path / "one", f"model={tmp_path}/models/base", f"data.train={tmp_path}/rows.jsonl",
        'endpoints.judge={ kind = "http", model = "m", url = "http://me:hidden@host/v1" }',
        "env.kind=mcp", f'env.options={{ command = "{tmp_path}/serve", env = {{ K = "hidden" }} }}',
        'agent.options={ system_prompt = "Be `brief`.", headers = { K = "hidden" } }',
        'sandbox.env={ WHO = "hidden" }', "loss.epsilon_high=0.3",
    )  # fmt: skip
    _, files = push.collect_files(run, "me/model")
    texts = {name: text.decode() for name, text in files.items() if isinstance(text, bytes)}
    assert texts.keys() == {"README.md", "config.json", "tokenizer_config.json"}
    for name, text in texts.items():
        assert str(tmp_path) not in text, name
        assert "hidden" not in text, name
    settings = tomllib.loads(texts["README.md"].split("````toml\n")[1].split("````")[0])
    assert settings["agent"] == {"options": {"system_prompt": "Be `brief`."}}
    assert (settings["env"], settings["loss"]) == ({"kind": "mcp"}, {"epsilon_high": 0.3})
    assert settings["data"]["train"] == "rows.jsonl"
    assert json.loads(texts["config.json"])["_name_or_path"] == "base"


def test_adapter_names_base_model_of_the_hub(tmp_path: Path) -> None:
    run = write_run(tmp_path / "one", "model=org/base", "learner.lora.rank=8", adapter=True)
    _, files = push.collect_files(run, "me/model")
    table, card = files[ADAPTER_CONFIG], files["README.md"]
    assert isinstance(table, bytes)
    assert isinstance(card, bytes)
    assert json.loads(table) == {"base_model_name_or_path": "org/base", "r": 8}
    assert "base_model: org/base\nlibrary_name: peft" in card.decode()


def broken(run: Path, how: str) -> None:
    newest = run / "checkpoints" / "step_000004"
    metrics = run / "metrics.jsonl"
    if how == "edited":
        metrics.write_text(metrics.read_text().replace("0.75", "0.99"))
    elif how == "short":
        (newest / "model.safetensors").write_bytes(b"\0" * 100)
    elif how == "none":
        for folder in (run / "checkpoints").iterdir():
            folder.rename(run / f"gone_{folder.name}")
    else:
        (run / "run.json").unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("edited", "metrics.jsonl:5: previous_hash is not that of the line before"),
        ("short", "choose another one with --checkpoint STEP"),
        ("none", "has checkpoints of steps (none)"),
        ("no run", "no run.json, so this is not a run's folder"),
    ],
)
def test_broken_runs_are_refused(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], how: str, message: str
) -> None:
    broken(run, how)
    assert push.main([str(run), "me/model"]) == 2
    assert message in error_line(capsys)
    assert not hub.files


@pytest.mark.parametrize(("at", "status"), [("create", 401), ("create", 500), ("commit", 403)])
def test_refusal_of_the_hub_is_one_line(
    hub: Hub, run: Path, capsys: pytest.CaptureFixture[str], at: str, status: int
) -> None:
    hub.refuses[at] = status
    assert push.main([str(run), "me/model"]) == 2
    line = error_line(capsys)
    assert line.startswith(f"error: {hub.address}: ")
    assert str(status) in line
    assert "`hf auth login`" in line
    assert TOKEN not in line
    assert hub.commits == 0


def test_no_network_is_one_line(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    assert push.main([str(run), "me/model", "--checkpoint", "2"]) == 2
    assert error_line(capsys).startswith("error: http://127.0.0.1:9: ")
