from __future__ import annotations

import json
from typing import Any, Literal

import pytest

from lightning_cpr import cli
from lightning_cpr.job.arguments import parser, run

seen: dict[str, Any] = {}


def command(
    root: str,
    to: Literal["a", "b"] = "a",
    keep_last: int | None = None,
    every: float = 2.5,
    dry_run: bool = False,
    figure: bool = True,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Do it.

    More about it.

    Args:
        root: Where; 100 % of it.
        keep_last: How many,
            over two lines.
    """
    seen.update(locals())
    return 1 if dry_run else 0


def test_every_kind_of_parameter() -> None:
    args = ["r", "--to", "b", "--keep-last", "3", "--dry-run", "--no-figure", "--storage-options", '{"anon": true}']
    assert run(command, "x", args) == 1
    assert seen == {"root": "r", "to": "b", "keep_last": 3, "every": 2.5, "dry_run": True, "figure": False,
                    "storage_options": {"anon": True}}  # fmt: skip
    assert run(command, "x", ["r"]) == 0
    assert seen["keep_last"] is None
    assert seen["figure"]


def test_help_comes_from_the_docstring() -> None:
    text = parser(command, "x").format_help()
    assert "Do it.\n\nMore about it." in text
    assert "Where; 100 % of it." in text
    assert "How many, over two lines." in text
    assert "(default: 2.5)" in text


@pytest.mark.parametrize("given", ['["secret-value"]', "{secret-value", '"secret-value"'])
def test_bad_options_are_refused_without_repeating_them(given: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        run(command, "x", ["r", "--storage-options", given])
    assert info.value.code == 2
    error = capsys.readouterr().err
    assert "not a JSON object" in error
    assert "secret-value" not in error


def test_every_command_has_help_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    usage = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"\n  {name} " in usage
        with pytest.raises(SystemExit) as info:
            cli.main([name, "--help"])
        assert info.value.code == 0
        assert f"usage: lightning-cpr {name} " in capsys.readouterr().out


def test_plan_runs_and_errors_take_one_line(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--total", "30d", "--json-out", f"{tmp_path}/plan.json"]) == 0
    assert json.loads((tmp_path / "plan.json").read_text())["mode"] == "partial"
    capsys.readouterr()
    assert cli.main(["plan", "--target-pls", "3"]) == 2
    assert capsys.readouterr().err == "lightning-cpr plan: target_pls=3.0: must lie in (0, 1]\n"
    assert cli.main(["simulate", f"{tmp_path}/none.yaml"]) == 2
    assert cli.main(["nonsense"]) == 2
    assert "no command 'nonsense'" in capsys.readouterr().err
