"""A small root with a model's blobs, and commands run as a user would."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lightning_cpr import cli
from lightning_cpr.store import Manifest, Storage
from lightning_cpr.store.blob import JOB_BLOB, encode_blob, rank_blob
from tests.unit.store.helpers import ELEMENT, ROW, Table, save_one, table
from tests.unit.store.test_compact import train

DENSE = {"net.mlp.weight": torch.arange(6.0).reshape(2, 3), "net.steps": torch.tensor(7)}


@dataclass
class Root:
    """Versions of steps 0 (a base), 1, 2, and the tables as they were at each."""

    storage: Storage
    versions: list[Manifest]
    weights: list[dict[str, Tensor]]
    tables: list[Table]

    @property
    def path(self) -> str:
        return self.storage.root


def make_root(storage: Storage) -> Root:
    tables = [table("net.ebc.embedding_bags.user", 200, 8), table("net.ebc.embedding_bags.item", 30, 4, (ROW, ELEMENT))]
    g = torch.Generator().manual_seed(0)
    versions: list[Manifest] = []
    weights = []
    for step in range(3):
        blobs = {
            JOB_BLOB: encode_blob({"state_dict": DENSE, "epoch": 0}),
            rank_blob(0): encode_blob({"loops": None, "rng": None, "scalars": {}}),
        }
        rows = {}
        for t in tables:
            rows[t.spec.fqn] = torch.arange(step, t.spec.rows, 5)
            if step:
                train(t, rows[t.spec.fqn], g)
        delta = {"rows": rows, "parent": versions[-1].path} if step else {}
        versions.append(save_one(storage, tables, step, blobs=blobs, **delta))  # type: ignore[arg-type]
        weights.append({t.spec.fqn: t.weight.clone() for t in tables})
    return Root(storage, versions, weights, tables)


def files_in(root: Root) -> Iterator[str]:
    for version in root.versions:
        yield version.path
        yield from (stored.path for stored in version.stored if version.version in stored.path)


def command(capsys: pytest.CaptureFixture[str], *args: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr)."""
    capsys.readouterr()
    status = cli.main(list(args))
    said = capsys.readouterr()
    return status, said.out, said.err
