"""The one place that says which Lightning is used: ``pytorch_lightning`` or ``lightning.pytorch``.

They are distinct class trees: a Trainer of one refuses a Strategy or Callback of the other. The choice falls once, when
this module is imported: the package that is already loaded; with both or none loaded ``pytorch_lightning`` if it is
installed, else ``lightning``. The environment variable ``LIGHTNING_CPR_LIGHTNING`` (``lightning`` or
``pytorch_lightning``) overrides it.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Collection
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_cpr.errors import ConfigError, DependencyError

ENV = "LIGHTNING_CPR_LIGHTNING"
COMPROMISED = ("2.6.2", "2.6.3")

_PYTORCH_LIGHTNING = "pytorch_lightning"
_LIGHTNING = "lightning.pytorch"
_DISTRIBUTION = {_PYTORCH_LIGHTNING: "pytorch-lightning", _LIGHTNING: "lightning"}
_FABRIC = {_PYTORCH_LIGHTNING: "lightning_fabric", _LIGHTNING: "lightning.fabric"}


def choose(loaded: Collection[str], installed: Collection[str], override: str | None) -> str:
    """The package to build on: ``"pytorch_lightning"`` or ``"lightning.pytorch"``.

    Raises:
        ConfigError: ``override`` names neither package.
        DependencyError: the chosen package, or both, are not installed.
    """
    if override:
        names = {"pytorch_lightning": _PYTORCH_LIGHTNING, "lightning": _LIGHTNING, "lightning.pytorch": _LIGHTNING}
        if override not in names:
            raise ConfigError(f"{ENV}={override!r}: use 'lightning' or 'pytorch_lightning'.")
        if names[override] not in installed:
            raise DependencyError(
                f"{ENV}={override!r}, but it is not installed: pip install {_DISTRIBUTION[names[override]]}"
            )
        return names[override]
    if len(loaded) == 1:
        return next(iter(loaded))
    for package in (_PYTORCH_LIGHTNING, _LIGHTNING):
        if package in installed:
            return package
    raise DependencyError(
        "lightning_cpr needs Lightning, and neither package is installed: pip install pytorch-lightning"
    )


def check_version(distribution: str, version: str) -> None:
    """Raises `DependencyError` for a release that must not be imported."""
    if version in COMPROMISED:
        raise DependencyError(
            f"{distribution} {version} is a compromised release: pip install '{distribution}>=2.6.4' "
            f"and treat the machine's credentials as leaked."
        )


def installed_packages() -> list[str]:
    """The Lightning packages that this environment has, without importing any."""
    return [p for p in (_PYTORCH_LIGHTNING, _LIGHTNING) if find_spec(p.split(".")[0]) is not None]


def _load() -> str:
    loaded = [p for p in (_PYTORCH_LIGHTNING, _LIGHTNING) if p in sys.modules]
    package = choose(loaded, installed_packages(), os.environ.get(ENV))
    check_version(_DISTRIBUTION[package], metadata.version(_DISTRIBUTION[package]))
    importlib.import_module(package)
    return package


PACKAGE = _load()
"""The chosen package's import name."""


if TYPE_CHECKING:
    import pytorch_lightning as pl
    from lightning_fabric.plugins import CheckpointIO
    from lightning_fabric.utilities.optimizer import _optimizers_to_device as optimizers_to_device
    from pytorch_lightning.callbacks import Callback
    from pytorch_lightning.core.optimizer import LightningOptimizer
    from pytorch_lightning.overrides.distributed import prepare_for_backward
    from pytorch_lightning.plugins import AsyncCheckpointIO
    from pytorch_lightning.strategies import DDPStrategy, StrategyRegistry
    from pytorch_lightning.strategies.strategy import _ForwardRedirection as ForwardRedirection
    from pytorch_lightning.trainer.states import TrainerFn
    from pytorch_lightning.utilities.exceptions import MisconfigurationException
    from pytorch_lightning.utilities.rank_zero import rank_zero_info, rank_zero_only, rank_zero_warn
else:
    pl = sys.modules[PACKAGE]

    def _name(module: str, name: str) -> Any:
        return getattr(importlib.import_module(module), name)

    _fabric = _FABRIC[PACKAGE]
    CheckpointIO = _name(f"{_fabric}.plugins", "CheckpointIO")
    optimizers_to_device = _name(f"{_fabric}.utilities.optimizer", "_optimizers_to_device")
    Callback = _name(f"{PACKAGE}.callbacks", "Callback")
    LightningOptimizer = _name(f"{PACKAGE}.core.optimizer", "LightningOptimizer")
    prepare_for_backward = _name(f"{PACKAGE}.overrides.distributed", "prepare_for_backward")
    AsyncCheckpointIO = _name(f"{PACKAGE}.plugins", "AsyncCheckpointIO")
    DDPStrategy = _name(f"{PACKAGE}.strategies", "DDPStrategy")
    StrategyRegistry = _name(f"{PACKAGE}.strategies", "StrategyRegistry")
    ForwardRedirection = _name(f"{PACKAGE}.strategies.strategy", "_ForwardRedirection")
    TrainerFn = _name(f"{PACKAGE}.trainer.states", "TrainerFn")
    MisconfigurationException = _name(f"{PACKAGE}.utilities.exceptions", "MisconfigurationException")
    rank_zero_info = _name(f"{PACKAGE}.utilities.rank_zero", "rank_zero_info")
    rank_zero_only = _name(f"{PACKAGE}.utilities.rank_zero", "rank_zero_only")
    rank_zero_warn = _name(f"{PACKAGE}.utilities.rank_zero", "rank_zero_warn")


def mixed_use_message(other: str) -> str:
    """What to tell a user whose Trainer, model or callback comes from ``other``, not from `PACKAGE`."""
    wanted = "lightning" if other.startswith("lightning.") else _PYTORCH_LIGHTNING
    return (
        f"This is {other}'s Trainer, but lightning_cpr was built on {PACKAGE} when it was imported: "
        f"import {wanted} before lightning_cpr, or set {ENV}={wanted}."
    )


def check_trainer(trainer: Any) -> None:
    """Raises `ConfigError` if ``trainer`` comes from the other Lightning package."""
    if not isinstance(trainer, pl.Trainer):
        module = type(trainer).__module__
        raise ConfigError(mixed_use_message(_LIGHTNING if module.startswith("lightning.") else module.split(".")[0]))


def register_strategy(name: str, module: str, attribute: str) -> None:
    """Registers ``module.attribute`` as ``Trainer(strategy=name)``, imported at its first use.

    A Trainer of the other package, where that is loaded, gets one clear sentence for the same name.
    """

    def build(**kwargs: Any) -> Any:
        return getattr(importlib.import_module(module), attribute)(**kwargs)

    StrategyRegistry.register(name, build, description="TorchRec sharding (lightning_cpr)", override=True)
    for other in (_PYTORCH_LIGHTNING, _LIGHTNING):
        if other != PACKAGE and other in sys.modules:

            def refuse(other: str = other, **_: Any) -> Any:
                raise ConfigError(mixed_use_message(other))

            registry = importlib.import_module(f"{other}.strategies").StrategyRegistry
            registry.register(name, refuse, description="see lightning_cpr", override=True)
