"""The errors of lightning_cpr. Each names the thing that failed (table, rank, file) and the remedy."""

from __future__ import annotations


class CPRError(Exception):
    """Base of every error that lightning_cpr raises on purpose."""


class ConfigError(CPRError, ValueError):
    """An argument is out of range, or two arguments contradict each other. Nothing was touched."""


class DependencyError(CPRError, ImportError):
    """A library is missing or does not match the others; the message holds the command that mends it."""


class UnsupportedError(CPRError):
    """A module, kernel, precision or plugin that lightning_cpr cannot protect. Raised at set-up."""


class IncompatiblePlanError(CPRError):
    """A version cannot be restored into this model or sharding plan. No tensor was changed."""


class StorageError(CPRError, OSError):
    """Storage refused an operation (permission, space, throttling, a missing bucket)."""


class ManifestError(CPRError):
    """A manifest is missing, malformed, of a newer schema, or does not cover every row."""


class CorruptShardError(CPRError):
    """Bytes do not match their recorded size or hash. They were not used."""


class CommitError(CPRError):
    """A version could not be committed; the previous one stands."""


class ForeignRunError(CPRError):
    """The root holds versions of another run, configuration or plan."""


class RecoveryError(CPRError):
    """A lost shard could not be brought back from any source."""


class FaultInjectedError(CPRError):
    """Raised by the fault injector's ``raise_``; stands for a bug in the user's code."""
