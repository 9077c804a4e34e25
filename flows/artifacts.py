"""Calls that show a run in the Prefect UI: the work goes on where one fails."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import httpx
from prefect.exceptions import PrefectException

P = ParamSpec("P")
Shown = TypeVar("Shown")
log = logging.getLogger(__name__)


def shown(call: Callable[P, Shown], *args: P.args, **kwargs: P.kwargs) -> Shown | None:
    """Return what `call`, a function of `flows.report`, returns; None where the server is away or refuses,
    which costs a warning in the log and never the work that was to be shown.
    """
    try:
        return call(*args, **kwargs)
    except (PrefectException, httpx.HTTPError) as error:
        log.warning("the Prefect UI misses something (%s): %s", call.__name__, error)
        return None
