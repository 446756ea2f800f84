"""Closing happens once, and nothing runs after it."""

from __future__ import annotations

import pytest
import torch
from engine_runs import HEARD, C, make_trainer, names_at

from runner import Callback, Event
from runner.data import TensorLoader


def test_close_happens_once():
    with make_trainer(callbacks=[C("c")]) as trainer:
        trainer.fit()
        assert not names_at("close")
        trainer.close()
        trainer.close()
    trainer.engine.close()
    assert names_at("close") == names_at("post_close") == ["c"]


@pytest.mark.parametrize("listened", [True, False])
def test_a_closed_engine_refuses_events(listened: bool):
    data = TensorLoader(torch.ones(6, 3), torch.zeros(6, dtype=torch.long), batch_size=2, shuffle=False)
    trainer = make_trainer(callbacks=[C("c")] if listened else [])
    trainer.close()
    HEARD.clear()
    for event in ("fit_start", Event.BATCH_END, "EVAL_START"):
        with pytest.raises(RuntimeError, match=r"came after close\(\); make a new Trainer"):
            trainer.engine.run_event(event)
    for use in (trainer.fit, trainer.eval, lambda: trainer.predict(data)):
        with pytest.raises(RuntimeError, match="came after close"):
            use()
    assert trainer.state.timestamp.batch == 0 and HEARD == []


def test_a_handler_may_close_the_trainer_and_training_ends_there():
    class Closes(Callback):
        def batch_end(self, state, logger):
            trainer.close()

    trainer = make_trainer(callbacks=[Closes(), C("c")])
    with pytest.raises(RuntimeError, match="came after close"):
        trainer.fit()
    assert trainer.state.timestamp.batch == 1
    assert names_at("close") == ["c"]
