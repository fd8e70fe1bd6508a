"""A dozen captioned photographs that ship inside the scikit-image wheel."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sana_pipe.base.errors import UserError


class _Photo(NamedTuple):
    """A crop of a photograph; `box` is (left, top, right, bottom) in its pixels."""

    name: str
    source: str
    box: tuple[int, int, int, int]
    caption: str


_PHOTOS = (
    _Photo("astronaut", "astronaut", (0, 0, 512, 512), "an astronaut in an orange space suit beside a US flag"),
    _Photo("tissue", "immunohistochemistry", (0, 0, 512, 512), "stained tissue under a microscope, brown and blue"),
    _Photo("retina", "retina", (0, 0, 1411, 1411), "the retina of an eye, a red disc on black"),
    _Photo("galaxies", "hubble_deep_field", (64, 0, 936, 872), "distant galaxies in a black sky"),
    _Photo("cat", "chelsea", (0, 0, 451, 300), "the face of a tabby cat"),
    _Photo("coffee", "coffee", (0, 0, 600, 400), "a cup of espresso on a red saucer on a wooden table"),
    _Photo("rocket", "rocket", (0, 0, 640, 427), "a rocket on its launch pad at dusk"),
    _Photo("motorcycle", "stereo_motorcycle", (0, 0, 741, 500), "a red motorcycle in a garage"),
    _Photo("portrait", "astronaut", (128, 0, 328, 300), "a smiling woman with short blond hair"),
    _Photo("shuttle", "astronaut", (338, 0, 498, 240), "a model of the space shuttle against a grey wall"),
    _Photo("wheel", "stereo_motorcycle", (500, 248, 648, 470), "the front wheel of a motorcycle"),
    _Photo("nerve", "retina", (50, 400, 350, 850), "bright optic nerve head with red blood vessels"),
)
_LATER = ("retina", "motorcycle", "wheel", "nerve")
_MARGIN = 0.01


def _narrower(photo: _Photo) -> _Photo:
    """The photograph without a margin: other pixels of the same view."""
    left, top, right, bottom = photo.box
    x, y = round(_MARGIN * (right - left)), round(_MARGIN * (bottom - top))
    return photo._replace(box=(left + x, top + y, right - x, bottom - y))


ROUNDS = {
    "photos": tuple(photo for photo in _PHOTOS if photo.name not in _LATER),
    "more": tuple(photo for photo in _PHOTOS if photo.name in _LATER),
    "heldout": tuple(_narrower(photo) for photo in _PHOTOS if photo.name in _LATER),
}
"""The demonstration's folders: the pictures of the first round, the pictures that the second round adds, and other
crops of these added pictures, for validation only."""


def demo_photos(out: Path, photos: Sequence[_Photo] = _PHOTOS) -> list[tuple[Path, str]]:
    """Write colour photographs (a dozen: four square, four landscape, four portrait) and a `.txt` caption next to each.

    They are crops of photographs that ship inside the scikit-image wheel, so there is no download. Existing
    files of these names are overwritten.

    Returns:
        (picture, caption), in a fixed order.

    Raises:
        UserError: scikit-image is not installed.
    """
    try:
        from skimage import data
    except ImportError:
        raise UserError(
            "the demonstration photographs come with scikit-image, which is not installed",
            fix="pip install 'sana-pipe[demo]', or give your own pictures with --data DIR",
        ) from None
    from PIL import Image

    out.mkdir(parents=True, exist_ok=True)
    written = []
    for photo in photos:
        pixels = getattr(data, photo.source)()
        if isinstance(pixels, tuple):  # stereo pictures: left, right, disparity
            pixels = pixels[0]
        crop = Image.fromarray(np.asarray(pixels)).convert("RGB").crop(photo.box)
        large = max(crop.size) > 640
        path = out / f"{photo.name}.{'jpg' if large else 'png'}"
        if large:
            crop.save(path, quality=95, subsampling=0)
        else:
            crop.save(path)
        path.with_suffix(".txt").write_text(photo.caption + "\n", encoding="utf-8")
        written.append((path, photo.caption))
    return written
