"""A Trainer is closed once, and runs no events afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_runs import HEARD, C, make_trainer, names_at

from runner import Callback, Event
from runner.data import TensorLoader


def test_hooks_are_closed_once_however_often_close_is_called():
    with make_trainer(callbacks=[C("c")]) as trainer:
        trainer.fit()
        assert not names_at("close")
        trainer.close()
        trainer.close()
    trainer.engine.close()
    assert names_at("close") == names_at("post_close") == ["c"]


@pytest.mark.parametrize("has_callback", [True, False])
def test_a_closed_trainer_refuses_events_and_all_use(has_callback: bool, tmp_path: Path):
    data = TensorLoader(torch.ones(6, 3), torch.zeros(6, dtype=torch.long), batch_size=2, shuffle=False)
    trainer = make_trainer(callbacks=[C("c")] if has_callback else [])
    trainer.fit()
    trainer.close()
    HEARD.clear()
    trained = trainer.state.timestamp.batch
    for event in ("fit_start", Event.BATCH_END, "EVAL_START"):
        with pytest.raises(RuntimeError, match=r"came after close\(\); make a new Trainer"):
            trainer.engine.run_event(event)
    uses = (
        trainer.fit,
        lambda: trainer.fit("1ep", reset_time=True),
        trainer.eval,
        lambda: trainer.eval(data, checkpoint=tmp_path / "missing"),
        lambda: trainer.predict(data),
        lambda: trainer.save_checkpoint(tmp_path / "saved"),
    )
    for use in uses:
        with pytest.raises(RuntimeError, match=r"^this Trainer is closed, .*; make a new one$"):
            use()
    assert trainer.state.timestamp.batch == trained and HEARD == [] and not [*tmp_path.iterdir()]
    trainer.close()


def test_a_callback_that_closes_the_trainer_ends_training():
    class Closes(Callback):
        def batch_end(self, state, logger):
            trainer.close()

    trainer = make_trainer(callbacks=[Closes(), C("c")])
    with pytest.raises(RuntimeError, match="came after close"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 1
    assert names_at("close") == ["c"]
