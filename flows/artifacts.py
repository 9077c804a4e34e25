"""What shows a run in the Prefect UI while the work goes on, whether the server takes it or not."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar
from uuid import UUID

import httpx
from prefect.artifacts import create_table_artifact
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import ArtifactFilter
from prefect.exceptions import PrefectException

P = ParamSpec("P")
Shown = TypeVar("Shown")
Row = dict[str, Any]
log = logging.getLogger(__name__)

TABLE_EVERY_S = 20.0
PAGE_ROWS = 500
"""Rows of one table artifact; larger ones make the UI slow."""


def shown(call: Callable[P, Shown], *args: P.args, **kwargs: P.kwargs) -> Shown | None:
    """Return what `call`, a function that speaks to the Prefect server, returns; None where the server is
    away or refuses, which costs a warning in the log and never the work that was to be shown.
    """
    try:
        return call(*args, **kwargs)
    except (PrefectException, httpx.HTTPError) as error:
        log.warning("the Prefect UI misses something (%s): %s", call.__name__, error)
        return None


class Table:
    """A table of the current run that grows while the run goes on: an artifact for each `PAGE_ROWS` rows.

    Pages that have changed are sent every `TABLE_EVERY_S` seconds and when the `with` block ends, however it
    ends; so ten thousand rows cost little more than the sending of each page while it fills.
    """

    def __init__(self, key: str, description: str) -> None:
        self._key, self._description = key, description
        self._page_of: dict[int, int] = {}
        self._pages: list[dict[int, Row]] = []
        self._artifacts: dict[int, UUID] = {}
        self._changed: set[int] = set()
        self._sent_at = time.monotonic()

    def __enter__(self) -> Table:
        return self

    def __exit__(self, *exc: object) -> None:
        self.send()

    def put(self, number: int, row: Row) -> None:
        """Add a row, or replace the one of this number."""
        page = self._page_of.setdefault(number, len(self._page_of) // PAGE_ROWS)
        if page == len(self._pages):
            self._pages.append({})
        self._pages[page][number] = row
        self._changed.add(page)

    @property
    def due(self) -> bool:
        """Whether it is time to send."""
        return time.monotonic() - self._sent_at >= TABLE_EVERY_S

    def send(self) -> None:
        """Show what has changed; what the server does not take is tried again the next time."""
        for page in sorted(self._changed):
            if shown(self._send, page):
                self._changed.discard(page)
        self._sent_at = time.monotonic()

    def _send(self, page: int) -> bool:
        rows = [row for _, row in sorted(self._pages[page].items())]
        if artifact := self._artifacts.get(page):
            # The client's own `update_artifact` also emits each version as an event, which the server keeps.
            with get_client(sync_client=True) as client:
                client.request(
                    "PATCH", "/artifacts/{id}", path_params={"id": artifact}, json={"data": json.dumps(rows)}
                )
        else:
            number = f", page {page + 1}" if page else ""
            created: Any = create_table_artifact(rows, self._key, f"{self._description}{number}")
            self._artifacts[page] = created
        return True


def read_table(flow_run: UUID, key: str) -> list[Row]:
    """Return the rows of a `Table` that another flow run shows, as they were sent last."""
    wanted = {"flow_run_id": {"any_": [flow_run]}, "key": {"any_": [key]}}
    with get_client(sync_client=True) as client:
        pages = client.read_artifacts(artifact_filter=ArtifactFilter.model_validate(wanted))
    return [row for page in pages for row in json.loads(str(page.data))]
