"""Operations on a local or network file system: open files, temporary files, syncing, digests, free space, errors."""

from __future__ import annotations

import errno
import os
import resource
import shlex
import shutil
import stat
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import xxhash

from sana_pipe.base import process_identity
from sana_pipe.base.errors import NO_SPACE, CacheError, IntegrityError, NoSpaceError, machine_errno, machine_error

STALE_TMP_S = 48 * 3600
"""Age after which a file in `tmp/` belongs to no living writer on another machine."""
SPARE_DESCRIPTORS = 128
"""File descriptors left for sockets, checkpoints and libraries."""


class Handle:
    """An open file, closed when it is garbage-collected: an eviction never interrupts a read.

    piece: bytes to read at a time where a whole file is read.
    """

    piece = 4 << 20

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self._close = partial(os.close, descriptor)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset` on; returns the number of bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(view):
            count = os.preadv(self.descriptor, [view[done:]], offset + done)
            if count == 0:
                break
            done += count
        return done

    def identity(self) -> tuple[int, ...]:
        """Numbers that change when the file is replaced or written to."""
        status = os.fstat(self.descriptor)
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns

    @property
    def size(self) -> int:
        """Return the size of the file in bytes."""
        return os.fstat(self.descriptor).st_size

    def file(self) -> BinaryIO:
        """The file as a seekable object with a separate descriptor."""
        return os.fdopen(os.dup(self.descriptor), "rb")

    def map(self) -> pa.Buffer:
        """The file mapped into memory for reading. The mapping needs no descriptor and outlives this handle."""
        return mapped(self.descriptor)

    # Without a Python function: Ctrl-C is raised at the beginning of one, and what a __del__ raises is lost.
    __del__ = property(attrgetter("_close"))


def mapped(descriptor: int) -> pa.Buffer:
    """An open file mapped into memory for reading. The mapping needs no descriptor."""
    # By descriptor, since the name may have been removed. Arrow keeps the pages mapped and closes the file.
    with pa.memory_map(f"/dev/fd/{descriptor}") as file:
        return file.read_buffer()


@contextmanager
def cache_errors(path: Path, top: Path | None = None) -> Iterator[None]:
    """Raise OSErrors of a write to `path` as `NoSpaceError` or `CacheError`, with the fix; FileExistsError as it is.

    top: the cache's folder, for the fix.
    """
    try:
        yield
    except FileExistsError:
        raise
    except OSError as error:
        closed = next((folder for folder in path.absolute().parents if folder.is_dir()), path)
        grant = f"chmod {'-R ' if top else ''}g+ws {shlex.quote(str(top or closed))}, as its owner or root, for a user"
        grant += " of its group"
        fixes = {
            errno.EROFS: "make the cache writable",
            errno.EACCES: grant,
            errno.EPERM: grant,
            errno.ENOTDIR: "mount the disk that the link points to, or --set cache=DIR, a folder",
        }
        what = f"{path}: cannot be written"
        known = machine_error(error, what, "run the same command again: it continues")
        found = _permissions(closed) if error.errno in (errno.EACCES, errno.EPERM) else None
        raise known or CacheError(f"{what}: {error.strerror}", found=found, fix=fixes.get(error.errno or 0)) from error


def _permissions(folder: Path) -> str:
    """The permissions of a folder: `/cache/tmp is drwxr-xr-x of user 1000, group 100`."""
    status = folder.stat()
    return f"{folder} is {stat.filemode(status.st_mode)} of user {status.st_uid}, group {status.st_gid}"


def is_out_of_resources(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes says that file descriptors, memory or disk space have run out."""
    return machine_errno(error) is not None


def is_out_of_space(error: BaseException | None) -> bool:
    """Return whether an error or one of its causes says that disk space has run out."""
    return machine_errno(error) in NO_SPACE


def raise_if_of_machine(error: BaseException, place: str) -> None:
    """Raise an error of reading that concerns this machine and no file.

    Args:
        place: what was read, for messages.

    Raises:
        NoSpaceError: disk space has run out, of the temporary folder for example.
        ResourceError: file descriptors or memory have run out.
    """
    what = f"{place}: cannot be read on this machine"
    if (known := machine_error(error, what)) is not None:
        if isinstance(known, NoSpaceError):
            known = NoSpaceError(known.what, fix=f"free space in {tempfile.gettempdir()}")
        raise known from error


def descriptors_left() -> int:
    """Return how many more files this process may open, with `SPARE_DESCRIPTORS` left over."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return sys.maxsize
    return limit - sum(int(number) < limit for number in os.listdir("/dev/fd")) - SPARE_DESCRIPTORS


def free_at(folder: Path) -> int:
    """Free bytes of the file system on which a folder is, or would be made (without regard to quotas)."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def free_if_known(folder: Path) -> int | None:
    """Return `free_at` for metrics; None if the disk does not say."""
    try:
        return free_at(folder)
    except OSError:
        return None


# ---------------------------------------------------------------- temporary files


@contextmanager
def temporary_in(folder: Path, top: Path | None = None) -> Iterator[Path]:
    """An unused path in a folder (made if need be, see `make_folder`); the file is removed at the end if it is still
    there."""
    with cache_errors(folder, top):
        make_folder(folder, top)
    path = folder / f"{process_identity.name_prefix()}-{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        with suppress(OSError):  # without permission it stays: readers ignore it, and it is swept later
            path.unlink(missing_ok=True)


def is_foreign(name: str) -> bool:
    """Return whether a file in a cache's folder is not the cache's: NFS clients (`.nfs*`), file browsers (`._*`) and
    editors leave files whose names begin with a dot.

    `.nfs*` is a removed file that a process has open; its client removes it when it is closed. Removing it on another
    machine would kill a process that has it mapped (SIGBUS).
    """
    return name.startswith(".")


def sweep_in(folder: Path) -> int:
    """Remove temporary files that no living process can own. Returns how many.

    Those of others (`is_foreign`) stay.
    """
    paths = [path for path in folder.glob("*") if not is_foreign(path.name)]
    if not paths:
        return 0
    count, before = 0, now_in(folder) - STALE_TMP_S
    for path in paths:
        with suppress(OSError):
            if path.stat().st_mtime <= before and not process_identity.is_owned_by_live_process(path.name):
                path.unlink()
                count += 1
    return count


def now_in(folder: Path) -> float:
    """The time by the clock of the file system of a folder, in seconds since 1970."""
    with temporary_in(folder) as path, cache_errors(path):
        path.touch()
        return path.stat().st_mtime


# ---------------------------------------------------------------- durability and digests


@contextmanager
def replacing(path: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """A path next to `path` to write to. At the end it is synced and replaces `path`; after an error it is removed and
    `path` stays as it is. For files outside a cache, which `Files` publishes.

    Args:
        check: called between the two; an error from it is one more.
    """
    work = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield work
        sync_path(work)
        check()
        os.replace(work, path)
        sync_path(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)  # a write names no file
        raise
    finally:
        work.unlink(missing_ok=True)


def make_folder(path: Path, top: Path | None = None) -> None:
    """Make a folder and its parents, durably: they survive a loss of power. What is made below `top` gets its group's
    permissions, see `share`."""
    if not path.is_dir():
        make_folder(path.parent, top)
        try:
            path.mkdir(exist_ok=True)
        except FileExistsError:
            problem = f"{path} is a file, or a link to a folder that is missing"
            raise NotADirectoryError(errno.ENOTDIR, problem) from None
        if top is not None and top in path.parents:
            share(path, top)
        sync_path(path.parent)


def share(path: Path, top: Path) -> None:
    """Give the group of a new file or folder the permissions that it has on the folder `top`, whatever the umask says.

    Users of one group then write into one cache. A file that has other names stays as it is: another cache has it, too.
    """
    # The folder of a cache is drwxrwsr-x of group lab. With umask 022, mkdir makes drwxr-sr-x below it (the kernel
    # hands s and the group on), and a file is -rw-r--r--; here they become drwxrwsr-x and -rw-rw-r--.
    status = path.stat()
    if stat.S_ISDIR(status.st_mode):
        bits = stat.S_ISGID | stat.S_IRWXG
    else:
        bits = stat.S_IRGRP | stat.S_IWGRP if status.st_nlink == 1 else 0
    missing = top.stat().st_mode & bits & ~status.st_mode
    if missing and status.st_uid == os.geteuid():  # another user who made it at the same time does this
        path.chmod(stat.S_IMODE(status.st_mode) | missing)


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync it.

    Raises:
        CacheError: see `cache_errors`.
    """
    with cache_errors(path), open(path, "xb") as file:
        file.write(data)
        sync(file)


def write_all(file: BinaryIO, data: memoryview) -> None:
    """Write to an unbuffered file, which may take less at a time."""
    while len(data):
        data = data[file.write(data) :]


def allocate(file: BinaryIO, size: int) -> None:
    """Give an empty file `size` bytes of zeros that occupy the disk."""
    if sys.platform == "linux":
        os.posix_fallocate(file.fileno(), 0, size)
        return
    zeros = bytes(1 << 20)
    for start in range(0, size, len(zeros)):
        file.write(zeros[: size - start])
    file.flush()


def sync(file: BinaryIO) -> None:
    """Sync a file and drop its pages from memory, so that reading it back reads the disk."""
    file.flush()
    os.fsync(file.fileno())
    if sys.platform == "linux":
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def sync_path(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_digest(path: Path) -> str:
    """Hex xxh3-128 of a file's bytes, read in pieces."""
    return digest_of(Handle(os.open(path, os.O_RDONLY)))


def check_digest(path: Path, digest: str) -> None:
    """Read a written file back.

    Raises:
        IntegrityError: its digest is another.
    """
    actual = file_digest(path)
    if actual != digest:
        raise IntegrityError(
            f"{path}: the bytes read back are not those that were written",
            expected=digest,
            found=actual,
            fix="check the disk",
        )


def digest_of(handle: Handle) -> str:
    """Hex xxh3-128 of an open file's bytes."""
    state, piece, offset = xxhash.xxh3_128(), memoryview(bytearray(handle.piece)), 0
    while count := handle.read_into(piece, offset):
        state.update(piece[:count])
        offset += count
    return state.hexdigest()
