"""The Lightning package of the user's Trainer: ``pytorch_lightning`` or ``lightning.pytorch``."""

from __future__ import annotations

try:
    from lightning_cpr._lightning import pl
except ImportError:
    import pytorch_lightning as pl

__all__ = ["pl"]
