"""Asking a store again: how long one that is away is waited for, what is said meanwhile, what no waiting will mend.

What: `tried` asks until there is an answer, for at most `patience_s` from the first failure on. A store that is silent
for `NOTICE_S` is named on stderr, with the time that it will be waited for, and again when it answers.
Why one helper: every read and write over a network gives up at the same time and in the same way, and a thousand
processes that were turned away together do not come back together (the pauses are drawn at random). Drivers try again
by themselves, too, in tries of tries; `drivers.open_url` turns that off, so that the sum is what the setting says.
Why not tenacity: it repeats one call and gives its conditions the state of that call, so it would replace the loop in
`tried` and no more. The rest is of a store, over all calls and threads (whether it answered this process yet or others
meanwhile, one notice for all that wait, even while an attempt hangs), or of drivers (which of their errors last, and
what mends them).
Price: a wrong address of a server that is there but silent looks like a store that is away. So a store that has not
answered this process yet is given `FIRST_S` only; a job that starts while its store is away ends, too.

What no waiting will mend fails at once: missing and forbidden objects, wrong credentials, a bucket or a host that does
not exist, a certificate that does not fit.
"""

from __future__ import annotations

import errno
import random
import socket
import ssl
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

PATIENCE_S = 300.0
FIRST_S = 5.0
CONNECT_S = 5.0
TIMEOUT_S = 15.0
"""Silence after which a driver gives one attempt up."""
WEB_TIMEOUT_S = 30.0
"""The same of a web server, which may make up a listing at length."""
NOTICE_S = 3.0
PAUSE_S = 0.5
"""The first pause; each further one is twice as long, at most `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S = 10.0

_ADDRESS = "check the address (for S3: AWS_ENDPOINT_URL, or endpoint_url in fsspec's configuration)"
_CREDENTIALS = (
    "check the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for GCS: "
    "GOOGLE_APPLICATION_CREDENTIALS; for a web server: ~/.netrc with trust_env in FSSPEC_HTTP)"
)
_REFUSALS = {
    "NoSuchBucket": "make the bucket, or correct its name",
    **dict.fromkeys(
        (
            "InvalidAccessKeyId",
            "SignatureDoesNotMatch",
            "ExpiredToken",
            "InvalidToken",
            "TokenRefreshRequired",
            "NoCredentialsError",
            "PartialCredentialsError",
            "ProfileNotFound",
            "SSOTokenLoadError",
            "UnauthorizedSSOTokenError",
            "DefaultCredentialsError",
            "RefreshError",
        ),
        _CREDENTIALS,
    ),
    "RequestTimeTooSkewed": "set this machine's clock",
    **dict.fromkeys(("NoRegionError", "InvalidRegionError", "AuthorizationHeaderMalformed"), "set AWS_DEFAULT_REGION"),
    **dict.fromkeys(("InvalidBucketName", "ParamValidationError"), "correct the bucket's name"),
    **dict.fromkeys(("InvalidURL", "InvalidUrlClientError", "NonHttpUrlClientError"), _ADDRESS),
}
"""Error codes of S3 and names of drivers' exceptions that concern the store as a whole, and what mends them."""
_TRANSFER = ("RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch")
"""Error codes of S3 that blame the request but come from a bad line."""
_LASTING = (FileExistsError, IsADirectoryError, PermissionError, NotImplementedError, TypeError, AttributeError)
_SCARCE = (errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_AWAY = (
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ESHUTDOWN,
    errno.ECONNRESET,
    errno.ECONNREFUSED,
    errno.ECONNABORTED,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EREMOTEIO,
)

T = TypeVar("T")


class Refused(Exception):
    """The store as a whole cannot be used, and waiting will not help. `fix`: what will."""

    def __init__(self, reason: str, fix: str):
        super().__init__(reason)
        self.fix = fix


class NoAnswer(Exception):
    """There was no answer for as long as one is waited for.

    Attributes:
        fix: what may help.
        alone: the store answered others meanwhile, so that it is this one object that cannot be had.
    """

    def __init__(self, reason: str, fix: str, alone: bool):
        super().__init__(reason)
        self.fix, self.alone = fix, alone


def say(line: str) -> None:
    """Tell a person about the waiting."""
    print(line, file=sys.stderr, flush=True)


def away_disk(error: BaseException) -> bool:
    """Whether a network file system is away, as far as the system's error says (that of a bad sector does not)."""
    return isinstance(error, OSError) and error.errno in _AWAY


def tried(
    ask: Callable[[], T],
    store: str,
    patience_s: float = PATIENCE_S,
    passing: Callable[[BaseException], bool] | None = None,
) -> T:
    """What `ask` returns, when it does.

    Args:
        store: what is asked, for messages; what has the same name is silent, and answers, together.
        passing: says of an error whether it is worth waiting; default: all that are not known to last.

    Raises:
        Refused, NoAnswer: see there.
        Exception: what `ask` raised, if another attempt will not mend it.
    """
    contact = _contact(store)
    first: float | None = None
    pause = PAUSE_S
    with contact.asked(patience_s):
        while True:
            began = time.monotonic()
            try:
                answer = ask()
            except Exception as error:
                known = contact.answered
                if passing is not None:
                    if not passing(error):
                        raise
                    contact.answered = True  # a file that was there before
                else:
                    _raise_lasting(error, contact)
                    if status_of(error) is not None:
                        contact.answered = True
                now = time.monotonic()
                if first is None:
                    first = now - min(now - began, TIMEOUT_S)
                left = first + contact.limit(patience_s) - now
                reason = f"{type(error).__name__}: {error}"
                if left <= 0:
                    waited = f"no answer for {now - first:.0f} s ({reason})"
                    fix = "run the same command again once it is back, or set patience_s to wait longer"
                    if not (known or contact.answered):
                        fix = f"{_ADDRESS}; if it is right, {fix.partition(', or')[0]}"
                    raise NoAnswer(waited, fix, contact.heard > first) from error
                contact.reason = reason
                _pause(min(left, pause * random.uniform(0.5, 1)))
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                contact.hear()
                return answer


@contextmanager
def stopping(check: Callable[[], None]) -> Iterator[None]:
    """Inside, `check` is called in every pause, in the thread that waits; what it raises ends the waiting."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


def status_of(error: BaseException) -> int | None:
    """The HTTP status of a driver's error; None if there was no answer."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            places = ((response, "status_code"), (cause, "status"), (cause, "code"))
            found = next((getattr(place, name) for place, name in places if hasattr(place, name)), None)
        if isinstance(found, int) and 100 <= found < 600:
            return found
    return None


# ------------------------------------------------------------------------------------------------ kinds of errors


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _raise_lasting(error: Exception, contact: _Contact) -> None:
    """Raise what no waiting will mend."""
    status = status_of(error)
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else type(cause).__name__
        if code in _TRANSFER:
            return
        if code in _REFUSALS:
            contact.hear()
            raise Refused(str(cause), _REFUSALS[code]) from error
        if isinstance(cause, OSError) and cause.errno in _SCARCE:
            raise cause  # of this machine
    if not contact.answered:  # later it is more likely that something on the way is down
        for cause in _chain(error):
            if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
                raise Refused(f"the host is not known: {error}", _ADDRESS) from error
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                fix = f"{_ADDRESS}: https or http, and a certificate that this machine trusts (AWS_CA_BUNDLE)"
                raise Refused(f"no secure connection: {error}", fix) from error
    lasting = isinstance(error, _LASTING) or (
        isinstance(error, FileNotFoundError) and status in (None, 404, 410) and not _unanswered(error)
    )
    if status is not None:
        lasting = lasting or (400 <= status < 500 and status not in (408, 409, 425, 429))
    if lasting:
        contact.hear()
        if status in (401, 403) and not isinstance(error, PermissionError):  # that for http calls it a missing file
            raise PermissionError(f"{status}: {[*_chain(error)][-1]}") from error
        raise error


def _unanswered(error: FileNotFoundError) -> bool:
    """Whether a driver says "not found" of a server that did not answer, as that for http does."""
    causes = [cause for cause in _chain(error) if not isinstance(cause, FileNotFoundError)]
    return any(isinstance(c, OSError) or type(c).__module__.startswith("aiohttp") for c in causes)


# ------------------------------------------------------------------------------------------------ what is said


class _Contact:
    """What this process knows of a store."""

    def __init__(self, store: str):
        self.store = store
        self.answered = False
        self.heard = 0.0
        self.reason = ""
        self._asking = 0
        self._since = self._patience = 0.0
        self._notice_s = NOTICE_S
        self._silent: float | None = None  # since when, once it was said

    def limit(self, patience_s: float) -> float:
        return patience_s if self.answered else min(patience_s, FIRST_S)

    @contextmanager
    def asked(self, patience_s: float) -> Iterator[None]:
        with _lock:
            if self._asking == 0:
                self._since = time.monotonic()
            self._asking += 1
            self._patience = patience_s
            _watched.add(self)
            _start_watching()
        try:
            yield
        finally:
            with _lock:
                self._asking -= 1
                if self._asking == 0:
                    _watched.discard(self)

    def hear(self) -> None:
        """There was an answer."""
        with _lock:
            self.answered, self.heard = True, time.monotonic()
            silent, self._silent = self._silent, None
            self.reason = ""
        if silent is not None:
            say(f"{self.store} answered after {time.monotonic() - silent:.0f} s")

    def notice(self) -> None:
        """Say that there is no answer, once for each time that there is none. A store that is merely slow is named
        less and less often."""
        with _lock:
            silent = max(self._since, self.heard)
            waited = time.monotonic() - silent
            if self._silent is not None or waited < self._notice_s:
                return
            self._silent = silent
            self._notice_s *= 2
            why = f" ({self.reason})" if self.reason else ""
            limit = self.limit(self._patience)
        say(f"waiting for {self.store}: {waited:.0f} s so far{why}, at most {limit:.0f} s (patience_s)")


_contacts: dict[str, _Contact] = {}
_watched: set[_Contact] = set()
_checks: list[Callable[[], None]] = []
_lock = threading.Lock()
_watching: threading.Thread | None = None


def _contact(store: str) -> _Contact:
    with _lock:
        return _contacts.setdefault(store, _Contact(store))


def _start_watching() -> None:
    global _watching
    if _watching is None:
        _watching = threading.Thread(target=_watch, name="waiting", daemon=True)
        _watching.start()


def _watch() -> None:
    """Runs while anything is asked."""
    global _watching
    while True:
        time.sleep(NOTICE_S / 8)
        with _lock:
            watched = list(_watched)
            if not watched:
                _watching = None
                return
        for contact in watched:
            contact.notice()


def _pause(seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        for check in list(_checks):
            check()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.1))
