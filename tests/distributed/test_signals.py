"""Signals during `fit`: the batch is finished, a checkpoint is written, and the process ends with the right code."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_runs import make_data, tiny_trainer

from runner import Callback, Event, Trainer, is_complete
from runner.callbacks import CheckpointSaver
from runner.checkpoints.files import find_checkpoint, read_file
from runner.checkpoints.snapshot import read_timestamp
from runner.failures.errors import SessionOver

SIGNALS = [signal.SIGTERM, signal.SIGINT]
OTHERS = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]


class Sends(Callback):
    """Sends this process a signal at one event of one batch, and records the events from there on."""

    def __init__(self, number: int, event: str = "before_forward", batch: int = 2, times: int = 1):
        self.number, self.event, self.batch, self.times = number, event, batch, times
        self.events: list[str] = []
        self.closed: list[str] = []
        self.handlers: list[Any] = []

    def run_event(self, event, state, logger):
        if self.events:
            self.events.append(event.name)
        if event.value == self.event and state.timestamp.batch == self.batch and not self.events:
            self.events.append(event.name)
            for _ in range(self.times):
                os.kill(os.getpid(), self.number)

    def close(self, state, logger):
        self.closed.append(type(state.error).__name__)
        self.handlers = [signal.getsignal(number) for number in SIGNALS]

    def post_close(self):
        self.closed.append("post_close")


def make_trainer(run_dir: Path, *callbacks: Callback, **arguments: Any) -> Trainer:
    data = make_data(8)
    defaults = {"train_dataloader": data, "eval_dataloader": data, "max_duration": "3ep", "run_dir": run_dir}
    return tiny_trainer(*callbacks, **(defaults | arguments))


def handlers() -> list[Any]:
    return [signal.getsignal(number) for number in SIGNALS]


@pytest.mark.parametrize("number", [*SIGNALS, *OTHERS])
def test_a_signal_lets_the_batch_finish_and_a_checkpoint_be_written(tmp_path: Path, number: int):
    before = handlers()
    sends, saver = Sends(number), CheckpointSaver()
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        make_trainer(tmp_path, sends, saver).fit()
    assert handlers() == before
    assert [signal.getsignal(other) for other in OTHERS] == [signal.SIG_DFL] * 3
    if number == signal.SIGINT:
        assert type(raised.value) is KeyboardInterrupt
    else:
        assert type(raised.value) is SystemExit and raised.value.code == 128 + number
    assert sends.events[-3:] == ["AFTER_TRAIN_BATCH", "BATCH_END", "BATCH_CHECKPOINT"]
    assert sends.events.count("BATCH_END") == 1
    assert sends.closed == [type(raised.value).__name__, "post_close"]
    checkpoint = tmp_path / "checkpoints" / "ep0-ba3"
    assert is_complete(checkpoint) and saver.latest is not None and saver.latest.name == "ep0-ba3"
    assert read_file(checkpoint, "state.pt")["timestamp"]["batch"] == 3


def test_a_run_that_pauses_at_the_end_of_its_session_resumes_bit_for_bit(tmp_path: Path):
    torch.manual_seed(0)
    with pytest.raises(SessionOver) as raised:
        make_trainer(tmp_path / "run", CheckpointSaver(), max_duration="1000000ep", session="0.05s").fit()
    assert raised.value.code == 0
    paused = find_checkpoint(tmp_path / "run")
    end = f"{read_timestamp(paused).batch + 3}ba"
    with make_trainer(tmp_path / "run", CheckpointSaver(), max_duration=end, resume_path=paused) as resumed:
        resumed.fit()
    torch.manual_seed(0)
    with make_trainer(tmp_path / "whole", max_duration=end) as whole:
        whole.fit()
    weights = (trainer.state.unwrapped_model.state_dict().values() for trainer in (resumed, whole))
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize("callbacks", [(), (CheckpointSaver(weights_only=True),)])
def test_a_session_that_would_lose_its_work_is_refused(tmp_path: Path, callbacks: tuple[Callback, ...]):
    with pytest.raises(ValueError, match="session='1h': nothing saves a checkpoint"):
        make_trainer(tmp_path, *callbacks, session="1h")
    with pytest.raises(ValueError, match="session='2ep': must be wall-clock time"):
        make_trainer(tmp_path, CheckpointSaver(), session="2ep")


def test_signals_that_are_ignored_or_have_another_handler_do_not_end_training(tmp_path: Path):
    """For example, nohup ignores SIGHUP, and submitit handles SIGUSR2."""
    received = []
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    user2 = signal.signal(signal.SIGUSR2, lambda number, frame: received.append(number))
    try:
        for number in (signal.SIGHUP, signal.SIGUSR2):
            make_trainer(tmp_path, Sends(number), max_duration="1ep").fit()
    finally:
        signal.signal(signal.SIGHUP, hangup)
        signal.signal(signal.SIGUSR2, user2)
    assert received == [signal.SIGUSR2]


def test_a_second_sigterm_changes_nothing_until_everything_is_closed(tmp_path: Path):
    class SendsAgain(Callback):
        def close(self, state, logger):
            os.kill(os.getpid(), signal.SIGTERM)

    before = handlers()
    sends = Sends(signal.SIGTERM, times=3)
    with pytest.raises(SystemExit) as raised:
        make_trainer(tmp_path, SendsAgain(), sends, CheckpointSaver()).fit()
    assert raised.value.code == 143 and sends.closed == ["SystemExit", "post_close"]
    assert is_complete(tmp_path / "checkpoints" / "ep0-ba3")
    assert sends.handlers != before == handlers(), "the handlers must be restored after closing, not before"


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path):
    sends = Sends(signal.SIGINT, times=2)
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, sends, CheckpointSaver()).fit()
    assert sends.events == ["BEFORE_FORWARD"], "the batch must not be finished"
    assert sends.closed == ["KeyboardInterrupt", "post_close"]
    assert not (tmp_path / "checkpoints" / "ep0-ba3").exists(), "there must be no checkpoint of half a batch"


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("event", [Event.EVAL_START, Event.EPOCH_END, Event.FIT_END, Event.EPOCH_CHECKPOINT])
def test_a_signal_at_the_end_of_training_is_not_lost(tmp_path: Path, number: int, event: Event):
    sends, saver = Sends(number, event.value, batch=4), CheckpointSaver()
    with pytest.raises((SystemExit, KeyboardInterrupt)) as raised:
        make_trainer(tmp_path, sends, saver, max_duration="1ep").fit()
    assert type(raised.value) is {signal.SIGTERM: SystemExit, signal.SIGINT: KeyboardInterrupt}[signal.Signals(number)]
    assert sends.events[-1] == "FIT_END" and sends.closed[-1] == "post_close"
    assert is_complete(tmp_path / "checkpoints" / "ep1-ba4")


def test_the_trainer_handles_signals_only_during_fit(tmp_path: Path):
    before = handlers()
    during = []

    class HandlerRecorder(Callback):
        def batch_end(self, state, logger):
            during.append(handlers())

        def eval_standalone_start(self, state, logger):
            assert handlers() == before

    with make_trainer(tmp_path, HandlerRecorder(), max_duration="1ba") as trainer:
        assert handlers() == before
        trainer.eval()
        trainer.fit()
        assert handlers() == before
    assert len(during) == 1 and all(new != old for new, old in zip(during[0], before, strict=True))


def test_the_user_s_handler_is_restored_even_after_an_error(tmp_path: Path):
    def mine(number, frame): ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        for error in (None, ValueError("mine")):

            class Fails(Callback):
                error: BaseException | None = None

                def batch_end(self, state, logger):
                    if self.error is not None:
                        raise self.error

            fails = Fails()
            fails.error = error
            trainer = make_trainer(tmp_path, fails, max_duration="1ba")
            try:
                trainer.fit()
            except ValueError as raised:
                assert raised is error
            assert signal.getsignal(signal.SIGTERM) is mine
            trainer.close()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_fit_in_a_thread_installs_no_handlers(tmp_path: Path):
    before, during = handlers(), []

    class HandlerRecorder(Callback):
        def batch_end(self, state, logger):
            during.append(handlers())

    def fit() -> None:
        with make_trainer(tmp_path, HandlerRecorder(), max_duration="2ba") as trainer:
            trainer.fit()

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join(60)
    assert during == [before, before]


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_command_ended_by_a_signal_saves_a_checkpoint_and_exits_with_128_plus_its_number(
    run_app, tmp_path: Path, number: int, exit_code: int
):
    (tmp_path / "sends.py").write_text(
        "import os\n"
        "from runner import Callback\n"
        "class Sends(Callback):\n"
        "    def __init__(self, number): self.number = number\n"
        "    def before_forward(self, state, logger):\n"
        "        if state.timestamp.batch == 2: os.kill(os.getpid(), self.number)\n"
        "    def close(self, state, logger): print('closed', type(state.error).__name__, state.timestamp.batch)\n"
    )
    finished = run_app(
        "callbacks=[checkpoint_saver]",
        "+callbacks.sends._target_=sends.Sends",
        f"+callbacks.sends.number={int(number)}",
        "hydra.run.dir=run",
        exit_code=exit_code,
    )
    assert f"closed {'SystemExit' if number == signal.SIGTERM else 'KeyboardInterrupt'} 3" in finished.stdout
    assert is_complete(tmp_path / "run" / "checkpoints" / "ep0-ba3")
    assert "Traceback" not in finished.stderr
