from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser

from lightning_cpr.errors import ConfigError, DependencyError
from lightning_cpr.report.planning import plan_command, simulate_command
from lightning_cpr.units import human

RECIPES = sorted((Path(__file__).parents[3] / "recipes" / "simulate").glob("*.yaml"))


def test_the_plan_is_printed_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot, out = tmp_path / "new" / "plan.png", tmp_path / "plan.json"
    found = plan_command(total="56h", save="5.6min", plot=str(plot), json_out=str(out))
    shown = capsys.readouterr().out
    for text in ("full", "partial", "2.29 h", "44.8 h", "8.46", "0.506", "0.085"):
        assert text in shown
    assert plot.read_bytes()[:4] == b"\x89PNG"
    written = json.loads(out.read_text())
    assert written["mode"] == found.mode == "partial"
    assert written["options"][1]["interval"] == pytest.approx(44.8 * 3600)


def test_hosts_and_parity_enter_the_plan() -> None:
    found = plan_command(total="56h", save="5.6min", owners=8, owners_per_host=4, parity_upkeep=0.0001)
    assert found.option("partial").interval == pytest.approx(44.8 * 3600 / 4)
    assert found.mode == "parity"
    assert len(found.options) == 3


def test_the_commands_are_exposed_by_jsonargparse() -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(plan_command)
    parsed = parser.parse_args(["--mtbf=14h", "--target_pls=0.02"])
    assert (parsed.mtbf, parsed.target_pls) == ("14h", 0.02)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_function_arguments(simulate_command)
    assert parser.parse_args(["--config=a.yaml"]).out == "simulation"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_runs(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = simulate_command(str(recipe), str(tmp_path), runs=20)
    written = json.loads((tmp_path / "outcomes.json").read_text())
    assert [o["strategy"] for o in written] == [o.strategy for o in outcomes]
    assert written[0]["overhead_total"] == outcomes[0].overhead.total
    assert (tmp_path / "figure.png").read_bytes()[:4] == b"\x89PNG"
    shown = capsys.readouterr().out
    assert "closed" in shown
    assert all(o.strategy in shown for o in outcomes)


def test_without_matplotlib_the_extra_is_named_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(DependencyError, match=r"lightning-cpr\[report\]"):
        simulate_command(str(RECIPES[0]), str(tmp_path), runs=5)
    assert list(tmp_path.iterdir()) == []
    assert simulate_command(str(RECIPES[0]), str(tmp_path), runs=5, figure=False)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    for options in (
        {"mtbf": "0h"},
        {"target_pls": 0.0},
        {"owners": 0},
        {"total": "-1h"},
        {"plot": f"{tmp_path}/a.txt2"},
    ):
        with pytest.raises(ConfigError):
            plan_command(**options)  # type: ignore[arg-type]


def test_durations_read_well() -> None:
    assert [human(x) for x in (0.5, 90, 8230, 44.8 * 3600, 10 * 86400)] == [
        "0.5 s",
        "1.5 min",
        "2.29 h",
        "44.8 h",
        "10 d",
    ]
