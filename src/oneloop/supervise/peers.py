"""The watching processes of one run, connected with that of rank 0: lines of JSON through TCP, without torch."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

ADDRESS = "ONELOOP_WATCHED_AT"
"""the variable by which rank 0's training process knows where its watching process listens: HOST PORT WORD"""


class Peer:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._buffer = connection, b""
        connection.setblocking(False)
        self.rank: int | None = None
        """of the other side, once it has said the word"""

    def messages(self) -> list[dict[str, Any]] | None:
        """What it has told since; None: it has gone."""
        try:
            while True:
                more = self.connection.recv(1 << 16)
                if not more:
                    return None
                self._buffer += more
        except BlockingIOError:
            pass
        except OSError:
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            return [json.loads(line) for line in lines]
        except ValueError:
            return None

    def tell(self, **message: Any) -> None:
        with suppress(OSError):
            self.connection.setblocking(True)
            self.connection.settimeout(1.0)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        with suppress(OSError):
            self.connection.setblocking(False)

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()


class Peers:
    """The others: of rank 0 all of them, of another rank that of rank 0.

    Args:
        rank: of this one.
        ranks: how many there are.
        selector: gets the sockets that are to be read.
    """

    def __init__(self, rank: int, ranks: int, selector: selectors.BaseSelector) -> None:
        self.rank, self.ranks, self._selector = rank, ranks, selector
        self.others: list[Peer] = []
        self._word = ""
        self._door: socket.socket | None = None

    def listen(self) -> None:
        """Opens a port, on rank 0 of several, and leaves its place to the training process in the environment."""
        local = os.environ.get("LOCAL_WORLD_SIZE") == str(self.ranks)
        host = "127.0.0.1" if local else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._word = secrets.token_hex(8)
        try:
            self._door = socket.create_server(("127.0.0.1" if local else "", 0))
        except OSError:
            return
        os.environ[ADDRESS] = f"{host} {self._door.getsockname()[1]} {self._word}"

    def watch(self) -> None:
        """From now on the port is looked at."""
        if self._door is not None:
            self._door.setblocking(False)
            self._selector.register(self._door, selectors.EVENT_READ, self._door)

    def connect(self, place: str) -> None:
        """To the watching process of rank 0."""
        host, port, word = place.split()
        with suppress(OSError):
            peer = Peer(socket.create_connection((host, int(port)), timeout=5.0))
            peer.rank = 0
            peer.tell(rank=self.rank, word=word)
            self.others.append(peer)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    @property
    def together(self) -> bool:
        """Whether all are connected."""
        known = [peer for peer in self.others if peer.rank is not None]
        return len(known) == (self.ranks - 1 if self.rank == 0 else 1)

    def read(self, readable: object) -> Iterator[tuple[int, dict[str, Any] | None]]:
        """What has come, by rank; None: that one has gone."""
        if readable is self._door:
            assert self._door is not None
            with suppress(OSError):
                peer = Peer(self._door.accept()[0])
                self.others.append(peer)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            return
        assert isinstance(readable, Peer)
        told = readable.messages()
        if told is None:
            self._forget(readable)
            if readable.rank is not None:
                yield readable.rank, None
            return
        for message in told:
            if readable.rank is None:
                if not secrets.compare_digest(str(message.get("word")), self._word):
                    self._forget(readable)
                    return
                readable.rank = int(message["rank"])
            else:
                yield readable.rank, message

    def _forget(self, peer: Peer) -> None:
        self._selector.unregister(peer.connection)
        peer.close()
        self.others.remove(peer)

    def tell(self, **message: Any) -> None:
        """All that are known."""
        for peer in self.others:
            if peer.rank is not None:
                peer.tell(**message)
