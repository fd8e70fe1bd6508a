"""URLs through fsspec: opening, sending requests with our retries and errors, listing everything below a folder.

`Connection` serves a cache in an object store (`object_store`) and sources behind a URL (`sources.remote`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any, TypeVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from sana_pipe.base import retrying
from sana_pipe.base.disk import is_out_of_resources
from sana_pipe.base.errors import AwayError, UserError
from sana_pipe.base.urls import strip_credentials

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_SECRETS = {
    "s3": "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (or AWS_PROFILE=...)",
    "gcs": "export GOOGLE_APPLICATION_CREDENTIALS=FILE",
    "http": """write "machine HOST login USER password PASSWORD" into ~/.netrc, and """
    """export FSSPEC_HTTP='{"client_kwargs": {"trust_env": true}}'""",
}
"""Ways to pass credentials, by the driver's extra."""

_UNNAMED = (
    "check the address, the region and the credentials (for S3: AWS_ENDPOINT_URL, AWS_DEFAULT_REGION and "
    "AWS_ACCESS_KEY_ID with AWS_SECRET_ACCESS_KEY; they may have expired)"
)
"""The fix for an error that its server does not name: S3 answers a HEAD with a status alone, also a 400 for expired
credentials and for another region."""

CHANGE_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")
"""Keys of the time at which a file was written; drivers differ."""

PAGE = 1000
"""Files that S3 lists at a time; a store may send fewer."""

T = TypeVar("T")


class ObjectAwayError(AwayError):
    """One file could not be read or written for `patience_s`, while the store answered other requests.

    reason: without the name of the file.
    """

    def __init__(self, what: str, *, reason: str, fix: str):
        super().__init__(f"{what}: {reason}", fix=fix)
        self.reason = reason


class RequestFailed(Exception):
    """A request for one file failed and repeating it is useless. `str()` is the reason, `fix` what may help."""

    def __init__(self, reason: str, fix: str | None = None):
        super().__init__(reason)
        self.fix = fix


