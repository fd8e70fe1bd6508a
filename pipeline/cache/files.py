"""Publication: a file appears whole and checked, or not at all.

What: the few operations that everything in a cache is written and read with. A file is written under `tmp/`, synced,
read back and compared, then published by a hard link, which fails if the name is taken: that is put-if-absent on
local disks and NFS alike (`O_EXCL` plus writing is not: a crash leaves half a file under the final name).
Why: a process killed at any instant leaves either the old state or the new one, plus an invisible file in `tmp/`.
Price: every byte is written once and read back once; a file system without hard links is refused with a message.

Names are relative to the root with forward slashes. `Files` is a folder on a disk or on NFS;
`pipeline.cache.objects.ObjectFiles` is the same over an object store.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar
from weakref import WeakSet

import pyarrow as pa
import xxhash

from pipeline import retrying
from pipeline.cache import layout, process_identity
from pipeline.cache.layout import Paths
from pipeline.errors import AwayError, CacheError, IntegrityError, NoSpaceError

STALE_TMP_S = 48 * 3600
"""Age after which a file in `tmp/` belongs to no living writer of another machine."""
SPARE_DESCRIPTORS = 128
"""What sockets, checkpoints and libraries may open beside shards."""
T = TypeVar("T")
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Entry:
    """A file: its name, its size in bytes, and when it was written (seconds since 1970, by the store's clock)."""

    name: str
    size: int
    modified: float


class Handle:
    """An open file that closes when its last reader lets go of it, so that no one's eviction cuts off a read."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor

    def read_into(self, view: memoryview, offset: int) -> int:
        """Fill `view` from `offset` on; returns the bytes read, fewer only at the end of the file."""
        done = 0
        while done < len(view):
            got = os.preadv(self.descriptor, [view[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def file(self) -> BinaryIO:
        """The same file as a seekable object of its own."""
        return os.fdopen(os.dup(self.descriptor), "rb")

    def map(self) -> pa.Buffer:
        """The file mapped into memory for reading. The mapping needs no descriptor and outlives this handle."""
        # By its descriptor, since the name may be gone by now. Arrow keeps the pages mapped and closes the file.
        with pa.memory_map(f"/dev/fd/{self.descriptor}") as file:
            return file.read_buffer()

    def __del__(self) -> None:
        os.close(self.descriptor)


class Closing(Protocol):
    """What keeps files open and can open them again."""

    def close(self) -> None: ...


class Files:
    """A folder of published files.

    Attributes:
        room: bytes of the copies that can be kept of it on this machine; None where the files themselves are read.
        patience_s: how long a network file system, or an object store, that is away is waited for.
        damage: documents that were lost or damaged when they were read, and what was wrong: their copies were read.
        mends: whether such a document is written again at once.
        reopen_s: a shard that was opened again because a record in it was wrong is not opened again for so long.
        readers: what keeps files open, to be asked to let go of them where descriptors or space run out.
    """

    room: int | None = None
    mends = False
    reopen_s = 0.0

    def __init__(self, root: Path | str, patience_s: float = retrying.PATIENCE_S):
        self.root, self.patience_s = Path(root), patience_s
        self.damage: dict[str, str] = {}
        self.readers: WeakSet[Closing] = WeakSet()

    def let_go(self) -> None:
        """Close the files that readers keep open and nobody reads from at this moment."""
        for reader in list(self.readers):
            reader.close()

    def path(self, name: str) -> Path:
        return self.root / name

    def waited(self, read: Callable[[], T]) -> T:
        """What a read of a file returns, when the file system that it lies on is there.

        Raises:
            AwayError: it was away for too long.
            OSError: as `read`.
        """
        try:
            return read()
        except OSError as error:
            if not retrying.away_disk(error):
                raise
        try:
            return retrying.tried(read, self.where(""), self.patience_s, retrying.away_disk)
        except retrying.NoAnswer as error:
            raise AwayError(f"{self.where('')}: {error}", fix=error.fix) from None

    def where(self, name: str) -> str:
        """The file's full name, for messages."""
        return str(self.path(name))

    def probe(self) -> None:
        """Find out, before any work is done, whether publication will hold here.

        Raises:
            CacheError: it will not, or nothing can be written.
        """

    def exists(self, name: str) -> bool:
        """Whether a file is there; of a document that was lost its copy counts."""
        return self.holds(name) or (layout.is_document(name) and self.holds(Paths.copy(name)))

    def holds(self, name: str) -> bool:
        """Whether there is a file of exactly this name."""
        try:
            return self.waited(self.path(name).exists)
        except OSError as error:
            raise CacheError(f"{self.where(name)}: cannot be looked for: {error.strerror}") from None

    def read(self, name: str) -> bytes:
        try:
            return self.waited(self.path(name).read_bytes)
        except FileNotFoundError:
            raise IntegrityError(f"{self.path(name)}: is missing", fix=layout.REPAIR) from None
        except OSError as error:
            kind = IntegrityError if error.errno == errno.EIO else CacheError
            raise kind(f"{self.path(name)}: cannot be read: {error.strerror}") from None

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; an absent folder is empty. Of documents that were lost their copies count."""
        return sorted({name for name, _ in self._list_both(folder)})

    def folders(self, folder: str) -> list[str]:
        """Sorted names of the folders in a folder, as `names`."""
        return sorted({name for name, kind in self._list_both(folder) if kind == "directory"})

    def _list_both(self, folder: str) -> list[tuple[str, str]]:
        documents = folder.partition("/")[0] in layout.DOCUMENTS
        return self._list(folder) + (self._list(Paths.copy(folder)) if documents else [])

    def _list(self, folder: str) -> list[tuple[str, str]]:
        """(name, `file` or `directory`) of what lies in a folder."""
        try:
            return self.waited(
                lambda: [(e.name, "directory" if e.is_dir() else "file") for e in os.scandir(self.path(folder))]
            )
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CacheError(f"{self.where(folder)}: cannot be listed: {error.strerror}") from None

    def walk(self, folder: str) -> Iterator[Entry]:
        """All files below a folder, in the order of their names; an absent folder is empty."""

        def unlisted(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise CacheError(f"{error.filename}: cannot be listed: {error.strerror}") from None

        for parent, folders, names in os.walk(self.path(folder), onerror=unlisted):
            folders.sort()
            for name in sorted(names):
                path = Path(parent, name)
                try:
                    found = path.stat()
                except FileNotFoundError:  # a claim or a temporary file that went away meanwhile
                    continue
                yield Entry(path.relative_to(self.root).as_posix(), found.st_size, found.st_mtime)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Sizes in bytes of those of the files that are there."""
        found = {}
        for name in names:
            try:
                found[name] = self.waited(self.path(name).stat).st_size
            except FileNotFoundError:
                continue
            except OSError as error:
                raise CacheError(f"{self.where(name)}: cannot be read: {error.strerror}") from None
        return found

    def documents(self, names: list[str]) -> Iterator[dict]:
        """`document` of many, in order."""
        return map(self.document, names)

    def open(self, name: str) -> Handle:
        """Open a content-addressed file for reading at offsets.

        Raises:
            FileNotFoundError: it is missing.
            CacheError: it cannot be read.
        """
        try:
            return Handle(self.waited(lambda: os.open(self.path(name), os.O_RDONLY)))
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CacheError(f"{self.where(name)}: cannot be opened: {error.strerror}") from error

    def ranged(self, name: str) -> Handle:
        """As `open`, for reading a few places of a large file: an object store is asked for those ranges."""
        return self.open(name)

    def digest(self, name: str) -> str:
        """Hex xxh3-128 of a file's bytes as they are now. Raises as `open`."""
        return digest_of(self.open(name))

    # ------------------------------------------------------------ writing

    def temporary(self) -> AbstractContextManager[Path]:
        """A path under `tmp/` that no other writer uses; removed at the end if still there."""
        return temporary_in(self.root / "tmp")

    def publish(self, temporary: Path, name: str) -> bool:
        """Give a finished temporary file its name, unless the name is taken.

        Returns:
            False if the name was taken (the temporary file is left as it is).
        """
        target = self.path(name)
        with explained(target):
            make_folder(target.parent)
            try:
                os.link(temporary, target)
            except FileExistsError:
                return False
            except OSError as error:
                if error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK):
                    raise CacheError(
                        f"{self.root}: this file system has no hard links, which publication needs",
                        fix="put the cache on a local disk or NFS, then copy it where you want it",
                    ) from None
                raise
            _sync_folder(target.parent)
        return True

    def put(self, name: str, data: bytes) -> bool:
        """Publish bytes under a name that is not taken. Returns False if it is.

        A document is published, then its copy: the first makes it count. Of a document that was lost, the copy still
        takes the name: nobody writes another one in its place.
        """
        twice = layout.is_document(name)
        if (twice and self.holds(Paths.copy(name))) or not self._put(name, data):
            return False
        if twice:
            self._put(Paths.copy(name), data)
        return True

    def ensure(self, name: str, data: bytes) -> None:
        """Publish a document that can only be this one (its name is made of what it says); a damaged one is written
        again."""
        if self.put(name, data):
            return
        try:
            self.document(name)
        except IntegrityError:
            for one in (name, Paths.copy(name)):
                self.replace(one, data)

    def _put(self, name: str, data: bytes) -> bool:
        if self.holds(name):
            return False
        with self.temporary() as path:
            with explained(path), open(path, "xb") as file:
                file.write(data)
                _sync(file)
            if path.read_bytes() != data:
                raise IntegrityError(f"{path}: reads back other bytes than were written", fix="check the disk")
            return self.publish(path, name)

    def put_content(self, data: bytes, folder_of: str, suffix: str) -> str:
        """Publish bytes under the digest of their content; returns the digest. A right namesake becomes as young as a
        new file, a damaged one is replaced."""
        name = layout.content_digest(data)
        target = Paths.table(name, suffix) if folder_of == "tables" else f"{folder_of}/{name}.{suffix}"
        if self.freshen(target):
            with suppress(IntegrityError):  # missing again: `discard` is looking at its age
                if self.read(target) == data:
                    return name
        with self.temporary() as path:
            with explained(path), open(path, "xb") as file:
                file.write(data)
                _sync(file)
            self.publish_content(path, target, name)
        return name

    def publish_content(self, temporary: Path, name: str, digest: str) -> None:
        """Publish a finished file whose content has `digest`, after reading it back.

        If the name is taken by the same content, that file becomes as young as a new one; a damaged file is replaced
        (never truncated: readers of the old one keep it).
        """
        found = file_digest(temporary)
        if found != digest:
            raise IntegrityError(
                f"{temporary}: reads back other bytes than were written",
                expected=digest,
                found=found,
                fix="check the disk",
            )
        while not self.publish(temporary, name):
            with suppress(FileNotFoundError):  # removed meanwhile: publish
                if not self.freshen(name):
                    continue
                if file_digest(self.path(name)) != digest:
                    with explained(self.path(name)):
                        os.replace(temporary, self.path(name))
                        _sync_folder(self.path(name).parent)
                return

    def replace(self, name: str, data: bytes) -> None:
        """Write a derived file that may change (reports); readers see the old one or the new one."""
        with self.temporary() as path:
            with explained(path), open(path, "xb") as file:
                file.write(data)
                _sync(file)
            target = self.path(name)
            with explained(target):
                make_folder(target.parent)
                os.replace(path, target)

    def remove(self, name: str) -> None:
        """Remove a file that means nothing to readers (claims) or that nothing needs, with its copy; it may be gone."""
        if layout.is_document(name):
            self._remove(Paths.copy(name))
        self._remove(name)

    def set_aside(self, name: str) -> None:
        """Move a file that cannot be read, and a document's copy, to `damaged/`: its name is free again."""
        for one in (name, Paths.copy(name)):
            if self.holds(one):
                self._move(one, f"damaged/{one}-{uuid.uuid4().hex[:8]}")

    def _move(self, name: str, to: str) -> None:
        with explained(self.path(to)):
            self.path(to).parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path(name), self.path(to))

    def _remove(self, name: str) -> None:
        with explained(self.path(name)):
            self.path(name).unlink(missing_ok=True)

    # ------------------------------------------------------------ age

    def now(self) -> float:
        """The time by the store's clock: that of a file which is written for it (seconds since 1970)."""
        return now_in(self.root / "tmp")

    def freshen(self, name: str) -> bool:
        """Make a file as young as one that is written now, so that `discard` spares it. To be called before a reference
        to the file is published. Returns False if it is not there."""
        path = self.path(name)
        with explained(path):
            try:
                os.utime(path)
            except FileNotFoundError:
                return False
            except PermissionError:  # another user's file: a copy takes its place
                with self.temporary() as copy:
                    shutil.copyfile(path, copy)
                    with open(copy, "rb+") as file:
                        _sync(file)
                    if file_digest(copy) != file_digest(path):
                        raise IntegrityError(
                            f"{copy}: reads back other bytes than were written", fix="check the disk"
                        ) from None
                    os.replace(copy, path)
                    _sync_folder(path.parent)
        return True

    def discard(self, name: str, before: float) -> bool:
        """Remove a file that was last written at or before a moment (see `now`), with its copy; a younger one stays.

        Returns:
            Whether it was removed.
        """
        removed = self._discard(name, before)
        if removed and layout.is_document(name):
            self._remove(Paths.copy(name))
        return removed

    def _discard(self, name: str, before: float) -> bool:
        """It is moved aside and looked at again there: who freshens it is either earlier, and it is put back, or later,
        and is told that it is missing."""
        path = self.path(name)
        with self.temporary() as aside, explained(path):
            try:
                os.rename(path, aside)
            except FileNotFoundError:
                return False
            with open(aside, "rb") as file:  # opened: on NFS the time is then the server's, not one remembered here
                old = os.fstat(file.fileno()).st_mtime <= before
            if not old:
                with suppress(FileExistsError):
                    os.link(aside, path)
        return old

    # ------------------------------------------------------------ numbered documents

    def numbers(self, folder: str) -> list[int]:
        """Numbers of the documents `NNNNNNNN.json` in a folder, without a gap.

        Raises:
            IntegrityError: a number is missing in the middle.
        """
        found = [int(name[:-5]) for name in self.names(folder) if name.endswith(".json") and name[:-5].isdigit()]
        if found != list(range(len(found))):
            missing = sorted(set(range(max(found) + 1)) - set(found))
            raise IntegrityError(
                f"{self.where(folder)}: documents are missing",
                expected="numbers without a gap",
                found=f"no {missing[:5]}",
                fix=layout.REPAIR,
            )
        return found

    def document(self, name: str) -> dict:
        """A document, checked. If it is lost or damaged and its copy is not: what the copy says (see `damage`).

        Raises:
            IntegrityError: it is lost or damaged, and so is its copy.
            CacheError: it is of another version, or cannot be read now.
        """
        try:
            return self.parse(name, self.read(name))
        except IntegrityError as error:
            try:
                data = self.read(Paths.copy(name)) if layout.is_document(name) else b""
                body = self.parse(name, data)
            except IntegrityError:
                raise error from None
            if name not in self.damage:
                self.damage[name] = error.what
                what = "it was put back" if self.mends else f"to put it back: {layout.REPAIR}"
                retrying.say(f"{error.what}; its copy is read instead ({what})")
            if self.mends:
                self.replace(name, data)
            return body

    def parse(self, name: str, data: bytes) -> dict:
        """The bytes of a document, checked, also whether they are those of this document and not of another."""
        body = layout.unseal(data, self.where(name))
        if other := layout.misplaced(name, body):
            raise IntegrityError(f"{self.where(name)}: is another document", found=other, fix=layout.REPAIR)
        return body

    def content(self, name: str, digest: str) -> bytes:
        """Read a content-addressed file and check it."""
        data = self.read(name)
        found = layout.content_digest(data)
        if found != digest:
            raise IntegrityError(
                f"{self.where(name)}: its bytes do not match its name",
                expected=digest,
                found=found,
                fix=layout.REPAIR,
            )
        return data

    # ------------------------------------------------------------ housekeeping

    def sweep(self) -> int:
        """Remove temporary files that no living writer can own. Returns how many."""
        return sweep_in(self.root / "tmp")

    def free_bytes(self) -> int | None:
        """Room for more, in bytes (quotas do not count); None where the store does not tell."""
        return free_at(self.root)

    def scratch_bytes(self) -> int:
        """Room where unfinished files are written, in bytes."""
        return free_at(self.root)


