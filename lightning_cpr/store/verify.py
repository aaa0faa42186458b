"""Checking a version from end to end, without a model."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from lightning_cpr.errors import CPRError
from lightning_cpr.store.coverage import check_coverage
from lightning_cpr.store.fetch import Fetcher
from lightning_cpr.store.manifest import BlobEntry, FileEntry, Manifest
from lightning_cpr.store.reader import THREADS, Progress, read_blob
from lightning_cpr.store.rows import runs_of
from lightning_cpr.store.storage import Storage
from lightning_cpr.store.versions import Problem


def verify(
    storage: Storage,
    manifest: Manifest,
    progress: Progress | None = None,
    *,
    checked: dict[str, Problem | None] | None = None,
    threads: int = THREADS,
) -> list[Problem]:
    """Everything wrong with a version: sizes, every hash, row numbers, decoding, coverage. Empty if it is sound.

    progress: called with (bytes done, bytes in all) after each object. checked: outcomes by path of objects that
    another version of the same root shares; not read again, and added to.
    """
    known = {} if checked is None else checked
    fetcher = Fetcher(storage, {spec.fqn: spec for spec in manifest.tables})

    def outcome(stored: FileEntry | BlobEntry) -> Problem | None:
        try:
            if isinstance(stored, FileEntry):
                fetcher.check_file(stored)
            else:
                read_blob(storage, manifest, stored.name)
        except CPRError as error:
            return Problem(stored.path, stored.table if isinstance(stored, FileEntry) else None, str(error))
        return None

    new = [stored for stored in manifest.stored if stored.path not in known]
    total, done = sum(stored.bytes for stored in new), 0
    with ThreadPoolExecutor(threads, thread_name_prefix="cpr-get") as pool:
        for stored, problem in zip(new, pool.map(outcome, new), strict=True):
            known[stored.path] = problem
            done += stored.bytes
            if progress:
                progress(done, total)
    problems = [problem for stored in manifest.stored if (problem := known[stored.path])]
    if problems:
        return problems
    try:
        check_coverage(
            manifest.version, manifest.tables, manifest.files, lambda entry: runs_of(fetcher.index(entry).rows()),
            disjoint=False,
        )  # fmt: skip
    except CPRError as error:
        return [Problem(manifest.path, None, str(error))]
    return []
