"""The record of a hand-written loop: its folder and result, MLflow, ranks, and continuing after a crash."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from python_process import run_python
from stores import query
from torch import nn

from runner import Recorder
from runner.callbacks import InMemoryLogger
from runner.checkpoints.digest import read_digests
from runner.failures.errors import WrongConfig
from runner.records.listing import SavedFolder
from runner.records.record import Record
from runner.records.result import Result, read_result
from runner.verbs.compare import difference

LOOP = '''
"""A hand-written loop, which can continue from its own checkpoint."""
import os, signal, sys
import torch
from torch import nn
import helper
from runner import Recorder
from runner.callbacks import InMemoryLogger

ends, after = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if after:
    model.load_state_dict(torch.load("own.pt", weights_only=True))
recorder = Recorder({"seed": 0, "lr": 0.1, "model": {"bias": True}}, folder="run", after_batch=after)
recorder.watch(model, optimizer)
for number in range(after + 1, 7):
    inputs = torch.full((2, 3), float(number))
    loss = model(inputs).square().mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    recorder.batch(loss, inputs, lr=0.1)
    if number == 3:
        torch.save(model.state_dict(), "own.pt")
    if number == 5 and ends == "killed":
        recorder._logger.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    if number == 5 and ends == "failed":
        raise ArithmeticError("it fails")
recorder.log({"eval/accuracy": torch.tensor(0.75), "eval/loss": 0.5})
'''


def result_of(folder: Path) -> Result:
    """Return the result in a run's folder."""
    result = read_result(folder)
    assert result is not None
    return result


