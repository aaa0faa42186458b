"""The TCP connections of a gloo process group, found from outside, so that a blocked collective can be ended.

gloo tells some survivors nothing when a peer dies: they wait for living ranks only. What frees them is ``shutdown`` on
the group's connections. The listening socket must be left alone: a failed accept ends the process. A pair's connection
is known by its ports: one side of it is a port that some rank of the group listens on.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress


def listening_ports() -> set[int]:
    """The TCP ports that this process listens on."""
    ports = set()
    for sock in _own_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            ports.add(sock.getsockname()[1])
    return ports


@contextmanager
def new_listeners(found: set[int]) -> Iterator[None]:
    """Adds to ``found`` the ports on which this process has begun to listen inside the block."""
    before = listening_ports()
    yield
    found |= listening_ports() - before


def shut_down(own: Collection[int], peers: Collection[int]) -> int:
    """End every connection with a local port in ``own`` or a remote port in ``peers``; returns how many.

    The descriptors stay open, their owner closes them.
    """
    ended = 0
    for sock in _own_sockets():
        if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            continue
        with suppress(OSError):  # not connected, or ended meanwhile
            if sock.getsockname()[1] in own or sock.getpeername()[1] in peers:
                sock.shutdown(socket.SHUT_RDWR)
                ended += 1
    return ended


def _own_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each as a duplicate: what is looked at cannot be closed and reused meanwhile."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = os.dup(int(name))
        except OSError:  # closed since it was listed
            continue
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock
