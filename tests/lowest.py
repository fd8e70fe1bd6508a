"""Print the lowest declared version of every dependency as constraints for pip: python -m tests.lowest > FILE.

`make lowest` runs the tests with them: what pyproject.toml declares must be true.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"


def lowest() -> dict[str, str]:
    """Distribution -> the highest of its lower bounds (the same one may be declared for several extras)."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    bounds: dict[str, str] = {}
    for line in (*project["dependencies"], *extras["demo"], *extras["test"], *extras["s3"], *extras["gcs"]):
        match = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^\]]*\])?>=([0-9.]+)", line.partition(";")[0].strip())
        if match is None:
            raise ValueError(f"no lower bound: {line}")
        name, bound = match[1].lower().replace("_", "-"), match[2]
        bounds[name] = max(bounds.get(name, bound), bound, key=lambda text: [int(part) for part in text.split(".")])
    return bounds


if __name__ == "__main__":
    print("\n".join(f"{name}=={bound}" for name, bound in sorted(lowest().items())))
