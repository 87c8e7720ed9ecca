"""scikit-learn's handwritten digits, 8 by 8 pixels each: enlarged, and as objects in larger scenes."""

import numpy as np
from sklearn.datasets import load_digits


def digits(size: int, channels: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Images `float32[1797, size, size, channels]` from 0 to 1, and what they show; `size` is a multiple of 8."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8).astype(np.float32) / 16.0
    if size > 64:  # enlarged one by one they would fill the memory: a batch's worth is kept
        images, labels = images[:256], labels[:256]
    images = images.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    return np.repeat(images[..., None], channels, axis=-1), labels.astype(np.int32)


def scenes(
    rng: np.random.Generator, count: int, size: int, objects: int, channels: int = 3
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Images with up to `objects` digits in them, their boxes, and what they are.

    The images are `float32[count, size, size, channels]`; boxes are `float32[count, objects, 4]` as the first and last
    row and column, `(top, left, bottom, right)`, in pixels; classes are `int32[count, objects]`, -1 where nothing is.
    """
    glyphs, labels = digits(8)
    images = rng.uniform(0.0, 0.2, (count, size, size, channels)).astype(np.float32)
    boxes = np.zeros((count, objects, 4), np.float32)
    classes = np.full((count, objects), -1, np.int32)
    for image, frames, names in zip(images, boxes, classes, strict=True):
        for place in range(rng.integers(1, objects + 1)):
            scale = int(rng.integers(1, max(2, size // 24) + 1))
            extent = 8 * scale
            top, left = rng.integers(0, size - extent + 1, 2)
            which = rng.integers(len(glyphs))
            glyph = glyphs[which].repeat(scale, axis=0).repeat(scale, axis=1)
            window = image[top : top + extent, left : left + extent]
            np.maximum(window, glyph, out=window)
            frames[place] = top, left, top + extent, left + extent
            names[place] = labels[which]
    return images, boxes, classes
