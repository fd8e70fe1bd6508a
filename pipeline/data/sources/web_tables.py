"""Tables whose pictures are on web servers: they are refused, with the command that fetches the pictures.

img2dataset retries, resumes and reports what it fetches, and its tars are a source. It wants one URL in each row of a
column, so other tables are to be written again first.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Collection, Sequence

from sana_pipe.base.config import setting
from sana_pipe.base.errors import UserError
from sana_pipe.data.sources.caption_columns import TEXT_FILE, CaptionRule, sure_columns
from sana_pipe.data.sources.filenames import escaped, extension, shown, stem
from sana_pipe.data.sources.filesystem import Filesystem

CAPTIONS = ("TEXT", "caption", "alt_text")
"""Caption columns of published tables of URLs that have no column `text`."""


def refused(
    filesystem: Filesystem,
    files: Sequence[str],
    file: str,
    column: str,
    example: str,
    columns: Collection[str],
    rule: CaptionRule,
    form: str | None,
) -> UserError:
    """The error for a table of URLs of web servers.

    Args:
        files: the tables of the source. file: the one that is refused.
        column: of the URLs. example: one of them.
        columns: all of the table.
        form: img2dataset's name of the table's format; None: it cannot read the table.
    """
    folder = posixpath.dirname(file)
    together = len(files) > 1 and all(posixpath.dirname(each) == folder and extension(each) == form for each in files)
    table = filesystem.full_name(folder).rstrip("/") if together else filesystem.full_name(file)
    out = f"{posixpath.basename(table if together else stem(table))}-pictures"
    first = ""
    if form is None:
        table, form = f"{stem(table)}-urls.parquet", "parquet"
        first = f"write a URL in each row of the column {escaped(column)} to {shlex.quote(table)}, then "
    captions, kept, read = _captions([each for each in columns if each != column], rule)
    words = ["img2dataset", "--url_list", table, "--input_format", form, "--url_col", column]
    words += ["--caption_col", captions] if captions else []
    words += ["--save_additional_columns", json.dumps(kept)] if kept else []
    words += ["--output_format", "webdataset", "--output_folder", out]
    words += ["--resize_mode", "no", "--disable_all_reencoding", "True"]  # else they become 256 pixels wide
    each = "for each table, " if len(files) > 1 and not together else ""
    encode = " ".join([shlex.quote(out), *read])
    return UserError(
        f"{filesystem.full_name(file)} names pictures on web servers, which are not fetched",
        expected="files, or objects of a store (s3://, gs://, hf://, az://)",
        found=f"the column {escaped(column)}: {shown(example)}",
        fix=f"{first}{each}fetch them with img2dataset, in an environment of its own (it needs webdataset < 0.3): "
        f"{shlex.join(words)}; then: sana-pipe encode --data {encode}",
    )


def _captions(columns: Collection[str], rule: CaptionRule) -> tuple[str | None, list[str], list[str]]:
    """The column of captions, other columns to keep, and the settings that read them in the tars."""
    if rule.listed:
        scores = rule.config.caption_scores
        wanted = [column for column in (*rule.columns, *scores.values()) if column in columns and column != TEXT_FILE]
        ways = [setting("data.caption_weights", rule.config.caption_weights)]
        ways += [setting("data.caption_scores", scores)] if scores else []
        return None, list(dict.fromkeys(wanted)), ways
    known = [column for column in (*rule.columns, *(CAPTIONS if rule.is_default else ())) if column in columns]
    return (known[0] if known else rule.likely(sure_columns(columns))), [], []
