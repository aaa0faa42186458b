"""Which of Lightning's options go with tables that are updated in backward."""

from __future__ import annotations

from torch import nn

from lightning_cpr._lightning import pl, rank_zero_warn
from lightning_cpr.errors import UnsupportedError
from lightning_cpr.tables.table_optim import has_fused_updates, undeclared_fused_tables


def check_training(trainer: pl.Trainer, model: nn.Module, other_tables: bool) -> None:
    """Refuse what trains wrongly, and name what trains differently, when tables are updated by their own optimizers.

    other_tables: whether tables in dense kernels are.

    Raises:
        UnsupportedError: a Trainer option that would train wrongly.
    """
    if undeclared := undeclared_fused_tables(model):
        rank_zero_warn(
            f"No optimizer was declared for {', '.join(undeclared)}: fbgemm trains them with SGD at a rate of "
            f"0.01. Declare one with apply_optimizer_in_backward."
        )
    fused = has_fused_updates(model)
    if not fused and not other_tables:
        return
    callbacks = trainer.callbacks  # type: ignore[attr-defined]
    schedules = [cb for cb in callbacks if hasattr(cb, "going_to_accumulate_grad_batches")]
    accumulates = trainer.accumulate_grad_batches > 1
    if fused and (accumulates or any(cb.going_to_accumulate_grad_batches() for cb in schedules)):
        raise UnsupportedError(
            "accumulate_grad_batches > 1: fused tables are updated in every backward, so tables would take one "
            "step a batch and dense parameters one step a window. Use a larger batch, or 1."
        )
    if getattr(trainer.precision_plugin, "precision", None) == "16-mixed":
        raise UnsupportedError(
            "precision='16-mixed': tables are updated by their own optimizers with the scaled gradient, infinite "
            "ones included, since those do not know the loss scale. Use precision='bf16-mixed'."
        )
    if trainer.gradient_clip_val:
        rank_zero_warn(
            "gradient_clip_val clips dense parameters only: fused tables are updated in backward, before it. "
            "Tables have their own: gradient_clipping=True and max_gradient in the fused params."
        )