@contextmanager
def temporary_in(folder: Path) -> Iterator[Path]:
    """A path in a folder (made if need be) that nobody else uses; removed at the end if still there."""
    with explained(folder):
        make_folder(folder)
    path = folder / f"{process_identity.mark()}-{uuid.uuid4().hex}"
    try:
        yield path
    finally:
        with suppress(OSError):  # permission lost: what is left there means nothing and is swept later
            path.unlink(missing_ok=True)


def free_at(folder: Path) -> int:
    """Free bytes where a folder is or will be (quotas do not count)."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def descriptors_left() -> int:
    """How many more files this process may open, but for `SPARE_DESCRIPTORS`."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    taken = len(os.listdir("/dev/fd"))
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit - taken - SPARE_DESCRIPTORS


def is_scarce(error: BaseException | None) -> bool:
    """Whether the reason is that descriptors or space have run out."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _SCARCE:
            return True
        error = error.__cause__
    return False


def sweep_in(folder: Path) -> int:
    """Remove temporary files that no living process can own. Returns how many."""
    found = list(folder.glob("*"))
    if not found:
        return 0
    count, before = 0, now_in(folder) - STALE_TMP_S
    for path in found:
        with suppress(OSError):
            if path.stat().st_mtime <= before and not process_identity.lives(path.name):
                path.unlink()
                count += 1
    return count


def now_in(folder: Path) -> float:
    """The time by the clock that the files of a folder get theirs from."""
    with temporary_in(folder) as path, explained(path):
        path.touch()
        return path.stat().st_mtime


def make_folder(path: Path) -> None:
    """Make a folder, with its parents, so that it is still there after a loss of power."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def file_digest(path: Path) -> str:
    """Hex xxh3-128 of a file's bytes, read in pieces."""
    return digest_of(Handle(os.open(path, os.O_RDONLY)))


def digest_of(handle: Handle) -> str:
    """Hex xxh3-128 of an open file's bytes."""
    state, piece, offset = xxhash.xxh3_128(), memoryview(bytearray(4 << 20)), 0
    while got := handle.read_into(piece, offset):
        state.update(piece[:got])
        offset += got
    return state.hexdigest()


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Turn the operating system's refusals into errors for people."""
    try:
        yield
    except OSError as error:
        if isinstance(error, FileExistsError):
            raise
        fixes = {
            errno.ENOSPC: "free space (or move the cache), then run the same command again: it continues",
            errno.EDQUOT: "raise the quota, then run the same command again: it continues",
            errno.EROFS: "make the cache writable",
            errno.EACCES: "give this user write permission to the cache",
            errno.EPERM: "give this user write permission to the cache",
        }
        kind = NoSpaceError if error.errno in (errno.ENOSPC, errno.EDQUOT) else CacheError
        raise kind(f"{path}: cannot be written: {error.strerror}", fix=fixes.get(error.errno or 0)) from error
