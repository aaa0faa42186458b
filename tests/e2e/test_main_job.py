"""The main job as a user runs it: the demo, and a recipe through ``lightning-cpr fit``."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cpr.store.find import find_version

ROOT = Path(__file__).parents[2]


def run(*command: str, cwd: Path = ROOT, timeout: float = 300) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT), "COLUMNS": "140"}
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_demo() -> None:
    text = run("-m", "recipes.demo", timeout=880)
    assert "rank 1: shards overwritten with garbage" in text
    assert "rank 1: process killed (SIGKILL)" in text
    assert text.count("2760 rows restored from step") == 2
    aucs = [float(x) for x in re.findall(r"│ +(0\.\d{4}) │", text)]
    assert len(aucs) >= 3
    assert min(aucs[:1]) > 0.7
    differences = [float(x) for x in re.findall(r"│ +([+-]0\.\d{4}) │", text)]
    assert len(differences) == 3
    assert max(abs(x) for x in differences) < 0.01


@pytest.mark.slow
def test_a_recipe_through_the_command_line(tmp_path: Path) -> None:
    config = tmp_path / "callbacks.yaml"
    config.write_text(
        f"""
trainer:
  default_root_dir: {tmp_path}
  max_steps: 30
  limit_val_batches: 2
  enable_progress_bar: false
  callbacks:
    - class_path: lightning_cpr.CPRCallback
      init_args: {{root: {tmp_path}/root, save_every_n_steps: 10}}
    - class_path: lightning_cpr.FaultInjector
      init_args: {{faults: [{{kind: wipe, rank: 1, step: 15}}]}}
"""
    )
    run("-m", "lightning_cpr.cli", "fit", "--config", "recipes/movielens.yaml", "--config", str(config))
    version = find_version(str(tmp_path / "root"))
    assert version.manifest.step == 30
    assert len(version.manifest.tables) == 9
    events = (tmp_path / "root" / "events.jsonl").read_text()
    assert events.count('"event":"recovery"') == 1
    text = run("-m", "lightning_cpr.cli", "inspect", str(tmp_path / "root"))
    assert "30" in text
    run("-m", "lightning_cpr.cli", "verify", str(tmp_path / "root"))
