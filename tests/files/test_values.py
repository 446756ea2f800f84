from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator

import pytest

from runner.cli.catalogue import CONF
from runner.config.signatures import locate
from runner.files.values import Kind
from runner.records.arguments import kinds_of
from runner.records.trust import HARMLESS

SUSPECT_NAMES = re.compile(
    r"(.*_)?(cmd|command|uri|url|address|server|host|endpoint|mirror|entity|repo|hub|revision|attention|tokenizer|trust\w*"
    r"|path|paths|file|files|filename|folder|dir|root|cache|checkpoint|name|model|overrides|lora)(_folder|_files)?"
)
# Arguments that name something which is neither downloaded nor written: a metric, a run, a model built into a library.
EXCEPTIONS = {
    *("metric_name", "system_name", "run_name", "experiment_name", "log_model", "runner.Interval:name"),
    *("runner.models.timm_model:name", "runner.models.torchvision_model:name", "runner.callbacks.WandBLogger:name"),
    *("runner.Recorder:name", "runner.models.torchvision_segmentation:name"),
}


def own_targets() -> Iterator[str]:
    """Yield the classes and functions of this project that somebody else's config can name."""
    for file in CONF.rglob("*.yaml"):
        yield from re.findall(r"_target_: *(runner\S+)", file.read_text(encoding="utf-8"))
    for module in ("runner", "runner.callbacks", "runner.algorithms"):
        names = (f"{module}.{name}" for name in importlib.import_module(module).__all__)
        yield from filter(HARMLESS.fullmatch, names)


@pytest.mark.parametrize("name", sorted({*own_targets()}))
def test_arguments_named_like_commands_addresses_or_paths_declare_their_kind(name: str):
    try:
        target = locate("x", name)
        parameters = inspect.signature(target).parameters
    except ValueError as error:  # the package is not installed, or this is not a class
        assert "not installed" in str(error) or "not a class" in str(error)
        return
    for key, parameter in parameters.items():
        is_text = re.search(r"\bstr\b|\b[A-Z]\w*(Path|Name|Options)\b", str(parameter.annotation))
        if is_text and SUSPECT_NAMES.fullmatch(key) and not EXCEPTIONS & {key, f"{name}:{key}"}:
            assert kinds_of(target, parameter), f"{name}({key}: {parameter.annotation})"


def test_the_kind_of_a_text_is_read_from_its_annotation():
    kinds = {
        "runner.callbacks.MLPerfCallback": {"cache_clear_cmd": Kind.COMMAND, "root_folder": Kind.INNER_PATH},
        "runner.callbacks.CheckpointSaver": {"mirror": Kind.ADDRESS},
        "runner.data.shards.tar_shards.load_tar_shards": {"path": Kind.PATH, "eval_path": Kind.PATH},
        "runner.models.hf.network.HFNetwork": {"name": Kind.HUB_NAME, "attention": Kind.CODE, "overrides": Kind.CODE},
        "runner.Trainer": {"load_path": Kind.PATH},
    }
    for name, expected in kinds.items():
        target = locate("x", name)
        parameters = inspect.signature(target).parameters
        assert {key: kinds_of(target, parameters[key]) for key in expected} == {k: {v} for k, v in expected.items()}
    benchmark = inspect.signature(locate("x", "runner.callbacks.MLPerfCallback")).parameters["benchmark"]
    assert not kinds_of(locate("x", "runner.callbacks.MLPerfCallback"), benchmark)
