"""The logger: values, records, wrong arguments, threads, and errors of destinations."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from python_process import PATIENCE, run_python
from tiny_runs import tiny_trainer

from runner import Callback, LoggerDestination, Timestamp, Trainer
from runner.callbacks import InMemoryLogger
from runner.core.destination import MetricRecord
from runner.core.logger import Logger, read_back
from runner.failures.facts import Raiser, facts_of


def make_trainer(*loggers: LoggerDestination, **arguments) -> Trainer:
    return tiny_trainer(loggers=list(loggers), **arguments)


def test_a_tensor_that_changes_after_it_was_logged_keeps_its_logged_value():
    memory = InMemoryLogger()
    with make_trainer(memory) as trainer:
        value = torch.tensor(1.0)
        trainer.logger.log_metrics({"a": value})
        value.fill_(2.0)
        trainer.logger.log_metrics({"a": value, "b": value.requires_grad_()})
    assert [value for _, value in memory.data["a"]] == [1.0, 2.0]
    assert [value for _, value in memory.data["b"]] == [2.0]


def test_nan_and_infinity_are_logged_unchanged():
    memory = InMemoryLogger()
    with make_trainer(memory) as trainer:
        trainer.logger.log_metrics({"nan": torch.tensor(float("nan")), "inf": float("-inf")})
    assert memory.data["nan"][0][1] != memory.data["nan"][0][1]
    assert memory.data["inf"][0][1] == float("-inf")


@pytest.mark.parametrize("shape", [(2,), (0,), (1, 3)])
def test_a_tensor_with_several_elements_or_none_is_an_error_with_its_key(shape):
    with make_trainer(InMemoryLogger()) as trainer, pytest.raises(ValueError, match=r"metric 'norm' has shape \("):
        trainer.logger.log_metrics({"norm": torch.zeros(shape)})


def test_a_complex_tensor_is_an_error_with_its_key():
    with make_trainer(InMemoryLogger()) as trainer, pytest.raises(TypeError, match="metric 'wave' is complex"):
        trainer.logger.log_metrics({"wave": torch.tensor(1j)})


def test_a_process_that_never_closes_its_trainer_still_writes_all_metrics(tmp_path: Path):
    program = """
import torch
from runner.callbacks import JSONLinesLogger
from runner import ClassificationModel, Trainer

data = [(torch.ones(2, 3), torch.zeros(2, dtype=torch.long))] * 7
sgd = lambda params: torch.optim.SGD(params, lr=0.1)
trainer = Trainer(model=ClassificationModel(torch.nn.Linear(3, 2), 2), train_dataloader=data, optimizers=sgd,
                  loggers=JSONLinesLogger(), run_dir="run", run_name="mine", device="cpu")
