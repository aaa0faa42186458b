"""Ranks meet under a token of their start, whatever their agents have counted (pytorch#135712)."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from lightning_cpr.errors import RecoveryError, UnsupportedError
from lightning_cpr.recovery import child, guardian
from lightning_cpr.recovery.election import Holding
from lightning_cpr.recovery.membership import Epoch, Membership, Timeouts, announce, store_from_env
from lightning_cpr.recovery.start import START_ENV, publish_error

TIMEOUTS = Timeouts(collective=10, announce=10, join=10, free=5)


@pytest.fixture
def server() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


def env_of(server: dist.TCPStore, rank: int, restarts: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.port),
        "TORCHELASTIC_RUN_ID": "run", "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }  # fmt: skip


def meet(env: dict[str, str]) -> Epoch:
    membership = Membership.from_env(env, timeouts=TIMEOUTS)
    try:
        return membership.meet(Holding(int(env["RANK"]), int(env["TORCHELASTIC_RESTART_COUNT"]), 0), after=-1)
    finally:
        membership.close()


def test_ranks_meet_though_their_agents_count_restarts_differently(server: dist.TCPStore) -> None:
    before = threading.active_count()
    tokens = set()
    with ThreadPoolExecutor(2) as pool:
        for counts in ((0, 0), (1, 0), (2, 0), (0, 1)):  # an agent that was replaced begins at 0
            envs = [env_of(server, rank, count) for rank, count in enumerate(counts)]
            met = list(pool.map(meet, envs))
            assert [epoch.number for epoch in met] == [0, 0]
            # Each of them met the other of this very start.
            assert [tuple(h.pid for h in epoch.holdings) for epoch in met] == [counts, counts]
            (token,) = {env[START_ENV] for env in envs}
            tokens.add(token)
            # A replacement of this start begins an epoch that its peers see, and no later start does.
            assert announce(store_from_env(env_of(server, 1, 0) | {START_ENV: token})(5.0), 1, "killed", 0.0) == 1
            assert store_from_env(envs[0])(5.0).add("epoch", 0) == 1
    assert len(tokens) == 4
    assert threading.active_count() == before


def test_a_rank_that_does_not_come_is_named(server: dist.TCPStore) -> None:
    env = env_of(server, 0, 0)
    with pytest.raises(RecoveryError, match=r"ranks \[1\] did not come up within 0.1 s"):
        store_from_env(env, 0.1)
    assert START_ENV not in env


def test_an_error_of_the_users_code_ends_every_later_start(server: dist.TCPStore) -> None:
    """Rank 1 fails before it has met rank 0, on whose host nobody else would tell it."""
    publish_error(1, "ValueError: x", 5.0, env_of(server, 1, 0))
    publish_error(0, "an echo", 5.0, env_of(server, 0, 0))
    for rank in (0, 1):
        with pytest.raises(RecoveryError, match=r"^rank 1 failed with ValueError: x; no peer was lost$"):
            store_from_env(env_of(server, rank, 1), 10.0)


def test_an_error_in_a_start_is_told_there(server: dist.TCPStore) -> None:
    envs = [env_of(server, rank, 0) | {START_ENV: "token"} for rank in (0, 1)]
    publish_error(1, "ValueError: x", 5.0, envs[1])
    with pytest.raises(RecoveryError, match="rank 1 failed with ValueError: x"):
        meet(envs[0])


def test_what_a_host_hears_of_an_error_elsewhere_ends_its_next_attempt(
    server: dist.TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (env_of(server, 0, 0) | {guardian.JOB_DIR_ENV: str(tmp_path)}).items():
        monkeypatch.setenv(name, value)
    assert child._report(RecoveryError("a peer is gone")) == guardian.EXIT_STEP_DOWN
    assert guardian.user_error_before(str(tmp_path)) is None
    publish_error(1, "ValueError: x", 5.0)
    assert child._report(RecoveryError("rank 1 failed")) == guardian.EXIT_STEP_DOWN
    assert guardian.user_error_before(str(tmp_path)) == 1


def test_a_store_of_its_own_takes_the_place_of_torchruns(server: dist.TCPStore) -> None:
    env = env_of(server, 0, 0) | {"MASTER_PORT": "1", "TORCHELASTIC_USE_AGENT_STORE": "False"}
    env |= {guardian.STORE_ENV: f"127.0.0.1:{server.port}", START_ENV: "token"}
    store_from_env(env)(5.0).set("key", "value")
    assert server.get("cpr/run/token/key") == b"value"


def test_without_the_agents_store_there_is_no_recovery(server: dist.TCPStore) -> None:
    with pytest.raises(UnsupportedError, match="store of torchrun's agent"):
        store_from_env(env_of(server, 0, 0) | {"TORCHELASTIC_USE_AGENT_STORE": "False"})
