"""Wrong commands: each is one message that shows the fault and what to write in its place, and leaves nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
from main_runs import query, run_folders
from tiers import one_in

# What is wrong, and what the message must hold: the fault as typed, and what to write in its place.
WRONG: dict[str, tuple[str, ...]] = {
    # words that are in another place
    "speed_monitor": ("speed_monitor", "+callbacks=speed_monitor"),
    "+algorithms=speed_monitor": ("algorithms=speed_monitor", "+callbacks=speed_monitor"),
    "batch_size=4": ("batch_size", "data.batch_size"),
    # groups and choices
    "modle=mlp": ("modle", "did you mean 'model'"),
    "model=mpl": ("model=mpl", "did you mean 'mlp'"),
    "model=": ("model=", "mlp, resnet18, resnet8"),
    "scheduler=cosine": ("scheduler=cosine", "write scheduler=cosine_annealing"),
    "trainer=fast": ("trainer=fast", "default"),
    "experiment=digits_plan": ("experiment=digits_plan", "did you mean 'digits_plain'"),
    "+callbacks=speed_monitr": ("callbacks=speed_monitr", "did you mean 'speed_monitor'"),
    "callbacks=null": ("callbacks=null", "none"),
    "callbacks=progress_bar,lr_monitor": ("callbacks=progress_bar,lr_monitor", "[progress_bar,lr_monitor]"),
    # words of other tools
    "--resume x": ("--resume", "Keys are written without dashes: resume=x"),
    "version": ("version: has no key", "did you mean --version?"),
    "my_config.yaml": ("my_config.yaml", "experiment=my_config"),
    "model=elsewhere/x.yaml": ("model=elsewhere/x.yaml", "conf/model/", "--config-dir"),
    "-m hydra.sweeper=optuna seed=0,1": ("hydra.sweeper=optuna", "hydra/sweeper=optuna"),
    "hydra/job_logging=disabled": ("hydra/job_logging=disabled", "~callbacks.console_summary ~callbacks.progress_bar"),
    "optimizer.lr=${oc.env:NO_SUCH_RATE,0.2}": ("optimizer.lr='0.2'", "${oc.decode:${oc.env:NAME}}"),
    "+callbacks.mine._target_=failing.Mine": ("KeyError: 'key'", "failing.py:1"),
    "-m sweep=optuna_tpe ~hydra.sweeper.params": ("~hydra.sweeper.params", "hydra.sweeper.params=null"),
    "-m sweep=optuna_tpe ~hydra.sweeper.params.optimizer.lr": ("optimizer.lr", "hydra.sweeper.params=null"),
    "hydra/launcher=slurm": ("hydra/launcher=slurm", "basic"),
    "+model=mlp": ("+model", "model=", "without the +"),
    "~data": ("data=None", "conf/data/"),
    "~seed": ("seed",),
    # keys
    "optimizer.lrr=1": ("optimizer.lrr", "did you mean 'lr'"),
    "experiment=digits_plain optimizer=adamw optimizer.momentum=0.9": ("optimizer.momentum", "betas"),
    "+trainer.typo=1": ("trainer.typo", "runner.Trainer has no such argument"),
    "+trainer.train_dataloader=1": ("trainer.train_dataloader", "other groups"),
    "+trainer.max_duration=2ep": ("+trainer.max_duration", "without the +"),
    "seed.x=1": ("seed.x", "single value"),
    "callbacks.speed_monitor.window_size=3": ("callbacks.speed_monitor.window_size", "+callbacks=speed_monitor"),
    "~callbacks.speed_monitor": ("callbacks.speed_monitor", "not part of this run"),
    # classes
    "+callbacks.mine=3": ("callbacks.mine=3", "_target_"),
    "callbacks.mlflow_logger=null": ("callbacks.mlflow_logger=None", "~callbacks."),
    "+callbacks.mine._target_=nowhere.Mine": ("callbacks.mine._target_='nowhere.Mine'", "no module 'nowhere'"),
    "+callbacks.mine._target_=runner.callbacks.SpeedMonitr": (
        "_target_='runner.callbacks.SpeedMonitr'",
        "'SpeedMonitor'",
    ),
    "+callbacks.mine._target_=own.Greter": ("_target_='own.Greter'", "did you mean 'Greeter'"),
    "+callbacks.mine._target_=needy.Mine": ("_target_='needy.Mine'", "package 'not_installed_at_all'"),
    "+callbacks.mine._target_=torn.Mine": ("_target_='torn.Mine'", "SyntaxError"),
    "+callbacks.mine._target_=own.Greeter +callbacks.mine.wrod=hi": ("callbacks.mine.wrod", "did you mean 'word'"),
    "+callbacks.mine._target_=own.Broken": ("callbacks.mine", "own.Broken", "NoneType", "own.py:"),
    "+callbacks.mine._target_=own.Lost": ("callbacks.mine: KeyError: 'key' (own.Lost)", "own.py:", "HYDRA_FULL_ERROR"),
    "~model.module +model.module._target_=own.Net +model.module.units=-3": (
        "model.module.units=-3: RuntimeError: ",
        "own.py:",
    ),
    "~data +data._target_=own.load_lost": ("data: KeyError: 'train' (own.load_lost)", "own.py:"),
    "model._target_=runner.models.ResNet8": ("model.module", "runner.models.ResNet8 has no such argument"),
    "optimizer._target_=torch.optim.SDG": ("torch.optim.SDG", "did you mean 'SGD'"),
    # types and values
    "seed=one": ("seed='one'", "whole number"),
    "optimizer.lr=fast": ("optimizer.lr='fast'", "takes a number"),
    "optimizer.lr=-1": ("optimizer", "learning rate", "-1"),
    "optimizer.nesterov=maybe": ("optimizer.nesterov='maybe'", "takes true or false"),
    "model.module.width=0": ("model.module.width=0", "at least 1"),
    "model=mlp model.module.hidden=[-3]": ("error: model.module.hidden=[-3]", "at least 1"),
    "data.batch_size=0": ("data.batch_size=0", "at least 1"),
    "trainer.precision=FP32": ("trainer.precision='FP32'", "did you mean 'fp32'"),
    "trainer.device=gpu": ("trainer.device='gpu'", "trainer.device=cuda"),
    "trainer.device=cuda:99": ("trainer.device='cuda:99'", "give auto or cpu"),
    "trainer.device=meta": ("trainer.device='meta'", "mode=check"),
    "+callbacks=speed_monitor callbacks.speed_monitor.window_size=0": ("speed_monitor.window_size=0", "at least 1"),
    "callbacks.checkpoint_saver.monitor=nothing": ("callbacks.checkpoint_saver.monitor='nothing'", "'eval/loss'"),
    # times
    "trainer.max_duration=5epochs": ("trainer.max_duration='5epochs'", "'5ep'"),
    "trainer.max_duration=0.5dur": ("trainer.max_duration='0.5dur'", "more than 0"),
    "trainer.max_duration=null": ("trainer.max_duration=None", "'10ep'"),
    "trainer.eval_interval=weekly": ("trainer.eval_interval='weekly'", "'10ep'"),
    "trainer.max_duration=${oops}": ("trainer.max_duration", "oops"),
    # what does not go together
    "trainer.grad_accum=2 trainer.microbatch_size=4": ("grad_accum=2", "microbatch_size=4", "cannot be combined"),
    "optimizer.momentum=0": ("optimizer", "Nesterov", "momentum"),
    "trainer.max_duration=1ep scheduler.t_warmup=2ep": ("scheduler.t_warmup='2ep'", "t_max='1dur'"),
    "trainer.max_duration=100tok": ("max_duration='100tok'", "num_tokens"),
    # paths
    "resume=missing": ("resume='missing'", "no such folder"),
    "resume=outputs": ("resume='outputs'", "holds no run"),
    "resume=latest": ("resume='latest'", "no run in outputs/ has written a checkpoint"),
    "trainer.load_path=missing": ("trainer.load_path='missing'", "no such folder"),
    "hydra.run.dir=/proc/none": ("cannot use '/proc/none'",),
    "hydra.run.dir=own.py/run": ("cannot use", "own.py"),
    "--config-dir=missing": ("missing", "not found"),
    "--config-name=nothing": ("error: --config-name=nothing: conf/ has no such file; experiment=<name>",),
    "rerun=missing": ("rerun='missing'", "no such folder"),
    "mode=sync resume=missing": ("resume=", "missing", "nothing was logged to MLflow"),
    # modes
    "mode=chek": ("mode='chek'", "did you mean 'check'"),
    "~mode": ("hydra.run.dir: uses ${mode}, and there is no such key",),
    "mode=eval": ("mode=eval", "resume=<run folder"),
    "mode=predict": ("mode=predict", "trainer.load_path"),
    "+predict.width=80": ("predict.width", "has no effect"),
    "mode=check model=gpt": ("model=gpt does not fit data=digits",),
    "objective=eval/acuracy": ("objective='eval/acuracy'", "did you mean 'eval/MulticlassAccuracy'"),
    "scheduler=none +scheduler.t_max=1ep": ("scheduler.t_max", "has no effect"),
    "rerun=a resume=b": ("resume= and rerun=", "give only one"),
    # processes and sweeps
    "launch.nproc=2": ("launch.nproc", "did you mean 'nproc_per_node'"),
    "launch.nproc_per_node=100000": ("launch.nproc_per_node=100000", "at most"),
    "launch=fast": ("launch=fast", "default"),
    "~launch": ("launch=None", "conf/launch/"),
    "sweep=seeds": ("sweep=seeds", "add -m"),
    "+folds.count=3": ("folds={'count': 3}: has no effect on its own", "-m sweep=folds"),
    "hydra/launcher=joblib": ("hydra/launcher=joblib", "add -m"),
    "-m hydra/launcher=jobllib seed=0,1": ("hydra/launcher=jobllib", "did you mean 'joblib'"),
    "seed=0,1": ("seed=0,1", "add -m"),
    "-m hydra/launcher=submitit_slurm seed=0,1": ("the sweep cannot start", "srun"),
    "-m optimizer.lr=0.1,x": ("optimizer.lr='x'", "takes a number"),
    "-m ~data +data._target_=own.load_lost data.batch_size=3 seed=0,1": ("data.batch_size", "+data.batch_size=..."),
    "-m optimizer.momentum=0.9,0 seed=0,1": ("optimizer: Nesterov", "in the job optimizer.momentum=0 seed=0"),
    "-m resume=outputs seed=0,1": ("resume='outputs'", "holds no run"),
    # grammar
    "nonsense": ("nonsense", "key=value"),
    "=3": ("=3", "key=value"),
    "+callbacks=[speed_monitor": ("+callbacks=[speed_monitor", "'+callbacks=[a,b]'"),
    "--seed=1": ("--seed=1", "seed=1"),
    "--mutlirun": ("--mutlirun", "--multirun"),
    "-m seed=": ("seed=''", "whole number"),
}


@pytest.mark.parametrize("command", one_in(6, WRONG))
def test_a_wrong_command_is_one_message_and_leaves_nothing(
    command: str, run_here: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    if "submitit_slurm" in command:  # as on a machine without Slurm
        monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    (folder / "needy.py").write_text("import not_installed_at_all\n")
    (folder / "torn.py").write_text("class Mine(:\n")
    (folder / "failing.py").write_text("{}['key']\n")
    before = sorted(folder.rglob("*"))
    code, out, err = run_here(*command.split())
    assert code == 2, err
    assert not out or (out.startswith("sweep-") and len(out.splitlines()) == 1)  # a sweep says what it begins
    lines = err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert len(lines) <= 6 and "Traceback" not in err, err
    for part in WRONG[command]:
        assert part in err, err
    # The lock beside a store stays, when the writer that was started early has already opened it.
    passing = ("__pycache__", "mlflow.db.lock")
    left = {path for path in folder.rglob("*") if not {*passing} & {*path.parts}} - {*before}
    assert left == set()
    assert query(folder, "select count(*) from runs") == [(0,)]


@pytest.mark.parametrize(
    "arguments",
    [
        ("data=digit",),
        ("optimizer.lrr=1",),
        ("callbacks=null",),
        ("--lr", "0.1"),
        ("resume=missing", "seed=x"),
        ("-m", "model=mlp,mpl"),
        ("trainer.max_duration=5epochs", "callbacks=none"),
    ],
    ids=" ".join,
)
def test_a_wrong_command_ends_a_process_with_2(run_app: Any, tmp_path: Path, arguments: tuple[str, ...]):
    done = run_app(*arguments, exit_code=2)
    assert done.stdout.count("\n") <= 1  # the title of what would have run
    assert done.stderr.count("error: ") == 1 and len(done.stderr.splitlines()) <= 2, done.stderr
    assert run_folders(tmp_path) == run_folders(tmp_path, "outputs/**/[0-9]*") == []
    assert not (tmp_path / "outputs" / "mlflow.db").exists()


def test_the_trace_of_a_wrong_configuration_is_there_for_the_asking(folder: Path, run_here: Any, monkeypatch: Any):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    code, _, err = run_here("+callbacks.mine._target_=own.Broken")
    assert code == 2
    assert "None + 1" in err and err.splitlines()[-1].startswith("error: callbacks.mine")
    assert os.environ["HYDRA_FULL_ERROR"] == "1"
