"""Names, identities and checksums of everything in a cache.

Digests, sample ids, checksums, canonical JSON, documents, and paths. Encodings and keys: `cache.encodings`.
Why: a record is found by its content and encoding, so nothing unchanged is encoded twice and nothing stale is used.
These functions are the format: a change makes every existing cache unreadable, so `VERSION` counts changes and a golden
test prevents accidental ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import xxhash

from sana_pipe.base.errors import CacheError, IntegrityError

FORMAT = "sana-pipe-cache"
VERSION = 1
META = "__sana_pipe__"
"""Folder of the members that describe a shard: `head`, `records`, `null`. Clients take a member without an extension
for no part of a sample (webdataset skips the folder, too)."""
PACKED = "packed-"
"""Prefix of the names of packs, which take the place of encoding names in `shards/`, `plans/`, `units/`, `claims/`."""


DOCUMENTS = ("encodings", "sources", "plans", "units", "segments", "snapshots", "names", "prompts", "withdrawn")
"""Folders of documents from which everything else follows. Each document is stored twice (`Paths.copy`)."""


def digest(*parts: bytes | str) -> bytes:
    """xxh3-128 (16 bytes) over length-prefixed parts, so that ("ab", "c") and ("a", "bc") differ."""
    state = xxhash.xxh3_128()
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.digest()


def digest_of_keys(parts: tuple[str, ...], keys: np.ndarray) -> bytes:
    """`digest` of some parts and then of 16-byte keys (an S16 array), one part each."""
    rows = np.empty(len(keys), [("length", "<u8"), ("key", "S16")])
    rows["length"], rows["key"] = 16, keys
    return xxhash.xxh3_128_digest(b"".join(map(framed, parts)) + rows.tobytes())


def content_digest(data: bytes | memoryview) -> str:
    """Hex xxh3-128 of bytes as they are: the name of a content-addressed file."""
    return xxhash.xxh3_128_hexdigest(data)


def canonical(value: Any) -> bytes:
    """JSON with sorted keys, no spaces, UTF-8, finite numbers: one value, one sequence of bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


# ---------------------------------------------------------------- keys and checksums


def sample_id(source: str, item: str) -> int:
    """64-bit id of a sample: the source's name and the item's key in it."""
    return int.from_bytes(digest("sample", source, item)[:8], "little")


def framed(part: str) -> bytes:
    """A part with its length, as `digest` hashes it."""
    data = part.encode("utf-8", "surrogatepass")
    return len(data).to_bytes(8, "little") + data


def checksum(encoding_id: str, key: bytes, payload: bytes | memoryview | Any) -> bytes:
    """16-byte checksum of a record: its encoding, its key and its payload (the tensor's bytes, without the npy header).

    Encoding and key are included, so an intact record in a wrong place is detected.
    """
    state = xxhash.xxh3_128(bytes.fromhex(encoding_id))
    state.update(key)
    state.update(payload)
    return state.digest()


# ---------------------------------------------------------------- documents


def seal(body: dict[str, Any]) -> bytes:
    """A document: the body and the digest over its canonical JSON, as readable JSON."""
    return _with_digest({"format": FORMAT, "version": VERSION, **body})


