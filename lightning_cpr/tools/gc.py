"""``lightning-cpr gc``: remove old versions and what killed saves left behind."""

from __future__ import annotations

from typing import Any

from lightning_cpr.store.manifest import FOLDER, SIBLING
from lightning_cpr.store.orphans import Orphan, find_orphans, remove_orphans
from lightning_cpr.store.retention import Removal, Rules, plan_removal, remove_planned, run_of
from lightning_cpr.store.storage import Storage
from lightning_cpr.tools.show import add, show, size, table
from lightning_cpr.units import counted, seconds


def gc_command(
    root: str,
    keep_last: int | None = None,
    keep_age: str | None = None,
    keep_every: int | None = None,
    grace: str = "1h",
    run_id: str | None = None,
    dry_run: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> int:
    """Remove versions that no rule keeps, and files that no version needs.

    A version is kept if any rule says so; without rules all are, and only leftovers of killed saves go. The newest
    version and the newest exact one always stay, with all files that they need. Other runs are never touched. Of
    checkpoints that Lightning's ModelCheckpoint saved here, only chunks go that no checkpoint beside them needs.

    Args:
        root: The root, or a folder of checkpoints.
        keep_last: Keep the newest so many versions.
        keep_age: Keep versions younger than this, e.g. 7d.
        keep_every: Keep the first exact version of each so many training steps.
        grace: Never remove anything younger than this.
        run_id: Which run's versions; needed where the root holds several.
        dry_run: Only say what would be removed.
        storage_options: Options of the filesystem for fsspec, e.g. credentials.
    """
    rules = Rules(keep_last, None if keep_age is None else seconds(keep_age), keep_every)
    storage = Storage(root, storage_options)
    orphans = find_orphans(storage, seconds(grace))
    if run_id is not None or storage.list(FOLDER) or not storage.list(SIBLING):
        removal = plan_removal(storage, run_of(storage, run_id), rules, seconds(grace))
        removed = len(removal.files) if dry_run else len(remove_planned(storage, removal))
        _report(storage.root, removal, removed, dry_run)
    if not dry_run:
        remove_orphans(storage, orphans)
    for orphan in orphans:
        _report_orphan(orphan, dry_run)
    return 0


def _report(root: str, removal: Removal, removed: int, dry_run: bool) -> None:
    made = table(f"{root}, run {removal.run_id}", ["version", "stays or goes"], [])
    for version, why in removal.keep.items():
        add(made, version, f"stays: {why}")
    verb = "would be removed" if dry_run else "removed"
    for ref in reversed(removal.versions):
        add(made, ref.version, verb)
    show(made)
    show(f"{verb}: {counted(len(removal.versions), 'version')} and {counted(removed, 'file')}, {size(removal.bytes)}")


def _report_orphan(orphan: Orphan, dry_run: bool) -> None:
    verb, total = "would be removed" if dry_run else "removed", size(sum(file.bytes for file in orphan.files))
    what = f"{counted(len(orphan.files), 'file')} of a checkpoint that was never finished, {total}"
    show(f"{verb}: {what} ({SIBLING}/{orphan.version})")
