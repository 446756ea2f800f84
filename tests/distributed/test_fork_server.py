"""What the server of data workers imports for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

OWN = """
import os, sys
from pathlib import Path
if "runner.program.job" not in sys.modules:  # not in the process that trains
    Path(f"worker-{os.getpid()}").write_text(str("torchvision" in sys.modules))
def flip(image): return image.rotate(180)
"""


@pytest.mark.slow
def test_workers_of_images_start_with_torchvision_imported(run_app: Any, tmp_path: Path):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("torchvision")
    for folder in ("train/cat", "train/dog", "val/cat", "val/dog"):
        (tmp_path / folder).mkdir(parents=True)
        image.new("RGB", (8, 8)).save(tmp_path / folder / "0.png")
    (tmp_path / "own.py").write_text(OWN)
    data = ["data=imagefolder", "data.path=.", "data.batch_size=2", "data.num_workers=2", "data.image_size=8"]
    data += ["data.transforms=[{_target_: own.flip, _partial_: true}]", "data.eval_image_size=8"]
    run_app(*data, "model=torchvision", "model.module.name=mobilenet_v3_small", "trainer.max_duration=1ba", real=True)
    assert {file.read_text() for file in tmp_path.glob("worker-*")} == {"True"}
