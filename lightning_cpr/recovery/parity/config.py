"""What the user says about parity in memory."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_cpr.errors import ConfigError


@dataclass(frozen=True)
class ParityConfig:
    """Parity in memory: a lost shard is decoded from the shards of other ranks, with its optimizer state.

    Args:
        k: members of a parity group, 1 to 16. Host memory for parity is about ``m / k`` of the tables.
        m: how many lost members of one group come back, 1 (XOR) or 2 (P + Q).
        every_n_steps: how many steps share one exchange. 1: no step is lost.
        scrub_every: all parity and all shards are compared by checksum once in so many exchanges, a slice with each;
            0 turns the comparison off.
        encode_mb: megabytes of a rank's rows that the first encoding adds to each exchange, until all is encoded.
        behind_mb: a replacement with so many megabytes of rows, or more, trains while they come back: what a batch
            looks up first, the rest behind the training (degraded reads). One with fewer waits for all of them.

    Raises:
        ConfigError: a value is out of range.
    """

    k: int = 4
    m: int = 1
    every_n_steps: int = 1
    scrub_every: int = 1000
    encode_mb: int = 64
    behind_mb: int = 1024

    def __post_init__(self) -> None:
        allowed = {
            "k": (1, 16),
            "m": (1, 2),
            "every_n_steps": (1, 100_000),
            "scrub_every": (0, 10_000_000),
            "encode_mb": (1, 1 << 20),
            "behind_mb": (0, 1 << 30),
        }
        for name, (low, high) in allowed.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise ConfigError(f"ParityConfig({name}={value!r}): allowed are whole numbers from {low} to {high}")
