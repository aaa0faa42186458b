"""How the tables of a model are updated, beside the dense parameters that the user's optimizers have."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_cpr._lightning import rank_zero_info, rank_zero_warn
from lightning_cpr.tables.table_optim import FusedRates, claim_tables, drop_fused


class TableUpdates:
    """Of one sharded model. ``rates``: what drives the learning rates of its tables."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._optimizers: list[Optimizer] = []
        self.rates = FusedRates(model)

    def claim(self, optimizers: Sequence[Optimizer]) -> None:
        """Settle who updates each table: fused ones leave the user's ``optimizers``, and those in dense kernels that
        are in none of these get the ordinary optimizer that was declared for them. The user is told.

        Raises:
            ConfigError: an optimizer holds fused tables only.
            UnsupportedError: a declared optimizer has no ordinary form, by table.
        """
        for optimizer in optimizers:
            if dropped := drop_fused(optimizer):
                rank_zero_info(
                    f"{dropped} table parameters were taken out of {type(optimizer).__name__}: they are updated in "
                    f"backward by their own optimizer."
                )
        self._optimizers, untrained = claim_tables(self._model, optimizers)
        self.rates.follow(self._model, self._optimizers)
        if untrained:
            rank_zero_warn(f"Nothing updates {', '.join(untrained)}: no optimizer has it and none was declared for it.")

    @property
    def ordinary(self) -> bool:
        """Whether tables in dense kernels have optimizers of their own."""
        return bool(self._optimizers)

    def step(self) -> None:
        """Update the tables that have ordinary optimizers, by the gradients of the batch; fused ones are updated."""
        # Step all before clearing any: the tables of one dense kernel share a gradient tensor.
        for optimizer in self._optimizers:
            optimizer.step()
        for optimizer in self._optimizers:
            optimizer.zero_grad()
