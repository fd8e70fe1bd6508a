"""Tables of links: `LinkTables` is what parquet files and listings of URLs share, `LinkListing` reads JSONL and CSV.

A link is known by its address alone: as long as that is unchanged in its row, a scan asks no server. The address is
read from the table whenever the picture is fetched, since it may hold credentials: the cache has its digest only.
Rows of a listing are streamed, and each is an item of its own, `<file>/<line, nine digits>`, as in a parquet file.
Price: a changed picture behind an unchanged link is noticed only by `--rehash`, which fetches every link again, or when
the picture is fetched to be encoded.
"""

from __future__ import annotations

import re
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, repeat
from typing import Any

import pyarrow as pa

from pipeline.cache.layout import digest
from pipeline.errors import AwayError, UserError
from pipeline.sources.caption_columns import CaptionRule
from pipeline.sources.filenames import escaped, has_surrogates, is_url, shown
from pipeline.sources.filesystem import Filesystem, Unreadable, unreadable_reason
from pipeline.sources.links import REQUESTS, Links
from pipeline.sources.metadata_files import (
    LINK_COLUMNS,
    NAME_COLUMNS,
    RowReader,
    check_caption_columns,
    no_column,
    only,
)
from pipeline.sources.range_prefetch import FileRange, RangePrefetch
from pipeline.sources.source import FilesSource, Fragment, Given, Item, ListedItems, Part, Place, Reject

ADDRESS = "@"
"""In `Place.where` of a link, before the digest of its address."""

_URLS = pa.schema([("url", pa.string())])
MAX_READ = 16
"""Listings whose links are kept, of those that are read in turn."""

LINK_RULE = "links-2"
LINK_CAPTIONS = ("TEXT", "caption", "alt_text")
"""Caption columns of tables of links that have no column `text`, where the configuration names no other."""

FIRST_ROWS = 64
"""Rows of a listing that are searched for a link, to find out whether it names files or links."""


class LinkTables(FilesSource):
    """Tables of which some may hold links."""

    def __init__(self, given: Given, files: Iterable[str]):
        super().__init__(given.filesystem, files, given.rule, given.name)
        config = given.config
        self.image_field, self.image_root, self.retries_links = (
            config.image_field,
            config.image_root,
            config.retry_links,
        )
        self.links = Links(config.max_bytes, config.link_timeout_s, given.patience_s, config.allow_links)

    @abstractmethod
    def _names_links(self, name: str) -> bool:
        """Whether a file is a table of links."""

    @abstractmethod
    def _url(self, place: Place) -> str | None:
        """The address in the row of an item; None if it names no link.

        Raises:
            Unreadable: the row cannot be read.
        """

    def _row_item(self, place: Place, values: dict[str, Any], rule: CaptionRule) -> Item | Reject:
        """The item of a row, or why it is none. values: of the columns beside the picture."""
        item = self._captioned(place, rule.read(values))
        if isinstance(item, Item) and any(has_surrogates(text) for text, _ in item.captions):
            return Reject(item.key, "its caption is not valid Unicode")
        return item

    def _fetch(self, place: Place, address: str) -> bytes:
        """The picture behind a link. address: its digest when the table was listed."""
        url = self._url(place)
        if url is None or digest_of(url) != address:
            raise Unreadable(f"{escaped(place.item)}: names another link than when it was scanned")
        return self.links.read(url.strip())

    def _rule(self, columns: Iterable[str]) -> CaptionRule:
        """The rule for a table of links with these columns."""
        if self.rule.is_default and "text" not in columns:
            for column in (column for column in LINK_CAPTIONS if column in columns):
                return replace(self.rule, config=self.rule.config.model_copy(update={"caption_field": column}))
        return self.rule

    @property
    def link_rule(self) -> str:
        """What decides which rows have pictures: links that were refused are tried when they are allowed."""
        return f"{LINK_RULE} {self.links.allowed}"

    @property
    def requests(self) -> int:  # type: ignore[override]
        return REQUESTS if self._fetches else super().requests

    @property
    def is_remote(self) -> bool:
        return self._fetches or self.filesystem.is_remote

    @property
    def _fetches(self) -> bool:
        """Whether the first file is a table of links, as far as can be told."""
        try:
            return bool(self.files) and self._names_links(self.files[0])
        except AwayError:  # the listing would wait again
            raise
        except (UserError, OSError, pa.ArrowException):  # is reported by the listing
            return False

    @contextmanager
    def reading(self, places: Iterable[Place]) -> Iterator[Callable[[Place], bytes]]:
        places = list(places)
        links = {place.item: place for place in places if ADDRESS in (place.where or "")}
        if not links:
            with super().reading(places) as read:
                yield read
            return
        ranges = ((place, FileRange(item)) for item, place in links.items())
        with RangePrefetch(lambda at: self.read(links[at.file]), ranges, self.read, REQUESTS) as prefetch:
            yield prefetch.read


