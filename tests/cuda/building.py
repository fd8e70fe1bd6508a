"""Set up the pretended card: torch's CUDA wheel of the pinned version, and libraries of `stubs/` in place of NVIDIA's.

All of it lies in `.venv-cuda`, or in the folder that SANA_PIPE_CUDA names, which several checkouts may share: libraries
lie there by the digest of their sources. What torch needs from a library and `stubs/` does not define is filled with
functions that return 0, by the wheel's own tables of symbols.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from tests.support.package_links import link

ROOT = Path(__file__).resolve().parents[2]
STUBS = Path(__file__).parent / "stubs"
TOOLS = ("gcc", "nm", "readelf")
SOURCES = {
    "libcudart": "runtime.c",
    "libcuda": "driver.c",
    "libnvidia-ml": "management.c",
    "libnccl": "nccl.c",
    "libcudnn": "cudnn.c",
    "libcublas": "cublas.c",
    "libcublasLt": "cublasLt.c",
}
"""Sources of a library; of the others: others.c."""
BY_NAME = {"libnvidia-ml.so.1": set(), "libcuda.so.1": {"cuTensorMapEncodeIm2col"}}
"""Libraries that torch loads, and symbols that Triton looks up, by name, so that no table mentions them."""
PREFIXES = {
    "nccl": "libnccl",
    "cuFile": "libcufile",
    "cusparseLt": "libcusparseLt",
    "nvshmem": "libnvshmem_host",
    "cu": "libcuda",
}
"""Whose a symbol without a version is, by its first letters; the first that fits."""


class CannotSetUp(Exception):
    """What is missing, and what to do."""


@dataclass(frozen=True)
class Installation:
    """wheel: a folder with torch. libraries: NVIDIA's names, our code. caches: of compiled kernels."""

    wheel: Path
    libraries: Path
    caches: Path

    def environ(self) -> dict[str, str]:
        """What makes a Python process use the pretended card."""
        return {
            "LD_LIBRARY_PATH": str(self.libraries),
            "PYTHONPATH": os.pathsep.join(map(str, (STUBS.parent / "site", link(), ROOT, self.wheel))),
            "TRITON_CACHE_DIR": str(self.caches / "triton"),
            "TORCHINDUCTOR_CACHE_DIR": str(self.caches / "inductor"),
            "OMP_NUM_THREADS": "1",
        }


def set_up() -> Installation:
    """The installation, made if it is not there (the wheel has 1 GB).

    Raises:
        CannotSetUp: no compiler, no wheel, or a wheel without CUDA.
    """
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        raise CannotSetUp(f"{', '.join(missing)}: not on PATH; fix (Debian): apt-get install gcc binutils")
    place = Path(os.environ.get("SANA_PIPE_CUDA") or ROOT / ".venv-cuda").resolve()
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / "lock"):
        wheel = _wheel(place)
        return Installation(wheel, _libraries(place, wheel), place)


def _wheel(place: Path) -> Path:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    version = re.findall(r"^torch==(\S+)", pins, re.MULTILINE)[0]
    wheel = place / "cu"
    if not (wheel / f"torch-{version}.dist-info" / "RECORD").is_file():
        shutil.rmtree(wheel, ignore_errors=True)
        # === compares as text: a wheel for the CPU is called 2.13.0+cpu
        words = ("install", "--quiet", "--no-deps", "--no-compile", "--target", str(wheel), f"torch==={version}")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *words]
        print(f"fetching torch {version} for CUDA into {wheel}", file=sys.stderr, flush=True)
        done = subprocess.run(pip, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
        if done.returncode:
            raise CannotSetUp(
                f"pip found no wheel of torch {version} for CUDA. PyPI has it for Linux on x86-64; fix: an index with "
                f"it (PIP_INDEX_URL), or SANA_PIPE_CUDA=FOLDER of an earlier set-up. pip says:\n{done.stdout.strip()}"
            )
    if not (wheel / "torch/lib/libtorch_cuda.so").is_file():
        raise CannotSetUp(f"{wheel} has a torch without CUDA; fix: rm -r {wheel}, and an index with the CUDA wheel")
    return wheel


def _libraries(place: Path, wheel: Path) -> Path:
    includes = _includes()
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for file in sorted([*STUBS.iterdir(), *wheel.glob("torch-*.dist-info/RECORD")]):
        digest.update(file.read_bytes())
    done = place / "libraries" / digest.hexdigest()[:16]
    if not done.is_dir():
        done.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=done.parent) as name:
            draft = Path(name) / "lib"
            draft.mkdir()
            _build(draft, needed_by(wheel), includes)
            draft.rename(done)
    return done