class Connection:
    """The files below a URL.

    Args:
        url: with a scheme that fsspec knows.
        error: the type of errors that concern the store as a whole.
        patience_s: seconds to wait for a store that does not answer.
        options: for the driver.

    Attributes:
        url: without a slash at the end.
        fs: the driver, set to make a single attempt and to notice silence.
        root: the driver's path of the URL.
        is_web: whether it is a web server (http, https).

    Raises:
        error: the URL holds credentials, its scheme is unknown, or its driver is not installed or does not start.
    """

    def __init__(self, url: str, error: type[UserError], patience_s: float, **options: Any):
        refuse_credentials(url, error)
        self.url, self.patience_s, self._error = url.rstrip("/"), patience_s, error
        self.fs, self.root = _open(url, error, patience_s, options)
        self.is_web = url.partition("://")[0].lower() in ("http", "https")
        self._store = "/".join(url.split("/")[:3])

    def where(self, name: str) -> str:
        """The URL of a file, for messages."""
        return f"{self.url}/{name}" if name else self.url

    def request(self, name: str, ask: Callable[[], T], action: str = "read") -> T:
        """The answer of `ask`, which is repeated while the store does not answer.

        Args:
            name: the file, relative to the URL; "" for the URL itself; for messages.
            action: a past participle, for messages.

        Raises:
            FileNotFoundError, FileExistsError: as the driver.
            AwayError: the store did not answer for `patience_s`; `ObjectAwayError`: only this file was not answered.
            UserError: of the type of this connection: the store as a whole cannot be used (credentials, bucket, host).
            OSError: this machine has no disk space or file descriptors left.
            RequestFailed: any other failure.
        """
        try:
            return retrying.retry(ask, self._store, self.patience_s)
        except (FileNotFoundError, FileExistsError):
            raise
        except retrying.NoAnswer as error:
            what = f"{self.where(name)}: cannot be {action}"
            if error.alone:
                raise ObjectAwayError(what, reason=str(error), fix=error.fix) from None
            raise AwayError(f"{what}: {error}", fix=error.fix) from None
        except retrying.Refused as error:
            raise self._error(f"{self.where(name)}: cannot be {action}: {error}", fix=error.fix) from None
        except PermissionError as error:
            fix = f"check the bucket's policy and the credentials: {_credentials_of(self.url)}"
            raise RequestFailed(f"may not be {action}: {error}", fix) from error
        except NotImplementedError as error:
            raise RequestFailed(f"the driver {self.fs.protocol} has no operation for it") from error
        except Exception as error:  # each driver has its own types
            if is_out_of_resources(error):
                raise
            advice = None if retrying.http_status(error) is None else _UNNAMED
            raise RequestFailed(f"cannot be {action}: {type(error).__name__}: {error}", advice) from error

    @property
    def is_paged(self) -> bool:
        """Return whether `find` reads page by page, so that its beginning is cheap."""
        return hasattr(self.fs, "call_s3")

    @property
    def sends_checksums(self) -> bool:
        """Return whether the driver sends a checksum with each put, which the store compares
        (AWS_REQUEST_CHECKSUM_CALCULATION can end it)."""
        return self.is_paged and self.fs.s3.meta.config.request_checksum_calculation == "when_supported"

    def info(self, path: str) -> dict[str, Any]:
        """The driver's description of a file, by one request: `info` of s3fs would look for a folder of a missing file.

        Args:
            path: the driver's.
        """
        if not self.is_paged:
            return dict(self.fs.info(path))
        bucket, key, _ = self.fs.split_path(path)
        head = self.fs.call_s3("head_object", Bucket=bucket, Key=key)
        return {**head, "name": path, "size": head["ContentLength"], "type": "file"}

    def read(self, path: str) -> bytes:
        """The bytes of a file, by one request: s3fs would ask for the size first. path: the driver's."""
        return bytes(self.fs.cat_file(path, **({"max_concurrency": 1} if self.is_paged else {})))

    def find(self, folder: str, deep: bool = True) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every file below a folder, in any order: the driver's path, and the driver's description of the file.

        Args:
            folder: the driver's path.
            deep: also the files in folders below it; False only where `is_paged`.

        Raises:
            FileNotFoundError: there is no such folder (some drivers describe it as empty instead).
            RequestFailed: a folder inside it was removed meanwhile, or the listing is not whole. All others as
                `request`.
        """
        if self.is_paged:
            yield from self._find_s3(folder, deep)
        elif has_own(self.fs, "find"):
            yield from self._list(folder, lambda: self.fs.find(folder, detail=True)).items()
        else:
            yield from self._find_below(folder).items()

    def _find_s3(self, folder: str, deep: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        bucket, key, _ = self.fs.split_path(folder)
        wanted: dict[str, Any] = {
            "Bucket": bucket,
            "Prefix": f"{key}/" if key else "",
            "MaxKeys": PAGE,
            "Delimiter": "" if deep else "/",
        }
        while True:
            page = self._list(folder, lambda: self.fs.call_s3("list_objects_v2", self.fs.req_kw, **wanted))
            for entry in page.get("Contents", []):
                path = f"{bucket}/{entry['Key']}"
                yield path, {**entry, "name": path, "size": entry["Size"], "type": "file"}
            if not page.get("IsTruncated"):
                return
            if not page.get("NextContinuationToken"):
                raise RequestFailed("the store sent a part of the listing, but no token for the rest")
            wanted["ContinuationToken"] = page["NextContinuationToken"]

    def _find_below(self, folder: str) -> dict[str, dict[str, Any]]:
        files: dict[str, dict[str, Any]] = {}
        folders = [folder]
        while folders:
            current = folders.pop()
            try:
                entries = self._list(current, partial(self.fs.ls, current, detail=True))
            except FileNotFoundError as error:
                if current == folder:
                    raise
                raise RequestFailed(f"{current} was listed but does not exist") from error
            for info in entries:
                path = str(info["name"]).rstrip("/")
                if info["type"] != "directory":
                    files[str(info["name"])] = info
                elif path.startswith(current + "/") and not path.endswith("/."):
                    folders.append(path)
        return files

    def _list(self, folder: str, ask: Callable[[], T]) -> T:
        return self.request(folder[len(self.root) + 1 :], ask, "listed")


def refuse_credentials(url: str, error: type[UserError] = UserError) -> None:
    """Raises `error` if a URL holds credentials, or a query, which may be a credential."""
    joined = re.sub(r"[\s'\"]", "", url)  # within a text they end a URL; here they are a part of it
    clean = strip_credentials(joined)
    if clean != joined:
        raise error(
            f"{clean}: was given with credentials or a query, which would be written into the cache and into messages",
            expected="a plain address; credentials come from the environment",
            fix=_credentials_of(url),
        )


def _credentials_of(url: str) -> str:
    """Say how to pass credentials to the driver of a URL."""
    scheme = url.partition("://")[0].rpartition(":")[2].lower()
    other = f"give them to the driver: export FSSPEC_{scheme.upper()}='{{\"password\": ...}}'"
    return _SECRETS.get(_EXTRAS.get(scheme, ""), other)


def _open(
    url: str, error: type[UserError], patience_s: float, options: dict[str, Any]
) -> tuple[AbstractFileSystem, str]:
    """The driver of a URL and the driver's path of it."""
    scheme = url.partition("://")[0].lower()
    try:
        fs, root = fsspec.core.url_to_fs(url, **one_attempt(scheme, patience_s), **options)
        _read_times_fast(fs)
    except (ImportError, ValueError) as cause:
        extra = _EXTRAS.get(scheme)
        raise error(
            f"{url}: cannot be opened: {cause}",
            expected="file, s3, gs, http, https, hf, or another scheme that fsspec knows",
            fix=f"pip install 'sana-pipe[{extra}]'" if extra else f"install the fsspec driver for {scheme}://",
        ) from None
    except Exception as cause:  # of any type: no region, no credentials, ...
        raise error(f"{url}: cannot be opened: {type(cause).__name__}: {cause}") from None
    if hasattr(fs, "retries"):
        fs.retries = 1
    return fs, str(root).rstrip("/")


