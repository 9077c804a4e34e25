"""The doctor: it names what is wrong, and a store that is right is tried out for real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from flows.cli import app
from flows.doctor import differences, disks, examine, lines, object_store, prefect_api
from storage.dataset import Dataset
from storage.dataset_spec import software_versions


def test_stores_are_tried_out(tmp_path: Path, s3_uri: str) -> None:
    for uri in (str(tmp_path / "store"), s3_uri):
        assert [finding.state for finding in object_store(uri)] == ["ok"]
    assert not list(tmp_path.iterdir()), "what it made is gone"
    (tmp_path / "kept").mkdir()
    assert [finding.state for finding in object_store(str(tmp_path / "kept" / "new" / "store"))] == ["ok"]
    assert [path.name for path in tmp_path.rglob("*")] == ["kept"]
    (broken,) = object_store("ftp://nowhere")
    assert broken.state == "broken" and "ftp" in broken.what and broken.remedy


def test_versions_are_compared_with_a_run_and_a_data_set(tmp_path: Path, sealed: Dataset) -> None:
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"versions": {**software_versions(), "torch": "1.0"}}))
    found = {finding.name: finding for finding in differences(str(tmp_path))}
    assert found["torch"].state == "slow" and "1.0 there" in found["torch"].what
    assert found["torch"].remedy == "pip install 'torch==1.0'"
    assert found["numpy"].state == "ok"
    assert {finding.state for finding in differences(sealed.uri)} == {"ok"}
    report.write_text("{}")
    with pytest.raises(UserError, match="records no versions"):
        list(differences(str(report)))
    for text, words in (("", "is not JSON"), ("a: b", "is not JSON"), ("[]", "records no versions")):
        report.write_text(text)
        with pytest.raises(UserError, match=rf"report\.json {words}.*give a report\.json"):
            list(differences(str(report)))


def test_everything_that_is_not_well_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    findings = examine()
    assert {"python", "torch", "C compiler", "scratch"} <= {finding.name for finding in findings}
    assert all(finding.remedy for finding in findings if finding.state != "ok")
    assert len(list(lines(findings))) > len(findings)
    monkeypatch.setattr("flows.doctor.ROOM_BYTES", 1 << 60)
    assert all(finding.state == "slow" for finding in disks())
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        assert any(finding.state == "slow" and "dflash up" in finding.remedy for finding in prefect_api())


def test_what_is_broken_shows_in_the_exit_code() -> None:
    result = CliRunner().invoke(app, ["doctor", "--store", "ftp://nowhere"])
    assert result.exit_code == 1
    assert any(line.split()[:2] == ["broken", "store"] for line in result.output.splitlines())
