"""The state of the rendezvous, signed with a secret that all nodes of a run know.

torch unpickles this state, and a pickle can run code: without a signature, anyone who reaches the
port of the rendezvous can run code on all nodes.
"""

import hashlib
import hmac
from collections.abc import MutableMapping
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous.api import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import Token

from oneloop.basics.exit_codes import BadInput

SECRET = "ONELOOP_SECRET"  # variable with the secret
SECRET_FILE = "ONELOOP_SECRET_FILE"  # variable with the path of a file that holds it
_LEAST = 16  # characters
_BYTES = hashlib.sha256().digest_size


def secret(environ: MutableMapping[str, str]) -> bytes | None:
    """Remove the secret of a run from the environment, and return it, or None.

    The training processes need not know it. Raise BadInput if it cannot be used.
    """
    # Read it.
    text = environ.pop(SECRET, None)
    file = environ.pop(SECRET_FILE, None)
    if text is None and file is not None:
        try:
            text = Path(file).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(
                f"the file {file} that {SECRET_FILE} names cannot be read: {error}; correct the "
                "path"
            ) from error
    if text is None:
        return None

    # A short one could be guessed.
    text = text.strip()
    if len(text) < _LEAST:
        raise BadInput(
            f"the secret in {SECRET} or {SECRET_FILE} must have at least {_LEAST} characters, got "
            f"{len(text)}; openssl rand -hex 32 prints one"
        )
    return text.encode()


def signature(key: bytes, content: bytes) -> bytes:
    """Return the HMAC-SHA256 of some bytes."""
    return hmac.digest(key, content, "sha256")


def agree_on_secret(store: Store, key: bytes | None) -> None:
    """Raise BadInput if another node has another secret, or only one of them has a secret."""
    mine = "none" if key is None else signature(key, b"oneloop").hex()
    first = store.compare_set("secret", "", mine).decode()
    if first != mine:
        which = "differs between nodes"
        if "none" in (first, mine):
            which = "is set on some nodes only"
        raise BadInput(
            "the nodes of a run need the same secret, and that of this run "
            f"{which}; set the same one on all nodes ({SECRET} or {SECRET_FILE})"
        )


class SignedBackend(C10dRendezvousBackend):
    """torch's rendezvous backend, whose state counts only with the right signature.

    Args:
        store: the store of the rendezvous.
        run: its name.
        key: the secret of the run.
    """

    def __init__(self, store: Store, run: str, key: bytes) -> None:
        super().__init__(store, run)
        self._secret = key

    def get_state(self) -> tuple[bytes, Token] | None:
        """Return the state and its version, or None. Raise RendezvousStateError."""
        found = super().get_state()
        if found is None:
            return None
        signed, version = found
        return self._verified(signed), version

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        """Set the state if its version is still ``token``; return the state as it is then."""
        found = super().set_state(signature(self._secret, state) + state, token)
        if found is None:
            return None
        signed, version, done = found
        return self._verified(signed), version, done

    def _verified(self, signed: bytes) -> bytes:
        state = signed[_BYTES:]
        if not hmac.compare_digest(signed[:_BYTES], signature(self._secret, state)):
            raise RendezvousStateError(
                "the state of the rendezvous has a wrong signature, and was not read: a program "
                "without the secret of the run has written it; close the port to strangers"
            )
        return state
