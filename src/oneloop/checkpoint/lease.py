"""The owner of a mirror: a lease (Gray and Cheriton, 1989).

Two machines thus never write the same run.

Each owner creates ``owner/00000003.json`` with the next number, only if it is new, and renews it.
If it does not for some time, another process may take the next number. The former owner then finds
that, and writes nothing more.
"""

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from xxhash import xxh3_64_hexdigest

from oneloop.basics.bucket import Bucket
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import one_line, printable
from oneloop.basics.heartbeats import BEATS
from oneloop.basics.untrusted import parsed_json

# variable with the seconds after which an owner that does not renew its lease is replaced
SECONDS = "ONELOOP_LEASE"
_LEAST = 1.0  # seconds
_MOST = 3600.0  # seconds that a start may have to wait for an owner that has died
_USUAL = 60.0  # seconds
_FOLDER = "owner"
_NAME = re.compile(r"([0-9]{8,})\.json")
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


def take(
    bucket: Bucket,
    about: Mapping[str, Any],
    *,
    earlier: str = "",
    say: Callable[[str], object] = print,
) -> Lease:
    """Become the owner of the mirror.

    An owner counts as gone if it does not renew its lease for its seconds, on the clock of this
    process.

    Args:
        bucket: the mirror.
        about: describes this process (host, pid, since, token).
        earlier: token of an owner that counts as gone: an earlier start in this run folder.
        say: reports a wait for another owner.

    Raises:
        Taken: if there is another owner, which renews its lease.
    """
    own = {**about, "seconds": _seconds(os.environ.get(SECONDS, f"{_USUAL:.0f}")), "beat": 0}
    seen = None  # the owner at the last look
    since = 0.0  # time of the first look
    while True:
        newest, there = _newest(bucket)
        gone = not newest or there.get("released")
        if earlier and there.get("token") == earlier:
            gone = True
        if not gone and seen not in (None, (newest, there)):
            raise Taken(
                f"{bucket.address} is in use by {_who(there)}; wait for its end, or choose "
                "another address"
            )

        # Take the next number, if the owner has not renewed its lease since the first look.
        if seen is None:
            since = time.monotonic()
        if gone or time.monotonic() - since > there.get("seconds", _USUAL):
            try:
                bucket.put(_name(newest + 1), json.dumps(own).encode(), create=True)
            except FileExistsError:
                continue  # another starter was faster
            bucket.remove(_name(newest - 1))
            return Lease(bucket, newest + 1, own)

        # Look again a little later. The wait for another owner does not count as a hang.
        BEATS.beat()
        if seen is None:
            say(
                f"{bucket.address} is held by {_who(there)}; waiting for up to "
                f"{there.get('seconds', _USUAL):.0f} s"
            )
        seen = newest, there
        time.sleep(min(0.5, own["seconds"] / 10))


def _name(number: int) -> str:
    return f"{_FOLDER}/{number:08d}.json"


def _seconds(text: str) -> float:
    """Return the seconds that the variable holds. Raises BadInput."""
    if not text.replace(".", "", 1).isdigit() or not _is_seconds(float(text)):
        raise BadInput(
            f"{SECONDS} must be a number of seconds from {_LEAST:.0f} to {_MOST:.0f}; got {text!r}"
        )
    return float(text)


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and _LEAST <= value <= _MOST


def _newest(bucket: Bucket) -> tuple[int, dict[str, Any]]:
    """Return the number and the description of the newest owner.

    The number is 0 if there is none. Of an incomplete or damaged description, only ``content``
    remains, which changes with it.
    """
    matches = map(_NAME.fullmatch, bucket.sizes(_FOLDER))
    newest = max((int(match[1]) for match in matches if match), default=0)
    content = b""
    with suppress(FileNotFoundError):
        content = bucket.get(_name(newest))
    with suppress(ValueError):
        owner: dict[str, Any] = parsed_json(content)
        if _is_seconds(owner.get("seconds", _USUAL)):
            return newest, owner
    return newest, {"content": xxh3_64_hexdigest(content)}


def _who(owner: Mapping[str, Any]) -> str:
    known = {"pid": "?", "host": "?", "since": "?", **owner}
    who = f"process {known['pid']} on {known['host']}, since {known['since']}"
    return one_line(printable(who))
