"""The processes of one launch encode with the same options: the first one writes its own into the cache, the others
compare. Without that the last scan would win, and half of the records would be those of other options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sana_pipe.base.errors import UserError
from sana_pipe.base.process_identity import age_s
from sana_pipe.data.cache import layout
from sana_pipe.data.cache.cache import Cache
from sana_pipe.data.cache.layout import Paths

SLACK_S = 60.0
"""The processes of a launch start within this time of each other, where its name alone does not tell it from an earlier
launch."""


def check(cache: Cache, launch: tuple[str, bool], work: str, options: Mapping[str, Any], place: str) -> None:
    """Compare the options of this process with those of its launch.

    Args:
        launch: as of `launch.identity`.
        work: the source, or what else the launch encodes; each is compared by itself.
        options: by name, JSON values.
        place: of this process, for messages.

    Raises:
        UserError: an option differs; it names the option and both values.
    """
    name, unique = launch
    files, document = cache.files, Paths.claim(f"launch-{layout.digest(name, work).hex()}")
    data = json.dumps({"launch": name, "place": place, "options": options}).encode()
    if files.put(document, data):
        return
    entry = files.store.stat(document)
    first = None if entry is None else json.loads(files.read(document))
    is_old = entry is not None and not unique and files.now() - entry.modified > age_s() + SLACK_S
    if (
        first is None or is_old or first["place"] == place
    ):  # of an earlier launch, or an earlier command of this process
        files.replace(document, data)
        return
    theirs, ours = ({name: json.dumps(value) for name, value in each.items()} for each in (first["options"], options))
    for option in sorted(theirs.keys() | ours.keys()):
        if theirs.get(option) != ours.get(option):
            if not unique:  # the launch begins again under the same name
                files.remove(document)
            raise UserError(
                f"the processes of this launch differ in {option}",
                expected=f"{theirs.get(option)}, as {first['place']} has it",
                found=f"{ours.get(option)}, as {place} has it",
                fix=f"start all processes with one configuration and one installation: the same {option} for each",
            )
