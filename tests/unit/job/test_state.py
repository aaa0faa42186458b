"""Captured state is plain, independent of what it was taken from, and loads with weights_only=True."""

from __future__ import annotations

import enum
import pathlib
import random
from collections import OrderedDict

import numpy as np
import pytest
import torch

from lightning_cpr.errors import CorruptShardError, UnsupportedError
from lightning_cpr.job.state import drop_unplain_hparams, rng_state, set_rng_state, to_plain
from lightning_cpr.store.blob import decode_blob, encode_blob


class Colour(enum.Enum):
    RED = "red"


def test_round_trip_of_every_plain_kind() -> None:
    live = torch.ones(3)
    value = {
        "tensor": live, "od": OrderedDict(a=1), "list": [1, 2.5, None, True, b"x"], "tuple": (1, "a"), "set": {1, 2},
        "np": np.float32(1.5), "array": np.arange(3), "path": pathlib.Path("a/b"), "enum": Colour.RED, 3: "int key",
        "dtype": torch.float16,
    }  # fmt: skip
    plain = to_plain(value)
    live.zero_()
    back = decode_blob(encode_blob(plain), "job.pt")
    assert torch.equal(back["tensor"], torch.ones(3))
    assert torch.equal(back["array"], torch.arange(3))
    assert isinstance(back["od"], OrderedDict)
    assert {k: back[k] for k in ("list", "tuple", "set", "np", "path", "enum", 3, "dtype")} == {
        "list": [1, 2.5, None, True, b"x"], "tuple": (1, "a"), "set": {1, 2}, "np": 1.5, "path": "a/b", "enum": "red",
        3: "int key", "dtype": torch.float16,
    }  # fmt: skip


def test_an_object_without_plain_form_is_refused_by_path() -> None:
    with pytest.raises(UnsupportedError, match=r"checkpoint\.callbacks\.mine\[1\] holds a .*object"):
        to_plain({"callbacks": {"mine": [1, object()]}})


def test_foreign_bytes_are_refused() -> None:
    with pytest.raises(CorruptShardError, match=r"rank0\.pt"):
        decode_blob(b"not a checkpoint", "rank0.pt")


def test_random_streams_go_on_where_they_were_saved() -> None:
    saved = decode_blob(encode_blob(to_plain(rng_state())), "rng")
    expected = (random.random(), np.random.rand(), torch.rand(1).item())
    set_rng_state(saved)
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == expected


def test_hyper_parameters_without_plain_form_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"hyper_parameters": {"lr": 0.1, "fn": lambda: 1}}
    drop_unplain_hparams(checkpoint, ("hyper_parameters", "datamodule_hyper_parameters"))
    assert checkpoint == {"hyper_parameters": {"lr": 0.1}}
    assert "hyper_parameters.fn" in caplog.text