def run_loop(folder: Path, ends: str = "finished", after: int = 0) -> int:
    """Run the loop in a process, and return its exit code; `ends` can also be "killed" or "failed"."""
    (folder / "loop.py").write_text(LOOP)
    (folder / "helper.py").write_text("VALUE = 1\n")
    return run_python(["loop.py", ends, str(after)], cwd=folder).returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of a loop that ran to its end."""
    folder = tmp_path_factory.mktemp("whole")
    assert run_loop(folder) == 0
    return folder


def test_a_recorded_loop_writes_a_run_folder_and_logs_to_mlflow(whole: Path):
    run = whole / "run"
    result = result_of(run)
    assert (result.status, result.batches, result.metrics) == ("FINISHED", 6, {"eval/accuracy": 0.75, "eval/loss": 0.5})
    assert (result.objective_name, result.objective, result.lower) == ("eval/accuracy", 0.75, ["eval/loss"])
    assert result.seconds > 0 and result.name == "run"
    record = Record(run)
    assert record.config == {"seed": 0, "lr": 0.1, "model": {"bias": True}} and record.is_own
    assert record.environment["command"].endswith("loop.py finished 0")
    assert {name for name in record.code if not name.startswith("runner/")} == {"loop.py", "helper.py"}
    store = whole / "outputs" / "mlflow.db"
    losses = query(store, "SELECT step FROM metrics WHERE key = 'loss/train/total' ORDER BY step")
    assert losses == [(number,) for number in range(1, 7)]
    latest = dict(query(store, "SELECT key, value FROM latest_metrics WHERE key NOT LIKE 'system%'"))
    assert latest.keys() >= {"lr", "metrics/eval/accuracy", "loss/eval/total", "best/eval/accuracy"}
    assert dict(query(store, "SELECT key, value FROM params")).items() >= {"lr": "0.1", "model.bias": "true"}.items()
    assert query(store, "SELECT status FROM runs") == [("FINISHED",)]
    assert len(read_digests(run)) == 6


def test_a_killed_loop_that_continues_equals_an_uninterrupted_one(whole: Path, tmp_path: Path):
    killed = tmp_path
    assert run_loop(killed, "killed") == -signal.SIGKILL
    assert SavedFolder(killed / "run", read_result(killed / "run")).status == "cut off"
    assert run_loop(killed, after=3) == 0
    assert difference(whole / "run", killed / "run").is_none
    assert [entry["batch"] for entry in read_digests(killed / "run")] == [1, 2, 3, 4, 5, 6]
    assert result_of(killed / "run").status == "FINISHED"
    assert Record(killed / "run").began_after == 3 and (killed / "run" / "sessions" / "1").is_dir()
    losses = "SELECT step, value FROM metrics WHERE key = 'loss/train/total' ORDER BY step"
    store = Path("outputs", "mlflow.db")
    assert query(killed / store, losses) == query(whole / store, losses)  # no batch twice
    assert query(killed / store, "SELECT status FROM runs") == [("FINISHED",)]  # one run in MLflow


def test_an_uncaught_exception_records_the_loop_as_failed(tmp_path: Path):
    assert run_loop(tmp_path, "failed") == 1
    result = result_of(tmp_path / "run")
    assert (result.status, result.batches) == ("FAILED", 5)
    assert result.message == "ArithmeticError: it fails" and "loop.py" in result.trace
    assert query(tmp_path / "outputs" / "mlflow.db", "SELECT status FROM runs") == [("FAILED",)]


@pytest.mark.parametrize(
    ("error", "status"), [(ValueError("wrong"), "FAILED"), (KeyboardInterrupt(), "KILLED"), (None, "FINISHED")]
)
def test_a_with_block_records_the_status_at_its_end(tmp_path: Path, error: BaseException | None, status: str):
    def loop() -> None:
        with Recorder(folder=tmp_path / "run", destinations=[]) as recorder:
            recorder.batch(1.0)
            if error is not None:
                raise error

    if error is None:
        loop()
    else:
        with pytest.raises(type(error)):
            loop()
    assert result_of(tmp_path / "run").status == status


@pytest.mark.parametrize(("loss", "accuracy"), [(float("nan"), 0.5), (1.0, float("inf"))])
def test_a_loop_with_a_loss_or_objective_that_is_not_finite_is_diverged(tmp_path: Path, loss: float, accuracy: float):
    with Recorder(folder=tmp_path / "run", destinations=[]) as recorder:
        recorder.batch(torch.tensor(loss))
        recorder.log({"eval/accuracy": accuracy})
    assert result_of(tmp_path / "run").status == "DIVERGED"


def test_any_mapping_is_recorded_as_a_plain_config(tmp_path: Path):
    config = {"device": torch.device("cpu"), "sizes": (1, 2), 3: {"rate": 1e-3}, "password": "http://me:secret@host"}
    with Recorder(config, folder=tmp_path / "run", destinations=[]):
        pass
    recorded = Record(tmp_path / "run").config
    assert recorded["device"] == "cpu" and recorded["sizes"] == [1, 2] and recorded["3"] == {"rate": 0.001}
    assert "secret" not in (tmp_path / "run" / "config.yaml").read_text()


def make_recorder(folder: Path, **arguments: Any) -> Recorder:
    return Recorder({"lr": 0.1}, folder=folder, destinations=[], **arguments)


def test_a_recorder_refuses_wrong_arguments_and_folders_and_verbs_refuse_its_runs(tmp_path: Path, run_here: Any):
    with pytest.raises(TypeError, match=r"config=.* must be a mapping .*vars\(args\)"):
        Recorder(object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="after_batch=3: must be 0 for a new run"):
        Recorder(after_batch=3)
    with pytest.raises(ValueError, match="holds no run to continue after batch 3"):
        make_recorder(tmp_path / "none", after_batch=3)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "config.yaml").write_text("mine")
    with pytest.raises(WrongConfig, match="which no run wrote"):
        make_recorder(tmp_path / "full")
    with make_recorder(tmp_path / "run") as recorder:
        with pytest.raises(ValueError, match=r"loss=\(2,\): .* give one number, its mean"):
            recorder.batch(torch.zeros(2))
        with pytest.raises(ValueError, match="name='accuracy': must be label/metric"):
            recorder.log({"accuracy": 0.5})
    with pytest.raises(ValueError, match="holds a run with another config"):
        Recorder({"lr": 0.2}, folder=tmp_path / "run", destinations=[])
    with Recorder({"lr": 0.2}, folder=tmp_path / "run", destinations=[], after_batch=1):
        pass  # a run that continues may change its config
    for verb in ("resume", "rerun", "eval", "predict"):
        refused = run_here(verb, "run", code=2)
        assert "runner.Recorder recorded this run of a custom training loop" in refused.err, verb


def test_recorded_loops_are_listed_and_compared_like_runs(tmp_path: Path, run_here: Any):
    for rate, gain in ((0.1, 0.0), (0.2, 0.1)):
        for seed in range(6):
            config = {"seed": seed, "optimizer": {"lr": rate}}
            with Recorder(config, folder=f"outputs/{rate}-{seed}", destinations=[]) as recorder:
                recorder.batch(1.0)
                recorder.log({"eval/accuracy": 0.5 + gain + seed / 100})
    assert "6 of 12 runs" in run_here("runs", "accuracy>0.56", "optimizer.lr=0.2", code=0).out
    assert "seed=3 lr=0.2" in run_here("runs", code=0).out
    verdict = json.loads(run_here("verdict", "optimizer.lr=0.1", "optimizer.lr=0.2", "--json", code=0).out)
    assert verdict["result"]["comparisons"][0]["verdict"] == "better"
    table = run_here("table", "--rows", "optimizer.lr", code=0).out
    assert "0.525" in table and "0.625" in table
    with Recorder({"seed": 9}, folder="outputs/longer", destinations=[]) as recorder:
        for _ in range(2):
            recorder.batch(1.0)
        recorder.log({"eval/accuracy": 0.9})
    refused = run_here("verdict", "outputs/0.1-0", "outputs/longer", code=125)
    assert "have different budgets: 1ba and 2ba" in refused.err


def test_only_rank_zero_records(tmp_path: Path, run_ranks: Any):
    def program() -> None:
        import gc

        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        from runner import Recorder

        dist.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recorder = Recorder({"seed": 0}, destinations=[])
        recorder.watch(model, optimizer)
        loss = torch.zeros(())
        for _ in range(3):
            inputs = torch.full((1, 2), dist.get_rank() + 1.0)
            loss = model(inputs).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            recorder.batch(loss, inputs)
        recorder.log({"eval/loss": loss})
        recorder.close()
        assert (recorder.folder is None) is (dist.get_rank() == 1)
        dist.barrier()
        del model, optimizer, recorder
        gc.collect()  # ends the threads of DDP, which keep the group from being destroyed now and then
        dist.destroy_process_group()

    run_ranks(program)
    (folder,) = tmp_path.glob("outputs/2*/*")
    assert (result_of(folder).status, result_of(folder).batches) == ("FINISHED", 3)
    assert Record(folder).ranks == 2
    lines = read_digests(folder)
    assert [line["batch"] for line in lines] == [1, 2, 3]
    assert {*lines[0]["tensors"]["weights"]} == {"weight", "bias"}  # without DDP's prefix


def test_digests_are_written_at_the_interval(tmp_path: Path):
    model = nn.Linear(2, 1)
    with Recorder(folder=tmp_path / "run", destinations=[]) as recorder:
        recorder.watch(model, interval=2)
        for _ in range(5):
            recorder.batch(model(torch.ones(1, 2)).sum())
    lines = read_digests(tmp_path / "run")
    assert [line["batch"] for line in lines] == [2, 4]
    assert "content" not in lines[0] and lines[0]["tensors"]["optimizer"] == {}


def test_a_forked_process_can_neither_end_a_run_nor_record_into_its_folder(tmp_path: Path):
    recorder = make_recorder(tmp_path / "run")
    child = os.fork()
    if not child:
        recorder.close()
        try:
            make_recorder(tmp_path / "run")
        except WrongConfig as error:
            os._exit(0 if "another process is training this run" in str(error) else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert result_of(tmp_path / "run").status == "RUNNING"
    recorder.close()
    assert result_of(tmp_path / "run").status == "FINISHED"


def test_every_batch_of_a_fast_loop_is_logged(tmp_path: Path):
    memory = InMemoryLogger()
    with Recorder(folder=tmp_path / "run", destinations=[memory]) as recorder:
        loss = torch.zeros(())  # the same tensor for all batches, as in a captured graph
        for number in range(1000):
            loss.fill_(number)
            recorder.batch(loss, **({"lr": 0.5} if number == 500 else {}))
    steps, losses = memory.get_timeseries("loss/train/total")
    assert steps == [*range(1, 1001)] and losses == [*map(float, range(1000))]
    assert memory.get_timeseries("lr") == ([501], [0.5])


def test_a_closed_recorder_takes_no_more_values(tmp_path: Path):
    with make_recorder(tmp_path / "run") as recorder:
        recorder.batch(1.0)
    for call in (lambda: recorder.batch(1.0), lambda: recorder.log({"eval/loss": 1.0})):
        with pytest.raises(RuntimeError, match="the recorder is closed; make a new one"):
            call()
    recorder.close()  # closing twice has no effect
    assert result_of(tmp_path / "run").status == "FINISHED"


def test_a_recorder_that_cannot_begin_unlocks_its_folder(tmp_path: Path):
    class Broken(InMemoryLogger):
        def init(self, state, logger):
            raise ValueError("no connection")

    for status in ("FAILED", "FINISHED"):
        destinations = [Broken()] if status == "FAILED" else []
        try:
            Recorder(folder=tmp_path / "run", destinations=destinations).close()
        except ValueError as error:
            assert "no connection" in str(error)
        assert result_of(tmp_path / "run").status == status


def test_a_loop_continues_when_its_digests_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with make_recorder(tmp_path / "run") as recorder:
        recorder.watch(nn.Linear(2, 1))
        (tmp_path / "run" / "digests.jsonl").mkdir()
        for _ in range(2):
            recorder.batch(1.0)
        (tmp_path / "run" / "digests.jsonl").rmdir()
    assert result_of(tmp_path / "run").batches == 2
    assert len([record for record in caplog.records if "digests cannot be written" in record.message]) == 1


def test_compare_says_how_a_loop_writes_digests(tmp_path: Path, run_here: Any):
    for name in ("a", "b"):
        with make_recorder(tmp_path / name) as recorder:
            recorder.batch(1.0)
    assert "recorder.watch writes them" in run_here("compare", "a", "b", code=0).out
