"""The watching processes of one run, connected with that of rank 0: lines of JSON through TCP, without torch."""

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


_FROM_A_STRANGER, _FROM_A_PEER = 1 << 10, 1 << 24
"""bytes of a message at most: before the secret word was sent, and after it"""
_STRANGERS = 64  # connections at most that have not sent the word


class SupervisorConnection:
    """One connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self._buffer = connection, b""
        connection.setblocking(False)
        self.rank: int | None = None  # of the other side, once it has said the word

    def messages(self) -> list[dict[str, Any]] | None:
        """Return its messages since the last call; None if it has gone, or sends anything else."""
        try:
            while more := self.connection.recv(1 << 16):
                self._buffer += more
                if len(self._buffer) > (_FROM_A_STRANGER if self.rank is None else _FROM_A_PEER):
                    return None
            return None
        except BlockingIOError:
            pass
        except OSError:
            return None
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            found = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            return None
        return found if all(isinstance(message, dict) for message in found) else None

    def send(self, **message: Any) -> None:
        with suppress(OSError):
            self.connection.setblocking(True)
            self.connection.settimeout(1.0)
            self.connection.sendall(json.dumps(message).encode() + b"\n")
        with suppress(OSError):
            self.connection.setblocking(False)

    def close(self) -> None:
        with suppress(OSError):
            self.connection.close()


class Supervisors:
    """Connections to the other supervisors: of rank 0 to all, of another rank to rank 0. ``selector`` gets the
    sockets."""

    def __init__(self, rank: int, ranks: int, selector: selectors.BaseSelector) -> None:
        self.rank, self.ranks, self._selector = rank, ranks, selector
        self.others: list[SupervisorConnection] = []
        self._word = ""
        self._door: socket.socket | None = None

    def listen(self) -> None:
        """Open a port, on rank 0 of several, and leave its address to the training process in the environment.

        It listens on loopback only; if there are several hosts, only on the interface of ``MASTER_ADDR``.
        """
        local = os.environ.get("LOCAL_WORLD_SIZE") == str(self.ranks)
        host = "127.0.0.1" if local else os.environ.get("MASTER_ADDR", "127.0.0.1")
        self._word = secrets.token_hex(8)
        try:
            family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
            self._door = socket.create_server(address[:2], family=family)
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
            peer = SupervisorConnection(socket.create_connection((host, int(port)), timeout=5.0))
            peer.rank = 0
            peer.send(rank=self.rank, word=word)
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
                peer = SupervisorConnection(self._door.accept()[0])
                self.others.append(peer)
                self._selector.register(peer.connection, selectors.EVENT_READ, peer)
            strangers = [peer for peer in self.others if peer.rank is None]
            for peer in strangers[:-_STRANGERS]:
                self._forget(peer)
            return
        assert isinstance(readable, SupervisorConnection)
        received = readable.messages() if readable in self.others else []
        if received is None:
            self._forget(readable)
            if readable.rank is not None:
                yield readable.rank, None
            return
        for message in received:
            if readable.rank is None:
                word, rank = str(message.get("word")), message.get("rank")
                known = secrets.compare_digest(word.encode(errors="replace"), self._word.encode())
                if not known or not isinstance(rank, int):
                    self._forget(readable)
                    return
                readable.rank = rank
            else:
                yield readable.rank, message

    def _forget(self, peer: SupervisorConnection) -> None:
        self._selector.unregister(peer.connection)
        peer.close()
        self.others.remove(peer)

    def send(self, **message: Any) -> None:
        """All that are known."""
        for peer in self.others:
            if peer.rank is not None:
                peer.send(**message)
