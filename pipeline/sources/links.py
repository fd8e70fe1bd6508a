"""Links: pictures that rows of tables name by URL, on web servers of other people or in object stores.

A link without a picture raises `DeadLink` and never ends the job: in tables of the web a tenth of the links and more
are dead. A table is often made by others, so it reaches public web servers only, unless `data.allow_links` opens more:
each socket's address is checked before it is connected, so also behind a redirect. Messages and documents name only the
host of a link: paths and queries may be credentials. Each picture may have its own server, so there is no
`RemoteFilesystem`, and names are looked up in many threads, where dead name servers do not hold up the others.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import socket
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import Any

import fsspec

from pipeline import retrying
from pipeline.cache.connections import Connection, ObjectAwayError, RequestFailed
from pipeline.errors import AwayError, UserError
from pipeline.sources.filenames import escaped, host
from pipeline.sources.filesystem import Unreadable
from pipeline.urls import strip_credentials

WEB = ("http", "https")
STORES = ("s3", "s3a", "gs", "gcs", "hf", "az", "abfs", "abfss")
REQUESTS = 64
"""Links that are fetched at once."""

SILENT = 64
"""Links in a row without an answer after which the network is doubted."""

SILENT_FROM_START = 1024
"""The same while no link has answered yet."""

REDIRECTS = 10
TIMEOUT_S = 10.0
MAX_BYTES = 3072 << 20
DEAD = "no picture behind the link"
"""What the reason of every reject for a `DeadLink` begins with."""

REFUSED = "a link that is not followed"
"""What the reason of every reject for a `RefusedLink` begins with."""

_PUBLIC_V6, _NAT64 = IPv6Network("2000::/3"), IPv6Network("64:ff9b::/96")


class DeadLink(Unreadable):
    """There is no picture behind a link. The message begins with `DEAD` and names the host alone."""


class RefusedLink(DeadLink):
    """A link leads to what `data.allow_links` does not open. The message begins with `REFUSED` in place of `DEAD`."""


@dataclass(frozen=True)
class _Answer:
    """What a request gave. data: None without a picture; reason: why; heard: whether somebody answered, None if nobody
    was asked; to_open: the value of `data.allow_links` without which nobody was."""

    data: bytes | None
    reason: str = ""
    heard: bool | None = True
    to_open: str = ""


class Links:
    """Fetches pictures by URL; see the module.

    Args:
        max_bytes: limit on a picture's bytes.
        timeout_s: limit on the time for one picture of a web server, with redirects.
        patience_s: how long to wait for an object store, and for the network, to answer again.
        allowed: `data.allow_links`.

    Attributes:
        witness: the last link that answered.
        silent: links in a row since then that got no answer.
    """

    def __init__(
        self,
        max_bytes: int = MAX_BYTES,
        timeout_s: float = TIMEOUT_S,
        patience_s: float = retrying.PATIENCE_S,
        allowed: str = "none",
    ):
        self.max_bytes, self.timeout_s, self.patience_s, self.allowed = max_bytes, timeout_s, patience_s, allowed
        self._lock = threading.Lock()
        self._checking = threading.Lock()
        self._stores: dict[str, Connection] = {}
        self.silent = 0
        self.witness: str | None = None

    def read(self, url: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            DeadLink: see there.
            AwayError: no link answers any more.
            UserError: the driver of web servers is not installed.
        """
        answer = self._ask(url)
        if answer.heard:
            self.silent, self.witness = 0, url
        elif answer.heard is False:
            with self._lock:
                self.silent += 1
            self._check_network(answer.reason)
        if answer.to_open:
            fix = f"--set data.allow_links={answer.to_open if self.allowed == 'none' else 'all'}"
            raise RefusedLink(f"{REFUSED}: {answer.reason}; if you trust the table: {fix} ({host(url)!r})")
        if answer.data is None:
            raise DeadLink(f"{DEAD}: {answer.reason} ({host(url)!r})")
        return answer.data

    def _check_network(self, reason: str) -> None:
        """Raise AwayError if too many links were silent, and the last one that answered is silent now."""
        with self._checking:  # the others wait for the result
            witness = self.witness
            if self.silent < (SILENT if witness is not None else SILENT_FROM_START):
                return

            def ask() -> None:
                if witness is None or not self._ask(witness).heard:
                    raise ConnectionError(reason)

            try:
                retrying.retry(ask, "the network", self.patience_s if witness is not None else 0, _is_silence)
            except retrying.NoAnswer as error:
                what = f"no link of the table answers any more: {self.silent} one after the other did not"
                fix = "run the same command again once this machine reaches the network"
                raise AwayError(what, found=error, fix=fix) from None
            self.silent = 0

    def _ask(self, url: str) -> _Answer:
        scheme = url.partition("://")[0].lower()
        if scheme in WEB:
            return _web(self.allowed in ("private", "all")).get(url, self.max_bytes, self.timeout_s)
        if scheme in STORES:
            if self.allowed in ("stores", "all"):
                return self._ask_store(url)
            return _Answer(None, "objects of stores are read with your credentials", None, "stores")
        return _Answer(None, f"addresses of the kind {escaped(scheme)}:// are not fetched", None)

    def _ask_store(self, url: str) -> _Answer:
        root, name = "/".join(url.split("/")[:3]), "/".join(url.split("/")[3:])
        try:
            with self._lock:
                if root not in self._stores:
                    self._stores[root] = Connection(root, UserError, self.patience_s)
                store = self._stores[root]
            path = f"{store.root}/{name}"
            data = store.request(host(url), lambda: store.fs.cat_file(path, start=0, end=self.max_bytes + 1))
        except FileNotFoundError:
            return _Answer(None, "does not exist")
        except ObjectAwayError as error:
            return _Answer(None, "no answer for it", bool(error))
        except AwayError:
            raise
        except UserError as error:  # no such bucket, no credentials
            return _Answer(None, strip_credentials(escaped(error.what)), False)
        except RequestFailed as error:
            return _Answer(None, type(error.__cause__ or error).__name__)
        return _Answer(None, _too_large(self.max_bytes)) if len(data) > self.max_bytes else _Answer(data)


