"""Wrong usage of ``lightning-cpr`` and wrong arguments: one line that names the remedy, status 2, no traceback."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from lightning_cpr import CPRCallback, cli
from lightning_cpr.errors import ConfigError
from lightning_cpr.recovery import launch

CONFIG = """
seed_everything: false
trainer:
  logger: false
  callbacks:
    - class_path: lightning_cpr.CPRCallback
      init_args: {root: somewhere, %s}
model: {class_path: pytorch_lightning.demos.boring_classes.BoringModel}
"""


def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fitt"]) == 2
    assert capsys.readouterr().err == "lightning-cpr: no command 'fitt'; lightning-cpr --help lists them\n"


def test_an_output_that_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "--total", "10d", "--mtbf", "28h", "--owners", "8", "--save", "5s", "--json-out", str(tmp_path)]
    assert cli.main(given) == 2
    assert capsys.readouterr().err == f"lightning-cpr plan: {tmp_path}: Is a directory\n"


def test_a_missing_script_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--nproc-per-node", "2", "none.py", "--lr", "1"]) == 2
    assert capsys.readouterr().err == "lightning-cpr run: no script 'none.py'; a module is named with -m\n"


def test_a_missing_module_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job").mkdir()
    (tmp_path / "job/__init__.py").write_text("raise AssertionError('imported by the launcher')")
    (tmp_path / "job/train.py").touch()
    for name in ("nomodule", "job", "job.eval", "job.train.more", "json.nothing", ".job"):
        assert cli.main(["run", "-m", name, "--lr", "1"]) == 2
        said = f"lightning-cpr run: no module {name!r} to run; a script is named without -m\n"
        assert capsys.readouterr().err == said
    started: list[str] = []
    monkeypatch.setattr(torchrun, "run", lambda options: started.append(options.training_script_args[-1]))
    for name in ("job.train", "json.tool", "unittest"):
        assert cli.main(["run", "-m", name]) == 0
    (tmp_path / "job/__main__.py").touch()
    assert cli.main(["run", "-m", "job"]) == 0
    assert started == ["job.train", "json.tool", "unittest", "job"]


@pytest.mark.parametrize(("exitcode", "code"), [(143, 143), (1, 1), (-9, 1)])
def test_a_preempted_job_ends_with_143(exitcode: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(args: object) -> None:
        if exitcode == 143:
            raise SignalException("asked to end", signal.SIGTERM)
        fail(args)

    def fail(args: object) -> None:
        raise ChildFailedError("job", {0: ProcessFailure(0, 7, exitcode, "")})

    for run in (end, fail):
        monkeypatch.setattr(launch, "run", run)
        assert cli.main(["run", "script.py"]) == code


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("save_every_n_steps: 0", "save_every_n_steps=0: must be a whole number, 1 or more"),
        ("target_pls: 2", "target_pls=2.0: must lie in (0, 1]"),
        ("parity: {k: 4, m: 3}", "ParityConfig(m=3): allowed are whole numbers from 1 to 2"),
    ],
)
def test_what_the_callback_refuses_is_one_line_from_a_config(
    argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG % argument)
    assert cli.main(["fit", "--config", str(config)]) == 2
    assert capsys.readouterr().err == f"lightning-cpr fit: {message}\n"


@pytest.mark.filterwarnings("ignore:LightningCLI's args parameter")
def test_a_missing_config_is_no_list_of_all_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["fit", "--config", "none.yaml"])
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("usage: lightning-cpr fit [--config FILE] [options]\n")
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"root": ""}, "root=''"),
        ({"root": None}, "root=None"),
        ({"save_every_n_steps": 1.5}, "save_every_n_steps=1.5"),
        ({"save_every_n_steps": "10"}, "save_every_n_steps='10'"),
        ({"save_every_n_steps": True}, "save_every_n_steps=True"),
        ({"save_interval": 0}, "save_interval=0"),
        ({"target_pls": "a"}, "target_pls='a'"),
    ],
)
def test_arguments_are_refused_by_their_own_names(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        CPRCallback(**{"root": "somewhere", **arguments})
    assert str(refused.value).startswith(message)


def test_a_path_is_a_root() -> None:
    assert CPRCallback(Path("a/b")).root == "a/b"
    assert CPRCallback("/").root == "/"
