"""Stage: copy the rows of a save into host memory. The only part of a save that training waits for.

The buffers are allocated and pre-faulted once and reused by every save, since touching fresh pages costs more than the
copy itself. On a GPU they are pinned, filled on a side stream, and `Stager.stage` returns when the copies have landed.
One set of buffers means one save in flight: a staged block is valid until the next call of `stage`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from lightning_cpr.spec import RowBlock, Shard, ShardSpec


class Stager:
    """Reused host buffers for the shards of one rank.

    Peak extra memory: one copy of what the largest save holds (for a base: of the rank's shards and their optimizer
    state), kept for the life of the job.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[ShardSpec, str], Tensor] = {}
        self._stream: torch.cuda.Stream | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held by the buffers."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def stage(self, shards: Sequence[Shard], rows: Mapping[ShardSpec, Tensor] | None = None) -> list[RowBlock]:
        """Copy rows with all their optimizer state.

        Args:
            shards: the live shards to save.
            rows: shard-local row numbers by shard, int64, strictly increasing, on the CPU. A shard that is not a key
                is copied whole.

        Returns:
            One block a shard, in the order of ``shards``, with global row numbers. Shards without rows are left out.
        """
        blocks = []
        with torch.no_grad(), self._side_stream(shards):
            for shard in shards:
                local = None if rows is None else rows.get(shard.spec)
                count = shard.spec.rows if local is None else int(local.numel())
                if count:
                    blocks.append(self._stage_shard(shard, local, count))
        if self._stream is not None:
            self._stream.synchronize()
        return blocks

    def _stage_shard(self, shard: Shard, local: Tensor | None, count: int) -> RowBlock:
        spec = shard.spec
        ids = torch.arange(spec.rows) if local is None else local
        return RowBlock(
            table=spec.table,
            rows=ids + spec.row_start,
            col_start=spec.col_start,
            weight=self._copy(spec, "weight", shard.weight, local, count),
            states={name: self._copy(spec, name, state, local, count) for name, state in shard.states.items()},
        )

    def _copy(self, spec: ShardSpec, name: str, live: Tensor, local: Tensor | None, count: int) -> Tensor:
        buffer = self._buffer(spec, name, live, count)[:count]
        if local is None:
            buffer.copy_(live, non_blocking=live.is_cuda)
        elif live.is_cuda:
            buffer.copy_(live.index_select(0, local.to(live.device, non_blocking=True)), non_blocking=True)
        else:
            torch.index_select(live, 0, local, out=buffer)
        return buffer

    def _buffer(self, spec: ShardSpec, name: str, live: Tensor, count: int) -> Tensor:
        buffer = self._buffers.get((spec, name))
        if buffer is None or len(buffer) < count:
            # zeros, not empty: writing the pages now keeps the page faults out of every later save
            shape = (min(spec.rows, count + count // 4), *live.shape[1:])
            buffer = torch.zeros(shape, dtype=live.dtype, pin_memory=live.is_cuda)
            self._buffers[spec, name] = buffer
        return buffer

    def _side_stream(self, shards: Sequence[Shard]) -> torch.cuda.StreamContext:
        device = next((s.weight.device for s in shards if s.weight.is_cuda), None)
        if device is not None:
            self._stream = self._stream or torch.cuda.Stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
        return torch.cuda.stream(self._stream)


def live_blocks(shards: Sequence[Shard], piece_bytes: int = 64 << 20) -> Iterator[RowBlock]:
    """All rows of the shards, piece by piece and without staging, for a save that training waits for.

    On the CPU the blocks are views: nothing may write to the shards until the save has ended.
    """
    for shard in shards:
        spec = shard.spec
        row_bytes = sum(t[:1].nbytes for t in (shard.weight, *shard.states.values())) if spec.rows else 1
        step = max(1, piece_bytes // max(1, row_bytes))
        for start in range(0, spec.rows, step):
            piece = slice(start, min(start + step, spec.rows))
            yield RowBlock(
                table=spec.table,
                rows=torch.arange(piece.start, piece.stop) + spec.row_start,
                col_start=spec.col_start,
                weight=shard.weight[piece].cpu(),
                states={name: state[piece].cpu() for name, state in shard.states.items()},
            )
