#!/bin/bash
# The pictures of the guides, made from the result of `make demo` (three minutes, Chromium):
#
#   PATH=$PWD/.venv/bin:$PATH bash docs/guides/pictures.sh demo
set -euo pipefail
guides=$(realpath "$(dirname "$0")")
work=$(mktemp -d)
cp -r "${1:-demo}/." "$work"
cd "$work"

jpg() { python -c 'import sys; from PIL import Image; Image.open(sys.argv[1]).convert("RGB").save(sys.argv[2], quality=85)' "$@"; }

# lora.jpg: the demonstration's model learns sepia as a style, and keeps two captions as they were
python - <<'PYTHON'
from pathlib import Path
from PIL import Image, ImageOps

Path("sepia").mkdir()
for text in Path("photos").glob("*.txt"):
    [picture] = [path for path in text.parent.glob(f"{text.stem}.*") if path != text]
    ImageOps.colorize(ImageOps.grayscale(Image.open(picture)), "#201008", "#ffe8b8").save(f"sepia/{text.stem}.png")
    Path("sepia", text.name).write_text(text.read_text())
PYTHON
run=(--set model.arch=null --set 'model.weights={id: export, subfolder: transformer}'
    --set train.output=runs/sepia)
astronaut='an astronaut in an orange space suit beside a US flag'
sana-pipe encode --data sepia --set data.caption_prefix='sepia style, '
sana-pipe encode --prompts prompts.txt
sana-pipe bucket --name sepia --set 'bucket.sources={photos: {weight: 0}, more: {weight: 0}, heldout: {weight: 0}}' \
    --set bucket.batch=8
sana-pipe train "${run[@]}" --snapshot sepia --set train.steps=1200 --set 'train.adapter={rank: 16, targets: all}' \
    --set train.optim.lr=3e-3 --set train.optim.warmup_steps=10 \
    --set "train.preserve={prompt: [$astronaut, distant galaxies in a black sky]}"
sana-pipe sample "${run[@]}" --out drawn --prompt "sepia style, $astronaut" \
    --prompt 'sepia style, a rocket on its launch pad at dusk' --prompt "$astronaut"
jpg drawn/contact_sheet.png "$guides/lora.jpg"

# captions.jpg: one section of the report
sana-pipe report --run runs/tiny/round2 --snapshot round2 --out report.html
sed 's|</head>|<style>body > :not(#captions), #captions > h2 { display: none }</style></head>|' report.html > captions.html
chromium --headless --no-sandbox --disable-gpu --hide-scrollbars --window-size=560,480 \
    --screenshot="$work/captions.png" "file://$work/captions.html"
jpg captions.png "$guides/captions.jpg"
rm -r "$work"
