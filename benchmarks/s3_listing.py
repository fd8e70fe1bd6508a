"""A server that lists pictures with captions as S3 does, a thousand a page, without having them.

    python -m benchmarks.s3_listing PICTURES

prints its port. `benchmarks.large_cache` lists it in another process, whose memory alone is measured.
"""

from __future__ import annotations

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from pipeline.processes import run_and_exit

BUCKET, FOLDER, PAGE = "bucket", "pictures", 1000
_ENTRY = (
    "<Contents><Key>{}</Key><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;{:032x}&quot;</ETag>"
    "<Size>{}</Size><StorageClass>STANDARD</StorageClass></Contents>"
)


def page(count: int, start: int) -> str:
    """One answer to ListObjectsV2: two files a picture, from file number `start` on."""
    stop = min(start + PAGE, 2 * count)
    entries = (
        _ENTRY.format(f"{FOLDER}/{n // 2:09d}.{'txt' if n % 2 else 'jpg'}", n, 40 if n % 2 else 1 << 17)
        for n in range(start, stop)
    )
    more = f"<NextContinuationToken>{stop}</NextContinuationToken>" if stop < 2 * count else ""
    return (
        '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>{BUCKET}</Name><KeyCount>{stop - start}</KeyCount><MaxKeys>{PAGE}</MaxKeys>"
        f"<IsTruncated>{'true' if more else 'false'}</IsTruncated>{more}{''.join(entries)}</ListBucketResult>"
    )


def main() -> None:
    count = int(sys.argv[1])

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            query = parse_qs(urlsplit(self.path).query)
            body = page(count, int(query.get("continuation-token", ["0"])[0])).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/xml")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    run_and_exit(main)
