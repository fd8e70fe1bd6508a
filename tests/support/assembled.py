"""Triton kernels compiled for GPUs that are not there, and what they need of one."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}
"""Bytes of shared memory that a block may have, by compute capability (CUDA C programming guide, technical
specifications per compute capability)."""
_INTEGERS = ("height", "width", "channels", "tokens", "dim", "count", "rows", "above")
_ALIGNED = ("channels", "dim")
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Needs(NamedTuple):
    """Of a kernel: registers of a thread, bytes of stack (spilled values) and of shared memory; instructions of its
    code."""

    registers: int
    stack: int
    shared: int
    instructions: int


def needs(kernel: Any, capability: int, dtype: str, num_warps: int, **constants: Any) -> Needs:
    """Compile a kernel; `constants` are its constexprs, and sizes that a launch would specialise (1)."""

    def kind(name: str) -> str:
        if name in constants:
            return "constexpr"
        if name in _INTEGERS or name.endswith("pitch"):
            return "i32"
        return "fp32" if name == "eps" else "*fp32" if "parts" in name or "state" in name else f"*{dtype}"

    signature = {name: kind(name) for name in kernel.arg_names}
    multiple = [name for name, k in signature.items() if k == "i32" and (name in _ALIGNED or name.endswith("pitch"))]
    aligned = [i for i, (name, k) in enumerate(signature.items()) if k[0] == "*" or name in multiple]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": num_warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage, code = (
            subprocess.run(
                [_TOOLS / "cuobjdump", what, file.name], capture_output=True, text=True, check=True, timeout=60
            )
            for what in ("-res-usage", "-sass")
        )
    registers, stack, local = (int(n) for n in re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage.stdout).groups())  # type: ignore[union-attr]
    instructions = len(re.findall(r"/\*[0-9a-f]{4,}\*/ +(?!NOP|BRA)[@A-Z]", code.stdout))
    return Needs(registers, stack + local, compiled.metadata.shared, instructions)
