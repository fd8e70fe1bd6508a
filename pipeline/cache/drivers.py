"""Drivers of fsspec: how a URL is opened, and how everything below a folder is listed.

Why a listing of our own: fsspec's general `find` takes a folder that it could not list for an empty one, so that a
server that goes away gives a shorter listing, or none, and no error.
Price: a driver without a `find` of its own is asked folder by folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractFileSystem

from pipeline.errors import UserError
from pipeline.retrying import CONNECT_S, TIMEOUT_S, WEB_TIMEOUT_S
from pipeline.urls import strip_credentials

_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_SECRETS = {
    "s3": "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (or AWS_PROFILE=...)",
    "gcs": "export GOOGLE_APPLICATION_CREDENTIALS=FILE",
    "http": """write "machine HOST login USER password PASSWORD" into ~/.netrc, and """
    """export FSSPEC_HTTP='{"client_kwargs": {"trust_env": true}}'""",
}
"""Where credentials belong, by the driver's extra."""

Ask = Callable[[str, Callable[[str], Any]], Any]
"""(path, request) -> the answer to `request(path)`, with the caller's retries and errors."""


def refuse_credentials(url: str, error: type[UserError] = UserError) -> None:
    """Raises `error` if a URL holds credentials, or a query, which may be one."""
    clean = strip_credentials(url)
    if clean != url:
        scheme = url.partition("://")[0].rpartition(":")[2].lower()
        other = f"give them to the driver: export FSSPEC_{scheme.upper()}='{{\"password\": ...}}'"
        raise error(
            f"{clean}: was given with credentials or a query, which would be written into the cache and into messages",
            expected="a plain address; credentials come from the environment",
            fix=_SECRETS.get(_EXTRAS.get(scheme, ""), other),
        )


def open_url(url: str, error: type[UserError], patience_s: float, **options: Any) -> tuple[AbstractFileSystem, str]:
    """The driver of a URL, set to make one attempt and to notice silence, and what the driver calls the place.

    Args:
        error: what to raise.
        patience_s: no single attempt is silent for longer.
        options: for the driver.

    Raises:
        error: the URL holds credentials, nobody knows its scheme, or its driver is not installed or does not start.
    """
    refuse_credentials(url, error)
    scheme = url.partition("://")[0].lower()
    try:
        fs, root = fsspec.core.url_to_fs(url, **_one_attempt(scheme, patience_s), **options)
    except (ImportError, ValueError) as cause:
        extra = _EXTRAS.get(scheme)
        raise error(
            f"{url}: cannot be opened: {cause}",
            expected="file, s3, gs, http, https, hf, or another scheme that fsspec knows",
            fix=f"pip install 'sana-pipe[{extra}]'" if extra else f"install the fsspec driver for {scheme}://",
        ) from None
    except Exception as cause:  # drivers raise what they like: no region, no credentials, ...
        raise error(f"{url}: cannot be opened: {type(cause).__name__}: {cause}") from None
    if hasattr(fs, "retries"):
        fs.retries = 1
    return fs, str(root).rstrip("/")


def _one_attempt(scheme: str, patience_s: float) -> dict[str, Any]:
    """Options of a driver, before those of fsspec's configuration: `retrying.tried` is who tries again."""
    given = fsspec.config.conf.get(scheme, {})

    def at_most(usual: float) -> float:
        return max(1.0, min(usual, patience_s))

    if scheme in ("s3", "s3a"):
        once = {"connect_timeout": at_most(CONNECT_S), "read_timeout": at_most(TIMEOUT_S)}
        return {"config_kwargs": {**once, "retries": {"total_max_attempts": 1}, **given.get("config_kwargs", {})}}
    if scheme in ("http", "https"):
        import aiohttp

        limits = aiohttp.ClientTimeout(total=None, sock_connect=at_most(CONNECT_S), sock_read=at_most(WEB_TIMEOUT_S))
        return {"client_kwargs": {"timeout": limits, **given.get("client_kwargs", {})}}
    return {}


def find(fs: AbstractFileSystem, root: str, ask: Ask) -> dict[str, dict[str, Any]]:
    """Every file below a folder, by the driver's path, with what the driver says of it.

    Raises:
        FileNotFoundError: there is no such folder (some drivers say that it is empty).
        OSError: a folder inside it could not be listed, or vanished meanwhile; and whatever `ask` raises.
    """
    own = type(fs)
    if isinstance(fs, AsyncFileSystem):
        general = own._find is AsyncFileSystem._find
    else:
        general = own.find is AbstractFileSystem.find
    if not general:
        return dict(ask(root, lambda path: fs.find(path, detail=True)))
    found: dict[str, dict[str, Any]] = {}
    folders = [root]
    while folders:
        folder = folders.pop()
        try:
            entries = ask(folder, lambda path: fs.ls(path, detail=True))
        except FileNotFoundError as error:
            if folder == root:
                raise
            raise OSError(f"{folder} was listed and is not there") from error
        for info in entries:
            path = str(info["name"]).rstrip("/")
            if info["type"] != "directory":
                found[str(info["name"])] = info
            elif path.startswith(folder + "/") and not path.endswith("/."):
                folders.append(path)
    return found
