"""Requests to S3 for a unit of work: counted at moto's server, with claims and without.

    python -m benchmarks.s3_listing PICTURES

starts another server: it lists pictures with captions as S3 does, a thousand a page, without having them, and prints
its port. `benchmarks.large_cache` lists it in another process, whose memory alone is measured.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from unittest import mock
from urllib.parse import parse_qs, urlsplit
from uuid import uuid4

import fsspec
import numpy as np
import pyarrow as pa

from benchmarks.report import finish, table
from sana_pipe.base.processes import run_and_exit
from sana_pipe.data.cache import index, layout, shard
from sana_pipe.data.cache.cache import Cache, Unit, WorkList
from sana_pipe.data.cache.config import MirrorConfig
from sana_pipe.data.cache.encodings import Encoding
from sana_pipe.data.signals.latent import LatentEncoding
from sana_pipe.data.work.claims import Claims
from sana_pipe.data.work.engine import Worker, make_units, missing_units
from sana_pipe.data.work.progress import Progress
from sana_pipe.data.work.stop import Stop

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


def serve(count: int) -> None:
    """Print a port, then list pictures there."""

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


# ---------------------------------------------------------------- requests of a unit


@contextmanager
def counting_server(sent: Counter[str] | None = None) -> Iterator[Counter[tuple[str, str]]]:
    """Start an S3 server on loopback. Yields its requests by operation and by the folder within a cache in the top of
    a bucket.

    Args:
        sent: counts the bytes of the bodies of answers, by operation.
    """
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    requests: Counter[tuple[str, str]] = Counter()
    application = DomainDispatcherApplication(create_backend_app)

    def count(environ: dict[str, Any], start: Callable[..., Any]) -> Any:
        query = parse_qs(environ.get("QUERY_STRING", ""))
        is_copy = "HTTP_X_AMZ_COPY_SOURCE" in environ
        operation = "LIST" if "list-type" in query else "COPY" if is_copy else environ["REQUEST_METHOD"]
        path = query.get("prefix", [""])[0] if operation == "LIST" else environ["PATH_INFO"].split("/", 2)[-1]
        requests[operation, path.partition("/")[2].split("/")[0]] += 1
        if sent is None:
            return application(environ, start)
        body = b"".join(application(environ, start))
        sent[operation] += len(body)
        return [body]

    server = make_server("127.0.0.1", 0, count, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    place = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}", "AWS_DEFAULT_REGION": "us-east-1"}
    secrets = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    with mock.patch.dict(os.environ, {**place, **secrets}):
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        yield requests
        s3fs.S3FileSystem.clear_instance_cache()
    server.shutdown()


class Maker:
    """Commits units with a shard of two small records."""

    def __init__(self, cache: Cache, encoding: Encoding):
        self.cache, self.encoding = cache, encoding

    def make(self, plan: WorkList, unit: Unit, progress: Callable[[int, int], None]) -> index.Commit:
        with shard.ShardWriter(self.cache.files, self.encoding, unit.unit) as writer:
            for number in range(2):
                writer.add(layout.digest(unit.unit, str(number)), np.full((2, 8, 8), number, np.uint16))
            commit = index.commit_of(self.cache.files, unit.unit, writer.finish())
        index.publish_commit(self.cache.files, plan.encoding, plan.number, commit)
        return commit


def unit_requests(few: int = 10, many: int = 26) -> dict[tuple[str, str], float]:
    """Requests of one unit by operation and folder: of a plan of many units against one of few, which one process
    claims, makes and commits."""
    encoding, seen = LatentEncoding(weights="w", compression=8, channels=2), []
    bucket = f"requests-{uuid4().hex}"
    with counting_server() as requests, tempfile.TemporaryDirectory() as folder:
        fsspec.filesystem("s3").mkdir(bucket)
        for count in (few, many):
            cache = Cache(f"s3://{bucket}/{count}", create=True, mirror=MirrorConfig(path=folder))
            cache.add_encoding(encoding)
            units = [Unit(layout.digest(str(number)).hex(), 2 * number, 2, 2) for number in range(count)]
            cache.add_plan(encoding.name, 0, units, pa.table({"n": range(2 * count)}))
            todo = missing_units(cache, cache.plans(encoding.name))
            requests.clear()
            worker = Worker(Claims(cache.files, 60), Stop(0))
            make_units(Maker(cache, encoding), todo, worker, Progress("units", 0))
            seen.append(dict(requests))
    return {kind: (number - seen[0].get(kind, 0)) / (many - few) for kind, number in sorted(seen[1].items())}


def main() -> None:
    if len(sys.argv) > 1:
        return serve(int(sys.argv[1]))
    each = unit_requests()
    table(("operation", "folder", "for a unit"), [(*kind, number) for kind, number in each.items()])
    claims = sum(number for (_, folder), number in each.items() if folder == "claims")
    return finish({"requests_per_unit": sum(each.values()) - claims, "requests_of_a_claim": claims})


if __name__ == "__main__":
    run_and_exit(main)
