"""The TCP port for peers' pages: known, and ours, from the start, although the receiver comes with the first worker."""

from __future__ import annotations

import socket

from kvferry.errors import ConfigError
from kvferry.transfer.sockets import parse_host_port

__all__ = ["DataPort"]

_HINT = "Choose another --data-listen; port 0 takes a free one."


class DataPort:
    """``listen``: HOST:PORT for the receiver, its port never 0; ``advertised``: HOST:PORT for peers.

    The port is bound but not listened on. Linux lets the receiver bind it too, because both allow reuse and one listens.
    """

    def __init__(self, listen: str, advertise: str) -> None:
        """Raises ConfigError where the address is none or is in use."""
        try:
            host, port = parse_host_port(listen)
            family, kind, protocol, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot listen on {listen}", why=str(error), hint=_HINT) from error
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(place)
        except OSError as error:
            self._socket.close()
            raise ConfigError(f"cannot listen on {listen}", why=error.strerror or str(error), hint=_HINT) from error
        port = self._socket.getsockname()[1]
        self.listen = f"{listen.rpartition(':')[0]}:{port}"
        name, _, wanted = (advertise or listen).rpartition(":")
        self.advertised = f"{name}:{port if wanted == '0' else wanted}"

    def close(self) -> None:
        self._socket.close()
