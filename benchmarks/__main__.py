"""`python -m benchmarks [NAME ...]`: runs the named measurements, or all that need no GPU, each in a process, one after
the other."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import benchmarks


def main(wanted: list[str]) -> int:
    modules = [m for m in pkgutil.iter_modules(benchmarks.__path__) if not m.name.startswith("_")]
    names = sorted(m.name for m in modules)
    unknown = [name for name in wanted if name not in names]
    if unknown:
        print(f"no such measurement: {', '.join(unknown)}; there are: {', '.join(names)}", file=sys.stderr)
        return 2
    all_but_parts = sorted(m.name for m in modules if not m.ispkg and not m.name.startswith("lab_"))  # `lab` has these
    for name in wanted or all_but_parts:
        print(f"== python -m benchmarks.{name}", flush=True)
        code = subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
