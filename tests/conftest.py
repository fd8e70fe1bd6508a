"""Options of the whole suite."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fault-seeds", type=int, default=3, metavar="N", help="how many seeds each `fault_seed` test runs with"
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `fault_seed` runs once for each of `--fault-seeds` seeds."""
    if "fault_seed" in metafunc.fixturenames:
        metafunc.parametrize("fault_seed", range(metafunc.config.getoption("--fault-seeds")))
