"""The handshake of a fetcher and its clients, which prove that they belong to the same run."""

import os
import socket
import struct
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

SECONDS = 20  # time limit of each answer of the other side


def prove(connection: Connection, key: bytes, *, accepted: bool) -> None:
    """Prove to the other side that this one knows the key, and the reverse.

    Args:
        connection: to the other side.
        key: of the run.
        accepted: whether this side has accepted the connection: it asks first.

    Raises:
        AuthenticationError, AssertionError: the other side does not know the key.
        OSError, EOFError: it says nothing, or has gone.
    """
    steps = [deliver_challenge, answer_challenge]
    if not accepted:
        steps.reverse()
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        # The system limits the time: a Connection itself waits without end.
        _limit_reads(peer, SECONDS)
        for step in steps:
            step(connection, key)
        _limit_reads(peer, 0)


def _limit_reads(peer: socket.socket, seconds: int) -> None:
    """Limit the time of each read (0: without limit), by ``struct timeval``."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
