"""A guardian's child: imports what training needs, waits for its order, then is the user's script.

``python child.py --control FD [--script S] [--modules F] [module ...]`` imports what S imports at its top, the modules,
and those that a trainer listed in F (`guardian.note_modules`). The order is one JSON line on the pipe FD: script, args,
module, and, for a replacement, ``replaces`` (why), ``died_at`` (when, ``time.time()``) and ``start`` (the token, see
`recovery.start`). A replacement announces its epoch before it runs the script, so that survivors are freed early.

Nothing of lightning_cpr is imported before the script's own imports: it builds on the Lightning that is loaded first.
"""

from __future__ import annotations

import argparse
import ast
import functools
import importlib
import json
import logging
import os
import runpy
import select
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

log = logging.getLogger("lightning_cpr.recovery.child")  # __name__ is __main__ here

_STORE_S = 5.0
"""For reaching the job's store when this process fails."""
BASE_MODULES = ("torch", "torchrec.distributed", "lightning_cpr.recovery.membership", "lightning_cpr.strategy")


def imports_of(source: str) -> list[str]:
    """The modules that a script imports by absolute name at its top level, in order."""
    names: list[str] = []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.append(node.module)
    return names


def warm_up(modules: Iterable[str], level: int = logging.WARNING) -> None:
    """Import modules; one that fails is told at ``level``, and the script's matter when its turn comes."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as e:
            log.log(level, "not imported ahead: %s (%s)", name, e)


def heartbeat() -> Callable[[], int] | None:
    """What to call now and then so that the guardian knows this process runs; None without a guardian.

    It returns whether the guardian wants this process to end: 0 no, 1 yes, 2 and half of its grace is over.
    """
    from lightning_cpr.recovery import guardian

    page = guardian.heartbeat_page()
    return None if page is None else functools.partial(guardian.beat, page)


def _imports(script: str | None) -> list[str]:
    return [] if script is None else imports_of(Path(script).read_text())


def _run(order: dict[str, Any]) -> None:
    sys.argv = [order["script"], *order["args"]]
    if order["module"]:
        runpy.run_module(order["script"], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(order["script"], run_name="__main__")


def _announce(reason: str, died_at: float, start: str) -> None:
    from lightning_cpr.recovery.membership import REPLACES_ENV, announce, store_from_env
    from lightning_cpr.recovery.start import START_ENV

    os.environ[START_ENV] = start
    os.environ[REPLACES_ENV] = str(announce(store_from_env()(60.0), int(os.environ["RANK"]), reason, died_at))


def _report(error: Exception) -> int:
    """Leave the error where other ranks, torchrun and this host's next attempt look for it. Returns the exit code."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    from lightning_cpr.errors import RecoveryError
    from lightning_cpr.recovery.election import is_lost_peer
    from lightning_cpr.recovery.guardian import EXIT_STEP_DOWN

    get_error_handler().record_exception(error)
    if isinstance(error, RecoveryError) or is_lost_peer(error):
        log.exception("this rank steps down: %s", error)
        _note_error_of_peer()
        return EXIT_STEP_DOWN
    _publish(f"{type(error).__name__}: {error}", 1)
    return 1


def _publish(error: str, code: int) -> None:
    """Tell this host's next attempt, and the other ranks, that the user's code failed here."""
    from lightning_cpr.errors import CPRError
    from lightning_cpr.recovery.guardian import JOB_DIR_ENV, note_user_error
    from lightning_cpr.recovery.start import publish_error

    rank = int(os.environ["RANK"])
    report = Path(os.environ.get("TORCHELASTIC_ERROR_FILE") or os.devnull)
    text = report.read_text() if report.exists() else ""
    note_user_error(os.environ.get(JOB_DIR_ENV), rank, error, code, text)
    try:
        publish_error(rank, error, _STORE_S)
    except (CPRError, RuntimeError) as e:  # the traceback is the record then
        log.warning("the other ranks are not told: %s", e)


def _note_error_of_peer() -> None:
    """If the user's code failed on another rank, on whatever host, this host need not try again either."""
    from lightning_cpr.errors import CPRError
    from lightning_cpr.recovery.guardian import JOB_DIR_ENV, note_user_error
    from lightning_cpr.recovery.start import published_error, run_store

    try:
        failed = published_error(run_store(os.environ, _STORE_S))
    except (CPRError, RuntimeError) as e:
        log.warning("nothing is known of errors on other ranks: %s", e)
        return
    if failed is not None:
        note_user_error(os.environ.get(JOB_DIR_ENV), *failed, 1)


def _is_own_error(code: int) -> bool:
    from lightning_cpr.recovery.guardian import DEFAULT_BUDGET, judge

    return judge(code, (), 0.0, DEFAULT_BUDGET).own_error


def _tell_over(code: int) -> None:
    from lightning_cpr.recovery.guardian import tell_over

    tell_over(code)


def show_log() -> None:
    """Print this package's log to stderr, whatever the user's script does with the root logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[lightning-cpr] %(message)s"))
    logger = logging.getLogger("lightning_cpr")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def main() -> None:
    parser = argparse.ArgumentParser(prog="child")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--script")
    parser.add_argument("--modules", type=Path, dest="listed")
    parser.add_argument("modules", nargs="*")
    options = parser.parse_args()
    sys.path[0] = str(Path(options.script).resolve().parent) if options.script else os.getcwd()
    if options.modules or options.script:
        warm_up([*_imports(options.script), *options.modules, *BASE_MODULES])
        if options.listed is not None and options.listed.exists():  # not where the trainer died before its first step
            warm_up(json.loads(options.listed.read_text()), logging.DEBUG)
        ordered, _, _ = select.select([options.control], [], [], 0)
        if not ordered and (beat := heartbeat()) is not None:
            beat()  # the spare is warm; a trainer's first beat says that it has begun, from then on silence counts
    with os.fdopen(options.control) as control:
        line = control.readline()
    if not line:
        return
    order = json.loads(line)
    script = None if order["module"] else order["script"]
    sys.path[0] = os.getcwd() if script is None else str(Path(script).resolve().parent)
    if "replaces" in order:
        warm_up(_imports(script))
        _announce(order["replaces"], order["died_at"], order["start"])
    code = 1
    try:
        _run(order)
        code = 0
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if _is_own_error(code):
            _publish(f"exit code {code}", code)
        raise
    except Exception as e:
        if (code := _report(e)) != 1:
            sys.exit(code)
        raise
    finally:
        _tell_over(code)


if __name__ == "__main__":
    show_log()
    main()