trainer.fit()
"""
    finished = run_python(["-c", program], cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (0, "")
    assert finished.stderr == "run 'mine' was not closed: use `with Trainer(...)`, or call close()\n"
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss/train/total" in record["metrics"]] == [*range(1, 8)]


@pytest.mark.parametrize("value", ["hello", "1.5", None, [1.0], 1j, np.zeros(3)], ids=str)
def test_a_value_that_is_no_number_is_an_error_that_names_the_callback(value):
    class Log(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"fine": 1.0, "mine": value})

    with pytest.raises(TypeError) as caught, make_trainer(InMemoryLogger(), callbacks=[Log()]) as trainer:
        trainer.fit()
    assert str(caught.value).startswith(f"metric 'mine'={value!r}: must be a number or a tensor with one element")
    assert caught.value.__notes__ == ["raised by 'log' at BATCH_END, in epoch 1, after 1 batch"]


@pytest.mark.parametrize("metrics", [("mine", 1.0), 1.0, "mine"])
def test_metrics_that_are_no_dict_are_an_error_with_an_example(metrics):
    message = re.escape(f"metrics={metrics!r}: must be a dict of numbers, such as {{'key': 0.5}}")
    with make_trainer(InMemoryLogger()) as trainer, pytest.raises(TypeError, match=message):
        trainer.logger.log_metrics(metrics)


def test_numbers_of_every_kind_are_logged_as_floats():
    numbers = {"bool": True, "int": 2, "float64": np.float64(1.5), "float32": np.float32(1.5), "array": np.array(3)}
    memory = InMemoryLogger()
    with make_trainer(memory) as trainer:
        trainer.logger.log_metrics({**numbers, "tensor": torch.ones(1, 1)})
    assert {key: series[0][1] for key, series in memory.data.items()} == {
        "bool": 1.0,
        "int": 2.0,
        "float64": 1.5,
        "float32": 1.5,
        "array": 3.0,
        "tensor": 1.0,
    }
    assert all(isinstance(series[0][1], float) for series in memory.data.values())


def test_read_back_keeps_records_and_their_order_for_all_dtypes():
    values = [torch.tensor(1.5), 2.0, torch.tensor(3, dtype=torch.int32), torch.tensor(0.1, dtype=torch.float64), 1.0]
    values.append(torch.tensor(2.0, dtype=torch.bfloat16))
    records = [
        MetricRecord({"a": value, "b": torch.tensor(float(i))}, i, Timestamp(), 0.0) for i, value in enumerate(values)
    ]
    read_back(records)
    assert [record.metrics["a"] for record in records] == [1.5, 2.0, 3.0, 0.1, 1.0, 2.0]
    assert [record.metrics["b"] for record in records] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert {type(value) for record in records for value in record.metrics.values()} == {float}


def test_all_metrics_of_a_batch_are_in_one_record_except_repeated_keys():
    class Records(LoggerDestination):
        def __init__(self):
            self.records: list[MetricRecord] = []

        def log_records(self, records):
            self.records += records

    class Log(Callback):
        def batch_end(self, state, logger):
            logger.log_metrics({"a": 1.0})
            logger.log_metrics({"b": torch.tensor(float(state.timestamp.batch))})

    destination = Records()
    with make_trainer(destination, callbacks=[Log(), Log()]) as trainer:
        trainer.logger._interval = 60.0  # the thread delivers nothing during this fit
        trainer.fit()
    batches = [record for record in destination.records if "loss/train/total" in record.metrics]
    assert [record.step for record in batches] == [1, 2, 3, 4]
    assert [record.metrics["b"] for record in batches] == [1.0, 2.0, 3.0, 4.0]
    # Keys that the second Log repeats are in further records.
    assert sum("b" in record.metrics for record in destination.records) == 8


def test_all_values_arrive_in_the_background_in_order():
    class Values(LoggerDestination):
        def __init__(self):
            self.values: list[tuple[int, float]] = []

        def log_metrics(self, metrics, step):
            self.values.append((step, metrics["i"]))

    destination = Values()
    with make_trainer(destination) as trainer:
        for i in range(1000):
            trainer.logger.log_metrics({"i": torch.tensor(i)}, step=i)
        deadline = time.monotonic() + PATIENCE
        while len(destination.values) < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert destination.values == [(i, float(i)) for i in range(1000)]
    assert not [thread for thread in threading.enumerate() if thread.name == "logger"], "close ends the thread"


def test_values_logged_from_several_threads_all_arrive():
    memory = InMemoryLogger()
    with make_trainer(memory) as trainer:
        threads = [
            threading.Thread(target=lambda k=k: [trainer.logger.log_metrics({f"t{k}": i}) for i in range(200)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
    assert {key: [int(value) for _, value in series] for key, series in memory.data.items()} == {
        f"t{k}": [*range(200)] for k in range(4)
    }


def test_without_destinations_nothing_is_kept():
    with make_trainer() as trainer:
        trainer.logger.log_metrics({"a": torch.zeros(())})
        assert not trainer.logger._pending and trainer.logger._thread is None
        trainer.fit()


def test_training_continues_after_a_single_warning_if_a_destination_cannot_write(caplog):
    class Full(LoggerDestination):
        def log_records(self, records):
            raise OSError(28, "No space left on device")

    memory = InMemoryLogger()
    with caplog.at_level(logging.WARNING, "runner"), make_trainer(Full(), memory) as trainer:
        trainer.fit()
        trainer.logger.flush()
        trainer.logger.log_metrics({"a": 1})
        trainer.logger.flush()
    assert len(memory.data["loss/train/total"]) == 4
    assert caplog.messages == ["full cannot write ([Errno 28] No space left on device): training continues without it"]


SQUARE = np.zeros((2, 4, 4, 3), np.uint8)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("log_images", (np.ones((2, 4, 4, 3)), "i"), "images=float64 of shape (2, 4, 4, 3): must be uint8 of shape (N"),
        ("log_images", (torch.ones(2, 3, 4, 4), "i"), "images=torch.float32 of shape (2, 3, 4, 4): must be uint8"),
        ("log_images", (np.zeros((2, 3, 4, 4), np.uint8), "i"), "images=uint8 of shape (2, 3, 4, 4): must be uint8 of"),
        ("log_images", (np.zeros((0, 4, 4, 3), np.uint8), "i"), "images=uint8 of shape (0, 4, 4, 3): must be"),
        ("log_images", ([SQUARE[0], SQUARE[0, :2]], "i"), "must be one array on the CPU"),
        ("log_images", (torch.zeros(1, 2, 2, 3, dtype=torch.uint8, device="meta"), "i"), "must be one array on the C"),
        ("log_images", (SQUARE, "i", 1, ["one"]), "captions=['one']: must be a list with a caption for each of 2"),
        ("log_images", (SQUARE, ""), "name='': must be a name to log this under"),
        ("log_images", (SQUARE, "i", 1.5), "step=1.5: must be a whole number of batches"),
        ("log_table", (["a", "b"], [[1, 2], [3]], "t"), "rows=[..., [3], ...]: a row must have a plain value for each"),
        ("log_table", (["a"], [[torch.ones(3)]], "t"), "a row must have a plain value for each of ['a']"),
        ("log_table", (["a"], torch.ones(1, 1), "t"), "arrays have tolist()"),
        ("log_table", ("a", [["x"]], "t"), "columns='a': must be a list of names"),
        ("log_table", (["a"], ["x"], "t"), "rows=['x']: must be a list with a list of values for each row"),
        ("log_table", (["a"], [[1]], None), "name=None: must be a name to log this under"),
        ("log_artifact", ("missing.txt",), "path='missing.txt': must be a complete file"),
        ("log_artifact", (None,), "path='None': must be a complete file"),
        ("log_artifact", (".",), "path='.': must be a complete file; a folder is logged file by file"),
        ("log_artifact", (__file__, "../up"), "name='../up': must be a folder in the destination, without '..'"),
        ("log_hyperparameters", ([1],), "hyperparameters=[1]: must be a dict of values by name"),
        ("log_tags", ({3: "b"},), "tags={3: 'b'}: must be a dict of values by name"),
        ("log_metrics", ({"a": 1.0}, "x"), "step='x': must be a whole number of batches"),
    ],
)
def test_a_wrong_argument_is_an_error_of_the_callback_that_logs_it(method: str, arguments: tuple, message: str):
    class Log(Callback):
        def batch_end(self, state, logger):
            getattr(logger, method)(*arguments)

    with (
        pytest.raises((ValueError, TypeError), match=re.escape(message)) as caught,
        make_trainer(InMemoryLogger(), callbacks=[Log()]) as trainer,
    ):
        trainer.fit()
    assert caught.value.__notes__[0].startswith("raised by 'log' at BATCH_END")


def test_images_and_tables_arrive_as_arrays_and_plain_values():
    memory = InMemoryLogger()
    pictures = torch.arange(48, dtype=torch.uint8).reshape(1, 4, 4, 3)
    with make_trainer(memory) as trainer:
        trainer.logger.log_images(pictures, "images", 3, ["first"])
        trainer.logger.log_table(("a", "b"), [(np.float32(0.5), torch.tensor(2)), (None, "x")], "table")
    (images,) = memory.images["images"]
    assert (images["step"], images["captions"]) == (3, ["first"])
    assert isinstance(images["images"], np.ndarray) and np.array_equal(images["images"], pictures.numpy())
    assert memory.tables["table"]["rows"] == [[0.5, 2], [None, "x"]]
    assert {type(value) for value in memory.tables["table"]["rows"][0]} == {float, int}


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("log_hyperparameters", ({"a": 1},)),
        ("log_tags", ({"a": "b"},)),
        ("log_table", (["a"], [[1]], "t")),
        ("log_images", (np.zeros((1, 2, 2, 3), np.uint8), "i")),
        ("log_artifact", (__file__,)),
    ],
)
def test_an_os_error_of_any_method_is_a_warning_and_other_errors_end_the_run(method: str, arguments: tuple, caplog):
    class Full(LoggerDestination):
        def __init__(self, error: Exception):
            self.error = error

    calls: list[tuple] = []

    def fail(self: Full, *arguments: object) -> None:
        calls.append(arguments)
        raise self.error

    setattr(Full, method, fail)
    with (
        caplog.at_level(logging.WARNING, "runner"),
        make_trainer(Full(OSError(28, "full")), InMemoryLogger()) as trainer,
    ):
        for _ in range(2):
            getattr(trainer.logger, method)(*arguments)
    assert len(calls) >= 2
    assert caplog.messages == ["full cannot write ([Errno 28] full): training continues without it"]
    with pytest.raises(KeyError, match="mine"), make_trainer(Full(KeyError("mine"))) as trainer:
        getattr(trainer.logger, method)(*arguments)


def test_an_error_in_the_code_of_a_destination_ends_the_run_unchanged():
    class Broken(LoggerDestination):
        def log_metrics(self, metrics, step):
            raise KeyError("mine")

    memory = InMemoryLogger()
    with pytest.raises(KeyError, match="mine") as caught, make_trainer(Broken(), memory, max_duration="9ep") as trainer:
        trainer.fit()
    assert len(memory.data["loss/train/total"]) >= 1, "the other destination still gets the values"
    assert trainer.state.error in (None, caught.value)


def test_a_value_that_cannot_be_read_back_is_an_error_and_later_values_still_arrive():
    memory = InMemoryLogger()
    with make_trainer(memory) as trainer:
        trainer.logger.log_metrics({"nowhere": torch.empty((), device="meta")})
        deadline = time.monotonic() + PATIENCE
        with pytest.raises(NotImplementedError, match="meta"):
            while time.monotonic() < deadline:  # the thread's error is raised by a later call
                time.sleep(0.01)
                trainer.logger.log_metrics({"meanwhile": 1.0})
        trainer.logger.log_metrics({"later": 1.0})
    assert "later" in memory.data


def test_flush_raises_an_error_of_a_destination_once():
    class Broken(LoggerDestination):
        def log_metrics(self, metrics, step):
            raise ArithmeticError("mine")

    trainer = make_trainer(Broken())
    trainer.logger.log_metrics({"a": 1})
    with pytest.raises(ArithmeticError, match="mine") as caught:
        trainer.logger.flush()
    assert caught.value.__notes__ == ["raised by 'broken', to which this was logged"]
    assert facts_of(caught.value).raisers == (Raiser("broken"),)
    trainer.logger.flush()
    trainer.close()


def test_metrics_that_a_callback_logs_in_close_arrive():
    class Late(Callback):
        def close(self, state, logger: Logger):
            logger.log_metrics({"late": torch.tensor(3.0)})

    memory = InMemoryLogger()
    with make_trainer(memory, callbacks=[Late()]):
        pass
    assert [value for _, value in memory.data["late"]] == [3.0]


def test_a_destination_has_all_metrics_before_it_is_closed():
    class Steps(LoggerDestination):
        def __init__(self):
            self.steps = []

        def log_metrics(self, metrics, step):
            self.steps.append(step)

        def close(self, state, logger):
            assert self.steps == [1, 2, 3, 4, 4]  # the last is the epoch's accuracy

    with make_trainer(Steps()) as trainer:
        trainer.fit()


def test_logging_a_tensor_does_not_wait_for_a_slow_destination():
    release = threading.Event()

    class Stuck(LoggerDestination):
        def log_metrics(self, metrics, step):
            assert release.wait(30)

    trainer = make_trainer(Stuck(), max_duration="50ep")
    try:
        trainer.fit()  # all 200 batches, while the destination still holds the first record
        assert trainer.state.timestamp.batch == 200
        assert not release.is_set()
    finally:
        release.set()
        trainer.close()


def test_a_destination_can_read_from_another_one_while_it_gets_records():
    class Lengths(LoggerDestination):
        def __init__(self):
            self.lengths: list[int] = []

        def log_metrics(self, metrics, step):
            self.lengths.append(len(memory.data["a"]))

    memory, destination = InMemoryLogger(), Lengths()

    def log_twice():
        with make_trainer(memory, destination) as trainer:
            for _ in range(2):
                trainer.logger.log_metrics({"a": 1.0})
                trainer.logger.flush()

    logging_thread = threading.Thread(target=log_twice, daemon=True)  # a deadlock must not hang the tests
    logging_thread.start()
    logging_thread.join(PATIENCE)
    assert destination.lengths == [1, 2]