def _is_silence(error: BaseException) -> bool:
    return isinstance(error, ConnectionError)


def _too_large(limit: int) -> str:
    return f"more than {limit:,} bytes (data.max_picture_mib)"


class _NotPublic(OSError):
    """A socket was to be connected to an address that is not public."""


def is_public(address: str) -> bool:
    """Whether an address is of the public internet, and so is the IPv4 address in it, if any."""
    try:
        ip = ip_address(address)
    except ValueError:  # a short form, such as 127.1
        return False
    if isinstance(ip, IPv6Address):
        ip = ip.ipv4_mapped or ip.sixtofour or (IPv4Address(int(ip) & 0xFFFFFFFF) if ip in _NAT64 else ip)
    return ip.is_global and not ip.is_multicast and (ip.version == 4 or ip in _PUBLIC_V6)


def _public_socket(info: tuple[Any, ...]) -> socket.socket:
    """A socket for an address that a name was resolved to. info: as of `getaddrinfo`.

    Raises:
        _NotPublic: see there.
    """
    family, kind, protocol, _, address = info
    if not is_public(address[0]):
        raise _NotPublic("not public")
    return socket.socket(family, kind, protocol)


class _Web:
    """An event loop in a thread, with a session for web servers. Cookies are not kept.

    Args:
        private: also for those that are not public. Each has its own session: an open connection is used again.
    """

    def __init__(self, private: bool) -> None:
        try:
            import aiohttp
        except ImportError:
            raise UserError("links to web servers need aiohttp", fix="pip install 'sana-pipe[http]'") from None
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(ThreadPoolExecutor(REQUESTS, thread_name_prefix="names"))
        threading.Thread(target=self._loop.run_forever, name="links", daemon=True).start()
        given = dict(fsspec.config.conf.get("http", {}).get("client_kwargs", {}))

        async def opened() -> aiohttp.ClientSession:
            checked = None if private else _public_socket
            connector = aiohttp.TCPConnector(limit=REQUESTS, use_dns_cache=False, socket_factory=checked)
            return aiohttp.ClientSession(**{"cookie_jar": aiohttp.DummyCookieJar(), **given, "connector": connector})

        self.session = self._run(opened())
        atexit.register(self._close)

    def get(self, url: str, limit: int, timeout_s: float) -> _Answer:
        answer: _Answer = self._run(_get(self.session, url, limit, timeout_s))
        return answer

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _close(self) -> None:
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self.session.close(), self._loop).result(1)


@cache
def opened(private: bool) -> _Web:
    """This process's loop and session; a forked process has others."""
    return _Web(private)


_opening = threading.Lock()


def _web(private: bool) -> _Web:
    with _opening:
        return opened(private)


os.register_at_fork(after_in_child=opened.cache_clear)  # threads do not survive a fork


async def _get(session: Any, url: str, limit: int, timeout_s: float) -> _Answer:
    """Fetch from a web server. aiohttp follows redirects to web servers only."""
    import aiohttp

    within = aiohttp.ClientTimeout(total=timeout_s)
    heard = False
    try:
        async with session.get(url, timeout=within, max_redirects=REDIRECTS) as response:
            heard = True
            if response.status != HTTPStatus.OK:
                return _Answer(None, f"HTTP {response.status} {_phrase(response.status)}".rstrip())
            if (response.content_length or 0) > limit:
                return _Answer(None, _too_large(limit))
            data = bytearray()
            async for chunk in response.content.iter_chunked(1 << 16):
                data += chunk
                if len(data) > limit:
                    return _Answer(None, _too_large(limit))
            return _Answer(bytes(data)) if data else _Answer(None, "an empty answer")
    except TimeoutError:
        return _Answer(None, f"no picture within {timeout_s:g} s (data.link_timeout_s)", heard)
    except aiohttp.TooManyRedirects:
        return _Answer(None, f"more than {REDIRECTS} redirects")
    except aiohttp.ClientPayloadError:
        return _Answer(None, "the answer broke off")
    except aiohttp.ClientConnectorError as error:
        if isinstance(error.os_error, _NotPublic):
            return _Answer(None, "it leads to this machine or into a private network", None, "private")
        known = not isinstance(error.os_error, OSError) or type(error.os_error).__name__ != "gaierror"
        return _Answer(None, "no connection" if known else "the host is not known", False)
    except (ValueError, aiohttp.NonHttpUrlClientError):
        return _Answer(None, "no valid address, or redirected to one that is not of the web", None)
    except aiohttp.ClientError as error:
        return _Answer(None, type(error).__name__, heard or not isinstance(error, aiohttp.ClientConnectionError))


def _phrase(status: int) -> str:
    with suppress(ValueError):
        return HTTPStatus(status).phrase
    return ""
