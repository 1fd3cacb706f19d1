"""The owner of a mirror: a lease (Gray and Cheriton, 1989), so that two machines never write the same run.

Each owner creates ``owner/00000003.json`` with the next number, only if it is new, and renews it. If it does not for
some time, another process may take the next number. The former owner then finds that, and writes nothing more.
"""

import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from oneloop.basics.bucket import Bucket

SECONDS = "ONELOOP_LEASE"  # variable with the seconds after which an owner that does not renew its lease is replaced
_FOLDER = "owner"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # continues while the machine sleeps


class Taken(OSError):
    """An error: another process owns the mirror."""


class Lease:
    """The lease with this number, of the owner that ``about`` describes (host, pid, since, token, seconds)."""

    def __init__(self, bucket: Bucket, number: int, about: Mapping[str, Any]) -> None:
        self.bucket, self.number, self.about = bucket, number, dict(about)
        self._renewed = time.clock_gettime(_CLOCK)

    def check(self) -> None:
        """Raise Taken if another process is the owner now."""
        following = _read(self.bucket, self.number + 1)
        if following is not None or (_read(self.bucket, self.number) or {}).get("token") != self.about["token"]:
            raise Taken(f"{self.bucket.address} was taken over by {_who(following)}; nothing more is written there")

    def guard(self) -> None:
        """:meth:`check`, if the lease was not renewed in time, for example because this process was paused."""
        if time.clock_gettime(_CLOCK) - self._renewed > self.about["seconds"] / 2:
            self.check()

    def renew(self, *, released: bool = False) -> None:
        """Renew the lease, or release it. Raises Taken."""
        self.check()
        self.about |= {"beat": self.about["beat"] + 1, "released": released}
        self.bucket.put(_name(self.number), json.dumps(self.about).encode())
        self._renewed = time.clock_gettime(_CLOCK)

    def keep(self, ended: threading.Event, taken: Callable[[Taken], None]) -> None:
        """Renew the lease until ``ended``, or until it is ``taken``. Call it in a thread."""
        while not ended.wait(self.about["seconds"] / 3):
            try:
                self.renew()
            except Taken as error:
                taken(error)
                break
            except OSError:  # the next upload reports it
                continue


def take(bucket: Bucket, about: Mapping[str, Any], *, wait: bool = True) -> Lease:
    """Become the owner of the mirror. Raises Taken if there is another owner, which renews its lease.

    An owner counts as gone if it does not renew its lease for its seconds, as this process measures them. An owner with
    the token of ``about`` is an earlier start of this run folder. Without ``wait``, any other owner counts as there,
    even if it has released its lease, because it may have trained."""
    own = {**about, "seconds": float(os.environ.get(SECONDS, 60.0)), "beat": 0, "released": False}
    seen, since = None, time.monotonic()
    while True:
        newest = max((int(name.removesuffix(".json")) for name in bucket.sizes(_FOLDER)), default=0)
        there = _read(bucket, newest) or {}
        same = not newest or there.get("token") == own["token"]
        if not same and (not wait or seen not in (None, (newest, there))):
            raise Taken(f"{bucket.address} is in use by {_who(there)}; wait for its end, or choose another address")
        if same or there.get("released") or time.monotonic() - since > there.get("seconds", 60.0):
            try:
                bucket.put(_name(newest + 1), json.dumps(own).encode(), create=True)
            except FileExistsError:
                continue  # another starter was faster
            bucket.remove([_name(newest - 1)] if newest > 1 else [])
            return Lease(bucket, newest + 1, own)
        seen = seen or (newest, there)
        time.sleep(min(0.5, own["seconds"] / 10))


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:08d}.json"


def _read(bucket: Bucket, number: int) -> dict[str, Any] | None:
    try:
        return dict(json.loads(bucket.get(_name(number))))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        return {}  # incomplete


def _who(owner: Mapping[str, Any] | None) -> str:
    known = owner is not None and "pid" in owner
    return (
        f"process {owner['pid']} on {owner['host']}, since {owner['since']}" if owner and known else "another process"
    )
