"""Which checkpoints are kept, by age and by metric; other files are left alone."""

from __future__ import annotations

import pytest
import torch
from saver_runs import fit, saved, target

from runner import Evaluator, is_complete
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader


@pytest.mark.parametrize(
    ("script", "mode", "best"),
    [
        ((3, 1, 2, 2), None, ["ep2-ba8"]),
        ((3, 1, 2, 2), "max", ["ep1-ba4"]),
        ((3, 2, 1, 2), "min", ["ep3-ba12"]),
        ((1, 1, 1, 1), "min", ["ep1-ba4"]),
        ((float("nan"), 1, float("nan"), 2), "min", ["ep2-ba8"]),
        ((3, 1, 2, 4), "min", ["ep2-ba8", "ep3-ba12"]),
    ],
)
def test_the_best_checkpoints_are_kept_beside_the_newest(tmp_path, script, mode, best: list[str]):
    fit(tmp_path, CheckpointSaver(keep=1, monitor="loss", mode=mode, keep_best=len(best)), script=script)
    assert saved(tmp_path) == {*best, "ep4-ba16"}
    assert target(tmp_path, "best") == best[0]


def test_a_metric_of_earlier_weights_does_not_rank_a_checkpoint(tmp_path):
    # Evaluations follow batches 4, 8, 12 and 16; only the last one comes before the checkpoint of its batch.
    fit(tmp_path, CheckpointSaver("3ba", keep=1, monitor="loss", keep_best=9), script=(1, 1, 9, 10))
    assert saved(tmp_path) == {"ep4-ba16"}
    assert target(tmp_path, "best") == "ep4-ba16"


@pytest.mark.parametrize("monitor", ["Accuracy", "test/loss", "MulticlassAccuracy"])
def test_the_error_for_an_unknown_metric_lists_the_metrics(tmp_path, monitor: str):
    inputs = TensorLoader(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64), batch_size=2, shuffle=False)
    evaluators = [Evaluator("first", inputs), Evaluator("second", inputs)]
    with pytest.raises(ValueError, match=rf"monitor='{monitor}' .*'first/loss'.*'second/MulticlassAccuracy'"):
        fit(tmp_path, CheckpointSaver(monitor=monitor), eval_dataloader=evaluators)
    fit(tmp_path, CheckpointSaver(monitor="second/MulticlassAccuracy"), eval_dataloader=evaluators)


def test_two_savers_cannot_share_a_folder(tmp_path):
    with pytest.raises(ValueError, match="checkpoint_saver and checkpoint_saver_2 both save there"):
        fit(tmp_path, CheckpointSaver(), CheckpointSaver("2ba", folder="./checkpoints"))
    fit(tmp_path, CheckpointSaver(keep=1), CheckpointSaver(folder="best", keep=1, monitor="loss", mode="max"))
    assert saved(tmp_path) == {"ep4-ba16"}
    assert is_complete(tmp_path / "best" / "best") and is_complete(tmp_path / "best" / "latest")


def test_another_runs_checkpoints_are_replaced_only_with_overwrite(tmp_path):
    fit(tmp_path, CheckpointSaver())
    with pytest.raises(FileExistsError, match="resume it, or set overwrite to true"):
        fit(tmp_path, CheckpointSaver())
    fit(tmp_path, CheckpointSaver(overwrite=True))


def test_leftovers_of_a_crash_are_removed(tmp_path):
    folder = tmp_path / "checkpoints"
    (folder / ".ep1-ba4.partial-123").mkdir(parents=True)
    (folder / ".latest.link").symlink_to("nowhere")
    fit(tmp_path, CheckpointSaver())
    assert not list(folder.glob(".*"))


def test_other_hidden_files_in_the_folder_are_left_alone(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / ".env").touch()
    fit(tmp_path, CheckpointSaver(folder="."))
    assert {path.name for path in tmp_path.glob(".*")} == {".git", ".env"}
