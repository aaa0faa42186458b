from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_cpr.cli import main
from lightning_cpr.errors import ConfigError
from lightning_cpr.report.render import report_command
from tests.unit.report.events import run_events


def write(root: Path, events: list[dict[str, Any]]) -> str:
    root.mkdir(exist_ok=True)
    (root / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return str(root)


def test_a_run_is_summed_up_drawn_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write(tmp_path / "root", run_events())
    page, plot = tmp_path / "new" / "report.html", tmp_path / "report.png"
    found = report_command(root, str(page), str(plot))
    assert found.saves == {"base": 2, "priority": 4, "delta": 4, "compaction": 1}
    assert found.written == {"base": 2_000_000, "priority": 400_000, "delta": 1_200_000, "compaction": 900_000}
    assert (found.failed, found.skipped, found.recoveries, found.pls) == (1, 1, 2, 0.05)
    assert found.stall == pytest.approx(10 * 0.02)
    assert (found.restore_seconds, found.replaced_seconds) == (3.0, 0.0)
    assert plot.read_bytes()[:4] == b"\x89PNG"
    text = page.read_text()
    assert "http" not in text
    assert "disk full &lt;here&gt;" in text
    assert "<here>" not in text
    shown = capsys.readouterr().out
    for words in ("2 base, 4 priority, 4 delta", "2 MB base", "1 skipped, 1 failed", "0.05", str(page)):
        assert words in shown


def test_the_time_until_all_train_again_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = run_events()
    joined = {
        "time": events[-1]["time"],
        "rank": 0,
        "event": "rejoined",
        "step": 7,
        "rendezvous_s": 7.9,
        "total_s": 8.26,
    }
    page = tmp_path / "report.html"
    found = report_command(write(tmp_path / "root", [*events, joined]), str(page))
    assert found.replaced_seconds == 8.26
    assert "8.26 s from a process's end until all trained again" in capsys.readouterr().out
    assert "rendezvous_s 7.9" in page.read_text()


def test_a_quiet_run(tmp_path: Path) -> None:
    first = run_events()[:1]
    found = report_command(write(tmp_path / "root", first), str(tmp_path / "report.html"))
    assert (found.saves, found.seconds, found.pls) == ({}, 0.0, 0.0)
    assert "None." in (tmp_path / "report.html").read_text()


def test_a_folder_without_events_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=r"no events\.jsonl"):
        report_command(str(tmp_path))
    assert main(["report", str(tmp_path)]) == 2
    assert "no events.jsonl" in capsys.readouterr().err
