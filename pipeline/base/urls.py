"""Remove credentials from URLs.

Addresses are written into scans, configurations, checkpoints, reports and logs, which are shared. The price: a query
(`?name=value...`) is removed completely, whatever it says. Outside of http(s) a pattern such as `shard-?.tar` is not a
query.
"""

from __future__ import annotations

import re

# The second form of the user part is for passwords with a slash, as AWS' secret keys often have: after a host and a
# colon only a port could follow. The third: after a bucket there is no port. A scheme may follow another
# (`simplecache::s3://`). A URL that was taken for a path has lost a slash.
_URL = re.compile(
    r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*:/{1,2})"
    r"(?P<user>[^/?#\s]*@|[^/?#\s:@\[]*:(?!\d+(?:[/?#\s]|$))\S*@|(?<=(?i:s3|gs|az)://)[^/?#\s:@]*:\S*@)?"
    r"(?P<path>[^\s?]*)"
    r"(?P<query>\?[^\s'\"]*)?"
)
_PARAMETERS = re.compile(r"\?[\w.~%+-]+=[^&]*(&[^&]*)*")


def strip_credentials(text: str) -> str:
    """The text without the credentials of its URLs: `user:password@`, for http(s) also `user@` (a token), and queries
    and fragments (`X-Amz-Signature`, SAS tokens, `token=`)."""

    def clean(url: re.Match[str]) -> str:
        scheme, user, path, query = url.group("scheme", "user", "path", "query")
        web = scheme.lower().startswith("http")
        if user and ":" not in user and not web:
            path = user + path  # a login name (sftp) or a container (abfs)
        if web:
            path = path.partition("#")[0]
        return scheme + path + ("" if web or query is None or _PARAMETERS.fullmatch(query) else query)

    return _URL.sub(clean, text)
