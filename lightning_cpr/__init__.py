"""lightning_cpr: TorchRec training in PyTorch Lightning that survives failures at almost no cost."""

from lightning_cpr._version import __version__

__all__ = ["__version__"]
