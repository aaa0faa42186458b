"""``lightning-cpr verify``: read everything back and check it."""

from __future__ import annotations

from typing import Any

from lightning_cpr.errors import CorruptShardError, ManifestError
from lightning_cpr.store.find import Version, find_root, find_version
from lightning_cpr.store.verify import verify
from lightning_cpr.store.versions import Problem, list_versions, load_manifest
from lightning_cpr.tools.show import progress, show, size
from lightning_cpr.units import counted


def verify_command(root: str, storage_options: dict[str, Any] | None = None) -> int:
    """Check versions from end to end: sizes, every hash, row numbers, decoding, coverage.

    Status 1 if anything is wrong; a line a problem then names file and table.

    Args:
        root: A root for all its versions, ROOT@VERSION for one (by id or step), or a checkpoint file.
        storage_options: Options of the filesystem for fsspec, e.g. credentials.
    """
    versions, problems = _targets(root, storage_options)
    checked: dict[str, Problem | None] = {}
    for version in versions:
        with progress(version.manifest.version) as bar:
            found = verify(version.storage, version.manifest, bar, checked=checked)
        problems += [problem for problem in found if problem not in problems]
    for problem in problems:
        of = f" (table {problem.table})" if problem.table else ""
        where = "" if problem.message.startswith(problem.path) else f"{problem.path}{of}: "
        show(f"BAD {where}{problem.message}")
    stored = {s.path: s.bytes for version in versions for s in version.manifest.stored}
    outcome = counted(len(problems), "problem") if problems else "all sound"
    held = f"{counted(len(versions), 'version')}, {counted(len(stored), 'file')}, {size(sum(stored.values()))}"
    show(f"{held}: {outcome}")
    return 1 if problems else 0


def _targets(root: str, storage_options: dict[str, Any] | None) -> tuple[list[Version], list[Problem]]:
    storage = find_root(root, storage_options)
    if storage is None:
        try:
            return [find_version(root, storage_options)], []
        except CorruptShardError as error:
            return [], [Problem(root, None, str(error))]
    versions, problems = [], []
    for ref in list_versions(storage):
        try:
            versions.append(Version(storage, load_manifest(storage, ref)))
        except (ManifestError, CorruptShardError) as error:
            problems.append(Problem(ref.path, None, str(error)))
    return versions, problems
