"""Commands typed wrongly by people who know other libraries, each with parts of the error message they must get."""

from __future__ import annotations

OWN = """
from torch import nn

from runner import Algorithm


def number():
    return 3


class Scale(Algorithm):
    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
"""


GLOBAL = "# @package _global_\n"


FILES = {
    "newcomer.py": OWN,
    "conf/model/number.yaml": "_target_: newcomer.number\n",
    "conf/algorithms/scale.yaml": "scale:\n  _target_: newcomer.Scale\n",
    "conf/algorithms/missing.yaml": "missing:\n  _target_: newcomer.Scale\n  alpha: ???\n",
    "conf/algorithms/nameless.yaml": "_target_: newcomer.Scale\nalpha: 3\n",
    "conf/experiment/no_package.yaml": "trainer:\n  max_duration: 1ep\n",
    "conf/experiment/no_package_but_model.yaml": "defaults:\n  - override /model: mlp\n",
    "conf/experiment/no_such_group.yaml": f"{GLOBAL}defaults:\n  - override /modell: mlp\n",
    "conf/experiment/no_override.yaml": f"{GLOBAL}defaults:\n  - /model: mlp\n",
    "conf/experiment/max_epochs.yaml": f"{GLOBAL}trainer:\n  max_epochs: 3\n",
    "conf/experiment/precision.yaml": f"{GLOBAL}trainer:\n  precision: bf16-mixed\n",
    "conf/experiment/training.yaml": f"{GLOBAL}training:\n  learning_rate: 0.1\n",
    "conf/experiment/paths.yaml": f"{GLOBAL}paths:\n  output: /data\n",
    "conf/experiment/own_section.yaml": f"{GLOBAL}mytool:\n  width: 3\n",
}


