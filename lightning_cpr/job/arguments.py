"""A command line from a function: its parameters become arguments, its docstring the help."""

from __future__ import annotations

import argparse
import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Sequence
from typing import Any, Literal


def run(function: Callable[..., Any], prog: str, args: Sequence[str]) -> int:
    """Call ``function`` with parsed ``args``; returns its status, 0 where it gives none.

    Parameters without a default become positional arguments, the others ``--options`` (dashes for underscores): a
    ``bool`` a switch, a ``Literal`` a choice, a ``dict`` a JSON object. Texts come from the docstring's ``Args``.
    """
    parsed = parser(function, prog).parse_args(list(args))
    status = function(**vars(parsed))
    return status if isinstance(status, int) else 0


def parser(function: Callable[..., Any], prog: str) -> argparse.ArgumentParser:
    """The parser that `run` uses."""
    doc = inspect.getdoc(function) or ""
    about, _, listed = doc.partition("\nArgs:\n")
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", listed, re.M))
    made = argparse.ArgumentParser(prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    hints = typing.get_type_hints(function)
    for name, parameter in inspect.signature(function).parameters.items():
        text = " ".join(texts.get(name, "").split()).replace("%", "%%")
        _add(made, name, hints[name], parameter.default, text)
    return made


def _add(made: argparse.ArgumentParser, name: str, hint: Any, default: Any, text: str) -> None:
    required = default is inspect.Parameter.empty
    flag = name if required else f"--{name.replace('_', '-')}"
    if hint is bool:
        action = argparse.BooleanOptionalAction if default else "store_true"
        made.add_argument(flag, action=action, default=default, help=text)
        return
    given: dict[str, Any] = {"help": text}
    if isinstance(hint, types.UnionType):
        (hint,) = (one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(hint) is Literal:
        given["choices"] = typing.get_args(hint)
    elif typing.get_origin(hint) is dict:
        given |= {"type": _json_object, "metavar": "JSON"}
    else:
        given["type"] = hint
    if not required:
        given["default"] = default
        if "choices" not in given and "metavar" not in given:
            given["metavar"] = {int: "N", float: "X"}.get(hint, name.upper())
        if default is not None:
            given["help"] += f" (default: {default})"
    made.add_argument(flag, **given)


def _json_object(text: str) -> dict[str, Any]:
    # argparse prints the message of this error, never the text: it may hold credentials.
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('not a JSON object, as in {"anon": true}')
    return value
