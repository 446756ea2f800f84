"""Pictures, captions and texts of samples."""

from __future__ import annotations

import numpy as np
import torch

from runner.pictures.samples import draw_images, find_images, make_captions, show_text, to_classes, to_pictures


def test_tokens_are_shown_as_bytes_or_numbers():
    tokens = torch.tensor([[*b"hello  you"], [*b"somethings"]])
    assert show_text(tokens, 0) == "hello you"
    assert show_text(tokens + 300, 0).startswith("404 401")
    assert show_text(torch.zeros(2, 3), 0) == "" == show_text(None, 0)


def test_only_tensors_with_one_or_three_channels_are_images():
    images = torch.zeros(2, 3, 4, 4)
    assert find_images({"features": torch.zeros(2, 2, 4, 4), "image": images}) is images
    assert find_images(torch.zeros(2, 2, 4, 4)) is None is find_images(None)


def test_captions_have_only_values_with_one_number_per_sample():
    classes = {"target": torch.tensor([3, 21840]), "prediction": to_classes(torch.eye(5)[:2], 2)}
    assert make_captions(classes) == ["target 3, prediction 0", "target 21840, prediction 1"]
    assert make_captions({"loss": [2.60349, 1.0], **classes}, [7, None]) == [
        "sample 7: loss 2.603, target 3, prediction 0",
        "sample ?: loss 1, target 21840, prediction 1",
    ]
    without = {"target": None, "prediction": to_classes(torch.zeros(2, 3, 4), 2)}
    assert make_captions(without) == []
    assert make_captions(without, [7, 8]) == ["sample 7", "sample 8"]


def test_the_caption_of_a_single_score_gives_the_score():
    scores = to_classes(torch.tensor([[0.25], [4.0]]), 2)
    assert make_captions({"prediction": scores}) == ["prediction 0.25", "prediction 4"]


def test_brightness_is_stretched_only_outside_of_0_to_1():
    normalized = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    normalized[1] *= 100
    pictures = to_pictures(normalized)
    assert pictures.min(axis=(1, 2, 3)).tolist() == [0, 0]
    assert pictures.max(axis=(1, 2, 3)).tolist() == [255, 255]
    order = normalized[0].permute(1, 2, 0).flatten().argsort().numpy()
    assert (np.diff(pictures[0].ravel()[order].astype(int)) >= 0).all()
    dark = torch.full((1, 1, 2, 2), 0.2)
    assert (to_pictures(dark) == 51).all()
    assert to_pictures(5 * dark + 1).max() == 0  # no contrast to stretch
    assert to_pictures(torch.full((1, 1, 1, 1), 7, dtype=torch.uint8)).item() == 7
    values = torch.tensor([torch.nan, -1.0, 1.0, torch.inf]).reshape(1, 2, 2, 1)
    assert to_pictures(values, channels_last=True).tolist() == [[[[128], [0]], [[255], [128]]]]


def test_gray_and_colored_images_are_drawn():
    for channels in (1, 3):
        drawn = draw_images(torch.rand(5, channels, 4, 4), ["$x"] * 5, "t", "png")
        assert drawn.startswith(b"\x89PNG")