def _read_times_fast(fs: AbstractFileSystem) -> None:
    """Let s3fs read times in answers with `_timestamp`."""
    if hasattr(fs, "call_s3") and fs.session is None:
        from aiobotocore.session import AioSession

        fs.session = AioSession(**fs.kwargs)
        fs.session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)


def _timestamp(value: Any) -> datetime:
    """A time in an answer of S3. botocore's parser takes any form, and three quarters of the time of a listing."""
    try:
        return datetime.fromisoformat(value)
    except (TypeError, ValueError):
        from botocore.utils import parse_timestamp

        when: datetime = parse_timestamp(value)
        return when


def one_attempt(scheme: str, patience_s: float) -> dict[str, Any]:
    """Driver options for a single attempt with timeouts of at most `patience_s`: `retrying.retry` repeats requests.
    fsspec's configuration takes precedence."""
    given = fsspec.config.conf.get(scheme, {})

    def at_most(usual: float) -> float:
        return max(1.0, min(usual, patience_s))

    connect = at_most(retrying.CONNECT_S)
    if scheme in ("s3", "s3a"):
        once = {"connect_timeout": connect, "read_timeout": at_most(retrying.TIMEOUT_S)}
        return {"config_kwargs": {**once, "retries": {"total_max_attempts": 1}, **given.get("config_kwargs", {})}}
    if scheme in ("http", "https"):
        import aiohttp

        read = at_most(retrying.WEB_TIMEOUT_S)
        limits = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=read)
        return {"client_kwargs": {"timeout": limits, **given.get("client_kwargs", {})}}
    return {}


def has_own(fs: AbstractFileSystem, operation: str) -> bool:
    """Return whether a driver implements an operation itself instead of inheriting fsspec's general operation."""
    kind = type(fs)
    if issubclass(kind, AsyncFileSystem):
        return getattr(kind, f"_{operation}") is not getattr(AsyncFileSystem, f"_{operation}")
    return getattr(kind, operation) is not getattr(AbstractFileSystem, operation)
