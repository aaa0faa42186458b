"""The ``lightning-cpr`` command: ``fit``, ``validate``, ``test``, ``predict`` are LightningCLI's, the rest are ours."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from lightning_cpr._version import __version__
from lightning_cpr.errors import CPRError
from lightning_cpr.job.arguments import run

TRAINER_COMMANDS = {
    "fit": "train a model from a config; the torchrec strategy is the default",
    "validate": "validate a model from a config",
    "test": "test a model from a config",
    "predict": "predict with a model from a config",
}

LAUNCH = {"run": "start a job as torchrun does; a process that dies is replaced, the others keep pid and memory"}

# command: (module, function). Imported when used: `inspect` needs no Trainer, `fit` no plots.
COMMANDS: dict[str, tuple[str, str]] = {
    "plan": ("lightning_cpr.report.planning", "plan_command"),
    "simulate": ("lightning_cpr.report.planning", "simulate_command"),
    "inspect": ("lightning_cpr.tools.inspect", "inspect_command"),
    "verify": ("lightning_cpr.tools.verify", "verify_command"),
    "export": ("lightning_cpr.tools.export", "export_command"),
    "import": ("lightning_cpr.tools.import_dcp", "import_command"),
    "diff": ("lightning_cpr.tools.diff", "diff_command"),
    "report": ("lightning_cpr.report.render", "report_command"),
    "gc": ("lightning_cpr.tools.gc", "gc_command"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 where a check failed, 2 for an error of ours, told in one line."""
    args = list(sys.argv[1:] if argv is None else argv)
    command = args[0] if args else "--help"
    try:
        if command in ("-h", "--help"):
            print(usage())
            return 0
        if command == "--version":
            print(f"lightning-cpr {__version__}")
            return 0
        if command in TRAINER_COMMANDS:
            return run_trainer(args if argv is not None else None)
        if command in LAUNCH:
            return launch(args[1:])
        if command in COMMANDS:
            return run(_function(command), f"lightning-cpr {command}", args[1:])
        print(f"lightning-cpr: no command {command!r}; lightning-cpr --help lists them", file=sys.stderr)
        return 2
    except CPRError as e:
        print(f"lightning-cpr {command}: {one_line(e)}", file=sys.stderr)
        return 2
    except OSError as e:
        if command not in COMMANDS or e.strerror is None:
            raise
        print(f"lightning-cpr {command}: {e.filename or 'output'}: {e.strerror}", file=sys.stderr)
        return 2


def one_line(error: CPRError) -> str:
    """An error's message without the traces of other ranks that follow it; lists are kept."""
    first, *more = str(error).splitlines() or [""]
    return " ".join([first, *(line.strip() for line in more)]) if first.endswith(":") else first


def usage() -> str:
    """The text of ``lightning-cpr --help``."""
    lines = ["usage: lightning-cpr COMMAND [options]", "", "commands:"]
    ours = {c: (_function(c).__doc__ or "").partition("\n")[0].rstrip(".") for c in COMMANDS}
    summaries = {**TRAINER_COMMANDS, **LAUNCH, **{c: text[:1].lower() + text[1:] for c, text in ours.items()}}
    lines += [f"  {name:<10} {summary}" for name, summary in summaries.items()]
    return "\n".join([*lines, "", "lightning-cpr COMMAND --help shows a command's options."])


def run_trainer(args: list[str] | None) -> int:
    """LightningCLI with strategy ``torchrec``; ``class_path``s are found from the current directory, as with -m.

    args: None for the process's own.
    """
    sys.path.insert(0, os.getcwd())
    from lightning_cpr._lightning import PACKAGE

    cli = import_module(f"{PACKAGE}.cli")
    try:
        cli.LightningCLI(
            args=args,
            trainer_defaults={"strategy": "torchrec"},
            save_config_kwargs={"overwrite": True},
            auto_configure_optimizers=False,
            # jsonargparse's own lists every option, on fifty lines before each error
            parser_kwargs={c: {"usage": f"lightning-cpr {c} [--config FILE] [options]"} for c in TRAINER_COMMANDS},
        )
    except ValueError as e:
        # What a class of the config refuses comes wrapped in what else jsonargparse tried.
        cause: BaseException | None = e
        while cause is not None and not isinstance(cause, CPRError):
            cause = cause.__cause__
        raise cause or e from None
    return 0


def launch(args: Sequence[str]) -> int:
    """``lightning-cpr run``: torchrun's options and ours. Of a job that was preempted the code is 143."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousClosedError

    from lightning_cpr.recovery.launch import run as run_job
    from lightning_cpr.recovery.preempt import EXIT_PREEMPTED

    try:
        run_job(args)
    except ChildFailedError as e:
        print(f"lightning-cpr run: the job failed\n{e}", file=sys.stderr)
        _, first = e.get_first_failure()
        return EXIT_PREEMPTED if first.exitcode == EXIT_PREEMPTED else 1
    except SignalException as e:
        print(f"lightning-cpr run: ended by {e.sigval.name}", file=sys.stderr)
        return 128 + e.sigval
    except RendezvousClosedError:
        print("lightning-cpr run: the job has ended on another host, see its log", file=sys.stderr)
        return 1
    return 0


def _function(command: str) -> Callable[..., Any]:
    module, name = COMMANDS[command]
    return getattr(import_module(module), name)


if __name__ == "__main__":
    sys.exit(main())
