"""URLs that people write: what in them is secret.

What: `strip_credentials` cleans a URL, or any text with URLs in it; `refuse_credentials` stops one that has any.
Why: an address is written into scans, configurations, checkpoints, reports and logs, and these are shared.
Price: a query is dropped whole, whatever it says (`?name=value...`; a pattern such as `shard-?.tar` is none).
"""

from __future__ import annotations

import re

from pipeline.errors import UserError

# The second form of a user is one whose password has a slash, as AWS' secret keys often do: after a host and a colon
# only a port could follow. A scheme may stand behind another (`simplecache::s3://`).
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*://)"
    r"(?P<user>[^/?#\s]*@|[^/?#\s:@\[]*:(?!\d+(?:[/?#\s]|$))\S*@)?"
    r"(?P<path>[^\s?]*)"
    r"(?P<query>\?[^\s'\"]*)?"
)
_PARAMETERS = re.compile(r"\?[\w.~%+-]+=[^&]*(&[^&]*)*")

_INSTEAD = {
    "s3": "export AWS_ACCESS_KEY_ID=... AWS_SECRET_ACCESS_KEY=... (or AWS_PROFILE=...)",
    "gs": "export GOOGLE_APPLICATION_CREDENTIALS=FILE",
    "http": """put "machine HOST login USER password PASSWORD" into ~/.netrc, and """
    """export FSSPEC_HTTP='{"client_kwargs": {"trust_env": true}}'""",
}
_INSTEAD |= {"s3a": _INSTEAD["s3"], "gcs": _INSTEAD["gs"], "https": _INSTEAD["http"]}


def strip_credentials(text: str) -> str:
    """The text without the credentials of its URLs: `user:password@`, for http(s) also a user alone (a token), and
    queries (`X-Amz-Signature`, SAS tokens, `token=`)."""

    def clean(found: re.Match[str]) -> str:
        scheme, user, path, query = found.group("scheme", "user", "path", "query")
        if user and ":" not in user and not scheme.lower().startswith("http"):
            path = user + path  # a login name (sftp) or a container (abfs)
        return scheme + path + ("" if query is None or _PARAMETERS.fullmatch(query) else query)

    return _URL.sub(clean, text)


def refuse_credentials(url: str) -> None:
    """Raises a UserError if a URL holds credentials."""
    clean = strip_credentials(url)
    if clean != url:
        scheme = url.partition("://")[0].rpartition(":")[2].lower()
        variable = f"FSSPEC_{scheme.upper()}"
        raise UserError(
            f"{clean}: was given with credentials or a query in it, which would be written into the cache",
            expected="a plain address; credentials come from the environment",
            fix=_INSTEAD.get(scheme, f"give them to the driver: export {variable}='{{\"username\": ...}}'"),
        )
