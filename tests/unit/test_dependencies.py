"""Missing or mismatched libraries give one sentence with the command that mends them."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from lightning_cpr import _lightning
from lightning_cpr.errors import ConfigError, DependencyError
from lightning_cpr.tables import _deps

BOTH = ["pytorch_lightning", "lightning.pytorch"]
GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


@pytest.mark.parametrize(
    ("loaded", "installed", "override", "expected"),
    [
        ([], BOTH, None, "pytorch_lightning"),
        ([], BOTH[1:], None, "lightning.pytorch"),
        (BOTH, BOTH, None, "pytorch_lightning"),
        (BOTH[1:], BOTH, None, "lightning.pytorch"),
        (BOTH[:1], BOTH, "lightning", "lightning.pytorch"),
        (BOTH[1:], BOTH, "pytorch_lightning", "pytorch_lightning"),
    ],
)
def test_choice_of_package(loaded: list[str], installed: list[str], override: str | None, expected: str) -> None:
    assert _lightning.choose(loaded, installed, override) == expected


def test_choice_that_cannot_be() -> None:
    with pytest.raises(DependencyError, match="pip install pytorch-lightning"):
        _lightning.choose([], [], None)
    with pytest.raises(DependencyError, match="pip install lightning"):
        _lightning.choose([], BOTH[:1], "lightning")
    with pytest.raises(ConfigError, match="LIGHTNING_CPR_LIGHTNING='keras'"):
        _lightning.choose([], BOTH, "keras")


@pytest.mark.parametrize("version", ["2.6.2", "2.6.3"])
def test_compromised_releases_are_not_imported(version: str) -> None:
    with pytest.raises(DependencyError, match=f"lightning {version} is a compromised release"):
        _lightning.check_version("lightning", version)
    _lightning.check_version("lightning", "2.6.6")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu-cpu": "1.9.0"}, None),
        ({"torch": "3.0.0"}, None),
        ({"torchrec": "1.9.2"}, "torch 2.13.0+cpu does not match torchrec 1.9.2 and fbgemm 1.8.0"),
        ({"fbgemm-gpu-cpu": "1.9.0"}, "torch 2.13.0+cpu does not match torchrec 1.8.0 and fbgemm 1.9.0"),
        ({"torchrec": ""}, "torchrec is not installed"),
        ({"fbgemm-gpu-cpu": ""}, "fbgemm is not installed"),
        ({"torch": ""}, "torch is not installed"),
    ],
)
def test_versions_that_do_not_match(changes: dict[str, str], problem: str | None) -> None:
    assert _deps.mismatch({k: v for k, v in (GOOD | changes).items() if v}) == problem


def test_the_remedy_fits_the_machine() -> None:
    cpu = "pip install --no-deps 'torchrec==1.8.*' 'fbgemm-gpu-cpu==1.8.*'"
    assert _deps.remedy("2.13.0+cpu", cuda=False) == cpu
    assert _deps.remedy(None, cuda=False) == f"pip install 'torch==2.13.*' && {cpu}"
    assert _deps.remedy("2.14.1", cuda=True) == "pip install 'torchrec==1.9.*' 'fbgemm-gpu==1.9.*'"
    assert _deps.remedy("2.9.0", cuda=True) == "pip install 'torch==2.13.*' 'torchrec==1.8.*' 'fbgemm-gpu==1.8.*'"


def test_a_loader_error_becomes_one_sentence() -> None:
    """In a process of its own, where torchrec's import fails as it does beside a wrong fbgemm."""
    code = """
    import sys
    from importlib.abc import MetaPathFinder
    class Broken(MetaPathFinder):
        def find_spec(self, name, path=None, target=None):
            if name == "torchrec":
                raise OSError('fbgemm_gpu_config.so')
    sys.meta_path.insert(0, Broken())
    import lightning_cpr
    from lightning_cpr.errors import DependencyError
    try:
        import lightning_cpr.strategy
    except DependencyError as error:
        print("told:", error)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True)
    assert "told: torchrec does not load" in done.stdout
    assert "Mend it with: pip install" in done.stdout
