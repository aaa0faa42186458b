from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.functional.classification import binary_auroc

from lightning_cpr.errors import ConfigError
from recipes.synthetic import SyntheticDataModule, SyntheticSource, criteo_like_tables

TABLES = {"a": 50, "b": 2000, "c": 1, "d": 7}


@given(st.lists(st.integers(0, 999), min_size=1, max_size=50), st.sampled_from([0.8, 1.0, 1.2]))
@settings(deadline=None, max_examples=30)
def test_a_sample_is_a_function_of_seed_and_position(rows: list[int], zipf: float) -> None:
    source = SyntheticSource(TABLES, 1000, seed=3, zipf=zipf)
    whole = source.take(np.arange(1000))
    part = source.take(np.array(rows))
    assert np.array_equal(part.dense, whole.dense[rows])
    assert np.array_equal(part.ids, whole.ids[:, rows])
    assert np.array_equal(part.labels, whole.labels[rows])
    later = SyntheticSource(TABLES, 10, start=990, seed=3, zipf=zipf).take(np.arange(10))
    assert np.array_equal(later.dense, whole.dense[990:])


def test_another_seed_is_other_data() -> None:
    a, b = (SyntheticSource(TABLES, 1000, seed=s).take(np.arange(1000)) for s in (0, 1))
    assert (a.dense != b.dense).all()
    assert (a.ids[1] != b.ids[1]).mean() > 0.9


def test_ids_are_zipf_and_within_their_tables() -> None:
    n = 50_000
    ids = SyntheticSource(TABLES, n, zipf=1.05).take(np.arange(n)).ids
    for row, size in zip(ids, TABLES.values(), strict=True):
        assert row.min() >= 0
        assert row.max() < size
    counts = np.sort(np.bincount(ids[1], minlength=2000))[::-1]
    # the continuous power law gives rank 1 its share of integral_1^2 x^-a
    share = (2**-0.05 - 1) / (2001**-0.05 - 1)
    assert counts[0] / n == pytest.approx(share, rel=0.05)
    assert all(a > 1.5 * b for a, b in pairwise(counts[[0, 2, 8, 40]]))
    assert np.unique(ids[0]).size == 50


def test_the_best_auc_is_known() -> None:
    source = SyntheticDataModule(100_000).source("train")
    rows = np.arange(50_000)
    p, labels = source.probabilities(rows), torch.from_numpy(source.take(rows).labels).long()
    best = source.bayes_auc(50_000)
    assert 0.8 < best < 0.9
    assert best == pytest.approx(float(binary_auroc(torch.from_numpy(p), labels)), abs=0.006)
    assert float(labels.float().mean()) == pytest.approx(p.mean(), abs=0.006)
    few = source.probabilities(rows[:200])
    pairs = [(a, b) for i, a in enumerate(few) for j, b in enumerate(few) if i != j]
    wins = sum(a * (1 - b) * (a > b) for a, b in pairs)
    assert source.bayes_auc(200) == pytest.approx(wins / sum(a * (1 - b) for a, b in pairs))


def test_stages_do_not_overlap() -> None:
    data = SyntheticDataModule(10_000, train=64, val=32, test=16, batch_size=8)
    dense = {s: torch.cat([b.dense[: b.valid] for b in data._loader(s)]) for s in ("train", "val", "test")}
    assert [len(d) for d in dense.values()] == [64, 32, 16]
    assert len(torch.unique(torch.cat(list(dense.values())), dim=0)) == 112


def test_tables_have_criteos_proportions() -> None:
    tables = criteo_like_tables(1_000_000)
    assert len(tables) == 26
    assert sum(tables.values()) == pytest.approx(1_000_000, rel=0.01)
    assert tables["cat_2"] / tables["cat_11"] == pytest.approx(10131227 / 8351593, rel=0.001)
    assert (tables["cat_8"], tables["cat_19"]) == (3, 4)
    with pytest.raises(ConfigError):
        SyntheticDataModule({"a": 0})
