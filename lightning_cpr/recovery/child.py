"""A guardian's child: imports what training needs, waits for its order, then is the user's script.

``python -m lightning_cpr.recovery.child [--script S] [module ...]`` imports the modules and what S imports at its top.
The order is one JSON line on the pipe of ``LIGHTNING_CPR_CONTROL_FD``: script, args, module, and, for a replacement,
``replaces`` (why). A replacement announces its epoch before it runs the script, so that survivors are freed early.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import logging
import mmap
import os
import runpy
import struct
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from lightning_cpr.recovery.guardian import (
    CONTROL_FD_ENV,
    EXIT_STEP_DOWN,
    HEARTBEAT_FD_ENV,
    JOB_DIR_ENV,
    note_user_error,
    show_log,
)

log = logging.getLogger("lightning_cpr.recovery.child")  # __name__ is __main__ here

BASE_MODULES = ("torch", "torchrec", "torchrec.distributed", "lightning_cpr.recovery.membership")
STRATEGY_MODULE = "lightning_cpr.strategy"


def imports_of(source: str) -> list[str]:
    """The modules that a script imports by absolute name at its top level, in order."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return names


def warm_up(modules: Iterable[str]) -> None:
    """Import modules; one that fails is the script's matter when its turn comes."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as e:
            log.warning("the spare could not import %s: %s", name, e)


def heartbeat() -> Callable[[], None] | None:
    """What to call now and then so that the guardian knows this process runs; None without a guardian."""
    fd = os.environ.get(HEARTBEAT_FD_ENV)
    if fd is None:
        return None
    page = mmap.mmap(int(fd), mmap.PAGESIZE)
    return lambda: struct.pack_into("d", page, 0, time.monotonic())


def _run(order: dict[str, Any]) -> None:
    sys.argv = [order["script"], *order["args"]]
    if order["module"]:
        sys.path[0] = os.getcwd()
        runpy.run_module(order["script"], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(order["script"]).resolve().parent)
        runpy.run_path(order["script"], run_name="__main__")


def _end_with(error: Exception) -> None:
    """Leave the error where the other ranks, torchrun and this host's next attempt look for it."""
    from lightning_cpr.errors import RecoveryError
    from lightning_cpr.recovery.membership import publish_error, store_from_env

    if isinstance(error, RecoveryError):
        log.exception("live recovery failed: this rank steps down")
        sys.exit(EXIT_STEP_DOWN)
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from lightning_cpr.recovery.election import is_lost_peer

    get_error_handler().record_exception(error)
    if is_lost_peer(error):
        log.exception("a peer was lost where live recovery cannot help (%s): this rank steps down", error)
        sys.exit(EXIT_STEP_DOWN)
    rank = int(os.environ["RANK"])
    publish_error(store_from_env()(5.0), rank, error)
    report = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "") or os.devnull)
    text = report.read_text() if report.exists() else ""
    note_user_error(os.environ.get(JOB_DIR_ENV), rank, f"{type(error).__name__}: {error}", 1, text)


def main() -> None:
    parser = argparse.ArgumentParser(prog="child")
    parser.add_argument("--script")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    show_log()
    if options.script or options.modules:
        sys.path[0] = str(Path(options.script).resolve().parent) if options.script else os.getcwd()
        wanted = imports_of(Path(options.script).read_text()) if options.script else []
        warm_up([*BASE_MODULES, *wanted, *options.modules])
        if any(name in sys.modules for name in ("pytorch_lightning", "lightning.pytorch")):
            warm_up([STRATEGY_MODULE])
    with os.fdopen(int(os.environ.pop(CONTROL_FD_ENV))) as control:
        line = control.readline()
    if not line:
        return
    order = json.loads(line)
    if "replaces" in order:
        from lightning_cpr.recovery.membership import REPLACES_ENV, announce, store_from_env

        epoch = announce(store_from_env()(60.0), int(os.environ["RANK"]), order["replaces"])
        os.environ[REPLACES_ENV] = str(epoch)
    try:
        _run(order)
    except Exception as e:
        _end_with(e)
        raise


if __name__ == "__main__":
    main()
