"""The owner of a mirror: a lease (Gray and Cheriton, 1989).

Two machines thus never write the same run.

Each owner creates ``owner/00000003.json`` with the next number, only if it is new, and renews it.
If it does not for some time, another process may take the next number. The former owner then finds
that, and writes nothing more.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from oneloop.basics.bucket import Bucket
from oneloop.basics.exit_codes import BadInput

# variable with the seconds after which an owner that does not renew its lease is replaced
SECONDS = "ONELOOP_LEASE"
_FOLDER = "owner"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # continues while the machine sleeps


class Taken(OSError):
    """An error: another process owns the mirror."""


class Lease:
    """The lease of one owner.

    Args:
        bucket: the mirror.
        number: of the lease.
        about: the owner (host, pid, since, token), its ``seconds``, and ``beat``, which counts the
            renewals.
    """

    def __init__(self, bucket: Bucket, number: int, about: Mapping[str, Any]) -> None:
        self.bucket = bucket
        self.number = number
        self.about = dict(about)
        self._renewed = 0.0  # time of the last renewal, on _CLOCK

    def check(self, *, now: bool = False) -> None:
        """Raise Taken if another process is the owner.

        Without ``now``, look only if the lease was not renewed lately: after a renewal, no other
        process can take it for its seconds.
        """
        if not now and time.clock_gettime(_CLOCK) - self._renewed < self.about["seconds"] / 2:
            return
        newest, owner = _newest(self.bucket)
        if newest > self.number or owner.get("token", self.about["token"]) != self.about["token"]:
            raise Taken(
                f"{self.bucket.address} was taken over by {_who(owner)}; nothing more is "
                "written there"
            )

    def renew(self, *, released: bool = False) -> None:
        """Renew the lease, or release it. Raises Taken."""
        self.check(now=True)
        began = time.clock_gettime(_CLOCK)  # before the request, which may take long
        self.about = {**self.about, "beat": self.about["beat"] + 1}
        content = {**self.about, "released": released}
        self.bucket.put(_name(self.number), json.dumps(content).encode())
        self._renewed = began

    def keep(self, taken: Callable[[Taken], None]) -> None:
        """Renew the lease until it is ``taken``. Call it in a thread."""
        while True:
            try:
                self.renew()
            except Taken as error:
                return taken(error)
            except Exception:  # the next upload reports it
                pass
            time.sleep(self.about["seconds"] / 3)


def take(bucket: Bucket, about: Mapping[str, Any], say: Callable[[str], object] = print) -> Lease:
    """Become the owner of the mirror.

    An owner counts as gone if it does not renew its lease for its seconds, on the clock of this
    process. An owner with the token of ``about`` is an earlier start in this run folder, which has
    ended.

    Args:
        bucket: the mirror.
        about: describes this process (host, pid, since, token).
        say: reports a wait for another owner.

    Raises:
        Taken: if there is another owner, which renews its lease.
    """
    own = {**about, "seconds": _seconds(os.environ.get(SECONDS, "60")), "beat": 0}
    seen = None  # the owner at the last look
    since = 0.0  # time of the first look
    while True:
        newest, there = _newest(bucket)
        gone = not newest or there.get("released") or there.get("token") == own["token"]
        if not gone and seen not in (None, (newest, there)):
            raise Taken(
                f"{bucket.address} is in use by {_who(there)}; wait for its end, or choose "
                "another address"
            )

        # Take the next number, if the owner has not renewed its lease since the first look.
        if seen is None:
            since = time.monotonic()
        if gone or time.monotonic() - since > there.get("seconds", 60.0):
            try:
                bucket.put(_name(newest + 1), json.dumps(own).encode(), create=True)
            except FileExistsError:
                continue  # another starter was faster
            bucket.remove(_name(newest - 1))
            return Lease(bucket, newest + 1, own)

        # Look again a little later.
        if seen is None:
            say(
                f"{bucket.address} is held by {_who(there)}; waiting for up to "
                f"{there.get('seconds', 60.0):.0f} s"
            )
        seen = newest, there
        time.sleep(min(0.5, own["seconds"] / 10))


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:08d}.json"


def _seconds(text: str) -> float:
    if not text.replace(".", "", 1).isdigit() or float(text) < 1:
        raise BadInput(f"{SECONDS} must be a number of seconds, at least 1; got {text!r}")
    return float(text)


def _newest(bucket: Bucket) -> tuple[int, dict[str, Any]]:
    """Return the number and the description of the newest owner.

    The number is 0 if there is none; the description is empty if it is incomplete.
    """
    numbers = [int(name.removesuffix(".json")) for name in bucket.sizes(_FOLDER)]
    newest = max(numbers, default=0)
    with suppress(FileNotFoundError, ValueError, TypeError):
        return newest, dict(json.loads(bucket.get(_name(newest))))
    return newest, {}


def _who(owner: Mapping[str, Any]) -> str:
    known = {"pid": "?", "host": "?", "since": "?", **owner}
    return f"process {known['pid']} on {known['host']}, since {known['since']}"
