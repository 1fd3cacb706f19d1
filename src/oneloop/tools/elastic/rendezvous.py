"""The store through which the nodes of a run find each other, and exchange values."""

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

from torch.distributed import DistError, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from oneloop.basics.exit_codes import BadInput
from oneloop.supervise.crash_report import say
from oneloop.tools.elastic.bounded_store import BoundedStore, answered
from oneloop.tools.elastic.signed_backend import (
    SECRET,
    SignedBackend,
    agree_on_secret,
)
from oneloop.tools.nodes import Nodes

BEAT = 2  # seconds between two signs of life of a node
_BEATS = 3  # signs of life of a node that may be missing
_LAST_CALL = 3.0  # seconds in which more nodes may join once there are enough
_RUN = "oneloop"  # name of the rendezvous in its store
END = 5  # seconds in which all nodes should end a run


def open_store(nodes: Nodes) -> tuple[BoundedStore, bool]:
    """Return the store of the rendezvous, and whether this process holds it.

    The first process on the node of the rendezvous holds it. Raise ConnectionError if the store
    does not answer.
    """
    # Open the store, unless its address is of another host, or an agent here has opened it.
    with suppress(OSError, DistError):
        return BoundedStore(_held(nodes)), True

    # Wait until the node of the rendezvous has opened it.
    until = time.monotonic() + nodes.rejoin
    with announced(
        f"waiting for the rendezvous at {nodes.host}:{nodes.port}, for up to {nodes.rejoin:.0f} s"
    ):
        while not _listens(nodes):
            if time.monotonic() > until:
                raise ConnectionError(
                    f"no answer from {nodes.host}:{nodes.port} in {nodes.rejoin:.0f} s; start the "
                    f"same command on {nodes.host}, or check the address and the firewall"
                )
            time.sleep(0.5)

    # Connect. The constructor never returns if another program listens there.
    try:
        return BoundedStore(answered(partial(TCPStore, nodes.host, nodes.port))), False
    except DistError:
        raise ConnectionError(
            f"{nodes.host}:{nodes.port} accepts connections, and no rendezvous answers there; if "
            "another program uses the port, choose another free port; if oneloop is stopped on "
            "that host, end it"
        ) from None


def joined(nodes: Nodes, training: Sequence[str], key: bytes | None) -> tuple[BoundedStore, bool]:
    """Return the store of the rendezvous, and whether this process holds it.

    Raise BadInput if this node was started in another way than the first one.
    """
    store, holds = open_store(nodes)
    if holds and key is None:
        say(
            f"this run trusts its network: anyone who reaches {nodes.host}:{nodes.port} can run "
            f"code on all nodes; set {SECRET} on all of them"
        )
    agree_on_secret(store, key)

    # The first node writes its command into the store, and the others compare theirs.
    mine = f"--nodes {nodes.least}:{nodes.most} {' '.join(training)}"
    other = store.compare_set("command", "", mine).decode()
    if other != mine:
        raise BadInput(
            f"start the same command on all nodes: another was started with {other!r}, this "
            f"with {mine!r}"
        )
    return store, holds


def _held(nodes: Nodes) -> TCPStore:
    """Open the store on the network interface of its address only.

    Raise OSError, DistError if the port is in use, or the address is not of this host.
    """
    # Debian gives a host's own name a loopback address, at which no other host could reach it.
    address = socket.gethostbyname(nodes.host)
    if address.startswith("127.") and nodes.host not in (address, "localhost"):
        address = ""
    server = socket.create_server((address, nodes.port))
    port = server.getsockname()[1]
    return TCPStore(
        nodes.host, port, is_master=True, multi_tenant=True, master_listen_fd=server.detach()
    )


def _listens(nodes: Nodes) -> bool:
    """Return whether the node of the rendezvous accepts connections."""
    try:
        with socket.create_connection((nodes.host, nodes.port), timeout=BEAT):
            return True
    except OSError:
        return False


def rendezvous_handler(
    nodes: Nodes, store: Store, address: str, key: bytes | None
) -> DynamicRendezvousHandler:
    """Return torch's rendezvous for these nodes.

    Args:
        nodes: the nodes of the run.
        store: the store of the rendezvous.
        address: of this node.
        key: the secret with which its state is signed; None: it is not.
    """
    backend = C10dRendezvousBackend(store, _RUN)
    if key is not None:
        backend = SignedBackend(store, _RUN, key)
    return DynamicRendezvousHandler.from_backend(  # type: ignore[no-any-return]
        run_id=_RUN,
        store=store,
        backend=backend,
        min_nodes=nodes.least,
        max_nodes=nodes.most,
        local_addr=address,
        timeout=RendezvousTimeout(
            join=timedelta(seconds=nodes.rejoin),
            last_call=timedelta(seconds=_LAST_CALL),
            close=timedelta(seconds=END),
        ),
        keep_alive_interval=BEAT,
        keep_alive_max_attempt=_BEATS,
    )


def lost(nodes: Nodes) -> str:
    """Return the message for the loss of the rendezvous."""
    return (
        f"the rendezvous at {nodes.host}:{nodes.port} does not answer: that node, or the link to "
        "it, is lost; start the same command again"
    )


def not_joined(nodes: Nodes, handler: DynamicRendezvousHandler) -> str:
    """Return the message for a node that has waited in vain."""
    others = len(handler._state_holder.state.participants)
    if others >= nodes.least:
        return (
            f"the {others} nodes that train did not start again with this one in "
            f"{nodes.rejoin:.0f} s; see their output"
        )
    return (
        f"fewer than {nodes.least} nodes joined in {nodes.rejoin:.0f} s; start the same command on "
        "more nodes"
    )


def exchanged(
    store: Store, name: str, mine: Any, rank: int, ranks: int, seconds: float = 20.0
) -> list[Any]:
    """Return the values of all nodes, in order. A signal can interrupt it.

    Collective: call on every node.

    Args:
        store: the store of the rendezvous.
        name: of the value.
        mine: this node's value, for JSON.
        rank: this node's number, from 0.
        ranks: the number of nodes.
        seconds: time to wait for the other nodes.

    Raises:
        ConnectionError: the value of a node is missing.
    """
    # The store's own wait would not let a signal interrupt it.
    store.set(f"{name}/{rank}", json.dumps(mine))
    keys = [f"{name}/{other}" for other in range(ranks)]
    until = time.monotonic() + seconds
    while not store.check(keys):
        time.sleep(0.05)
        if time.monotonic() > until:
            raise ConnectionError(
                f"another node did not answer in {seconds:.0f} s; see the output of all nodes"
            )
    return [json.loads(store.get(key)) for key in keys]


@contextmanager
def announced(words: str) -> Iterator[None]:
    """Print the words if the block takes longer than three seconds."""
    timer = threading.Timer(3.0, say, [words])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
