"""A signal to one rank ends all ranks after the same batch."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import torch
from rank_models import Classifier, class_data
from rank_runs import program_of

from runner import Callback, Trainer
from runner.callbacks import CheckpointSaver
from runner.data import TensorLoader
from runner.distributed.ranks import get_global_rank


def train_until_signaled() -> None:
    """Train until rank 1 gets a signal, and write the last batch to a file."""

    class Terminate(Callback):
        def batch_end(self, state, logger):
            if get_global_rank() == 1 and state.timestamp.batch == 25:
                os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.005)

        def close(self, state, logger):
            Path(f"stopped{get_global_rank()}.json").write_text(json.dumps(state.timestamp.batch))

    with Trainer(
        model=Classifier(),
        train_dataloader=TensorLoader(*class_data(24), batch_size=8, shuffle=True),
        optimizers=lambda params: torch.optim.SGD(params, lr=0.1),
        max_duration="100000ba",
        callbacks=[CheckpointSaver("50000ba"), Terminate()],
        run_dir="run",
        device="cpu",
    ) as trainer:
        trainer.fit()


def test_a_signal_to_one_rank_ends_all_ranks_after_the_same_batch(run_ranks, tmp_path: Path, strict):
    start_time = time.monotonic()
    finished = run_ranks(program_of("distributed/test_clock", "train_until_signaled"), 2, check=False, env=strict)
    assert [rank.returncode for rank in finished] == [143, 143], [rank.stderr for rank in finished]
    assert time.monotonic() - start_time < 120  # all 100,000 batches would take longer
    stopped = [json.loads((tmp_path / f"stopped{rank}.json").read_text()) for rank in range(2)]
    assert stopped[0] == stopped[1] >= 25
    checkpoints = [path for path in (tmp_path / "run" / "checkpoints").iterdir() if not path.is_symlink()]
    assert [path.name.partition("-")[2] for path in checkpoints] == [f"ba{stopped[0]}"]
