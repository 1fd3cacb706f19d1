"""Remote data sets: the Parquet files that an address names, by split, as rows."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from oneloop.basics.bucket import StoreError, ends_program, is_address
from oneloop.basics.seeds import restored_generators
from oneloop.tasks.rows.find_files import KINDS, Found, chosen, split_of
from oneloop.tasks.rows.remote.addresses import address_of
from oneloop.tasks.rows.remote.footers import opened_files
from oneloop.tasks.rows.remote.open_store import open_store
from oneloop.tasks.rows.remote.remote_file import RemoteFile
from oneloop.tasks.rows.remote.remote_parquet import RemoteParquet
from oneloop.tasks.rows.remote.web import listed, with_owner

_CONVERTED = "refs/convert/parquet"  # branch with the hub's own conversion


@dataclass(frozen=True)
class RemoteFound(Found[PurePosixPath]):
    """Parquet files in a store, by split, with their footers."""

    opened: Mapping[PurePosixPath, RemoteFile] = field(default_factory=dict)

    def rows(self, columns: Sequence[str], *, window: int) -> dict[str, RemoteParquet]:
        """Return the files' rows by split.

        Args:
            columns: the columns to read.
            window: megabytes that a process caches.
        """
        made = {}
        for split, names in self.parts.items():
            files = [self.opened[name] for name in names]
            versions = {str(file.item.name): [file.size, file.item.version] for file in files}
            made[split] = RemoteParquet(
                files,
                self.where,
                columns,
                window=window,
                content={"files": versions},
                part=split,
            )
        return made


def is_hub(where: str) -> bool:
    """Return whether data is named ``hf:NAME``."""
    return where.startswith("hf:") and not is_address(where)


def check_stream(names: Iterable[str], stream: bool) -> None:
    """Raise ValueError if ``task.stream`` is true, and no data is named ``hf:NAME``."""
    if stream and not any(map(is_hub, names)):
        raise ValueError(
            "task.stream true has an effect only for task.data hf:NAME; remove it (s3://, gs://, "
            "hf:// and https:// are always read in place)"
        )


def local_only(where: str) -> None:
    """Raise ValueError if data is remote, for tasks that store tokens before training."""
    if is_address(where) and not where.startswith("file://"):
        address_of(where)  # raises, without printing a secret
        raise ValueError(
            f"task.data {where!r}: this task stores the tokens of all rows on the disk before "
            "training, which is not supported for remote data; download it and give the folder, "
            "or give hf:NAME, which downloads it"
        )


def found_remotely(where: str, *, whole: bool) -> RemoteFound | None:
    """Return the Parquet files of remote data; None if data is a path.

    Args:
        where: an address, or ``hf:NAME`` to read in place.
        whole: return the files as one set.

    Raises:
        ValueError: the store has no such data, or denies access; or as :func:`remote_found`.
        Unavailable: the store cannot be reached now.
    """
    if where.startswith("file://") or not (is_address(where) or is_hub(where)):
        return None
    try:
        # Clients of stores that try again draw their waits from Python's global generator.
        with restored_generators():
            address = streamed(where[3:]) if is_hub(where) else where
            return remote_found(address, whole=whole)
    except StoreError as error:
        raise ends_program(error) from error


def remote_found(address: str, *, whole: bool = False) -> RemoteFound:
    """Return the Parquet files of an address, by the splits in their names.

    Args:
        address: of the data.
        whole: return the files as one set.

    Raises:
        StoreError: the store cannot be read.
        ValueError: the address names no data, or other files than Parquet; a footer is damaged.
    """
    given = address_of(address)
    store = open_store(address)
    objects = {PurePosixPath(item.name): item for item in store.objects()}

    # One file is its own root, as on a disk: its name means no split.
    root = PurePosixPath()
    if given.pattern.endswith(".parquet") and not given.is_glob and len(objects) == 1:
        (root,) = objects
    if not objects:
        raise ValueError(f"{address!r} names no file; check the folder and the pattern")
    files = chosen([*objects], root, set(KINDS.values()), whole=whole, where=address)
    if files.kind != "parquet":
        raise ValueError(f"{address!r} holds {files.kind} files; {_conversion(files.kind)}")
    items = [objects[name] for name in files.files]
    opened = dict(zip(files.files, opened_files(store, items), strict=True))
    return RemoteFound(root, "parquet", files.parts, files.notes, address, opened=opened)


def _conversion(kind: str) -> str:
    """Return what to do with files of another kind than Parquet."""
    if kind in ("image", "text"):
        return "only Parquet is read in place: download the folder, and train on the download"
    return (
        "only Parquet is read in place: download the folder, convert it with python -m "
        "oneloop.tasks.rows.rewrite FOLDER NEW_FOLDER, and upload NEW_FOLDER"
    )


def streamed(name: str) -> str:
    """Return the address of the Parquet files of a data set on the hub, at one commit.

    They are its own ones, or those that the hub has made of its other files.

    Args:
        name: ``NAME[:CONFIG][@REVISION]``.

    Raises:
        StoreError: the hub cannot be read, or has no such data set.
        ValueError: it has no Parquet files of this configuration.
    """
    wanted, _, revision = name.partition("@")
    short, _, config = wanted.partition(":")
    repository = with_owner(short)  # which an address of the hub needs
    own = _parquet(listed(repository, revision or None, ""))
    folders = _folders(own)
    if own and (not config or config in folders):
        return _address(repository, own, _chosen(name, folders, config))
    if revision:
        raise ValueError(
            f"hf:{name} has no Parquet files; the hub converts only the main branch: "
            "leave @REVISION out, or set task.stream false to download it"
        )
    made = _parquet(listed(repository, _CONVERTED, ""))
    if any(part.startswith("partial-") for path in made for part in path.split("/")):
        raise ValueError(
            f"hf:{name}: the hub has converted only a part of it to Parquet; set task.stream "
            "false to download it"
        )
    return _address(repository, made, _chosen(name, _folders(made), config))


def _parquet(files: Iterable[tuple[str, int, str]]) -> dict[str, str]:
    """Return the commit of each Parquet file by its path."""
    return {path: commit for path, _, commit in files if path.endswith(".parquet")}


def _folders(paths: Iterable[str]) -> list[str]:
    """Return the first folders of paths; empty for a file without a folder."""
    return sorted({path.rpartition("/")[0].partition("/")[0] for path in paths})


def _chosen(name: str, folders: Sequence[str], config: str) -> str:
    """Return the folder of a configuration; empty: all of them belong to one."""
    if config in folders and config:
        return config
    if not config and folders and all(split_of(one) or one in ("", "data") for one in folders):
        return ""
    if not config and len(folders) == 1:
        return folders[0]
    if not config and "default" in folders:
        return "default"
    known = ", ".join(folders) or "none"
    raise ValueError(f"hf:{name}: its configurations are {known}; write hf:NAME:CONFIG")


def _address(repository: str, paths: Mapping[str, str], folder: str) -> str:
    commit = next(iter(paths.values()))
    root = f"hf://datasets/{repository}@{commit}"
    return f"{root}/{folder}/**/*.parquet" if folder else f"{root}/**/*.parquet"
