"""lightning_cpr: TorchRec training in PyTorch Lightning that survives failures at almost no cost."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_cpr._version import __version__

if TYPE_CHECKING:
    from lightning_cpr.callback import CPRCallback
    from lightning_cpr.checkpoint_io import CPRCheckpointIO
    from lightning_cpr.faults import Fault, FaultInjector
    from lightning_cpr.recovery.parity.config import ParityConfig
    from lightning_cpr.strategy import TorchRecStrategy

_PUBLIC = {
    "CPRCallback": "lightning_cpr.callback",
    "CPRCheckpointIO": "lightning_cpr.checkpoint_io",
    "TorchRecStrategy": "lightning_cpr.strategy",
    "ParityConfig": "lightning_cpr.recovery.parity.config",
    "FaultInjector": "lightning_cpr.faults",
    "Fault": "lightning_cpr.faults",
}

__all__ = [
    "__version__",
    "CPRCallback",
    "CPRCheckpointIO",
    "TorchRecStrategy",
    "ParityConfig",
    "FaultInjector",
    "Fault",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'lightning_cpr' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


# Without Lightning there is no Trainer to register for, and inspecting a store needs none.
if find_spec("pytorch_lightning") or find_spec("lightning"):
    from lightning_cpr._lightning import register_strategy

    register_strategy("torchrec", "lightning_cpr.strategy", "TorchRecStrategy")
