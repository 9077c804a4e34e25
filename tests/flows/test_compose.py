"""docker-compose.yml: pinned, healthy, without a secret, and what the Compose specification allows."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docker-compose.yml").read_text()
EXAMPLE = dict(
    line.split("=", 1)
    for line in (ROOT / ".env.example").read_text().splitlines()
    if line and not line.startswith("#")
)


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return yaml.safe_load(TEXT)["services"]


def test_images_are_pinned(services: dict[str, dict[str, Any]]) -> None:
    for name, service in services.items():
        tag = service["image"].rpartition(":")[2]
        assert re.search(r"\d+\.\d+", tag) and "latest" not in tag, name


def test_services_are_watched_and_wait_for_one_another(services: dict[str, dict[str, Any]]) -> None:
    lasting = {name for name, service in services.items() if "restart" in service}
    assert lasting == {"postgres", "prefect", "s3", "worker", "worker-cpu"}
    for name in lasting:
        assert "healthcheck" in services[name], name
    for name in ("worker", "worker-cpu"):
        conditions = {need: how["condition"] for need, how in services[name]["depends_on"].items()}
        assert conditions == {"prefect": "service_healthy", "s3": "service_healthy"}
    devices = services["worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}]


def test_ports_are_published_on_this_machine_alone(services: dict[str, dict[str, Any]]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)


def test_no_secret_is_shipped_and_none_is_forgotten() -> None:
    variables = dict(re.findall(r"\$\{(\w+)(:[?-][^}]*)?\}", TEXT))
    assert set(variables) == set(EXAMPLE)
    for name, rest in variables.items():
        if name.endswith(("PASSWORD", "KEY")):
            assert rest.startswith(":?"), f"{name} must have no default"
            assert EXAMPLE[name] == ""
    assert not re.search(r"(PASSWORD|KEY|KEY_ID|TOKEN): (?!\$\{)", TEXT)


def test_the_compose_specification_allows_it() -> None:
    pytest.importorskip("check_jsonschema", reason="pip install check-jsonschema: it carries the schema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*command, str(ROOT / "docker-compose.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