def _with_digest(body: dict[str, Any]) -> bytes:
    sealed = {**body, "digest": content_digest(canonical(body))}
    return (json.dumps(sealed, sort_keys=True, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


REPAIR = "sana-pipe verify --repair"
"""The command that repairs a damaged cache."""


ENCODE, BUCKET, PROMPTS = "sana-pipe encode --data DIR", "sana-pipe bucket", "sana-pipe encode --prompts FILE"
METADATA = f"{BUCKET} --metadata FILE"
"""The command that stores a lost table of metadata again, with the file that it was made from."""
FORGET = "sana-pipe forget --check"
"""The command that ends a takedown that was stopped, and looks for what is left of withdrawn pictures."""


def way_out(name: str) -> str:
    """The command that makes again what a document was for, once the document is lost with its copy."""
    folder, _, rest = name.partition("/")
    if rest.startswith(PACKED):
        return f"{BUCKET} --pack"
    snapshot = f"{BUCKET} --name NAME --move, with the settings that it was made with"
    withdrawn = "sana-pipe forget --digests FILE, with the digests of the pictures that were taken out"
    others = {"snapshots": snapshot, "names": BUCKET, "prompts": PROMPTS, "withdrawn": withdrawn}
    return others.get(folder, ENCODE)


def is_document(name: str) -> bool:
    """Return whether a file is a document, which is stored twice."""
    return name == Paths.FORMAT or (name.partition("/")[0] in DOCUMENTS and name.endswith(".json"))


def has_copy(name: str) -> bool:
    """Return whether a file is stored twice: documents, and tables that cannot be made from other files."""
    return is_document(name) or name.startswith("tables/")


def numbers_of(names: Iterable[str], suffix: str = ".json") -> list[int]:
    """The numbers in names of documents (`NNNNNNNN.json`) or, without the suffix, of folders. Others are left out."""
    stems = (name.removesuffix(suffix) for name in names if name.endswith(suffix))
    return [int(stem) for stem in stems if len(stem) >= 8 and stem.isascii() and stem.isdigit()]


_ALWAYS = {
    "format.json": ("what",),
    "encodings": ("kind", "values"),
    "sources": ("table", "encodings"),
    "plans": ("table", "units"),
    "units": ("rejects",),
    "segments": ("table", "commits"),
    "names": ("snapshot",),
    "prompts": ("text", "prompts", "rows"),
    "withdrawn": ("digests", "keys", "done"),
}
"""Keys that each document of a folder has, or the document of this name."""


def contradicts_name(name: str, body: dict[str, Any]) -> str:
    """Return what in a document contradicts its name, "" if nothing. It may be another, intact document."""
    folder, _, rest = name.partition("/")
    owner, stem = rest.partition("/")[0], rest.rpartition("/")[2].removesuffix(".json")
    lacking = [f"no {key}" for key in _ALWAYS.get(folder, ()) if key not in body]
    if folder == "units" and rest.split("/")[2:-1] != [stem[:2]]:
        return "a unit of another folder"
    if folder == "snapshots":
        body = {"id": content_digest(canonical(body))}
    wanted = {
        "encodings": {"kind": stem.partition("-")[0]},
        "sources": {"source": owner},
        "plans": {"encoding": owner, "number": stem},
        "units": {"unit": stem},
        "segments": {"encoding": owner, "plan": stem},
        "snapshots": {"id": stem},
        "names": {"name": owner},
        "prompts": {"name": owner},
    }.get(folder, {})
    actual = {key: body.get(key) for key in wanted}
    actual = {key: f"{value:08d}" if isinstance(value, int) else value for key, value in actual.items()}
    return ", ".join([*lacking, *(f"{key} {value}" for key, value in actual.items() if value != wanted[key])])


def unseal(data: bytes, where: str) -> dict[str, Any]:
    """Parse and check a document. where: for messages.

    Raises:
        IntegrityError: not JSON, or other bytes than `seal` makes of its values.
        CacheError: another format or version.
    """
    try:
        body = json.loads(data)
        if not isinstance(body, dict):
            raise ValueError("not an object")
        del body["digest"]
        intact = data == _with_digest(body)
    except (ValueError, KeyError, RecursionError) as error:
        raise IntegrityError(f"{where}: not a document of this cache: {error}", fix=REPAIR) from None
    if not intact:
        raise IntegrityError(f"{where}: its bytes do not match its values and their digest", fix=REPAIR)
    if body.pop("format", None) != FORMAT:
        raise CacheError(f"{where}: is not a {FORMAT} document")
    if (version := body.pop("version", None)) != VERSION:
        raise CacheError(
            f"{where}: has format version {version}; this sana-pipe reads version {VERSION}",
            fix="use the version of sana-pipe that wrote it",
        )
    return body


# ---------------------------------------------------------------- paths


class Paths:
    """Every path of a cache, relative to its root, with forward slashes."""

    FORMAT = "format.json"
    WITHDRAWN = "withdrawn"
    LISTED = "reports/listed"
    ROUNDS = "rounds"

    @staticmethod
    def copy(name: str) -> str:
        """The path of the copy of a document or of a folder of documents."""
        return f"copies/{name}"

    @staticmethod
    def encoding(encoding: str) -> str:
        return f"encodings/{encoding}.json"

    @staticmethod
    def scans(source: str) -> str:
        return f"sources/{source}"

    @staticmethod
    def plans(encoding: str) -> str:
        return f"plans/{encoding}"

    @staticmethod
    def units(encoding: str, plan: int) -> str:
        return f"units/{encoding}/{plan:08d}"

    @staticmethod
    def unit(encoding: str, plan: int, unit: str) -> str:
        return f"{Paths.units(encoding, plan)}/{unit[:2]}/{unit}.json"

    @staticmethod
    def segment(encoding: str, plan: int) -> str:
        return f"segments/{encoding}/{plan:08d}.json"

    @staticmethod
    def claims(*work: str | int) -> str:
        return "/".join(("claims", *(part if isinstance(part, str) else f"{part:08d}" for part in work)))

    @staticmethod
    def claim(*work: str | int) -> str:
        """The claim on a unit (encoding, plan, unit) or on a fragment of a scan ("fragments", source, fragment)."""
        return Paths.claims(*work) + ".json"

    @staticmethod
    def fragments(source: str) -> str:
        return f"fragments/{source}"

    @staticmethod
    def fragment(source: str, fragment: str) -> str:
        return f"fragments/{source}/{fragment}.json"

    @staticmethod
    def round(number: int) -> str:
        """The folder of a round of `verify`."""
        return f"{Paths.ROUNDS}/{number:08d}"

    @staticmethod
    def shard(encoding: str, name: str) -> str:
        return f"shards/{encoding}/{name[:2]}/{name}.tar"

    @staticmethod
    def table(name: str, suffix: str) -> str:
        return f"tables/{name[:2]}/{name}.{suffix}"

    @staticmethod
    def snapshot(name: str) -> str:
        return f"snapshots/{name}.json"

    @staticmethod
    def names(name: str) -> str:
        return f"names/{name}"

    @staticmethod
    def prompts(name: str) -> str:
        return f"prompts/{name}"

    @staticmethod
    def numbered(folder: str, number: int) -> str:
        return f"{folder}/{number:08d}.json"
