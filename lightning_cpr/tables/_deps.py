"""torch, torchrec and fbgemm must match; a mismatch shows as a loader's OSError. Here it becomes one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module, metadata

from lightning_cpr.errors import DependencyError

MATCHING = {"2.13": ("1.8", "1.8"), "2.14": ("1.9", "1.9")}
"""torch minor version -> the torchrec and fbgemm minor versions built against it."""

_DEFAULT_TORCH = "2.13"
_FBGEMM = ("fbgemm-gpu", "fbgemm-gpu-cpu")


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def remedy(torch_version: str | None, cuda: bool) -> str:
    """The pip command that installs a matching torchrec and fbgemm."""
    torch_minor = _minor(torch_version) if torch_version else _DEFAULT_TORCH
    target = torch_minor if torch_minor in MATCHING else _DEFAULT_TORCH
    torchrec, fbgemm = MATCHING[target]
    torch_pin = "" if torch_minor == target and torch_version else f" 'torch=={target}.*'"
    if cuda:
        return f"pip install{torch_pin} 'torchrec=={torchrec}.*' 'fbgemm-gpu=={fbgemm}.*'"
    torch_step = f"pip install{torch_pin} && " if torch_pin else ""
    return f"{torch_step}pip install --no-deps 'torchrec=={torchrec}.*' 'fbgemm-gpu-cpu=={fbgemm}.*'"


def mismatch(versions: Mapping[str, str]) -> str | None:
    """What does not fit among installed versions by distribution name, or None. An unknown torch is not judged."""
    if "torch" not in versions:
        return "torch is not installed"
    if "torchrec" not in versions:
        return "torchrec is not installed"
    fbgemm = next((versions[name] for name in _FBGEMM if name in versions), None)
    if fbgemm is None:
        return "fbgemm is not installed"
    wanted = MATCHING.get(_minor(versions["torch"]))
    if wanted is None or (_minor(versions["torchrec"]), _minor(fbgemm)) == wanted:
        return None
    return f"torch {versions['torch']} does not match torchrec {versions['torchrec']} and fbgemm {fbgemm}"


def _installed() -> dict[str, str]:
    found = {}
    for name in ("torch", "torchrec", *_FBGEMM):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def check() -> None:
    """Imports torchrec and fbgemm.

    Raises:
        DependencyError: one is missing, does not match torch or does not load; the message has the pip command.
    """
    versions = _installed()
    problem = mismatch(versions)
    cause: Exception | None = None
    if problem is None:
        try:
            import_module("torchrec")
        except (OSError, ImportError, RuntimeError, AttributeError) as error:
            problem, cause = f"torchrec does not load ({type(error).__name__}: {error})", error
    if problem is None:
        return
    cuda = "torch" in versions and import_module("torch").version.cuda is not None
    raise DependencyError(f"{problem}. Mend it with: {remedy(versions.get('torch'), cuda)}") from cause
