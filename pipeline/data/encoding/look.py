"""Look at a source by headers before it has a configuration: its items, its captions, what it is taken for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from sana_pipe.base.errors import UserError
from sana_pipe.data.encoding import estimate, scan_rows, understood
from sana_pipe.data.encoding.survey import ScanSettings, scanning_of
from sana_pipe.data.encoding.understood import Understood
from sana_pipe.data.sources import controls_and_masks
from sana_pipe.data.sources.detect import open_source
from sana_pipe.data.sources.reject_kinds import Kinds
from sana_pipe.data.sources.source import Source


@dataclass(frozen=True)
class Looked:
    """A source and its scan by headers. The caption of a picture without one is empty.

    Attributes:
        data: as `--data` names it.
        field: the column of its captions, where it is not that of the configuration.
        taken: what the scan was taken for.
    """

    data: str
    source: Source
    table: pa.Table
    taken: Understood
    field: str | None = None

    @classmethod
    def of(cls, data: str, settings: ScanSettings, patience_s: float, field: str | None = None) -> Looked:
        """Scan a source; again, if its captions are in another column.

        Args:
            settings: with the section `data` of the configuration.
            field: the column of the captions; None: that of the configuration.
        """
        of_source = settings.data if field is None else settings.data.model_copy(update={"caption_field": field})
        source = open_source(data, of_source, patience_s=patience_s)
        offered = source.rule.offered
        try:
            with scanning_of(source, None, settings, scan_rows.from_header) as (scanned, _):
                table = scanned.table()
        except UserError:
            if field is not None or not offered or not source.rule.is_default:
                raise
        else:
            if field is not None or not offered or not source.rule.is_default:
                is_chosen = field is None and not source.rule.is_default
                return cls(data, source, table, understood.of(source, table, of_source, is_chosen), field)
        return cls.of(data, settings, patience_s, source.rule.likely(sorted(offered)))

    @property
    def usable(self) -> pa.Table:
        return self.table.filter(pc.is_null(self.table.column("reject")))

    @property
    def rejected(self) -> Kinds:
        """Rejects, by reason."""
        rejected, refused = Kinds(), self.table.filter(pc.is_valid(self.table.column("reject")))
        rejected.add(zip(*(refused.column(name).to_pylist() for name in ("item", "reject")), strict=True))
        return rejected

    def captions(self) -> pa.Array:
        """The first caption of each usable picture."""
        return pc.struct_field(pc.list_element(self.usable.column("captions").combine_chunks(), 0), "text")

    def lines(self) -> list[str]:
        """Say what the source holds, and why items of it cannot be used."""
        rejected = self.rejected
        what = f"source {self.source.name!r}: {self.usable.num_rows} usable pictures, {rejected.total} rejects"
        return [what, *rejected.ranked().lines(), *estimate.ignored_lines(self.source.ignored)]


def check_usable(looked: Sequence[Looked]) -> None:
    """Raise a UserError, with the reasons, if no picture is usable."""
    if looked and not any(each.usable.num_rows for each in looked):
        reasons = [line.strip() for each in looked for line in each.rejected.ranked().lines()]
        advice = [
            each.taken.remedy or controls_and_masks.remedy(each.source.controls_and_masks, each.rejected.counts)
            for each in looked
        ]
        raise UserError(
            "no picture is usable",
            expected="pictures with captions, or with the trigger word in their place",
            found="; ".join(reasons) or "no picture",
            fix="; ".join(filter(None, advice)) or "fix the causes above, then run the same command again",
        )
