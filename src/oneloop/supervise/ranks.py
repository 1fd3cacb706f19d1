"""TCP connections between the supervisors of a run: all are connected to that of rank 0.

They send lines of JSON.
"""

import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from oneloop.basics.launcher import HOST, local_ranks
from oneloop.supervise.crash_report import Cause
from oneloop.supervise.pipe import ADDRESS

# maximum bytes of a message, before and after authentication by the secret token
_MAX_BYTES_UNKNOWN = 1 << 10
_MAX_BYTES_KNOWN = 1 << 24
_MAX_UNKNOWN = 64  # maximum number of connections without authentication
_LOST = 8.0  # seconds without a message after which a rank on another node counts as lost


class SupervisorConnection:
    """A connection to another supervisor."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""  # a part of the next message
        connection.setblocking(False)
        self.heard = time.monotonic()  # when the last message arrived
        self.rank: int | None = None  # rank of the other side, once it is authenticated

    def messages(self) -> list[dict[str, Any]] | None:
        """Return the messages since the last call.

        None if the connection is closed, or if the data is not valid.
        """
        # Read all that has arrived.
        try:
            while more := self.connection.recv(1 << 16):
                self._buffer += more
                self.heard = time.monotonic()
                most = _MAX_BYTES_UNKNOWN if self.rank is None else _MAX_BYTES_KNOWN
                if len(self._buffer) > most:
                    return None
            return None
        except BlockingIOError:
            pass
        except OSError:
            return None

        # Divide it into messages.
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return found if all(isinstance(message, dict) for message in found) else None

    def send(self, **message: Any) -> None:
        """Send one message; drop it after a second, or if the connection is closed."""
        with suppress(OSError):
            self.connection.setblocking(True)
            self.connection.settimeout(1.0)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        with suppress(OSError):
            self.connection.setblocking(False)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self.connection.close()


class Supervisors:
    """Connections to the other supervisors (rank 0: to all; others: to rank 0).

    Args:
        rank: of this supervisor.
        ranks: their number.
        selector: gets the sockets.
    """

    def __init__(self, rank: int, ranks: int, selector: selectors.BaseSelector) -> None:
        self.rank = rank
        self.ranks = ranks
        self._selector = selector
        self.others: list[SupervisorConnection] = []
        # name of each rank's node, if there are several
        self.hosts = {rank: os.environ.get(HOST, "")}
        self._token = ""
        self._server: socket.socket | None = None
        # whether all ranks are on this node
        self._local = local_ranks() == ranks
        self._given_up_until = 0.0

    def listen(self) -> None:
        """Open a port, on rank 0 of several; leave its address to the training process.

        It listens on loopback only; if there are several hosts, only on the interface of
        ``MASTER_ADDR``. The address is in the environment.
        """
        host = "127.0.0.1" if self._local else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._token = secrets.token_hex(8)
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._server = socket.create_server(address[:2], family=family)
        except OSError:
            return
        os.environ[ADDRESS] = f"{host} {self._server.getsockname()[1]} {self._token}"

    def watch(self) -> None:
        """Accept connections from now on."""
        if self._server is not None:
            self._server.setblocking(False)
            self._selector.register(self._server, selectors.EVENT_READ, self._server)

    def connect(self, address: str) -> None:
        """Connect to the supervisor of rank 0 at ``address``: HOST PORT TOKEN."""
        host, port, token = address.split()
        with suppress(OSError):
            peer = SupervisorConnection(socket.create_connection((host, int(port)), timeout=5.0))
            peer.rank = 0
            peer.send(rank=self.rank, word=token, host=os.environ.get(HOST, ""))
            self.others.append(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    @property
    def all_connected(self) -> bool:
        """Whether all supervisors that this one talks to are connected."""
        known = [peer for peer in self.others if peer.rank is not None]
        return len(known) == (self.ranks - 1 if self.rank == 0 else 1)

    def lost(self, patience: float) -> Cause | None:
        """Return a message if a supervisor on another node was silent for too long."""
        if self._local:
            return None
        for peer in self.others:
            silent = time.monotonic() - peer.heard
            if peer.rank is not None and silent > _LOST * patience:
                words = (
                    f"rank {peer.rank} does not answer for {silent:.0f} s: its node or the link to "
                    "it is lost"
                )
                return Cause(peer.rank, words)
        return None

    def reset_timers(self, stopped_for: float = 0.0) -> None:
        """Restart all timers: this host was suspended for ``stopped_for`` seconds."""
        now = time.monotonic()
        if stopped_for > _LOST and not self._local:
            self._given_up_until = now + _LOST
        for peer in self.others:
            peer.heard = now

    @property
    def gave_this_up(self) -> bool:
        """Whether other nodes count this one as lost, if one of them ends now.

        This node was suspended for too long just before. It must not write to the run folder.
        """
        return time.monotonic() < self._given_up_until

    def on(self, rank: int) -> str:
        """Return "; node NAME" for a rank, if there are several nodes."""
        return f"; node {self.hosts[rank]}" if self.hosts.get(rank) else ""

    def read(self, readable: object) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """Yield received messages as (rank, message).

        The message is None if that rank's connection is closed.
        """
        # Accept a new connection; close the oldest ones of too many that are not authenticated.
        if readable is self._server:
            assert self._server is not None
            with suppress(OSError):
                peer = SupervisorConnection(self._server.accept()[0])
                self.others.append(peer)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            unknown = [peer for peer in self.others if peer.rank is None]
            for peer in unknown[:-_MAX_UNKNOWN]:
                self._forget(peer)
            return

        # Read a connection.
        assert isinstance(readable, SupervisorConnection)
        received = readable.messages() if readable in self.others else []
        if received is None:
            self._forget(readable)
            if readable.rank is not None:
                yield readable.rank, None
            return
        for message in received:
            # The first message must hold the secret token.
            if readable.rank is None:
                token = str(message.get("word"))
                rank = message.get("rank")
                known = secrets.compare_digest(token.encode(errors="replace"), self._token.encode())
                if not known or not isinstance(rank, int):
                    self._forget(readable)
                    return
                readable.rank = rank
                self.hosts[rank] = str(message.get("host") or "")
            else:
                yield readable.rank, message

    def _forget(self, peer: SupervisorConnection) -> None:
        self._selector.unregister(peer.connection)
        peer.close()
        self.others.remove(peer)

    def send(self, **message: Any) -> None:
        """Send a message to all authenticated supervisors."""
        for peer in self.others:
            if peer.rank is not None:
                peer.send(**message)
