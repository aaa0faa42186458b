"""Random histories of a root against a plain in-memory model: save, fail, compact, collect, reopen, restore."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_cpr.errors import CommitError, CPRError
from lightning_cpr.store import Manifest, Storage, list_versions, load_manifest, newest, read_into, verify
from lightning_cpr.store.compact import compact
from lightning_cpr.store.retention import Rules, plan_removal, remove_planned
from lightning_cpr.store.save import Compacted
from tests.unit.store.helpers import ELEMENT, ROW, Table, save_one, table, threads
from tests.unit.store.test_compact import train

Snapshot = dict[str, tuple[torch.Tensor, dict[str, torch.Tensor]]]


class History(RuleBasedStateMachine):
    """``contents``: what each committed version must hold, by version id; ``live``: the tables as they are now."""

    folder: Path

    @initialize()
    def begin(self) -> None:
        self.storage = Storage(str(self.folder / os.urandom(6).hex()))
        self.live: list[Table] = [table("a", 97, 5, (ROW, ELEMENT)), table("b", 1, 3, ())]
        self.dirty = {t.spec.fqn: torch.zeros(t.spec.rows, dtype=torch.bool) for t in self.live}
        self.contents: dict[str, Snapshot] = {}
        self.parent: Manifest | None = None
        self.compacted: Compacted | None = None
        self.step = self.now = 0
        self.g = torch.Generator().manual_seed(0)

    def snapshot(self) -> Snapshot:
        return {t.spec.fqn: (t.weight.clone(), {k: s.clone() for k, s in t.states.items()}) for t in self.live}

    @rule(rows=st.lists(st.integers(0, 96), max_size=12), both=st.booleans())
    def train(self, rows: list[int], both: bool) -> None:
        for t in self.live if both else self.live[:1]:
            mine = torch.tensor(sorted({row % t.spec.rows for row in rows}), dtype=torch.int64)
            train(t, mine, self.g)
            self.dirty[t.spec.fqn][mine] = True

    @rule(
        base=st.booleans(),
        chunk=st.sampled_from([300, 1500, 1 << 20]),
        point=st.sampled_from(["", "", "", "pre_write", "mid_write", "pre_commit"]),
    )
    def save(self, base: bool, chunk: int, point: str) -> None:
        """A delta goes on from a compaction that its parent has not taken up, if its files are there still."""

        def fail(at: str, step: int) -> None:
            if at == point:
                raise RuntimeError("injected")

        self.step += 1
        delta = {}
        if not base and self.parent is not None:
            rows = {name: torch.nonzero(mask)[:, 0] for name, mask in self.dirty.items()}
            delta = {"rows": rows, "parent": self.parent.path, "compacted": self.compacted}
        try:
            made = save_one(self.storage, self.live, self.step, chunk_bytes=chunk, points=fail, **delta)  # type: ignore[arg-type]
        except CommitError:
            assert point
            return
        assert not point
        self.parent = made
        self.contents[made.version] = self.snapshot()
        for mask in self.dirty.values():
            mask.zero_()

    @precondition(lambda self: self.parent is not None)
    @rule(chunk=st.sampled_from([300, 2000, 1 << 20]), fail_at=st.integers(0, 6), adopt=st.booleans())
    def compact(self, chunk: int, fail_at: int, adopt: bool) -> None:
        puts = 0

        def intercept(path: str, buffers: object) -> object:
            nonlocal puts
            puts += 1
            if puts == fail_at:
                raise OSError(28, "injected")
            return buffers

        assert self.parent is not None
        self.storage.intercept = intercept  # type: ignore[assignment]
        try:
            done = compact(self.storage, self.parent, chunk_bytes=chunk)
        except CPRError:
            assert puts == fail_at
            return
        finally:
            self.storage.intercept = None
        if done is not None:
            self.contents[done.manifest.version] = self.contents[self.parent.version]
            if adopt:
                self.parent = done.manifest
            else:
                self.compacted = Compacted(self.parent.files, done.manifest.files)

    @precondition(lambda self: self.contents)
    @rule(last=st.integers(1, 3), every=st.sampled_from([None, 2, 3]), kill_at=st.integers(0, 12))
    def collect(self, last: int, every: int | None, kill_at: int) -> None:
        """Retention, killed at some delete; it then begins anew, or not."""
        self.now += 10_000_000_000
        removal = plan_removal(self.storage, "run", Rules(last=last, every=every), 0.0, self.now)
        if self.parent is not None and self.parent.version not in removal.keep:
            # A job goes on from its newest version, which retention keeps; compacted twins are as good.
            twin = newest(self.storage, None).require()
            assert twin.step == self.parent.step
            self.parent = twin
        deletes, delete = 0, os.unlink

        def dying(path: str) -> None:
            nonlocal deletes
            deletes += 1
            if deletes == kill_at:
                raise KeyboardInterrupt
            delete(path)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "unlink", dying)
            try:
                remove_planned(self.storage, removal)
            except KeyboardInterrupt:
                assert deletes == kill_at
        left = {ref.version for ref in list_versions(self.storage)}
        assert set(removal.keep) <= left
        self.contents = {version: held for version, held in self.contents.items() if version in left}

    @rule()
    def reopen(self) -> None:
        self.storage = Storage(self.storage.root)

    @invariant()
    def every_version_holds_what_was_saved(self) -> None:
        refs = list_versions(self.storage) if self.contents else []
        assert {ref.version for ref in refs} == set(self.contents)
        for ref in refs:
            manifest = load_manifest(self.storage, ref)
            targets = [t.shard(0, t.spec.rows, 0, t.spec.cols) for t in self.live]
            read_into(self.storage, manifest, targets)
            for target in targets:
                weight, states = self.contents[ref.version][target.spec.table]
                assert torch.equal(target.weight, weight)
                assert all(torch.equal(target.states[name], state) for name, state in states.items())
        if refs:
            assert newest(self.storage).require().version == refs[0].version

    def teardown(self) -> None:
        for ref in list_versions(self.storage) if self.contents else []:
            assert verify(self.storage, load_manifest(self.storage, ref)) == []
        assert threads() == set()


def test_random_histories(tmp_path: Path) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    History.folder = tmp_path
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        History,
        settings=settings(
            max_examples=15, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
