"""The config of an evaluation is made from that of the run whose weights it loads."""

from __future__ import annotations

from composed_configs import small_experiment
from tiny_runs import tiny_trainer

from runner.cli.command import Command
from runner.history.weights import with_saved_weights


def test_an_evaluation_leaves_out_callbacks_for_training(tmp_path):
    checkpoint = tmp_path / "checkpoint"
    with tiny_trainer() as trainer:
        trainer.save_checkpoint(checkpoint)
    names = {"load_checkpoint": "LoadCheckpoint", "crash_bundle": "CrashBundle", "speed_monitor": "SpeedMonitor"}
    sections = {key: {"_target_": f"runner.callbacks.{name}"} for key, name in names.items()}
    experiment = small_experiment(callbacks=sections)
    command = Command.of("eval", str(checkpoint))
    evaluation, tags = with_saved_weights(command, experiment, str(checkpoint), None)
    assert [*evaluation.callbacks] == ["speed_monitor"]
    assert evaluation.trainer.get("load_path") == tags["runner.evaluates"] == str(checkpoint)
