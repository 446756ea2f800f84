"""What the server of data workers imports for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from python_process import run_python

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


WORKER = """
import multiprocessing, sys
from runner.distributed.fork_server import start_fork_server

def show():
    print([name in sys.modules for name in ("torch", "torchvision", "datasets")], flush=True)

if __name__ == "__main__":
    start_fork_server(sys.argv[1:])
    worker = multiprocessing.get_context("forkserver").Process(target=show)
    worker.start()
    worker.join()
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("targets", "imported"),
    [
        (["own.load"], [True, False, False]),
        (["runner.data.hf.chat.load_chat"], [True, False, True]),
        (["own.load", "torchvision.transforms.v2.RandAugment"], [True, True, False]),
    ],
)
def test_the_server_imports_libraries_that_targets_need(targets: list[str], imported: list[bool], tmp_path: Path):
    pytest.importorskip("torchvision")
    pytest.importorskip("datasets")
    (tmp_path / "worker.py").write_text(WORKER)
    finished = run_python(["worker.py", *targets], real=True, cwd=tmp_path, check=True)
    assert finished.stdout == f"{imported}\n"
