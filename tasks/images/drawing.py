"""The embedded images: ten shapes, each drawn at a place, a size and an angle of its own, in grey on noise.

Everything is a function of the seed. Only the generator PCG64 itself is used, whose sequence NumPy guarantees across
versions (https://numpy.org/neps/nep-0019-rng-policy.html), and only operations that IEEE 754 rounds correctly, element
by element, so that every processor draws the same bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

NUM_TRAIN, NUM_VALIDATION = 4000, 1000
SIZE = 28

_LARGEST_SLOPE = 0.15  # the tangent of half the angle, about 17 degrees: a turned plus is no cross
_LARGEST_SHIFT = 0.2
_SHARPNESS = 7.0
_ROOT_OF_HALF = np.sqrt(0.5)
_DRAWN_AT_ONCE = 1000

_Numbers = npt.NDArray[np.float64]


class Images(NamedTuple):
    """Labelled images.

    Attributes:
        pixels: Brightness from 0 to 255, uint8 [N, height, width].
        labels: The number of each image's class, int64 [N].
    """

    pixels: npt.NDArray[np.uint8]
    labels: npt.NDArray[np.int64]


def _disc(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.sqrt(x * x + y * y) - 0.6


def _ring(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.abs(np.sqrt(x * x + y * y) - 0.55) - 0.12


def _square(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.maximum(np.abs(x), np.abs(y)) - 0.55


def _frame(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.abs(np.maximum(np.abs(x), np.abs(y)) - 0.5) - 0.12


def _pole(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.maximum(np.abs(x) - 0.14, np.abs(y) - 0.7)


def _bar(x: _Numbers, y: _Numbers) -> _Numbers:
    return _pole(y, x)


def _plus(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.minimum(_pole(x, y), _bar(x, y))


def _cross(x: _Numbers, y: _Numbers) -> _Numbers:
    return _plus(_ROOT_OF_HALF * (x + y), _ROOT_OF_HALF * (x - y))


def _triangle(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.maximum(y - 0.5, 0.9 * np.abs(x) - 0.45 * y - 0.35)


def _bowl(x: _Numbers, y: _Numbers) -> _Numbers:
    return np.maximum(np.sqrt(x * x + y * y) - 0.7, -y)


# For each class, about how far a point of the plane lies outside its shape; inside, this is negative.
SHAPES: dict[str, Callable[[_Numbers, _Numbers], _Numbers]] = {
    "disc": _disc,
    "ring": _ring,
    "square": _square,
    "frame": _frame,
    "pole": _pole,
    "bar": _bar,
    "plus": _plus,
    "cross": _cross,
    "triangle": _triangle,
    "bowl": _bowl,
}


def draw(num_images: int, *, seed: int) -> Images:
    """Draws images, whose classes come in turn.

    Args:
        num_images: How many images to draw.
        seed: Images of equal seeds are equal.

    Returns:
        Images of SIZE x SIZE pixels, whose labels number the keys of SHAPES.
    """
    generator = np.random.PCG64(seed)
    labels = np.arange(num_images, dtype=np.int64) % len(SHAPES)
    parts = [labels[start : start + _DRAWN_AT_ONCE] for start in range(0, num_images, _DRAWN_AT_ONCE)]
    return Images(np.concatenate([_drawn(part, generator) for part in parts]), labels)


def _drawn(labels: npt.NDArray[np.int64], generator: np.random.PCG64) -> npt.NDArray[np.uint8]:
    """Draws one image for each label."""

    def uniform(*shape: int) -> _Numbers:
        drawn = generator.random_raw(math.prod(shape)) >> np.uint64(11)
        return drawn.astype(np.float64).reshape(shape) * 2.0**-53

    number = len(labels)
    slope = _LARGEST_SLOPE * (2.0 * uniform(number, 1, 1) - 1.0)
    # A turn without sines, whose last digit depends on the processor.
    cosine, sine = (1.0 - slope * slope) / (1.0 + slope * slope), 2.0 * slope / (1.0 + slope * slope)
    size = 0.6 + 0.4 * uniform(number, 1, 1)
    right, down = _LARGEST_SHIFT * (2.0 * uniform(2, number, 1, 1) - 1.0)
    paper = 0.3 * uniform(number, 1, 1)
    ink = 0.5 + 0.5 * uniform(number, 1, 1)
    noise = 0.25 * (uniform(number, SIZE, SIZE) - 0.5)
    line = (np.arange(SIZE, dtype=np.float64) + 0.5) * (2.0 / SIZE) - 1.0
    across, along = line[None, None, :] - right, line[None, :, None] - down
    x, y = (cosine * across + sine * along) / size, (cosine * along - sine * across) / size
    outside = np.empty((number, SIZE, SIZE))
    for label, shape in enumerate(SHAPES.values()):
        mine = labels == label
        outside[mine] = shape(x[mine], y[mine])
    covered = np.clip(0.5 - _SHARPNESS * outside, 0.0, 1.0)
    brightness = np.clip(paper + (ink - paper) * covered + noise, 0.0, 1.0)
    return np.floor(255.0 * brightness).astype(np.uint8)
