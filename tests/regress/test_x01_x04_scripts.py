"""X01 (torchsnapshot#135), X04 (torchft#58), E06 (pytorch#76198): whole scripts under torchrun and Lightning's own
launcher, with either Lightning package, killed, restarted and continued; and the built wheel as a plugin.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_cpr.report.events import read_events
from lightning_cpr.store import Storage, list_versions

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("job_script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "1"]


def python(*arguments: str, timeout: float = 240, path: str = str(ROOT)) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("LIGHTNING_CPR_LIGHTNING", "PYTHONPATH")}
    env |= {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=env, timeout=timeout, capture_output=True, text=True, check=False, cwd="/"
    )


def trained(folder: Path, tag: str, rank: int) -> list[tuple[int, float]]:
    lines = (folder / f"{tag}-{rank}").read_text().splitlines()
    return [(int(line.split()[0]), float(line.split()[1])) for line in lines]


def test_x01_x04_a_script_is_killed_restarted_and_continued(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    for folder in (killed, whole):
        folder.mkdir()
    first = python(*TORCHRUN, str(SCRIPT), "pytorch_lightning", str(killed), "16", "killed")
    assert first.returncode == 0, first.stderr[-3000:]
    # The same folder, by Lightning's own launcher and the other package, for more steps.
    second = python(str(SCRIPT), "lightning", str(killed), "20", "more")
    assert second.returncode == 0, second.stderr[-3000:]
    reference = python(*TORCHRUN, str(SCRIPT), "lightning", str(whole), "20", "whole")
    assert reference.returncode == 0, reference.stderr[-3000:]

    storage = Storage(str(killed / "root"))
    events = read_events(storage)
    assert [(e["rank"], e["step"], e["point"]) for e in events if e["event"] == "fault"] == [(1, 13, "forward")]
    starts = [(e["step"], e["samples"]) for e in events if e["event"] == "run_started"]
    assert starts == [(0, 0), (10, 80), (16, 128)]
    for rank in range(2):
        expected = trained(whole, "whole-0", rank)
        assert [i for i, _ in expected] == list(range(20))
        # A rank may be killed before or after its 12th batch was noted; what it noted is right.
        before = trained(killed, "killed-0", rank)
        assert before == expected[: len(before)]
        assert len(before) in (12, 13)
        assert trained(killed, "killed-1", rank) == expected[10:16]
        assert trained(killed, "more-0", rank) == expected[16:]
    refs = list_versions(storage)
    assert (refs[0].epoch, refs[0].step) == (2, 20)
    assert len({ref.run_id for ref in refs}) == 1


def test_the_built_wheel_is_a_plugin_that_moves_nothing(tmp_path: Path) -> None:
    """Installed apart from everything else, it finds the torch, torchrec and Lightning that are there."""
    if subprocess.run([sys.executable, "-c", "import pip, hatchling"], capture_output=True).returncode:
        pytest.skip("pip and hatchling are needed to build a wheel without a network")
    build = ["-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT)]
    made = python(*build)
    assert made.returncode == 0, made.stderr[-3000:]
    (wheel,) = tmp_path.glob("*.whl")
    target = str(tmp_path / "site")
    versions = "from importlib.metadata import version as v; print([v(n) for n in ('torch', 'torchrec', 'lightning')])"
    before = python("-c", versions)
    put = python("-m", "pip", "install", "-q", "--no-deps", "--target", target, str(wheel))
    assert put.returncode == 0, put.stderr[-3000:]
    code = f"""
import lightning as L
import lightning_cpr
from importlib.metadata import requires
assert lightning_cpr.__file__.startswith({target!r}), lightning_cpr.__file__
assert lightning_cpr._lightning.PACKAGE == "lightning.pytorch"
trainer = L.Trainer(accelerator="cpu", devices=1, strategy="torchrec", logger=False, enable_checkpointing=False,
                    callbacks=[lightning_cpr.CPRCallback("x"), lightning_cpr.FaultInjector()])
print(type(trainer.strategy).__name__, type(trainer.strategy.checkpoint_io).__name__)
print(sorted(n for n in ("torch", "torchrec", "fbgemm", "lightning", "pytorch") if any(
    r.lower().startswith(n) for r in requires("lightning-cpr") if "extra ==" not in r)))
"""
    used = python("-c", code, path=target)
    assert used.returncode == 0, used.stderr[-3000:]
    assert used.stdout.splitlines() == ["TorchRecStrategy CPRCheckpointIO", "[]"]
    assert python("-c", versions).stdout == before.stdout
    command = python("-m", "lightning_cpr.cli", "--version", path=target)
    assert command.stdout.startswith("lightning-cpr ")
