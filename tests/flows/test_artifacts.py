"""Tables of the Prefect UI, on a real server: while a run goes on, when it is interrupted, and many rows."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.sorting import ArtifactSort
from prefect.runtime import flow_run
from prefect.settings import PREFECT_API_URL, PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.artifacts import PAGE_ROWS, Table, read_table
from flows.config import ExtractConfig
from flows.extract_plan import plan_dataset
from tests.storage.faulty_proxy import Rule, faulty_proxy

pytestmark = pytest.mark.usefixtures("prefect")
MakeConfig = Callable[..., ExtractConfig]


def pages_of(run: UUID, key: str) -> list[list[dict[str, Any]]]:
    wanted = {"flow_run_id": {"any_": [run]}, "key": {"any_": [key]}}
    with get_client(sync_client=True) as client:
        found = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    return [json.loads(str(page.data)) for page in found]


def test_a_table_is_sent_page_by_page_and_what_it_holds_when_it_ends_whichever_way() -> None:
    rows = {number: {"number": number, "state": "done"} for number in range(PAGE_ROWS + 3)}

    @flow
    def show() -> None:
        runs.append(UUID(flow_run.id))
        with Table("many", "Many rows") as table:
            for number in reversed(rows):
                table.put(number, {"number": number, "state": "waiting"})
            table.send()
            assert len(read_table(runs[0], "many")) == len(rows)
            for number, row in rows.items():
                table.put(number, row)
            raise KeyboardInterrupt

    runs: list[UUID] = []
    with pytest.raises(KeyboardInterrupt):
        show()
    pages = sorted(pages_of(runs[0], "many"), key=len)
    assert [len(page) for page in pages] == [3, PAGE_ROWS]
    assert pages == [[rows[0], rows[1], rows[2]], [rows[number] for number in range(3, PAGE_ROWS + 3)]]
    assert sorted(read_table(runs[0], "many"), key=lambda row: row["number"]) == list(rows.values())


def test_the_table_of_shards_grows_while_they_are_captured(
    extract_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flows.extract import extract_hidden_states

    monkeypatch.setattr("flows.artifacts.TABLE_EVERY_S", 0.0)
    config = extract_config(shard_tokens=100, shards_per_child=10, codec="lossless")
    planned = len(plan_dataset(config).plan.shards)
    assert 10 < planned < 20
    seen: dict[str, set[int]] = {"shards": set(), "child-runs": set()}
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.05):
            for key, counts in seen.items():
                with get_client(sync_client=True) as client:
                    (newest,) = client.read_artifacts(
                        artifact_filter=ArtifactFilter.model_validate({"key": {"any_": [key]}}),
                        sort="CREATED_DESC",
                        limit=1,
                    ) or [None]
                if newest is not None and newest.id not in before:
                    rows = json.loads(str(newest.data))
                    counts.add(len(rows) if key == "shards" else sum(row["done"] for row in rows))

    with get_client(sync_client=True) as client:
        newest_first = client.read_artifacts(sort=ArtifactSort.CREATED_DESC, limit=200)
    before = {artifact.id for artifact in newest_first}
    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        state = extract_hidden_states(config, return_state=True)
    finally:
        over.set()
        watcher.join()
    assert state.is_completed()
    assert any(0 < count < planned - 10 for count in seen["shards"]), seen
    assert any(0 < count < 10 for count in seen["child-runs"]), seen


def test_a_table_that_the_server_refuses_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    port = urlsplit(PREFECT_API_URL.value() or "").port
    assert port is not None
    held: list[list[dict[str, Any]]] = []

    @flow
    def show() -> None:
        run = UUID(flow_run.id)
        with Table("refused", "Sent twice") as table:
            for refusal in (
                Rule("refuse", "POST", "/api/artifacts"),
                Rule("refuse", "PATCH", "/api/artifacts"),
            ):
                proxy.rules = [refusal]
                table.put(0, {"refused": refusal.method})
                table.send()
                held.append(read_table(run, "refused"))
                table.send()
                held.append(read_table(run, "refused"))

    with faulty_proxy(port) as proxy:
        relay: Any = proxy.RequestHandlerClass
        monkeypatch.setattr(relay, "do_PATCH", relay.do_GET, raising=False)
        settings = {PREFECT_API_URL: f"{proxy.endpoint}/api", PREFECT_CLIENT_MAX_RETRIES: 0}
        with temporary_settings(settings):
            show()
    assert held == [[], [{"refused": "POST"}], [{"refused": "POST"}], [{"refused": "PATCH"}]]
