"""Repeating requests to a store that does not answer: for how long, with which messages, and which errors are final.

`retry` asks until there is an answer, for at most `patience_s` from the first failure on, with random pauses. A store
whose requests fail for `NOTICE_S` is named on stderr, and again when it answers. Final errors (missing and forbidden
objects, wrong credentials, no such bucket or host, an invalid certificate) are raised immediately.
Why not tenacity: its conditions see one call. Here the state of a store over all calls and threads decides.
Price: a silent server at a wrong address looks like a store that is down. So a store that has never answered this
process gets `FIRST_S` only, and a job that starts while its store is down ends, too.
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

from sana_pipe.base import counters
from sana_pipe.base.errors import NO_SPACE, AwayError

PATIENCE_S = 300.0
FIRST_S = 5.0
CONNECT_S = 5.0
TIMEOUT_S = 15.0
"""Silence after which a driver gives up one attempt."""
WEB_TIMEOUT_S = 30.0
"""The same for a web server, which may take long to build a listing."""
NOTICE_S = 3.0
PAUSE_S = 0.5
"""The first pause; each further one is twice as long, up to `LONGEST_PAUSE_S`."""
LONGEST_PAUSE_S = 10.0

_ADDRESS = "check the address (for S3: AWS_ENDPOINT_URL, or endpoint_url in fsspec's configuration)"
_CREDENTIALS = (
    "check the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE; for GCS: "
    "GOOGLE_APPLICATION_CREDENTIALS; for a web server: ~/.netrc with trust_env in FSSPEC_HTTP)"
)
_REFUSALS = {
    "NoSuchBucket": "make the bucket, or correct its name",
    **dict.fromkeys(
        [
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
        ],
        _CREDENTIALS,
    ),
    "RequestTimeTooSkewed": "set this machine's clock",
    **dict.fromkeys(("NoRegionError", "InvalidRegionError", "AuthorizationHeaderMalformed"), "set AWS_DEFAULT_REGION"),
    **dict.fromkeys(("InvalidBucketName", "ParamValidationError"), "correct the bucket's name"),
    **dict.fromkeys(("InvalidURL", "InvalidUrlClientError", "NonHttpUrlClientError"), _ADDRESS),
}
"""Error codes of S3 and names of drivers' exceptions that concern the store as a whole -> the fix."""
_TRANSFER_ERRORS = ("RequestTimeout", "BadDigest", "IncompleteBody", "XAmzContentSHA256Mismatch")
"""Error codes of S3 that blame the request but come from a bad connection."""
_FINAL = (FileExistsError, IsADirectoryError, PermissionError, NotImplementedError, TypeError, AttributeError)
_LOCAL_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EROFS, *NO_SPACE)
_DISCONNECTED = (
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
    """The store as a whole cannot be used, and waiting does not help. `fix`: what does."""

    def __init__(self, reason: str, fix: str):
        super().__init__(reason)
        self.fix = fix


class NoAnswer(Exception):
    """There was no answer within the time limit.

    Attributes:
        fix: what may help.
        alone: the store answered other requests meanwhile, so only this object cannot be read.
    """

    def __init__(self, reason: str, fix: str, alone: bool):
        super().__init__(reason)
        self.fix, self.alone = fix, alone


def log(line: str) -> None:
    """Print a line on stderr."""
    print(line, file=sys.stderr, flush=True)


def is_disconnected(error: BaseException) -> bool:
    """Return whether an error says that a network file system is disconnected (a bad sector does not)."""
    return isinstance(error, OSError) and error.errno in _DISCONNECTED


def retry(
    ask: Callable[[], T],
    store: str,
    patience_s: float = PATIENCE_S,
    retryable: Callable[[BaseException], bool] | None = None,
) -> T:
    """The answer of `ask`, repeated until there is one.

    Args:
        store: name of the store, for messages; calls with the same name share what is known of it.
        patience_s: time limit from the first failure on, in seconds.
        retryable: whether an error is worth a retry; default: every error that is not known to be final.

    Raises:
        Refused, NoAnswer: see there.
        Exception: as `ask`, if the error is final.
    """
    state = _state(store)
    first_failure: float | None = None
    pause = PAUSE_S
    while True:
        began = time.monotonic()
        try:
            answer = ask()
        except Exception as error:
            was_known = state.answered
            _raise_unless_retryable(error, state, retryable)
            now = time.monotonic()
            if first_failure is None:
                first_failure = now - min(now - began, TIMEOUT_S)
            limit = patience_s if state.answered else min(patience_s, FIRST_S)
            left = first_failure + limit - now
            reason = f"{type(error).__name__}: {error}"
            if left <= 0:
                fix = "run the same command again once it is back, or set patience_s to wait longer"
                if not (was_known or state.answered):
                    fix = f"{_ADDRESS}; if it is right, {fix.partition(', or')[0]}"
                silence = f"no answer for {now - first_failure:.0f} s ({reason})"
                raise NoAnswer(silence, fix, state.last_answer > first_failure) from error
            state.record_failure(first_failure, f"({reason}), at most {limit:.0f} s (patience_s)")
            counters.add(retries=1)
            _pause(min(left, pause * random.uniform(0.5, 1)))
            pause = min(2 * pause, LONGEST_PAUSE_S)
        else:
            state.record_answer()
            counters.add(requests=1, request_s=time.monotonic() - began)
            return answer


def when_reachable(read: Callable[[], T], store: str, patience_s: float) -> T:
    """The result of `read`, repeated while a network file system is disconnected. store: as in `retry`.

    Raises:
        AwayError: it stays disconnected for `patience_s`.
        OSError: as `read`.
    """
    try:
        return read()
    except OSError as error:
        if not is_disconnected(error):
            raise
    try:
        return retry(read, store, patience_s, is_disconnected)
    except NoAnswer as error:
        raise AwayError(f"{store}: {error}", fix=error.fix) from None


def _raise_unless_retryable(
    error: Exception, state: _StoreState, retryable: Callable[[BaseException], bool] | None
) -> None:
    """Raise an error that is final; note whether the store is known to exist."""
    if retryable is not None:
        if not retryable(error):
            raise error
        state.answered = True  # the file existed before
        return
    _raise_final(error, state)
    if http_status(error) is not None:
        state.answered = True


@contextmanager
def stopping(check: Callable[[], None]) -> Iterator[None]:
    """Within the block, every waiting thread calls `check` during its pauses; an exception from it ends the waiting."""
    wait_checks.append(check)
    try:
        yield
    finally:
        wait_checks.remove(check)


def http_status(error: BaseException) -> int | None:
    """The HTTP status of a driver's error; None if there was no answer."""
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        else:
            places = ((response, "status_code"), (cause, "status"), (cause, "code"))
            status = next((getattr(holder, name) for holder, name in places if hasattr(holder, name)), None)
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None


# ------------------------------------------------------------------------------------------------ kinds of errors


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _raise_final(error: Exception, state: _StoreState) -> None:
    """Raise an error that a retry cannot solve."""
    status = http_status(error)
    for cause in _chain(error):
        response = getattr(cause, "response", None)
        code = response.get("Error", {}).get("Code") if isinstance(response, dict) else type(cause).__name__
        if code in _TRANSFER_ERRORS:
            return
        if code in _REFUSALS:
            state.record_answer()
            raise Refused(str(cause), _REFUSALS[code]) from error
        if isinstance(cause, OSError) and cause.errno in _LOCAL_LIMITS:
            raise cause  # a limit of this machine
    if not state.answered:  # afterwards a network failure is more likely
        for cause in _chain(error):
            if isinstance(cause, socket.gaierror) and cause.errno != socket.EAI_AGAIN:
                raise Refused(f"the host is not known: {error}", _ADDRESS) from error
            if isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
                fix = f"{_ADDRESS}: https or http, and a certificate that this machine trusts (AWS_CA_BUNDLE)"
                raise Refused(f"no secure connection: {error}", fix) from error
    final = isinstance(error, _FINAL) or (
        isinstance(error, FileNotFoundError) and status in (None, 404, 410) and not _unanswered(error)
    )
    if status is not None:
        final = final or status == 501 or (400 <= status < 500 and status not in (408, 409, 425, 429))
    if final:
        state.record_answer()
        if status in (401, 403) and not isinstance(error, PermissionError):  # http: FileNotFoundError
            raise PermissionError(f"{status}: {[*_chain(error)][-1]}") from error
        raise error


def _unanswered(error: FileNotFoundError) -> bool:
    """Return whether "not found" means that the server did not answer, as the driver for http reports it."""
    causes = [cause for cause in _chain(error) if not isinstance(cause, FileNotFoundError)]
    return any(isinstance(c, OSError) or type(c).__module__.startswith("aiohttp") for c in causes)


# ------------------------------------------------------------------------------------------------ notices


class _StoreState:
    """The state of a store as this process knows it."""

    def __init__(self, store: str):
        self.store = store
        self.answered = False
        self.last_answer = 0.0
        self._silent: float | None = None  # since when
        self._counted = 0.0  # until when its silence is counted
        self._named = False

    def record_answer(self) -> None:
        """Note that the store answered, and print it if its silence was printed."""
        with _lock:
            self._count()
            self.answered, self.last_answer = True, time.monotonic()
            silent, self._silent = self._silent, None
            named, self._named = self._named, False
        if named and silent is not None:
            log(f"{self.store} answered after {self.last_answer - silent:.0f} s")

    def record_failure(self, since: float, why: str) -> None:
        """Note a silence, and print it once if it is one of `NOTICE_S` or more."""
        with _lock:
            if self._silent is None:
                self._silent = self._counted = max(since, self.last_answer)
            self._count()
            waited = self._counted - self._silent
            if self._named or waited < NOTICE_S:
                return
            self._named = True
        log(f"waiting for {self.store}: {waited:.0f} s so far {why}")

    def _count(self) -> None:
        """Count the seconds of a silence, those of several threads once."""
        if self._silent is not None:
            now = time.monotonic()
            counters.add(store_wait_s=now - self._counted)
            self._counted = now


_states: dict[str, _StoreState] = {}
wait_checks: list[Callable[[], None]] = []
_lock = threading.Lock()


def _state(store: str) -> _StoreState:
    with _lock:
        return _states.setdefault(store, _StoreState(store))


def _pause(seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        for check in list(wait_checks):
            check()
        left = end - time.monotonic()
        if left <= 0:
            return
        time.sleep(min(left, 0.1))
