"""Wrong commands, each with parts of its error message: the mistake as typed, and what to write instead."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

WRONG: dict[str, tuple[str, ...]] = {
    # names that were typed without their group or section, or in the wrong group
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
    "prove hydra.mode=MULTIRUN": ("hydra.mode", "prove takes one experiment at a time"),
    # words of other tools
    "--resume x": ("--resume x", "write runner resume x"),
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
    "~data": ("data: none is chosen", "write data=<name>: chat, cifar10, digits"),
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
    "trainer.device=meta": ("trainer.device='meta'", "runner check"),
    "+callbacks=speed_monitor callbacks.speed_monitor.window_size=0": ("speed_monitor.window_size=0", "at least 1"),
    "callbacks.checkpoint_saver.monitor=nothing": ("callbacks.checkpoint_saver.monitor='nothing'", "'eval/loss'"),
    # times
    "trainer.max_duration=5epochs": ("trainer.max_duration='5epochs'", "'5ep'"),
    "trainer.max_duration=0.5dur": ("trainer.max_duration='0.5dur'", "more than 0"),
    "trainer.max_duration=null": ("trainer.max_duration=None", "'10ep'"),
    "trainer.eval_interval=weekly": ("trainer.eval_interval='weekly'", "'10ep'"),
    "trainer.max_duration=${oops}": ("trainer.max_duration", "oops"),
    # values that cannot be combined
    "trainer.grad_accum=2 trainer.microbatch_size=4": ("grad_accum=2", "microbatch_size=4", "cannot be combined"),
    "optimizer.momentum=0": ("optimizer", "Nesterov", "momentum"),
    "trainer.max_duration=1ep scheduler.t_warmup=2ep": ("scheduler.t_warmup='2ep'", "t_max='1dur'"),
    "trainer.max_duration=100tok": ("max_duration='100tok'", "num_tokens"),
    # paths
    "resume missing": ("RUN='missing'", "no such folder"),
    "resume outputs": ("RUN='outputs'", "holds no run"),
    "resume latest": ("RUN='latest'", "no run in outputs/ has written a checkpoint"),
    "fork outputs ba3": ("RUN='outputs'", "no record (config.yaml) there; give a run's folder"),
    "trainer.load_path=missing": ("trainer.load_path='missing'", "no such folder"),
    "hydra.run.dir=/proc/none": ("cannot use '/proc/none'",),
    "hydra.run.dir=own.py/run": ("cannot use", "own.py"),
    "--config-dir=missing": ("--config-dir=", "missing': no such folder"),
    "hydra.run.dir=": ("hydra.run.dir='': must be a folder",),
    "--config-name=nothing": ("error: --config-name=nothing: conf/ has no such file; experiment=<name>",),
    "rerun missing": ("RUN='missing'", "no such folder"),
    "sync missing": ("RUN=", "missing", "nothing was logged to MLflow"),
    # verbs, their words and options
    "chek": ("chek", "did you mean runner check?"),
    "mode=chek": ("mode=chek", "write runner check"),
    "eval": ("eval", "runner eval RUN"),
    "predict": ("predict", "trainer.load_path"),
    "resume": ("resume: needs RUN", "runner resume latest"),
    "fork latest": ("fork: takes RUN BATCH", "runner fork RUN BATCH"),
    "fork outputs ba3,ba4": ("BATCH='ba3,ba4'", "add -m"),
    "export outputs/one": ("export: takes RUN FILE", "runner export RUN model.pt"),
    "predict --formt pt": ("--formt", "predict has no such option", "did you mean --format?"),
    "predict --format xlsx": ("--format='xlsx'", "csv, jsonl, parquet, pt"),
    "eval outputs --split test": ("--split", "is an option of predict, not of eval"),
    "prove --kills 0": ("--kills=0", "at least 1"),
    "prove --kills many": ("--kills='many'", "whole number"),
    "prove --kills": ("--kills", "needs a value"),
    "lr-range --batches 3": ("--batches=3", "at least 20"),
    "--json=yes": ("--json='yes'", "takes no value"),
    "check model=gpt": ("model=gpt does not fit data=digits",),
    "objective=eval/acuracy": ("objective='eval/acuracy'", "did you mean 'eval/MulticlassAccuracy'"),
    "scheduler=none +scheduler.t_max=1ep": ("scheduler.t_max", "has no effect"),
    "rerun=a resume=b": ("rerun=a resume=b", "give only one"),
    # processes and sweeps
    "launch.nproc=2": ("launch.nproc", "did you mean 'nproc_per_node'"),
    "launch.nproc_per_node=100000": ("launch.nproc_per_node=100000", "at most"),
    "launch=fast": ("launch=fast", "default"),
    "~launch": ("launch: none is chosen", "write launch=<name>: default"),
    "sweep=seeds": ("sweep=seeds", "add -m"),
    "+folds.count=3": ("folds={'count': 3}: has no effect on its own", "-m sweep=folds"),
    "hydra/launcher=joblib": ("hydra/launcher=joblib", "add -m"),
    "-m hydra/launcher=jobllib seed=0,1": ("hydra/launcher=jobllib", "did you mean 'joblib'"),
    "seed=0,1": ("seed=0,1", "add -m"),
    "-m hydra/launcher=submitit_slurm seed=0,1": ("the sweep cannot start", "srun"),
    "-m optimizer.lr=0.1,x": ("optimizer.lr='x'", "takes a number"),
    "-m ~data +data._target_=own.load_lost data.batch_size=3 seed=0,1": ("data.batch_size", "+data.batch_size=..."),
    "-m optimizer.momentum=0.9,0 seed=0,1": ("optimizer: Nesterov", "in the job optimizer.momentum=0 seed=0"),
    "-m fork outputs ba3,ba4": ("RUN='outputs'", "no record (config.yaml) there; give a run's folder"),
    "-m resume outputs seed=0,1": ("-m", "resume takes one experiment at a time"),
    # grammar
    "nonsense": ("nonsense", "key=value"),
    "optimizer.lr=0.1,": ("optimizer.lr=0.1,", "a value is missing next to a comma"),
    "=3": ("=3", "key=value"),
    "+callbacks=[speed_monitor": ("+callbacks=[speed_monitor", "'+callbacks=[a,b]'"),
    "--seed=1": ("--seed=1", "seed=1"),
    "--mutlirun": ("--mutlirun", "--multirun"),
    "-m seed=": ("seed=''", "whole number"),
}

ONE_OF_EACH_KIND = (
    *("speed_monitor", "scheduler=cosine", "hydra/job_logging=disabled", "prove hydra.mode=MULTIRUN"),
    *("+trainer.train_dataloader=1", "+callbacks.mine._target_=own.Greeter +callbacks.mine.wrod=hi"),
    *("optimizer._target_=torch.optim.SDG", "model=mlp model.module.hidden=[-3]", "trainer.max_duration=${oops}"),
    *("optimizer.momentum=0", "resume outputs", "--config-dir=missing", "eval", "predict --formt pt"),
    *("launch.nproc=2", "-m optimizer.momentum=0.9,0 seed=0,1", "--seed=1"),
)
"""Commands that are also tested without --json."""


def assert_one_message(command: str, err: str) -> None:
    """Assert that stderr holds a single short message with the parts that `WRONG` lists for the command."""
    lines = err.splitlines()
    assert len([line for line in lines if line.startswith("error: ")]) == 1
    assert len(lines) <= 6 and "Traceback" not in err, err
    for part in WRONG[command]:
        assert part in err, err


def assert_nothing_left(folder: Path, before: Iterable[Path]) -> None:
    """Assert that a folder has no files that did not exist before."""
    # The lock of a store stays if the MLflow writer, which is started early, has already opened it.
    ignored = ("__pycache__", "mlflow.db.lock")
    new = {path for path in folder.rglob("*") if not {*ignored} & {*path.parts}} - {*before}
    assert new == set()


def plant_modules(folder: Path) -> None:
    """Write the modules that some of the commands refer to, none of which can be imported."""
    (folder / "needy.py").write_text("import not_installed_at_all\n")
    (folder / "torn.py").write_text("class Mine(:\n")
    (folder / "failing.py").write_text("{}['key']\n")
