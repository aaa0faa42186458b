from __future__ import annotations

import socket

from lightning_cpr.recovery.sockets import listening_ports, new_listeners, shut_down


def test_only_the_groups_connections_are_ended_and_never_a_listener() -> None:
    found: set[int] = set()
    with socket.create_server(("127.0.0.1", 0)) as other:
        with new_listeners(found):
            server = socket.create_server(("127.0.0.1", 0))
        with server:
            port = server.getsockname()[1]
            assert found == {port}
            client, stranger = (socket.create_connection(s.getsockname()) for s in (server, other))
            accepted, guest = server.accept()[0], other.accept()[0]
            with client, stranger, accepted, guest:
                assert shut_down(own=(), peers={port}) == 1  # the client's side
                assert accepted.recv(1) == b""
                assert shut_down(own={port}, peers=()) == 1  # the accepted side
                assert client.recv(1) == b""
                guest.sendall(b"x")
                assert stranger.recv(1) == b"x"
                assert {port, other.getsockname()[1]} <= listening_ports()
                with socket.create_connection(server.getsockname()), server.accept()[0]:
                    pass
