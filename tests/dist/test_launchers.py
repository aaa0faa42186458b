"""Both Lightning packages, under torchrun and under Lightning's own launcher."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("_train_script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run_python(*arguments: str, timeout: float = 120, **extra: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "LIGHTNING_CPR_LIGHTNING"}
    env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | extra
    return subprocess.run(
        [sys.executable, *arguments], env=env, timeout=timeout, capture_output=True, text=True, check=False
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "launcher"), [("lightning", []), ("pytorch_lightning", TORCHRUN)], ids=["own launcher", "torchrun"]
)
def test_a_script_trains(package: str, launcher: list[str]) -> None:
    done = run_python(*launcher, str(SCRIPT), package)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"base"')))
    module = "lightning.pytorch" if package == "lightning" else "pytorch_lightning"
    assert result["base"].startswith(f"{module}.strategies")
    assert [r[0] for r in result["ranks"]] == [0, 1]
    assert all(r[1].startswith(module) for r in result["ranks"])
    assert all(len(r[2]) == 3 for r in result["ranks"])
    assert all(r[3] for r in result["ranks"])


def test_the_other_packages_trainer_is_told_in_one_sentence() -> None:
    code = """
import pytorch_lightning, lightning as L
import lightning_cpr
from lightning_cpr.errors import ConfigError
try:
    L.Trainer(accelerator="cpu", devices=1, strategy="torchrec", logger=False, enable_checkpointing=False)
except ConfigError as error:
    print("told:", error)
from lightning_cpr._lightning import PACKAGE, check_trainer
try:
    check_trainer(L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False))
except ConfigError as error:
    print("told:", error)
print("built on", PACKAGE)
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr[-3000:]
    told = [line for line in done.stdout.splitlines() if line.startswith("told:")]
    assert len(told) == 2
    for line in told:
        assert "lightning.pytorch's Trainer" in line
        assert "import lightning before lightning_cpr" in line
    assert "built on pytorch_lightning" in done.stdout


@pytest.mark.parametrize(
    ("before", "override", "expected"),
    [
        ("import lightning", "", "lightning.pytorch"),
        ("import lightning", "pytorch_lightning", "pytorch_lightning"),
    ],
)
def test_the_package_follows_what_is_loaded(before: str, override: str, expected: str) -> None:
    code = f"""
{before}
import sys
import lightning_cpr
from lightning_cpr._lightning import PACKAGE
from importlib import import_module
registry = import_module(PACKAGE + ".strategies").StrategyRegistry
print(PACKAGE, "torchrec" in registry, "torchrec" in sys.modules)
"""
    extra = {"LIGHTNING_CPR_LIGHTNING": override} if override else {}
    done = run_python("-c", code, **extra)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [expected, "True", "False"]
