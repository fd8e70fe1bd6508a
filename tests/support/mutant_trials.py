"""Tries mutants in forks of one process: `python -m tests.support.mutant_trials ORDER.json`, in mutmut's mutated copy.

Imports and collection are paid once. First each test file runs in a fork, which tells the functions that each test and
each session fixture reaches. Then each mutant has a fork, in which the tests that reach its function run, quickest
first, until one fails. What session fixtures left on disk is shared; a mutant that survives this and was reached while
they were made is tried again with fixtures of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import select
import signal
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mutmut.mutation import trampoline

PATIENCE_S = 60.0  # added to limits of time, for fixtures
BUSY = 10.0  # how much slower a busy machine is


class Trials:
    """A plugin of pytest that obeys an order: a dict of

    mutants: names, as mutmut gives them.
    seconds: CPU time of tests for one mutant; there is always one test.
    report: file of JSON lines: first a list of the tests that are left out because they fail without a mutant, then
        for each mutant [its name; "killed", "timeout", "alive" or "unreached"; the test that failed or the number of
        tests that passed; CPU seconds].
    """

    def __init__(self, order: dict[str, Any]) -> None:
        self.order = order
        self.failed: list[str] = []
        self.tests: dict[str, _Test] = {}
        self.fixtures: dict[str, set[str]] = defaultdict(set)  # functions that the making of a session fixture reaches
        self.reached: set[str] = set()
        trampoline.record_trampoline_hit = lambda name, caller=None: self.reached.add(name)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        if fixturedef.scope != "session":
            return (yield)
        before, self.reached = self.reached, set()
        try:
            return (yield)
        finally:
            self.fixtures[fixturedef.argname] |= self.reached
            self.reached |= before

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _make_folders_in_one_place()
        self.items = {item.nodeid: item for item in session.items}
        files: dict[Path, list[str]] = defaultdict(list)
        for name, item in self.items.items():
            files[item.path].append(name)
        for names in files.values():
            tests, fixtures = _in_fork(self._reach, names, limit_s=BUSY * 600) or ({}, {})
            self.tests |= tests
            for fixture, reached in fixtures.items():
                self.fixtures[fixture] |= reached
        with open(self.order["report"], "w", encoding="utf-8") as report:
            print(json.dumps(sorted(self.items.keys() - self.tests.keys())), file=report, flush=True)
            for mutant in self.order["mutants"]:
                print(json.dumps([mutant, *self._result(mutant)]), file=report, flush=True)
        return True

    def _result(self, mutant: str) -> list[object]:
        function = _imported(mutant).rpartition("__mutmut_")[0]
        made = {fixture for fixture, reached in self.fixtures.items() if function in reached}
        reaching = {name for name, test in self.tests.items() if function in test.reached}
        result: list[object] = ["unreached", 0, 0.0]
        if reaching:
            result = self._tried(mutant, reaching, False)
        if made and result[0] in ("unreached", "alive"):
            users = {name for name in self.tests if made.intersection(self.items[name].fixturenames)}  # type: ignore[attr-defined]
            result = self._tried(mutant, reaching | users, True)
        return result

    def _tried(self, mutant: str, names: set[str], own_fixtures: bool) -> list[object]:
        chosen: list[Any] = []
        seconds = 0.0
        for name in sorted(names, key=lambda name: self.tests[name].seconds):
            seconds += self.tests[name].seconds
            if chosen and seconds > self.order["seconds"]:
                break
            chosen.append(name)
        limit = 5 * seconds + PATIENCE_S
        result = _in_fork(self._try, mutant, chosen, own_fixtures, limit, limit_s=BUSY * limit)
        return result or ["timeout", 0, limit]

    def _run(self, names: list[str]) -> Iterator[str]:
        for name, following in zip(names, [*names[1:], None]):
            item = self.items[name]
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following and self.items[following])
            yield name

    def _reach(self, names: list[str]) -> object:
        """What the tests, if they pass, and the session fixtures reach."""
        trampoline.set_mutant_under_test("stats")
        del os.environ["MUTANT_UNDER_TEST"]  # other processes have nowhere to report to
        tests, start = {}, _cpu()
        for name in self._run(names):
            if name not in self.failed:
                tests[name] = _Test(_cpu() - start, self.reached)
            self.reached = set()
            start = _cpu()
        return tests, dict(self.fixtures)

    def _try(self, mutant: str, names: list[str], own_fixtures: bool, limit: float) -> list[object]:
        resource.setrlimit(resource.RLIMIT_CPU, (int(_cpu() + limit),) * 2)
        if own_fixtures:
            _make_folders_in_one_place()
        trampoline.set_mutant_under_test(_imported(mutant))
        start = _cpu()
        for name in self._run(names):
            if self.failed:
                return ["killed", name, round(_cpu() - start, 2)]
        return ["alive", len(names), round(_cpu() - start, 2)]


def _imported(mutant: str) -> str:
    """The mutant's name by the module that is imported; mutmut names it by the file."""
    top = mutant.partition(".")[0]
    return mutant.replace(top, "sana_pipe" if top == "pipeline" else f"sana_pipe.{top}", 1)


class _Test:
    def __init__(self, seconds: float, reached: set[str]) -> None:
        self.seconds, self.reached = seconds, reached


def _in_fork(work: Callable[..., object], *arguments: object, limit_s: float) -> Any:
    """What `work` returns in a forked process; None if that ends otherwise or takes longer."""
    with tempfile.NamedTemporaryFile() as result:
        if not (pid := os.fork()):
            try:
                os.setsid()
                result.write(pickle.dumps(work(*arguments)))
                result.flush()
            finally:
                os._exit(0)
        process = os.pidfd_open(pid)
        try:
            select.select([process], [], [], limit_s)
        finally:
            os.close(process)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)  # what its tests left behind, too
            os.waitpid(pid, 0)
        result.seek(0)
        value = result.read()
    return pickle.loads(value) if value else None


def _make_folders_in_one_place() -> None:
    """This process and its forks share a new folder for `tmp_path` and `made_once`."""
    folder = Path(tempfile.mkdtemp(prefix="mutants-"))
    pytest.TempPathFactory.getbasetemp = lambda self: folder  # type: ignore[method-assign]


def _cpu() -> float:
    """CPU seconds of this process and of those that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir=."]
    sys.exit(int(pytest.main([*quiet, *order["tests"]], plugins=[Trials(order)])))
