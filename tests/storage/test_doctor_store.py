"""`dflash doctor --store` finds what would stop a run later."""

from __future__ import annotations

import pytest

from flows.doctor import object_store
from storage.objects import open_store
from tests.storage.faulty_proxy import Rule, faulty_proxy
from tests.storage.seaweed import SeaweedServer


def test_a_server_that_ignores_ranges_is_found(
    s3: SeaweedServer, s3_uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_proxy(s3.port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert [finding.state for finding in object_store(s3_uri)] == ["ok"]
        proxy.whole = lambda path: b"dflash doctor"
        proxy.rules = [Rule("ignore range", "GET", "doctor/", times=99)]
        (finding,) = object_store(s3_uri)
        assert finding.state == "broken" and "ignores ranges" in finding.what and finding.remedy
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    assert not list(open_store(s3_uri).list())
