"""Work in a process that is killed at one of its writes into a cache on a disk."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from sana_pipe.base.errors import UserError
from sana_pipe.data.cache.folder_store import FolderStore

WRITES = ("create", "replace", "move", "remove")
"""The operations of a `Store` that change what readers see."""


def forked(work: Callable[[], Any]) -> tuple[int, Any]:
    """The exit code of `work` in a forked process (negative: the signal that ended it), and what it returned: the
    value, or what its error says."""
    with tempfile.TemporaryFile() as answer:
        child = os.fork()
        if not child:
            code = 1
            try:
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), 1)
                    os.dup2(nowhere.fileno(), 2)
                try:
                    value = work()
                    code = value if isinstance(value, int) else 0
                except UserError as error:
                    value, code = str(error), error.exit_code
                except BaseException:
                    value, code = traceback.format_exc(), 99
                pickle.dump(value, answer)
                answer.flush()
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        answer.seek(0)
        said = answer.read()
        return os.waitstatus_to_exitcode(status), pickle.loads(said) if said else None


def dying(work: Callable[[], Any], at: int, before: bool) -> Callable[[], Any]:
    """`work`, killed right before or right after its write number `at`."""

    def run() -> Any:
        left = at

        def watched(method: Callable[..., Any]) -> Callable[..., Any]:
            def write(*args: Any, **kwargs: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0 and before:
                    os.kill(os.getpid(), signal.SIGKILL)
                result = method(*args, **kwargs)
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return result

            return write

        for name in WRITES:
            setattr(FolderStore, name, watched(getattr(FolderStore, name)))
        return work()

    return run
