"""Credentials in URLs: what is taken out of them, and what is left alone."""

from __future__ import annotations

from pathlib import Path

import fsspec
import pytest

import sana_pipe.stages.status
from sana_pipe.base import retrying
from sana_pipe.base.errors import UserError
from sana_pipe.base.urls import strip_credentials
from sana_pipe.data.cache.connections import one_attempt, refuse_credentials
from tests.support import synthetic


@pytest.mark.parametrize(
    ("url", "clean"),
    [
        ("http://user:secret@host/x", "http://host/x"),
        ("https://secret@host:80/x@y", "https://host:80/x@y"),
        ("s3://AKIA:wJalr/secret/bP+x@bucket/x", "s3://bucket/x"),
        ("s3://AKIA:1/secret@bucket/x", "s3://bucket/x"),
        ("simplecache::s3://k:secret@b/x", "simplecache::s3://b/x"),
        ("postgresql+psycopg2://u:secret@h/db", "postgresql+psycopg2://h/db"),
        ("https://h/x?X-Amz-Date=1&X-Amz-Signature=secret", "https://h/x"),
        ("https://h/x?secret", "https://h/x"),
        ("https://h/x#token=secret", "https://h/x"),
        ("https:/u:secret@h/x", "https:/h/x"),
        ("https://a.blob.core.windows.net/c/x?sv=2020&sig=secret%3D", "https://a.blob.core.windows.net/c/x"),
        (
            "no answer from 'http://h/a?token=secret', nor 'ftp://u:secret@h/b'",
            "no answer from 'http://h/a', nor 'ftp://h/b'",
        ),
    ],
)
def test_credentials_are_taken_out(url: str, clean: str) -> None:
    assert strip_credentials(url) == clean
    assert strip_credentials(clean) == clean
    with pytest.raises(UserError) as refused:
        refuse_credentials(url)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url",
    [
        "s3://b/a@b.jpg",
        "hf://datasets/o/n@rev/x",
        "abfs://container@account.dfs.core.windows.net/x",
        "sftp://user@h/x",
        "s3://b/shard-?.tar",
        "s3://b/?/year=2020/x",
        "s3://b/a#1.jpg",
        "no such file:/data/a",
        "http://[::1]:80/a@b",
        "http://h:8000/x@y",
        "http://h:8000: no answer",
        "/data/a:b@c?d=e",
        "an address@host and a?b=c",
        "",
    ],
)
def test_what_is_no_secret_stays(url: str) -> None:
    assert strip_credentials(url) == url
    refuse_credentials(url)


@pytest.mark.parametrize("url", ["ftp://user:my secret@host/x", "https://h/x?token='secret", 'https://h/x?a="secret"'])
def test_spaces_and_quotes_in_a_credential_do_not_save_it(url: str) -> None:
    with pytest.raises(UserError) as refused:
        refuse_credentials(url)
    assert "secret" not in str(refused.value)


def test_spaces_and_quotes_in_a_name_are_no_credential() -> None:
    refuse_credentials("s3://bucket/it's my folder/a b@c.jpg")


def test_no_part_of_an_error_shows_credentials() -> None:
    url = "https://user:secret@host/x"
    error = UserError(url, expected=url, found=[url], fix=f"open {url}")
    for shown in (str(error), error.what, repr(error.fields())):
        assert "host/x" in shown and "secret" not in shown


def test_roots_of_earlier_scans_are_shown_without_credentials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of = synthetic.config(tmp_path / "cache")
    cache = synthetic.add(of, "one", synthetic.pictures(4))
    body = cache.last_scan("one") or {}
    values = {key: value for key, value in body.items() if key not in ("format", "version", "digest")}
    cache.add_scan("one", {**values, "root": "http://user:secret@host/x"})
    for as_json in (False, True):
        sana_pipe.stages.status.run(of, as_json=as_json)
        said = capsys.readouterr().out
        assert "http://host/x" in said and "secret" not in said


def test_a_driver_tries_once_and_no_longer_than_the_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    import aiohttp

    for patience, connect, read, web in (
        (1e6, retrying.CONNECT_S, retrying.TIMEOUT_S, retrying.WEB_TIMEOUT_S),
        (1.5, 1.5, 1.5, 1.5),
        (0.1, 1.0, 1.0, 1.0),
    ):
        once = {"connect_timeout": connect, "read_timeout": read, "retries": {"total_max_attempts": 1}}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, sock_read=web)
        for s3, http in (("s3", "http"), ("s3a", "https")):
            with monkeypatch.context() as patch:
                assert one_attempt(s3, patience) == {"config_kwargs": once}
                assert one_attempt(http, patience) == {"client_kwargs": {"timeout": timeout}}
                patch.setitem(fsspec.config.conf, s3, {"config_kwargs": {"read_timeout": 7, "x": 1}, "anon": True})
                patch.setitem(fsspec.config.conf, http, {"client_kwargs": {"x": 1}})
                assert one_attempt(s3, patience) == {"config_kwargs": {**once, "read_timeout": 7, "x": 1}}
                assert one_attempt(http, patience) == {"client_kwargs": {"timeout": timeout, "x": 1}}
        assert one_attempt("gs", patience) == {}
