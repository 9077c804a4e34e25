"""The `dflash` command itself: numbers within bounds, and each error on a line of its own."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from dflash_core.configuration import UserError
from flows.cli import app, progress_line


@pytest.mark.parametrize(
    "command",
    [
        ["up", "--port", "0"],
        ["up", "--port", "65536"],
        ["up", "--limit", "0"],
        ["join", "--limit", "0"],
    ],
)
def test_ports_and_limits_have_bounds(command: list[str]) -> None:
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2 and f"Invalid value for '{command[1]}'" in result.output


def test_an_error_has_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError), progress_line() as show_progress:
        show_progress(0, None)
        show_progress(3, 8)
        raise UserError("no answer")
    assert capsys.readouterr().err == "\r0 of ?\r3 of 8\n"
    with progress_line():
        pass
    assert not capsys.readouterr().err