class LinkListing(LinkTables):
    """Rows of JSONL or CSV files whose pictures are links."""

    format = "links"
    has_links = True
    WHERE = re.compile(rf"(?P<line>\d+){ADDRESS}(?P<address>[0-9a-f]{{16}})")

    def __init__(self, given: Given, files: Iterable[str]):
        super().__init__(given, files)
        self._urls: dict[str, pa.Table] = {}
        self._lock = threading.Lock()

    def part(self, name: str) -> Iterator[Item | Reject]:
        rule: CaptionRule | None = None
        column, any_row = self.image_field, False
        try:
            for line, row in RowReader(name, self.filesystem.open(name, spool=True)):
                key = f"{name}/{line:09d}"
                any_row = True
                if isinstance(row, str):
                    yield Reject(key, row)
                    continue
                if rule is None:
                    rule = self._rule(row)
                    column = column or link_column(row)
                    self._check(name, column, rule, row)
                yield from self._item(key, name, str(line), row, column or "", rule)
        except OSError as error:
            yield Reject(escaped(name), unreadable_reason(name, error))
            return
        if not any_row:
            yield Reject(escaped(name), "holds no row")

    def _check(self, name: str, column: str | None, rule: CaptionRule, row: dict[str, Any]) -> None:
        """Raises a UserError if the first row has no column of links, or of captions."""
        if column is None or column not in row:
            what = repr(column) if column else "of links"
            raise no_column(self.filesystem, name, what, row, "--set data.image_field=COLUMN")
        check_caption_columns(self.filesystem, name, rule, list(row), column)

    def _item(
        self, key: str, part: str, place: str, row: dict[str, Any], column: str, rule: CaptionRule
    ) -> Iterator[Item | Reject]:
        url = only(row.get(column))
        if not isinstance(url, str) or not url.strip():
            yield Reject(key, "has no picture")
            return
        if not is_link(url) or has_surrogates(url):
            yield Reject(key, f"names {shown(url)!r}: is no link, in a table of links")
            return
        values = {other: value for other, value in row.items() if other != column}
        yield self._row_item(Place(key, part, f"{place}{ADDRESS}{digest_of(url)}"), values, rule)

    def fragments(self, part: Part, size: int, listed: ListedItems) -> Iterator[Fragment]:
        """As `Source.fragments`; but fetching takes long, so also a file with a stamp is cut."""
        return listed.fragments(self, part, size)

    def _prepare(self) -> None:
        self._urls = {}

    def _stamp(self, file: str) -> str | None:
        versions = map(str, self._versions[file])
        return digest(self.link_rule, self.rule.identity(), str(self.image_field), *versions).hex()

    def _names_links(self, name: str) -> bool:
        return True

    def stat(self, place: Place) -> tuple[int, int]:
        return -1, int(self._located(place)[1]["address"], 16) >> 1

    def read(self, place: Place) -> bytes:
        return self._fetch(place, self._located(place)[1]["address"])

    def _url(self, place: Place) -> str | None:
        part, where = self._located(place)
        with self._lock:  # the first link that is read of a file costs a pass over it
            urls = self._urls.pop(part, None)
            self._urls[part] = urls = self.scratch.rows(_URLS, self._read_urls(part)) if urls is None else urls
            if len(self._urls) > MAX_READ:
                del self._urls[next(iter(self._urls))]
        line = int(where["line"])
        return urls.column("url")[line].as_py() if line < len(urls) else None

    def _read_urls(self, part: str) -> Iterator[tuple[str | None]]:
        """The link of each line of a file, from line 0 on; None where no row with a link ends."""
        lines = 0
        for line, row in RowReader(part, self.filesystem.open(part, spool=True)):
            url = only(row.get(self.image_field or link_column(row) or "")) if isinstance(row, dict) else None
            if isinstance(url, str) and not has_surrogates(url):
                yield from repeat((None,), line - lines)
                yield (url,)
                lines = line + 1


def link_column(row: dict[str, Any]) -> str | None:
    """The column of a listing that holds the links."""
    return next((column for column in (*NAME_COLUMNS, *LINK_COLUMNS) if column in row), None)


def first_row(
    filesystem: Filesystem, file: str, image_field: str | None, any_row: bool = False
) -> tuple[str, dict[str, Any]]:
    """The first picture that a listing names, and its row; ("", {}) if none of the first rows does. any_row: the first
    row, also if it names none."""
    try:
        for _, row in islice(RowReader(file, filesystem.open(file)), FIRST_ROWS):
            name = only(row.get(image_field or link_column(row) or "")) if isinstance(row, dict) else None
            if isinstance(name, str) and name and isinstance(row, dict):
                return name, row
            if any_row and isinstance(row, dict):
                return "", row
    except OSError:  # is reported by the listing
        pass
    return "", {}


def is_link(name: str) -> bool:
    """Whether a name is an address of another machine. One on this disk is an absolute name."""
    return is_url(name) and not name.strip().lower().startswith(("file:", "local:"))


def digest_of(url: str) -> str:
    """The digest of an address that stands for it in the cache, 16 hex digits."""
    return digest("link", url.strip()).hex()[:16]