# The typed command, and the parts of its error message: the key as typed, and what to write instead.
MISTAKES: dict[str, tuple[str, ...]] = {
    # the length of training
    "epochs=3": ("epochs=3: ", "write trainer.max_duration=3ep"),
    "trainer.max_epochs=3": ("trainer.max_epochs=3: ", "trainer.max_duration=3ep"),
    "num_train_epochs=2": ("num_train_epochs=2: ", "trainer.max_duration=2ep"),
    "max_steps=100": ("max_steps=100: ", "trainer.max_duration=100ba"),
    "trainer.check_val_every_n_epoch=2": ("trainer.check_val_every_n_epoch=2: ", "trainer.eval_interval=2ep"),
    "trainer.val_check_interval=0.5": ("trainer.val_check_interval=0.5: ", "trainer.eval_interval=500ba"),
    "eval_strategy=steps": ("eval_strategy=steps: ", "trainer.eval_interval=500ba"),
    "trainer.fast_dev_run=true": ("trainer.fast_dev_run=true: ", "write runner check"),
    "trainer.limit_train_batches=10": ("trainer.limit_train_batches=10: ", "trainer.train_subset_num_batches=10"),
    # precision and devices
    "trainer.precision=bf16-mixed": ("trainer.precision='bf16-mixed': ", "write trainer.precision=amp_bf16"),
    "trainer.precision=16-mixed": ("trainer.precision='16-mixed': ", "trainer.precision=amp_fp16"),
    "trainer.shard_size=None": ("trainer.shard_size='None': ", "write null"),
    "trainer.precision=32": ("trainer.precision=32: ", "trainer.precision=fp32"),
    "bf16-mixed": ("bf16-mixed: ", "trainer.precision=amp_bf16"),
    "fp16": ("fp16: ", "trainer.precision=amp_fp16"),
    "fp16=true": ("fp16=true: ", "trainer.precision=amp_fp16"),
    "fp16=false": ("fp16=false: ", "trainer.precision=fp32"),
    "trainer.accelerator=gpu": ("trainer.accelerator=gpu: ", "trainer.device=cuda"),
    "trainer.devices=2": ("trainer.devices=2: ", "launch.nproc_per_node=2"),
    "trainer.devices=[0,1]": ("trainer.devices=[0,1]: ", "launch.nproc_per_node=..."),
    "trainer.gpus=4": ("trainer.gpus=4: ", "launch.nproc_per_node=4"),
    "trainer.num_nodes=2": ("trainer.num_nodes=2: ", "torchrun --nnodes=2 -m runner"),
    "trainer.strategy=ddp": ("trainer.strategy=ddp: ", "launch.nproc_per_node=auto"),
    "trainer=ddp": ("trainer=ddp: ", "launch.nproc_per_node=auto"),
    "trainer=gpu": ("trainer=gpu: ", "trainer.device=cuda"),
    "deepspeed=ds.json": ("deepspeed=ds.json: ", "trainer.parallel=fsdp"),
    "trainer.fsdp=true": ("trainer.fsdp=true: ", "trainer.parallel=fsdp"),
    # batches and gradients
    "per_device_train_batch_size=8": ("per_device_train_batch_size=8: ", "data.batch_size=8"),
    "device_train_microbatch_size=auto": ("device_train_microbatch_size=auto: ", "trainer.microbatch_size=auto"),
    "num_workers=4": ("num_workers=4: ", "data.num_workers=4"),
    "data.num_workers=4": ("data.num_workers: ", "batch_size"),
    "trainer.accumulate_grad_batches=4": ("trainer.accumulate_grad_batches=4: ", "trainer.grad_accum=4"),
    "gradient_accumulation_steps=4": ("gradient_accumulation_steps=4: ", "trainer.grad_accum=4"),
    "trainer.gradient_clip_val=0.5": (
        "trainer.gradient_clip_val=0.5: ",
        "+algorithms=gradient_clipping algorithms.gradient_clipping.clipping_threshold=0.5",
    ),
    "max_grad_norm=1.0": ("max_grad_norm=1.0: ", "clipping_threshold=1.0"),
    "gradient_checkpointing=true": ("gradient_checkpointing=true: ", "+algorithms=activation_checkpointing"),
    # optimizers and schedules
    "learning_rate=1e-3": ("learning_rate=1e-3: ", "optimizer.lr=1e-3"),
    "optimizer.learning_rate=1e-3": ("optimizer.learning_rate=1e-3: ", "optimizer.lr=1e-3"),
    "optim=adam": ("optim=adam: ", "optimizer=adam"),
    "optimizer=Adam": ("optimizer=Adam: ", "did you mean 'adam'"),
    "optimizer=adamw_torch": ("optimizer=adamw_torch: ", "optimizer=adamw"),
    "optimizer._target_=AdamW": ("optimizer._target_='AdamW': ", "torch.optim.AdamW"),
    "lr_scheduler=cosine": ("lr_scheduler=cosine: ", "scheduler=cosine_annealing"),
    "lr_scheduler_type=linear": ("lr_scheduler_type=linear: ", "scheduler=linear"),
    "scheduler=CosineAnnealingLR": ("scheduler=CosineAnnealingLR: ", "scheduler=cosine_annealing"),
    "warmup_steps=500": ("warmup_steps=500: ", "scheduler.t_warmup=500ba"),
    "warmup_ratio=0.1": ("warmup_ratio=0.1: ", "scheduler.t_warmup=0.1dur"),
    "weight_decay=0.1": ("weight_decay=0.1: ", "optimizer.weight_decay=0.1"),
    # models and data
    "model=resnet50": ("model=resnet50: ", "model=torchvision model.module.name=resnet50"),
    "model_name_or_path=gpt2": ("model_name_or_path=gpt2: ", "model=hf_causal_lm model.module.name=gpt2"),
    "data=mnist": ("data=mnist: ", "data=hf_dataset data.name=ylecun/mnist"),
    "dataset=digits": ("dataset=digits: ", "data=digits"),
    "datamodule.batch_size=64": ("datamodule.batch_size=64: ", "data.batch_size=64"),
    "model=number": ("model._target_='newcomer.number': ", "made a int", "runner.ClassificationModel"),
    # loggers, callbacks and checkpoints
    "logger=wandb": ("logger=wandb: ", "+callbacks=wandb_logger"),
    "logger=null": ("logger=null: ", "~callbacks.mlflow_logger"),
    "trainer.logger=false": ("trainer.logger=false: ", "~callbacks.mlflow_logger"),
    "report_to=none": ("report_to=none: ", "~callbacks.mlflow_logger"),
    "trainer.log_every_n_steps=10": ("trainer.log_every_n_steps=10: ", "every batch is logged"),
    "trainer.enable_progress_bar=false": ("trainer.enable_progress_bar=false: ", "~callbacks.progress_bar"),
    "callbacks=model_checkpoint": ("callbacks=model_checkpoint: ", "checkpoint_saver"),
    "+callbacks=early_stopping": ("callbacks=early_stopping: ", "did you mean 'early_stopper'"),
    "+callbacks=learning_rate_monitor": ("callbacks=learning_rate_monitor: ", "+callbacks=lr_monitor"),
    "+callbacks=stochastic_weight_averaging": ("callbacks=stochastic_weight_averaging: ", "+algorithms=swa"),
    "callbacks=default": ("callbacks=default: ", "+callbacks=<name>"),
    "+callbacks.es._target_=lightning.pytorch.callbacks.EarlyStopping": (
        "callbacks.es._target_='lightning.pytorch.callbacks.EarlyStopping'",
        "no module 'lightning'",
    ),
    "ckpt_path=last.ckpt": ("ckpt_path=last.ckpt: ", "write runner resume last.ckpt"),
    "resume_from_checkpoint=out": ("resume_from_checkpoint=out: ", "write runner resume out"),
    "save_top_k=3": ("save_top_k=3: ", "callbacks.checkpoint_saver.keep_best=3"),
    "output_dir=out": ("output_dir=out: ", "hydra.run.dir=out"),
    "task_name=mine": ("task_name=mine: ", "experiment_name=mine"),
    "tags=[a,b]": ("tags=[a,b]: ", "callbacks.mlflow_logger.tags", "vars"),
    # the user's own keys
    "paths.data=/data": ("paths.data=/data: ", "+vars.paths"),
    "mytool=3": ("mytool: no key 'mytool'", "+vars.mytool=..."),
    "+mytool.width=3": ("mytool: no such key", "+vars.mytool=..."),
    "vars.width=3": ("vars.width: is not among your values", "+vars.width=..."),
    "run_name=${vars.mine}": ("run_name: ", "uses ${vars.mine}", "+vars.<name>=..."),
    # keys in the wrong section
    "callbacks.early_stopping.patience=3": ("callbacks.early_stopping.patience: ", "+callbacks=early_stopper"),
    "callbacks.model_checkpoint.monitor=acc": ("callbacks.model_checkpoint.monitor: ", "checkpoint_saver does this"),
    "algorithms.gradient_clip.max_norm=1": ("algorithms.gradient_clip.max_norm: ", "+algorithms=gradient_clipping"),
    "model.optimizer.lr=0.1": ("model.optimizer.lr: ", "did you mean optimizer.lr?"),
    "model.compile=true": ("model.compile: ", "did you mean trainer.compile?"),
    "model.net.width=8": ("model.net.width: ", "did you mean model.module.width?"),
    "trainer.callbacks=[a]": ("trainer.callbacks: ", "did you mean callbacks?"),
    "trainer.profiler=simple": ("trainer.profiler=simple: ", "+callbacks=torch_profiler"),
    "load_from=x.pth": ("load_from=x.pth: ", "trainer.load_path=x.pth"),
    "param_scheduler=cosine": ("param_scheduler=cosine: ", "scheduler=cosine_annealing"),
    "optimized_metric=eval/loss": ("optimized_metric=eval/loss: ", "objective=eval/loss"),
    # options and spelling
    "optimizer=sgd,adam": ("optimizer=sgd,adam: several values; add -m",),
    "mode=train,eval": ("mode=train,eval: ", "verb"),
    "mode=resume": ("mode=resume: ", "write runner resume RUN"),
    "--epochs 3": ("--epochs: ", "trainer.max_duration=3ep"),
    "--lr=0.1": ("--lr=0.1: ", "write optimizer.lr=0.1"),
    "--max-epochs=3": ("--max-epochs=3: ", "trainer.max_duration=3ep"),
    "--no-cuda": ("--no-cuda: ", "trainer.device=cpu"),
    "--config my.yaml": ("--config: ", "--config-dir <folder>"),
    "--gpus 2": ("--gpus: ", "launch.nproc_per_node=2"),
    "-e 3": ("-e: ", "e=3"),
    "optimizer.lr = 0.1": ("optimizer.lr = 0.1: ", "write optimizer.lr=0.1"),
    "optimizer.lr= 0.1": ("write optimizer.lr=0.1",),
    "fit": ("fit: ", "runner without a verb trains"),
    "validate": ("validate: ", "write runner eval RUN"),
    "mode=fit": ("mode=fit: ", "runner without a verb trains"),
    "mode=test": ("mode=test: ", "write runner eval RUN test=best"),
    "mode=predict resume=out": ("mode=predict resume=out: ", "write runner predict out"),
    "--resume out": ("--resume out: ", "write runner resume out"),
    "--checkpoint out": ("--checkpoint: ", "write runner resume out"),
    "--evaluate": ("--evaluate: ", "write runner eval RUN"),
    "resme out": ("resme: ", "did you mean runner resume?"),
    "scheduler=ReduceLROnPlateau": ("scheduler=ReduceLROnPlateau: ", "scheduler=reduce_on_plateau"),
    "init": ("init: ", "write runner init FOLDER, such as runner init my_project"),
    # files
    "experiment=no_package": ("experiment.trainer: ", "'# @package _global_'"),
    "experiment=no_package_but_model": ("experiment/no_package_but_model: ", "'# @package _global_'"),
    "experiment=no_such_group": ("'override /modell'", "did you mean 'model'"),
    "experiment=no_override": ("model: ", "write 'override /model: ...'"),
    "experiment=max_epochs": ("trainer.max_epochs: ", "trainer.max_duration=3ep", "correct it there"),
    "experiment=precision": ("trainer.precision='bf16-mixed': ", "trainer.precision=amp_bf16"),
    "experiment=training": ("training: ", "for training.learning_rate write optimizer.lr=0.1"),
    "experiment=paths": ("paths: ", "+vars.paths"),
    "experiment=own_section": ("mytool: ", "+vars.mytool=..."),
    "+algorithms=scale": ("algorithms.scale.alpha: ", "+algorithms.scale.alpha=..."),
    "+algorithms=missing": ("algorithms.missing.alpha: ", "write algorithms.missing.alpha=..."),
    "+algorithms=nameless": ("algorithms._target_=", "starts with its own name"),
}

ONE_OF_EACH_SECTION = (
    *("epochs=3", "eval_strategy=steps", "trainer.limit_train_batches=10", "trainer.precision=16-mixed", "fp16=false"),
    *("trainer.devices=2", "trainer=gpu", "max_grad_norm=1.0", "data.num_workers=4", "optim=adam", "warmup_ratio=0.1"),
    *("model=resnet50", "data=mnist", "logger=wandb", "trainer.logger=false", "callbacks=model_checkpoint"),
    *("ckpt_path=last.ckpt", "save_top_k=3", "paths.data=/data", "+mytool.width=3", "model.net.width=8"),
    *("trainer.profiler=simple", "mode=resume", "--gpus 2", "optimizer.lr = 0.1", "fit", "mode=predict resume=out"),
    *("experiment=no_override", "experiment=precision", "+algorithms=scale", "+algorithms=nameless"),
)
"""Mistakes that the first tier tests."""
AS_PROCESSES = ("epochs=3", "trainer=gpu", "model=resnet50", "paths.data=/data", "--gpus 2", "+algorithms=scale")
"""Mistakes that are also tried as separate commands."""
