"""Gradient buckets of DDP that stay the same from a process group's first step on.

DDP lays its buckets out anew after the first step, in the order in which gradients came. A bucket's place decides in
which order an all-reduce adds the ranks' gradients, so of three ranks and more the first step after a resume or a
recovery would give other bits than the same step of the uninterrupted run.
"""

from __future__ import annotations

from typing import Any

from torch.nn.parallel import DistributedDataParallel


class DenseDDP(DistributedDataParallel):
    """DDP that lists the parameters backwards: about the order in which their gradients come."""

    def _build_params_for_reducer(self) -> Any:
        parameters, expect_sparse = super()._build_params_for_reducer()
        if self.find_unused_parameters:  # then DDP lays out nothing anew, and turns the order round itself
            return parameters, expect_sparse
        return parameters[::-1], expect_sparse[::-1]


def fix_buckets(ddp: DistributedDataParallel) -> None:
    """Lay the buckets out for good, in the order of the parameters. Collective; before the reducer's first step."""
    ddp.reducer._push_all_rebuilt_params()
    ddp._has_rebuilt_buckets = ddp.reducer._rebuild_buckets()


__all__ = ["DenseDDP", "fix_buckets"]
