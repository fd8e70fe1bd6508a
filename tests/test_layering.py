"""The import table: who may import whom, which libraries belong in which room, and who may read the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.import_graph import imports, module_name, nodes

ROOT = Path(__file__).resolve().parent.parent

# Longest matching prefix decides. A room may always import itself; each permission is used by somebody. Wings look down
# only: tools, train, data, base; a test holds it. `config` composes the sections of data and train.
ALLOWED: dict[str, set[str]] = {
    room: {f"sana_pipe.{name}" for name in names.split()}
    for room, names in {
        "sana_pipe": "",
        "sana_pipe.base": "",
        "sana_pipe.data.cache": "base",
        "sana_pipe.data.encoders": "base",
        "sana_pipe.data.sources": "base data.cache data.encoders.config",
        "sana_pipe.data.images": "base data.sources.config data.snapshots.config",
        "sana_pipe.data.signals": "base data.cache data.encoders data.images data.sources data.encoding.config",
        "sana_pipe.data.loader": "base data.cache data.signals data.sources",
        "sana_pipe.data.work": "base data.cache data.encoding.config",
        "sana_pipe.data.snapshots": "base data.cache data.encoding.config data.images data.loader data.signals"
        " data.sources",
        "sana_pipe.data.encoding": "base data.cache data.encoders data.images data.signals data.sources data.work",
        "sana_pipe.data.verification": "base data.cache data.encoding data.snapshots data.work",
        "sana_pipe.train.config": "base train.models.config train.parallel.config train.training.config"
        " train.training.optimizer_records",
        "sana_pipe.train.kernels": "",
        "sana_pipe.train.models": "base train.config train.kernels",
        "sana_pipe.train.parallel": "base train.config train.kernels",
        "sana_pipe.train.training": "base data.cache.layout data.cache.snapshot_head data.loader train.config"
        " train.kernels train.models train.parallel",
        "sana_pipe.config": "base configs data.cache.config data.encoders.config data.encoding.config"
        " data.snapshots.config data.sources.config train.config train.models.config",
        "sana_pipe.tools.demo": "base train.models",
        "sana_pipe.tools.locations": "config data.cache",
        "sana_pipe.tools.model_check": "base data.encoders data.images data.sources.config train",
        "sana_pipe.tools.outputs": "base config tools.locations",
        "sana_pipe.tools.planning": "base config data.cache data.images data.loader data.signals data.snapshots.config"
        " data.sources.config train",
        "sana_pipe.tools.reporting": "base config data tools.outputs train.config train.models train.training",
        "sana_pipe.cli": "base config data.sources.formats stages",
        "sana_pipe.stages": "base config data train tools",
    }.items()
}
FORBIDDEN_LIBRARIES: dict[str, set[str]] = {  # library: the modules that may import it
    "diffusers": {"sana_pipe.data.encoders", "sana_pipe.train.models", "sana_pipe.tools.demo"},
    "transformers": {"sana_pipe.base.hub", "sana_pipe.data.encoders", "sana_pipe.tools.demo"},
    "tokenizers": {"sana_pipe.tools.demo"},
    "triton": {
        "sana_pipe.train.kernels.gated_convolution_triton",
        "sana_pipe.train.kernels.linear_attention_triton",
    },
}
CACHE_LIBRARIES = {
    "numpy",
    "pyarrow",
    "fsspec",
    "aiohttp",
    "aiobotocore",
    "botocore",
    "pydantic",
    "xxhash",
    "zstandard",
}
ENVIRONMENT_HOME = "sana_pipe.base.launch"


@pytest.fixture(scope="module", autouse=True)
def _parsed_once() -> Iterator[None]:
    yield
    nodes.cache_clear()


def _within(module: str, room: str) -> bool:
    return module == room or module.startswith(room + ".")


def _room(module: str) -> str:
    return max((room for room in ALLOWED if _within(module, room)), key=len)


def _permitted(target: str, here: str) -> bool:
    room = _room(here)
    if room == "sana_pipe.stages":  # each stage is a room of its own
        if _within(target, room):
            return False
    elif room != "sana_pipe" and _within(target, room):
        return True
    if target.startswith("sana_pipe.__"):  # names of the top package itself, such as __version__
        return True
    return any(_within(target, allowed) for allowed in ALLOWED[room])


def violations(root: Path) -> list[str]:
    """Every import under `root`/{pipeline,stages} that the table forbids, as `file:line: what`."""
    result = []
    for path in sorted([*root.glob("pipeline/**/*.py"), *root.glob("stages/**/*.py")]):
        here = module_name(path, root)
        for line, target in imports(path, root):
            where = f"{path.relative_to(root)}:{line}"
            top = target.partition(".")[0]
            if top in ("sana_pipe", "benchmarks", "tests"):
                if not _permitted(target, here):
                    result.append(f"{where}: {here} imports {target}")
                continue
            homes = FORBIDDEN_LIBRARIES.get(top)
            if homes is not None and not any(_within(here, home) for home in homes):
                result.append(f"{where}: {here} imports {top}")
            if _within(target, "torch.distributed") and _within(here, "sana_pipe.train.models"):
                result.append(f"{where}: {here} imports torch.distributed")
            if _within(here, "sana_pipe.data.cache") and top not in CACHE_LIBRARIES | sys.stdlib_module_names:
                result.append(f"{where}: {here} imports {top}")
        if here != ENVIRONMENT_HOME:
            result += [f"{path.relative_to(root)}:{line}: {here} reads the environment" for line in _environment(path)]
    return result


def _environment(path: Path) -> Iterator[int]:
    for node in nodes(path.read_text(encoding="utf-8")):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "environb", "getenv"):
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in ("environ", "environb", "getenv"))


def test_every_import_is_in_the_table() -> None:
    assert len(list(ROOT.glob("pipeline/**/*.py"))) > 10, "the tree was not found"
    assert violations(ROOT) == []


WINGS = ("configs", "base", "data", "train", "config", "tools", "cli", "stages")


def _wing(room: str) -> int:
    return WINGS.index(room.split(".")[1])


WHOLE = {
    "tools.locations.cache_location",
    "tools.outputs.inputs",
    "tools.outputs.check",
    "tools.reporting.encoder_process.decode",
    "tools.reporting.encoder_process.encode_prompts",
}
"""The functions below the stages that take the whole configuration; their docstrings say why."""


def test_below_the_stages_functions_take_a_section_or_values() -> None:
    taking = set()
    for path in sorted(ROOT.glob("pipeline/*/**/*.py")):
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.FunctionDef):
                given = [
                    ast.unparse(each.annotation) for each in node.args.args + node.args.kwonlyargs if each.annotation
                ]
                if any(each in ("Config", "Config | None") for each in given):
                    taking.add(f"{module_name(path, ROOT).removeprefix('sana_pipe.')}.{node.name}")
            elif isinstance(node, ast.AnnAssign):
                assert ast.unparse(node.annotation) != "Config", path
    assert taking == WHOLE


def test_wings_look_down() -> None:
    """The table permits nothing that leads up."""
    for room, names in ALLOWED.items():
        assert all(_wing(name) <= _wing(room) or room == "sana_pipe.cli" for name in names), room


def test_no_test_imports_another_test() -> None:
    """What they share is in tests/support."""
    paths = list((ROOT / "tests").rglob("*.py"))
    assert len(paths) > 100, "the tests were not found"
    borrowed = [
        f"{path.relative_to(ROOT)}:{line}: {target}"
        for path in paths
        if "test_" in path.read_text(encoding="utf-8").replace("def test_", "")
        for line, target in imports(path, ROOT)
        if target.startswith("tests.") and ".test_" in target
    ]
    assert borrowed == []


def circular(root: Path) -> list[str]:
    """Modules that import themselves through others, also inside functions and for types alone."""
    modules = {here for here, _ in _imported(root)}
    left: dict[str, set[str]] = {here: set() for here in modules}
    for here, target in _imported(root):
        while target not in modules and target:
            target = target.rpartition(".")[0]
        left[here] |= {target} - {here, ""}
    while ends := {here for here, targets in left.items() if not targets}:
        left = {here: targets - ends for here, targets in left.items() if here not in ends}
    used = set[str]().union(*left.values())
    while tops := left.keys() - used:
        left = {here: targets for here, targets in left.items() if here not in tops}
        used = set[str]().union(*left.values())
    return sorted(left)


def test_no_module_imports_itself_through_others() -> None:
    assert circular(ROOT) == []


def test_a_planted_circle_is_named(tmp_path: Path) -> None:
    """Also one for types, below a module that is in no circle, and above another."""
    (tmp_path / "pipeline").mkdir()
    for name, line in {
        "top": "from sana_pipe.one import x",
        "one": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from sana_pipe.two import x",
        "two": "def f():\n    from sana_pipe import one, end",
        "end": "",
    }.items():
        (tmp_path / f"pipeline/{name}.py").write_text(line + "\n")
    assert circular(tmp_path) == ["sana_pipe.one", "sana_pipe.two"]


PRIVATE_USES = 23
"""Places where tests name what a module keeps to itself. May go down, never up: make the name public, or test the
behaviour."""


def private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def private_uses(paths: list[Path], defined: set[str]) -> list[str]:
    """Where files take such a name from an object, import it or patch it, as `file:line: name`."""
    uses = []
    for path in paths:
        for node in nodes(path.read_text(encoding="utf-8")):
            names: list[Any] = []
            if isinstance(node, ast.Attribute):
                names = [node.attr] if getattr(node.value, "id", "") not in ("self", "cls") else []
            elif isinstance(node, ast.ImportFrom):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("setattr", "object", "delattr"):
                names = [word.value for word in node.args[1:2] if isinstance(word, ast.Constant)]
            uses += [f"{path}:{node.lineno}: {name}" for name in names if private(name) and name in defined]
    return uses


def test_tests_reach_for_less_that_is_private() -> None:
    defined = set()
    for path in [path for folder in ("pipeline", "stages", "benchmarks") for path in (ROOT / folder).rglob("*.py")]:
        for node in nodes(path.read_text(encoding="utf-8")):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                defined.add(node.id if isinstance(node, ast.Name) else node.attr)
    uses = private_uses(sorted((ROOT / "tests").rglob("*.py")), defined)
    assert len(uses) <= PRIVATE_USES, "\n".join(uses)
    assert len(uses) == PRIVATE_USES, f"lower PRIVATE_USES to {len(uses)}"


@pytest.mark.parametrize(
    "line", ["module._x()", "from sana_pipe.module import _x", "patch.setattr(module, '_x', None)", "a.b._x = 1"]
)
def test_a_planted_use_is_counted(tmp_path: Path, line: str) -> None:
    (tmp_path / "test.py").write_text(f"self._x\nmodule._other\nmodule.x\n{line}\n")
    assert private_uses([tmp_path / "test.py"], {"_x", "x"}) == [f"{tmp_path / 'test.py'}:4: _x"]


@cache
def _imported(root: Path) -> set[tuple[str, str]]:
    """(module, what it imports); every module is there with "", too."""
    return {
        (module_name(path, root), target)
        for path in [*root.glob("pipeline/**/*.py"), *root.glob("stages/**/*.py")]
        for _, target in [(0, ""), *imports(path, root)]
    }


def unused(root: Path) -> list[str]:
    """Rows of the tables without a module, and permissions that no module under `root` uses."""
    used = _imported(root)
    room_of = {here: _room(here) for here in {here for here, _ in used}}
    imported: dict[str, set[str]] = {room_of[here]: set() for here in room_of}
    for here, target in used:
        imported[room_of[here]].add(target)
    result = [f"{room}: no module" for room in ALLOWED if room not in imported]
    for room, names in ALLOWED.items():
        taken = imported.get(room, set())
        result += [f"{room}: {name}" for name in sorted(names) if not any(_within(target, name) for target in taken)]
    libraries = {(library, home) for library, homes in FORBIDDEN_LIBRARIES.items() for home in homes}
    libraries |= {(library, "sana_pipe.data.cache") for library in CACHE_LIBRARIES}
    for library, home in sorted(libraries):
        if not any(_within(here, home) and _within(target, library) for here, target in used):
            result.append(f"{home}: {library}")
    return result


def test_every_row_and_permission_is_used() -> None:
    assert unused(ROOT) == []
    assert list(_environment(ROOT / "pipeline/base/launch.py")), ENVIRONMENT_HOME


@pytest.mark.parametrize(
    ("table", "planted", "line"),
    [
        ("ALLOWED", {"sana_pipe.gone": set()}, "sana_pipe.gone: no module"),
        ("ALLOWED", {"sana_pipe.train.kernels": {"sana_pipe.config"}}, "sana_pipe.train.kernels: sana_pipe.config"),
        ("FORBIDDEN_LIBRARIES", {"tokenizers": {"sana_pipe.tools.demo", "sana_pipe.cli"}}, "sana_pipe.cli: tokenizers"),
        ("CACHE_LIBRARIES", {"torch"}, "sana_pipe.data.cache: torch"),
    ],
)
def test_a_planted_permission_is_named(monkeypatch: pytest.MonkeyPatch, table: str, planted: Any, line: str) -> None:
    monkeypatch.setitem(globals(), table, globals()[table] | planted)
    assert unused(ROOT) == [line]


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("pipeline/train/models/bad.py", "from sana_pipe.data.cache import layout"),
        ("pipeline/train/models/bad.py", "from ...data.cache import layout"),
        ("pipeline/train/models/bad.py", "from ...data import sources"),
        ("pipeline/train/kernels/bad.py", "from sana_pipe.train.models import sana_layers"),
        ("pipeline/train/models/bad.py", "import torch.distributed as dist"),
        ("pipeline/train/models/bad.py", "from torch import distributed"),
        ("pipeline/train/models/deep/bad.py", "import sana_pipe.train.parallel.mesh"),
        ("pipeline/data/cache/bad.py", "import torch"),
        ("pipeline/data/cache/bad.py", "def f():\n    import sana_pipe.data.loader.loader"),
        ("pipeline/data/sources/bad.py", "import importlib\nimportlib.import_module('sana_pipe.train.models.sana')"),
        ("pipeline/data/sources/bad.py", "from transformers import AutoTokenizer"),
        ("pipeline/train/kernels/backend.py", "import triton.language as tl"),
        ("pipeline/train/parallel/bad.py", "from sana_pipe.train.models.sana import SanaTransformer"),
        ("pipeline/train/training/bad.py", "from diffusers import SanaPipeline"),
        ("pipeline/train/training/bad.py", "import sana_pipe.data.encoding.plan"),
        ("pipeline/train/training/bad.py", "import os\nos.environ['RANK']"),
        ("pipeline/data/encoding/bad.py", "from os import getenv"),
        ("pipeline/config.py", "from sana_pipe.train.parallel.mesh import Layout"),
        ("stages/bad.py", "from sana_pipe.stages import train"),
        ("stages/bad.py", "from . import train"),
        ("stages/bad.py", "from sana_pipe.cli import main"),
        ("pipeline/bad.py", "from sana_pipe.stages import train"),
    ],
)
def test_a_planted_import_is_caught(tmp_path: Path, file: str, line: str) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True)
    path.write_text("import os\n")
    assert violations(tmp_path) == []
    path.write_text(line + "\n")
    (result,) = violations(tmp_path)
    assert result.startswith(f"{file}:{1 + line.count(chr(10))}:")


def _loaded(statement: str) -> set[str]:
    code = f"import sys; {statement}; print(*sorted(sys.modules), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def _heavy(modules: set[str]) -> list[str]:
    names = ("autoencoder_dc", "modeling_gemma2", "pipeline_sana")
    whole = ("diffusers", "transformers", "sana_pipe.data.encoders.vae", "sana_pipe.tools.demo.small_models")
    return sorted(m for m in modules if m in whole or m.rpartition(".")[2] in names)


LOADERS = {"from_pretrained", "from_single_file", "load_config", "pipeline", "hub_load"}


def loader_calls(code: str) -> list[tuple[str, set[str]]]:
    """Calls that can run the code of a model folder: function, keywords with the value of constants."""
    return [
        (ast.unparse(node.func), {f"{k.arg}={ast.unparse(k.value)}" for k in node.keywords})
        for node in nodes(code)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LOADERS
    ]


def test_models_are_loaded_in_one_place_that_runs_none_of_their_code() -> None:
    paths = [p for folder in ("pipeline", "stages") for p in ROOT.glob(f"{folder}/**/*.py")]
    found = [(path.name, *call) for path in paths for call in loader_calls(path.read_text())]
    ((file, _, options),) = found
    assert file == "hub.py" and {"local_files_only=True", "trust_remote_code=False"} <= options
    assert loader_calls("a.B.from_pretrained(x, y=1)") == [("a.B.from_pretrained", {"y=1"})]


def test_memory_is_never_measured_by_tracemalloc() -> None:
    """Its hooks crash the process when threads of pyarrow take memory; children are watched from outside instead."""
    paths = [p for folder in ("pipeline", "stages", "benchmarks") for p in ROOT.glob(f"{folder}/**/*.py")]
    assert [path for path in paths if any("tracemalloc" in name for _, name in imports(path, ROOT))] == []


@pytest.mark.slow
def test_training_imports_no_encoder() -> None:
    loaded = _loaded("import sana_pipe.stages.train, sana_pipe.train.models.sampler")
    assert _heavy(loaded) == [] and "accelerate" not in loaded


@pytest.mark.slow
def test_the_check_sees_an_encoder_that_is_imported() -> None:
    loaded = _loaded("import sana_pipe.stages.train, diffusers.models.autoencoders.autoencoder_dc")
    assert "diffusers" in _heavy(loaded)


def test_the_command_line_answers_without_torch() -> None:
    assert not {"torch", "numpy", "diffusers"} & _loaded("import sana_pipe.cli, sana_pipe.config")


def test_functions_and_the_heads_of_modules_are_short() -> None:
    long = []
    for path in sorted([*ROOT.glob("pipeline/**/*.py"), *ROOT.glob("stages/*.py")]):
        all_nodes, module = nodes(path.read_text(encoding="utf-8")), module_name(path, ROOT)
        head = len((ast.get_docstring(all_nodes[0]) or "").splitlines())  # type: ignore[arg-type]
        if head > 8:
            long.append(f"{module}: a docstring of {head} lines")
        for node in all_nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_documented = ast.get_docstring(node) is not None and len(node.body) > 1
                lines = (node.end_lineno or 0) - node.body[is_documented].lineno + 1
                if lines > 60:
                    long.append(f"{module}.{node.name}: {lines} lines")
    assert long == []
