"""Connections of a supervisor: to its training process, and to the supervisors of other ranks.

All supervisors are connected to that of rank 0.
"""

import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from oneloop.basics.launcher import local_ranks
from oneloop.supervise.crash_report import Cause
from oneloop.supervise.pipe import ADDRESS, Connection

_LOST = 8.0  # seconds without a message after which a rank on another node counts as lost


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
        self._connections: list[Connection] = []
        # gets the rank and the message of another supervisor; None: it is gone
        self.handle: Callable[[int, dict[str, Any] | None], None] = lambda *_: None
        self._token = secrets.token_hex(8)
        # whether all ranks are on this node
        self._local = local_ranks() == ranks
        self._given_up_until = 0.0

    def listen(self) -> None:
        """Open a port, on rank 0 of several; leave its address to the training process.

        It listens on loopback only; if there are several hosts, only on the interface of
        ``MASTER_ADDR``. The address is in the environment.
        """
        host = "127.0.0.1" if self._local else os.environ.get("MASTER_ADDR", "127.0.0.1")
        with suppress(OSError):
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            server = socket.create_server(address[:2], family=family)
            server.setblocking(False)
            self._selector.register(server, selectors.EVENT_READ, partial(self._accept, server))
            os.environ[ADDRESS] = f"{host} {server.getsockname()[1]} {self._token}"

    def _accept(self, server: socket.socket) -> None:
        with suppress(OSError):
            self._added(server.accept()[0])

    def connect(self, address: str) -> None:
        """Connect to the supervisor of rank 0 at ``address``: HOST PORT TOKEN."""
        host, port, token = address.split()
        with suppress(OSError):
            peer = self._added(socket.create_connection((host, int(port)), timeout=5.0), rank=0)
            peer.send(rank=self.rank, word=token)

    def _added(self, link: socket.socket, rank: int = -1) -> Connection:
        peer = Connection(link, rank)
        self._connections.append(peer)
        self._selector.register(link, selectors.EVENT_READ, partial(self._read, peer))
        return peer

    @property
    def others(self) -> list[Connection]:
        """The connections to supervisors that are authenticated."""
        return [peer for peer in self._connections if peer.rank >= 0]

    @property
    def all_connected(self) -> bool:
        """Whether all supervisors that this one talks to are connected."""
        return len(self.others) == (self.ranks - 1 if self.rank == 0 else 1)

    def lost(self, patience: float) -> Cause | None:
        """Return a message if a supervisor on another node was silent for too long."""
        if self._local:
            return None
        for peer in self.others:
            silent = time.monotonic() - peer.heard
            if silent > _LOST * patience:
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

    def _read(self, peer: Connection) -> None:
        """Handle what has arrived from another supervisor."""
        received = peer.received() if peer in self._connections else []
        if received is None:
            self._forget(peer)
            if peer.rank >= 0:
                self.handle(peer.rank, None)
            return
        for message in received:
            if peer.rank >= 0:
                self.handle(peer.rank, message)
                continue
            # The first message must hold the secret token.
            match message:
                case {"word": str(word), "rank": int(rank)} if secrets.compare_digest(
                    word.encode(errors="replace"), self._token.encode()
                ):
                    peer.rank = rank
                case _:
                    self._forget(peer)
                    return

    def _forget(self, peer: Connection) -> None:
        self._selector.unregister(peer.link)
        peer.link.close()
        self._connections.remove(peer)

    def send(self, **message: Any) -> None:
        """Send a message to all authenticated supervisors."""
        for peer in self.others:
            peer.send(**message)
