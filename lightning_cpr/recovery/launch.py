"""``lightning-cpr run [options] script.py [args]``: torchrun, with a guardian in each rank's place."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from lightning_cpr.errors import ConfigError
from lightning_cpr.recovery import guardian, stash
from lightning_cpr.recovery.host import SHM

DEFAULT_MAX_RESTARTS = 3
_DEFAULT_ENV = {
    # torchrun's default has NCCL end the process when a collective fails, and with it everything that it holds.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    # Tables in host memory take huge pages: a replacement's are there three times as fast.
    "THP_MEM_ALLOC_ENABLE": "1",
}


def make_parser() -> argparse.ArgumentParser:
    """torchrun's own parser with our options added."""
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()
    parser.prog = "lightning-cpr run"
    parser.description = (
        "torchrun, but a process that dies is replaced while the others keep pid and memory. All options of torchrun"
        f" are taken; --max-restarts, the step down when a process cannot be replaced, is {DEFAULT_MAX_RESTARTS} here."
    )
    if "PET_MAX_RESTARTS" not in os.environ:
        parser.set_defaults(max_restarts=DEFAULT_MAX_RESTARTS)
    budget = guardian.DEFAULT_BUDGET
    group = parser.add_argument_group("replacing processes")
    group.add_argument("--spares", type=int, choices=(0, 1), default=1, help="warm spares a rank")
    group.add_argument("--preload", default="", help="more modules for a spare to import, comma-separated")
    group.add_argument("--max-replacements", type=int, default=budget.replacements, help="of one rank in one window")
    group.add_argument("--window", type=float, default=budget.window, help="seconds")
    group.add_argument("--hang-timeout", type=float, default=30.0, help="silence that counts as death, s; 0: never")
    return parser


def run(argv: Sequence[str]) -> None:
    """Run a job on this host, as torchrun does, and wait for it.

    Raises:
        ConfigError: options that contradict each other, or no such script or module.
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: the job failed; it holds the first failure.
    """
    from torch.distributed import run as torchrun

    options = make_parser().parse_args(argv)
    if options.no_python or options.run_path:
        raise ConfigError("lightning-cpr run starts Python scripts and modules: leave out --no-python and --run-path")
    if options.module:
        _check_module(options.training_script)
    elif not Path(options.training_script).is_file():
        raise ConfigError(f"no script {options.training_script!r}; a module is named with -m")
    own = {name: getattr(options, name) for name in ("spares", "preload", "max_replacements", "window", "hang_timeout")}
    passed = [f"--{name.replace('_', '-')}={value}" for name, value in own.items()]
    if options.module:
        passed.append("--module")
    options.training_script_args = [*passed, options.training_script, *options.training_script_args]
    options.training_script, options.module = str(Path(guardian.__file__).resolve()), False
    added = {name: value for name, value in _DEFAULT_ENV.items() if name not in os.environ} | _store_of(options)
    own_env = {name: os.environ[name] for name in added if name in os.environ}
    with tempfile.TemporaryDirectory(prefix="lightning-cpr-") as job_dir:
        added[guardian.JOB_DIR_ENV] = job_dir
        os.environ.update(added)
        try:
            torchrun.run(options)
        finally:
            stash.remove_of_agent(SHM, stash.agent_of(os.getpid()))  # left for a restart that will not come
            for name in added:
                del os.environ[name]
            os.environ.update(own_env)


def _check_module(name: str) -> None:
    """Whether ``-m name`` finds something to run from the current directory, as it will on the ranks. Imports nothing:
    what is in a package is for the ranks.

    Raises:
        ConfigError: there is no such module, or it is a package that cannot be run.
    """
    parts = name.split(".")
    spec = PathFinder.find_spec(parts[0], [os.getcwd()]) or (find_spec(parts[0]) if parts[0] else None)
    for depth in range(2, len(parts) + 1):
        spec = _within(spec, ".".join(parts[:depth]))
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _within(spec, f"{name}.__main__")
    if spec is None:
        raise ConfigError(f"no module {name!r} to run; a script is named without -m")


def _within(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    places = None if package is None else package.submodule_search_locations
    return None if places is None else PathFinder.find_spec(name, list(places))


def _store_of(options: argparse.Namespace) -> dict[str, str]:
    """What makes trainers of several hosts meet in the store of the c10d rendezvous.

    The store that torchrun (2.13) shares otherwise lies on the host that was first when the job began; a host that
    takes a lost one's place is never told where that is.
    """
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import DEFAULT_PORT
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import parse_min_max_nnodes

    _, hosts = parse_min_max_nnodes(options.nnodes)
    if options.standalone or options.rdzv_backend != "c10d" or hosts == 1:
        return {}
    host, port = parse_rendezvous_endpoint(options.rdzv_endpoint, default_port=DEFAULT_PORT)
    return {guardian.STORE_ENV: f"{host}:{port}", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