def _includes() -> Path:
    """CUDA's headers, which Triton's wheel has."""
    import importlib.util

    spec = importlib.util.find_spec("triton")
    headers = Path(spec.origin or "").parent / "backends/nvidia/include" if spec else None
    if headers is None or not (headers / "cuda_runtime_api.h").is_file():
        raise CannotSetUp("Triton, whose wheel has CUDA's headers, is not installed; fix: pip install -e '.[test]'")
    return headers


def needed_by(wheel: Path) -> dict[str, dict[str, set[str]]]:
    """The symbols that torch needs of each of NVIDIA's libraries, by their version ("" without one)."""
    needed: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    files = sorted((wheel / "torch/lib").glob("*.so"))
    of_torch = {file.name for file in files}
    for file in files:
        dynamic = _told("readelf", "-dW", str(file))
        nvidia = {
            name for name in re.findall(r"NEEDED.*\[(.*)\]", dynamic)
            if name not in of_torch and re.match(r"lib(cu|nv|nccl)", name)
        }  # fmt: skip
        if not nvidia:
            continue
        for name in nvidia:
            needed[name]  # a library without a symbol must be there, too
        versions = _versions(_told("readelf", "-VW", str(file)))
        for line in _told("nm", "-D", "--undefined-only", str(file)).splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            library = versions.get(version, "") if version else _owner(symbol, nvidia)
            if library in nvidia:
                needed[library][version].add(symbol)
    for name, symbols in BY_NAME.items():
        needed[name][""] |= symbols
    return needed


def _owner(symbol: str, libraries: Iterable[str]) -> str:
    """The library of a symbol without a version; "" if it is none of these."""
    stem = next((stem for prefix, stem in PREFIXES.items() if re.match(prefix + "[A-Z_]", symbol)), None)
    return next((name for name in libraries if name.startswith(f"{stem}.")), "")


def _versions(told: str) -> dict[str, str]:
    """The library of each version that a file needs."""
    versions, library = {}, ""
    for line in told.splitlines():
        if found := re.search(r"File: (\S+)", line):
            library = found[1]
        elif found := re.search(r"Name: (\S+)", line):
            versions[found[1]] = library
    return versions


def _build(folder: Path, needed: dict[str, dict[str, set[str]]], includes: Path) -> None:
    names = sorted(needed, key=lambda name: (not name.startswith("libcudart"), name))  # the others use it
    runtime = f"-l:{names[0]}"
    for name in names:
        stem = name.partition(".so")[0]
        source = STUBS / SOURCES.get(stem, "others.c")
        symbols = needed[name]
        compile_ = ("gcc", "-O1", "-fPIC", "-w", f"-I{includes}", f"-I{STUBS}", f"-DLIBRARY_{stem.removeprefix('lib')}")
        with tempfile.TemporaryDirectory() as scratch:
            object_, rest, versions = (Path(scratch) / file for file in ("stub.o", "rest.c", "versions"))
            _told(*compile_, "-c", str(source), "-o", str(object_))
            table = _told("nm", "--defined-only", "--extern-only", str(object_))
            defined = {line.split()[-1] for line in table.splitlines()}
            _write_rest(rest, set().union(*symbols.values()) - defined)
            link = ["gcc", "-shared", "-fPIC", "-w", str(object_), str(rest)]
            link += ["-o", str(folder / name), f"-Wl,-soname,{name}"]
            if version := next(filter(None, symbols), None):
                versions.write_text(f"{version} {{ global: *; }};\n", encoding="utf-8")
                link.append(f"-Wl,--version-script={versions}")
            link += ["-ldl", "-lpthread"] if name == names[0] else [f"-L{folder}", runtime, "-Wl,-rpath,$ORIGIN"]
            _told(*link)
    (folder / "libcuda.so").symlink_to("libcuda.so.1")


def _write_rest(path: Path, symbols: Iterable[str]) -> None:
    path.write_text("".join(f"int {symbol}(void) {{ return 0; }}\n" for symbol in sorted(symbols)), encoding="utf-8")


def _told(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise CannotSetUp(f"{words[0]} failed: {' '.join(words)}\n{done.stderr.strip()}")
    return done.stdout
