"""The layout of a mirror, and copies of its folders on this machine.

    owner/00000003.json             the owner (:mod:`oneloop.checkpoint.lease`)
    checkpoints/step-00000500/
      3-12-rank-00000.safetensors   written by attempt 12 of owner 3
      MANIFEST.json                 names the attempt; written last, and only if it is new
    base/CHECKSUM/…, final/…        frozen parameters and final weights, in the same way
    recipe.yaml, metrics.jsonl, …   files of the run folder

A manifest is that of the run folder, with the ``attempt``.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock

from oneloop.basics.bucket import (
    Bucket,
    StoreError,
    check_address,
    ends_program,
    is_address,
)
from oneloop.basics.exit_codes import BadInput
from oneloop.basics.files import cache_folder, writing
from oneloop.basics.untrusted import damaged, delete, read_bytes
from oneloop.checkpoint.manifest import (
    BASE,
    MANIFEST,
    base_folder,
    base_in,
    parsed_manifest,
    read_manifest,
    signed,
)
from oneloop.checkpoint.store import Store, name_of, problems, read_state, step_in, step_of

if TYPE_CHECKING:
    from oneloop.checkpoint.ranks import Ranks

CHECKPOINTS = "checkpoints"
FINAL = "final"
FILES = (
    "summary.json",
    "recipe.yaml",
    "environment.json",
    "metrics.jsonl",
    "examples.json",
    "report.html",
)
"""files of the run folder that a mirror holds"""
ADDRESS = ".address"  # file of a copy in the cache, with the address of the mirror

_STEP = re.compile(rf"(?:{CHECKPOINTS}/)?step-([0-9]{{8,15}})/{MANIFEST}")
OURS = re.compile(
    rf"(?:{CHECKPOINTS}/step-[0-9]{{8,15}}|{BASE}/[0-9a-f]{{32}}|{FINAL})/([0-9]+-.+|{MANIFEST})"
)
"""names of the objects in its folders"""


class Damaged(ValueError):
    """An error: a checkpoint in a mirror is incomplete, or its content differs from a checksum."""


def folder_of(step: int) -> str:
    """Return the folder of a checkpoint in a mirror."""
    return f"{CHECKPOINTS}/{name_of(step)}"


def steps_in(bucket: Bucket, names: Iterable[str] | None = None) -> list[int]:
    """Return the steps of the checkpoints in a mirror (or among ``names``), in ascending order.

    The checkpoints are not verified.
    """
    if names is None:
        names = bucket.sizes(CHECKPOINTS)
    matches = map(_STEP.fullmatch, names)
    return sorted(int(match[1]) for match in matches if match)


def manifest_at(bucket: Bucket, folder: str) -> dict[str, Any]:
    """Return the manifest of a folder of a mirror, after checking that all its objects are there.

    Raises:
        Damaged: if the manifest, or one of its objects, is missing or has another size.
        OSError: if the mirror cannot be read.
    """
    try:
        with damaged(MANIFEST):
            manifest = parsed_manifest(bucket.get(f"{folder}/{MANIFEST}"))
            attempt = manifest["attempt"]
            files = manifest["files"].items()
            expected = {f"{attempt}-{name}": int(entry["size"]) for name, entry in files}
    except (FileNotFoundError, ValueError) as error:
        raise Damaged(f"{MANIFEST} is missing, or not of a mirror ({error})") from error
    if manifest.get("step") != step_in(folder.rpartition("/")[2]):
        raise Damaged(f"its {MANIFEST} belongs to step {manifest.get('step')}")
    sizes = bucket.sizes(folder)
    for name, size in expected.items():
        if sizes.get(name) != size:
            raise Damaged(f"{name}: expected {size} bytes, found {sizes.get(name, 'none')}")
    return manifest


def fetch(bucket: Bucket, folder: str, path: Path, *, part: int = 0, parts: int = 1) -> None:
    """Fetch a folder of a mirror, and verify its files.

    Args:
        bucket: the mirror.
        folder: the name of the folder there.
        path: of the copy. It is deleted before, unless there are several ``parts``.
        part: number of the files that are fetched: each ``parts``-th one.
        parts: into which the processes of a host divide the files.

    Raises:
        Damaged: if it is not intact.
        OSError: if the mirror cannot be read, or the copy cannot be written.
    """
    manifest = manifest_at(bucket, folder)
    if parts == 1:
        delete(path, inside=path.parent)
    for name, entry in [*manifest["files"].items()][part::parts]:
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        remote = f"{folder}/{manifest['attempt']}-{name}"
        checksum = bucket.fetch(remote, file, int(entry["size"]))
        if checksum != entry.get("xxh3"):
            raise Damaged(f"{name}: expected checksum {entry.get('xxh3')}, found {checksum}")
    path.mkdir(parents=True, exist_ok=True)
    (path / MANIFEST).write_bytes(signed(manifest))


def fetch_base(bucket: Bucket, checkpoint: Path, run: Path) -> None:
    """Fetch the frozen parameters that a checkpoint refers to, unless the run folder has them."""
    base = base_in(read_manifest(checkpoint))
    if base is not None and problems(base_folder(run, base)):
        fetch(bucket, f"{BASE}/{base['xxh3']}", base_folder(run, base))


def fetch_files(bucket: Bucket, run: Path) -> None:
    """Fetch the files of the run folder."""
    run.mkdir(parents=True, exist_ok=True)
    sizes = bucket.sizes("")
    for name in FILES:
        delete(run / name, inside=run)
        if name in sizes:
            bucket.fetch(name, run / name, sizes[name])


def local_run(run: str | Path) -> Path:
    """Return a run folder; of a mirror, a copy in the cache, for which :func:`complete` fetches.
    Raises BadInput."""
    if not is_address(run):
        return Path(run)
    check_address(str(run), "RUN")
    folder = _copies() / str(run).replace("://", "/")
    with readable(str(run), folder):
        # List the folders of the mirror.
        bucket = Bucket(str(run))
        sizes = bucket.sizes("")
        there = [folder_of(step) for step in steps_in(bucket, sizes)]
        if f"{FINAL}/{MANIFEST}" in sizes:
            there.append(FINAL)
        if not there:
            raise BadInput(
                f"{run} holds no checkpoint of a run (looked for {CHECKPOINTS}/step-…/{MANIFEST})"
            )

        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / ".lock"):
            # Fetch the small files.
            fetch_files(bucket, folder)
            (folder / ADDRESS).write_text(bucket.address)

            # Delete what the mirror does not hold any more.
            for path in [folder / FINAL, *(folder / CHECKPOINTS).glob("*")]:
                if path.relative_to(folder).as_posix() not in there:
                    delete(path, inside=path.parent)

            # Of each folder, fetch only the manifest.
            for name in there:
                try:
                    manifest = bucket.get(f"{name}/{MANIFEST}")
                except ValueError:  # too long to be one
                    continue
                (folder / name).mkdir(parents=True, exist_ok=True)
                (folder / name / MANIFEST).write_bytes(manifest)
    return folder


@contextmanager
def readable(address: str, folder: Path) -> Iterator[None]:
    """Raise errors while a mirror is copied to a folder as Unavailable, or as BadInput."""
    try:
        remedy = "make room, or set ONELOOP_CACHE to another folder"
        with writing(f"the copy of {address} in {folder}", remedy):
            yield
    except StoreError as error:
        raise ends_program(error, "the mirror") from error


def local_checkpoint(path: str) -> Path:
    """Return the folder of a checkpoint (or of a run), which is fetched from a mirror.

    Raises BadInput.
    """
    run, _, step = path.rstrip("/").rpartition(f"/{CHECKPOINTS}/")
    if not is_address(path) or not run:
        return local_run(path).expanduser()
    folder = local_run(run) / CHECKPOINTS / step
    complete(folder)
    return folder


def address_of(run: Path) -> str | None:
    """Return the address of the mirror of which a run folder is a copy in the cache, or None."""
    file = run / ADDRESS
    if not file.is_file() or not file.resolve().is_relative_to(_copies().resolve()):
        return None
    return read_bytes(file).decode()


def _copies() -> Path:
    """Return the folder for copies of mirrors in the cache."""
    return cache_folder() / "mirrors"


def complete(path: Path, *, again: bool = False) -> None:
    """Fetch a checkpoint, or ``final``, in a copy of a mirror, if incomplete or ``again``.

    Raises BadInput.
    """
    run = path.parent if path.name == FINAL else path.parent.parent
    address = address_of(run)
    if address is None:
        return
    try:
        with readable(address, run), FileLock(run / ".lock"):
            bucket = Bucket(address)
            folder = path.relative_to(run).as_posix()
            if again or problems(path):
                fetch(bucket, folder, path)
            fetch_base(bucket, path, run)
    except Damaged as error:
        raise BadInput(
            f"{path.name} of the mirror cannot be fetched: {error}; choose another checkpoint"
        ) from error


class Fetcher:
    """Fetches checkpoints of a mirror into hidden folders of a run: each file once per host.

    Args:
        address: of the mirror.
        store: the checkpoints folder of the run.
        ranks: of the run.
        say: reports damaged checkpoints.
    """

    def __init__(
        self, address: str, store: Store, ranks: "Ranks", say: Callable[[str], object]
    ) -> None:
        self._bucket = Bucket(address)
        self._store = store
        self._ranks = ranks
        self._say = say
        self.damaged: list[int] = []  # steps of damaged checkpoints in the mirror

    def source(self, path: Path) -> str:
        """Return where a checkpoint comes from."""
        step = step_in(path.name)
        if step is None or not path.name.startswith("."):
            return str(path)
        return f"{self._bucket.address}/{folder_of(step)}"

    def _on_all(self, act: Callable[[], Any]) -> list[Any]:
        """Return the results of all ranks, or raise the error of one on all. Collective."""

        def readably() -> Any:
            with readable(self._bucket.address, self._store.root):
                return act()

        return self._ranks.all_of(readably)

    def newest(self, own: Path | None) -> Path | None:
        """Return a copy of the newest intact checkpoint; log damaged ones. Collective.

        Args:
            own: the newest checkpoint of the run folder; only later ones are fetched.

        Returns:
            The copy; None if there is none.

        Raises:
            ValueError: if only damaged ones are there, and none in the run folder.
        """
        steps = self.later(step_of(own) if own is not None else -1)
        for step in reversed(steps):
            try:
                return self.fetch(step)
            except Damaged as error:
                self.damaged.append(step)
                place = f"{self._bucket.address}/{folder_of(step)}"
                self._say(f"checkpoint {place} cannot be used, and was skipped: {error}")
        if steps and own is None:
            raise ValueError(
                f"no intact checkpoint is left in {self._bucket.address}; choose another address"
            )
        return None

    def later(self, than: int) -> list[int]:
        """Return the steps in the mirror after a step, except damaged ones. Collective."""
        steps = self._on_all(lambda: steps_in(self._bucket) if self._ranks.is_main else [])[0]
        return [step for step in steps if step > than and step not in self.damaged]

    def fetch(self, step: int) -> Path:
        """Return a copy of a checkpoint, for the ranks of this host. Collective.

        Raises:
            Damaged: on all ranks.
            Unavailable: on all ranks, if the mirror cannot be read now.
            ValueError: on all ranks, if one cannot read it.
        """
        leader = self._ranks.leader
        leads = self._ranks.rank == leader
        path = self._store.root / f".{name_of(step)}.{leader}.fetched"
        self._on_all(lambda: self._store.sweep(f".{leader}.fetched") if leads else None)

        # The ranks of a host divide the files.
        parts = self._ranks.gather(leader).count(leader)
        part = self._ranks.rank - leader
        self._on_all(lambda: fetch(self._bucket, folder_of(step), path, part=part, parts=parts))

        def complete() -> None:
            try:
                read_state(path)
            except ValueError as error:
                raise Damaged(str(error)) from error
            if leads:
                fetch_base(self._bucket, path, self._store.root.parent)

        self._on_all(complete)
        return path
