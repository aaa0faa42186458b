from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lightning_cpr.errors import ConfigError
from lightning_cpr.recovery import guardian, launch
from lightning_cpr.recovery.child import imports_of
from lightning_cpr.recovery.guardian import EXIT_STEP_DOWN, Budget, judge, note_user_error, user_error_before

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    ("returncode", "act", "code", "own"),
    [
        (0, "end", 0, False),
        (-signal.SIGKILL, "replace", 0, False),
        (-signal.SIGSEGV, "replace", 0, False),
        (-signal.SIGTERM, "end", 143, False),
        (1, "end", 1, True),
        (143, "end", 143, False),
        (255, "end", 255, True),  # sys.exit(-1)
        (128, "end", 128, True),
        (-40, "end", 168, False),
        (EXIT_STEP_DOWN, "end", EXIT_STEP_DOWN, False),
    ],
)
def test_only_a_signal_is_a_lost_peer(returncode: int, act: str, code: int, own: bool) -> None:
    verdict = judge(returncode, [], now=0.0, budget=Budget())
    assert (verdict.act, verdict.code, verdict.own_error) == (act, code, own)


def test_the_budget_counts_what_lies_in_the_window() -> None:
    budget = Budget(replacements=2, window=100.0)
    assert judge(-9, [0.0, 950.0], now=1000.0, budget=budget).act == "replace"
    spent = judge(-9, [920.0, 950.0], now=1000.0, budget=budget)
    assert (spent.act, spent.code) == ("end", EXIT_STEP_DOWN)
    assert "budget" in spent.reason


def test_nobody_replaces_a_trainer_that_has_not_met_the_others() -> None:
    verdict = judge(-9, [], now=0.0, budget=Budget(), started=False)
    assert (verdict.act, verdict.code) == ("end", EXIT_STEP_DOWN)
    assert "while the job started" in verdict.reason


def test_the_first_note_of_a_user_error_stands_and_restores_torchruns_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert user_error_before(None) is None
    assert user_error_before(str(tmp_path)) is None
    note_user_error(str(tmp_path), 1, "ValueError: x", 3, report='{"message": "x"}')
    note_user_error(str(tmp_path), 0, "an echo", 1)
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    assert user_error_before(str(tmp_path)) == 3
    assert json.loads(report.read_text()) == {"message": "x"}


def test_imports_of_a_script() -> None:
    source = "import a.b\nfrom c import d\nfrom . import e\nif True:\n    import f\ndef g():\n    import h\n"
    assert imports_of(source) == ["a.b", "c"]


def test_a_job_runs_with_huge_pages_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("torch.distributed.run.run", lambda options: seen.append(os.environ["THP_MEM_ALLOC_ENABLE"]))
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    launch.run([__file__])
    assert "THP_MEM_ALLOC_ENABLE" not in os.environ
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    launch.run([__file__])
    assert seen == ["1", "0"]


def test_torchruns_options_and_ours_share_one_command_line() -> None:
    options = launch.make_parser().parse_args(["--nproc-per-node=2", "--spares=0", "train.py", "--spares", "7"])
    assert (options.nproc_per_node, options.spares, options.max_restarts) == ("2", 0, launch.DEFAULT_MAX_RESTARTS)
    assert (options.training_script, options.training_script_args) == ("train.py", ["--spares", "7"])
    with pytest.raises(ConfigError, match="--no-python"):
        launch.run(["--no-python", "train.sh"])


SCRIPT = """
import os, pathlib, sys, time
out = pathlib.Path(sys.argv[1])
(out / f"pid-{os.getpid()}").touch()
time.sleep(60)
"""


def start(tmp_path: Path, text: str = SCRIPT) -> subprocess.Popen[str]:
    script = tmp_path / "script.py"
    script.write_text(text)
    (tmp_path / "out").mkdir()
    env = os.environ | {"RANK": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, guardian.__file__, "--spares=0", str(script), str(tmp_path / "out")]
    return subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, start_new_session=True)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_dies_with_its_guardian(tmp_path: Path, how: signal.Signals) -> None:
    process = start(tmp_path)
    wait_until(lambda: list((tmp_path / "out").glob("pid-*")))
    (pid,) = (int(p.name[4:]) for p in (tmp_path / "out").glob("pid-*"))
    process.send_signal(how)
    _, stderr = process.communicate(timeout=20)
    wait_until(lambda: not alive(pid))
    if how == signal.SIGTERM:
        assert process.returncode == 143
        assert "SIGTERM, passed on" in stderr


@pytest.mark.parametrize(("last", "code"), [("", 0), ("sys.exit(3)", 3), ("sys.exit('no')", 1)])
def test_an_abort_on_the_way_out_is_no_death(tmp_path: Path, last: str, code: int) -> None:
    """Libraries abort the interpreter as it ends; a trainer whose script is over is not replaced for it."""
    process = start(tmp_path, f"import atexit, os, sys\natexit.register(os.abort)\n{last}\n")
    _, stderr = process.communicate(timeout=60)
    assert "after its script had ended" in stderr
    assert "takes over" not in stderr
    assert process.returncode == code


def test_a_trainer_that_is_killed_before_it_has_met_the_others_steps_down(tmp_path: Path) -> None:
    process = start(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)\n")
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == EXIT_STEP_DOWN
    assert "while the job started" in stderr
    assert "takes over" not in stderr
