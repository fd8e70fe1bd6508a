"""The blocks of the README run as they are written: on the demonstration's models, in place of the released ones, and
with stand-ins for SLURM's commands that start two processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sana_pipe.config import SHIPPED
from sana_pipe.tools.demo import photographs
from tests.support.package_links import link

ROOT = Path(__file__).parent.parent
FULL = SHIPPED / "sana_1600m_1024.yaml"
STAND_INS = {
    "sana-pipe": f"""
"{sys.executable}" -m sana_pipe.cli "$@" || exit
[ "$1" != init ] || PYTHONPATH="{ROOT}" "{sys.executable}" -m tests.test_readme_blocks "$@" """,
    "sbatch": """
if grep -q "^#SBATCH --array" "$1"; then
    export SLURM_ARRAY_JOB_ID=7 SLURM_ARRAY_TASK_MIN=0 SLURM_ARRAY_TASK_MAX=1 SLURM_ARRAY_TASK_COUNT=2 TASKS=1
    SLURM_ARRAY_TASK_ID=0 bash "$1" & SLURM_ARRAY_TASK_ID=1 bash "$1" && wait $!
else
    SLURM_JOB_ID=$$ TASKS=2 bash "$1"
fi""",
    "srun": """
while [[ $1 == --* ]]; do shift; done
export SLURM_STEP_NUM_TASKS=$TASKS SLURM_STEP_TASKS_PER_NODE=$TASKS SLURM_NODEID=0 SLURM_STEP_NODELIST=localhost
for ((task = 1; task < TASKS; task++)); do SLURM_PROCID=$task SLURM_LOCALID=$task "$@" & done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" && { [ "$TASKS" = 1 ] || wait $!; }""",
}


def blocks(heading: str) -> list[str]:
    """The commands under a heading of the README, block by block."""
    section = re.split(rf"^## {heading}$", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)[1]
    return re.findall(r"```bash\n(.*?)```", section.partition("\n## ")[0], flags=re.DOTALL)


def make_small(path: Path, base: Path, models: Path) -> None:
    """Put the demonstration's models, sizes and two steps into a configuration."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    tiny = yaml.safe_load((SHIPPED / "tiny.yaml").read_text(encoding="utf-8"))
    tree["model"] = {"weights": {"id": str(base)}}
    for section in ("vae", "text"):
        tree[section] = {**tiny[section], "id": str(models)}
    short = {"steps": 2, "microbatch": 4, "precision": "fp32", "activation_checkpointing": "none", "save_every": 1}
    drawn = {"pictures": {"every": 1}} if "pictures" in tree["train"] else {}
    for section, values in {**tiny, "train": {**short, **drawn, "trackers": []}, "sample": {"steps": 2}}.items():
        if section in ("data", "encode", "train", "sample"):
            tree[section] = {**tree.get(section, {}), **values}
    path.write_text(yaml.safe_dump(tree))


@pytest.fixture
def place(tmp_path: Path, tiny_repo: Path) -> Path:
    """A checkout with pictures in it, in which the file that `init` writes and the shipped one name small models."""
    from diffusers import SanaTransformer2DModel

    for name in ("pipeline", "stages", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    link(tmp_path)
    arch = yaml.safe_load((SHIPPED / "tiny.yaml").read_text(encoding="utf-8"))["model"]["arch"]
    width = arch["num_attention_heads"] * arch["attention_head_dim"]
    base = SanaTransformer2DModel(
        **arch, out_channels=arch["in_channels"], cross_attention_dim=width, sample_size=8, patch_size=1
    )
    base.save_pretrained(tmp_path / "base" / "transformer")
    (tmp_path / "models").symlink_to(tiny_repo)
    for name, text in STAND_INS.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    photographs.demo_photos(tmp_path / "pictures")
    return tmp_path


def walk(place: Path, block: str) -> str:
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "RANK", "WORLD_"))}
    outside |= {"PYTHONPATH": str(place / "build/links"), "HF_HUB_OFFLINE": "1"}
    outside["PATH"] = f"{place / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block], cwd=place, env=outside, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_block_has_at_most_eight_commands() -> None:
    for heading in ("One card, your pictures", "A cluster"):
        for block in blocks(heading):
            assert 1 <= len(re.findall(r"^\S", block, flags=re.MULTILINE)) <= 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_card_as_written(place: Path) -> None:
    lora, full = blocks("One card, your pictures")
    walk(place, lora)
    assert (place / "runs/lora/export/pytorch_lora_weights.safetensors").exists() and (place / "report.html").exists()
    walk(place, full)
    assert list(place.glob("runs/*/export/model_index.json"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cluster_as_written(place: Path) -> None:
    make_small(place / "configs" / FULL.name, place / "base", place / "models")
    [block] = blocks("A cluster")
    walk(place, block)
    assert (place / "export" / "model_index.json").exists()


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_the_notebook_as_written(place: Path) -> None:
    """Its cells in order: shell lines as those of the README, then all Python so far. Only pip is left out."""
    cells = json.loads((ROOT / "docs/notebook.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert [source.split()[0] for source in sources[:2]] == ["%env", "!pip"]
    python = ""
    shutil.rmtree(place / "pictures")
    for source in sources[2:]:
        if source.startswith("!"):
            walk(place, source.removeprefix("!").replace("train.steps=300", "train.steps=4"))
        else:
            python += f"{source}\n"
            subprocess.run([sys.executable, "-c", python], cwd=place, check=True)
    assert (place / "runs/lora/export/pytorch_lora_weights.safetensors").exists()


if __name__ == "__main__":  # the words of an `init` that has just run here
    words = sys.argv[1:]
    file = words[words.index("--out") + 1] if "--out" in words else "sana-pipe.yaml"
    make_small(Path(file), Path("base").resolve(), Path("models").resolve())
