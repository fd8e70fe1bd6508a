"""Credentials in URLs: what is taken out of them, and what is left alone."""

from __future__ import annotations

import pytest

from pipeline.cache.drivers import refuse_credentials
from pipeline.errors import UserError
from pipeline.urls import strip_credentials


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("http://user:secret@host/x", "http://host/x"),
        ("https://secret@host:80/x@y", "https://host:80/x@y"),
        ("s3://AKIA:wJalr/secret/bP+x@bucket/x", "s3://bucket/x"),
        ("simplecache::s3://k:secret@b/x", "simplecache::s3://b/x"),
        ("postgresql+psycopg2://u:secret@h/db", "postgresql+psycopg2://h/db"),
        ("https://h/x?X-Amz-Date=1&X-Amz-Signature=secret", "https://h/x"),
        ("https://a.blob.core.windows.net/c/x?sv=2020&sig=secret%3D", "https://a.blob.core.windows.net/c/x"),
        ("no answer from 'http://h/a?token=secret', nor 'ftp://u:secret@h/b'", "no answer from 'http://h/a', nor "
         "'ftp://h/b'"),
    ],
)  # fmt: skip
def test_credentials_are_taken_out(url: str, clean: str) -> None:
    assert strip_credentials(url) == clean
    assert strip_credentials(clean) == clean
    with pytest.raises(UserError) as refused:
        refuse_credentials(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a@b.jpg", "hf://datasets/o/n@rev/x", "abfs://container@account.dfs.core.windows.net/x",
        "sftp://user@h/x", "s3://b/shard-?.tar", "s3://b/?/year=2020/x", "http://[::1]:80/a@b", "http://h:8000/x@y",
        "http://h:8000: no answer", "/data/a:b@c?d=e", "an address@host and a?b=c", "",
    ],
)  # fmt: skip
def test_what_is_no_secret_stays(url: str) -> None:
    assert strip_credentials(url) == url
    refuse_credentials(url)
