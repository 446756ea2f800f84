"""Load transformers models from a folder, the cache or the Hub, and explain a failure in one sentence."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from runner.distributed.ranks import get_global_rank
from runner.failures.checks import check_keys, check_one_of
from runner.failures.errors import wrong_argument
from runner.failures.facts import argument_of
from runner.libraries.hugging_face import bars_on_terminals, draws_bars, import_hf
from runner.libraries.targets import prepare_import
from runner.models.by_name import is_making_by_name
from runner.models.hf.deferred_weights import defer_weights
from runner.models.hf.tasks import TASKS

log = logging.getLogger("runner")


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Within the `with` block, transformers logs only errors, and draws progress bars only on rank 0's terminal.

    Raises:
        ModuleNotFoundError: transformers is not installed.
    """
    prepare_import("transformers")
    hf_logging: Any = import_hf("transformers.utils.logging")
    hub = logging.getLogger("huggingface_hub")
    hf_level = hf_logging.get_verbosity()
    hub_level = hub.level
    has_bars = hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    if not draws_bars():
        hub.setLevel(logging.ERROR)
        hf_logging._tqdm_active = False  # the public function warns if an environment variable overrides it
    try:
        with bars_on_terminals("huggingface_hub"):
            yield
    finally:
        hf_logging.set_verbosity(hf_level)
        hub.setLevel(hub_level)
        hf_logging._tqdm_active = has_bars


def is_local(name: str) -> bool:
    """Return whether a name is a folder rather than a model on the Hub."""
    return os.path.isdir(name) or name.startswith((".", "/", "~", os.sep)) or name.count("/") > 1


def find_config(name: str, revision: str | None, task: str, pretrained: bool) -> Any:
    """Return the config of a model.

    Args:
        name: a folder, or a model on the Hub, which is asked only if the model is not in the cache. Without pretrained
            weights it may also be an architecture, such as 'bert'.
        revision: revision of the model on the Hub; None takes its main branch.
        task: a key of `TASKS`.
        pretrained: whether the model's weights are needed too.

    Raises:
        FileNotFoundError: there is no model of that name.
        ValueError: transformers has no model of that kind for the task.
    """
    import transformers
    from transformers import AutoConfig

    if is_local(name):
        if not Path(name).is_dir():
            raise FileNotFoundError(f"name={name!r}: there is no such folder; give a folder, or a model on the Hub")
        if not Path(name, "config.json").is_file():
            raise FileNotFoundError(f"name={name!r}: has no config.json; give a folder that save_pretrained wrote")
    config = None
    with suppress(OSError):
        config = _load_pretrained(AutoConfig, name, revision=revision, local_files_only=True)
    if config is None and not pretrained and name in transformers.CONFIG_MAPPING:
        config = AutoConfig.for_model(name)
    if config is None:
        config = _config_of_hub(name, revision)
    if isinstance(config, Exception):
        raise type(config)(*config.args)
    if type(config) not in getattr(transformers, TASKS[task].mapping):
        kind = config.model_type
        reason = f"transformers has no {kind!r} model for task={task!r}; choose another model"
        raise wrong_argument("name", name, reason)
    return config


@functools.cache  # without a network this takes half a minute
def _config_of_hub(name: str, revision: str | None) -> Any:
    from transformers import AutoConfig

    if get_global_rank() == 0:
        log.info("looking for %r on the Hub", name)
    try:
        return _load_pretrained(AutoConfig, name, revision=revision)
    except Exception as error:
        return error


def override(config: Any, name: str, overrides: Mapping[str, Any]) -> Any:
    """Return a config with some entries changed; mappings are merged.

    Raises:
        ValueError: the config has no such entry, or refuses the value.
    """
    known = sorted({*config.to_dict(), *config.attribute_map} - {"transformers_version", "model_type", "_name_or_path"})
    check_keys("overrides", overrides, known, f"the config of {name!r}")
    if not overrides:
        return config
    named = {config.attribute_map.get(key, key): value for key, value in overrides.items()}
    try:
        return type(config).from_dict(_merge(config.to_dict(), named))
    except Exception as error:  # the validation library and each config raise their own kinds
        reason = " ".join(str(error).split())
        raise wrong_argument("overrides", dict(overrides), f"the config of {name!r} rejects them: {reason}") from error


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for key, value in new.items():
        old_value = old.get(key)
        if isinstance(old_value, Mapping) and isinstance(value, Mapping):
            value = _merge(old_value, value)
        merged[key] = value
    return merged


def check_attention(attention: str | None) -> None:
    """Raise ValueError if transformers does not know this implementation of attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if "/" not in (attention or ""):  # the Hub's kernels are owner/kernel
        check_one_of("attention", attention, (None, "eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()))


def load_network(
    config: Any,
    name: str,
    task: str,
    pretrained: bool,
    attention: str | None,
    revision: str | None,
    quantized: Mapping[str, Any],
) -> Any:
    """Return the model of a config, in float32; `quantized` has arguments of `from_pretrained` for other types.

    Raises:
        FileNotFoundError: the weights cannot be found.
        ValueError: the weights do not fit the config, or the model is not causal or lacks this implementation of
            attention.
    """
    auto_class = getattr(import_hf("transformers"), TASKS[task].auto_class)
    options = {"dtype": torch.float32, **({} if attention is None else {"attn_implementation": attention})}
    try:
        if pretrained:
            network = _load_weights(auto_class, config, name, task, revision, {**options, **quantized})
        else:
            network = auto_class.from_config(config, **options)
    except (ImportError, ValueError) as error:
        if attention is None or argument_of(error) in ("name", "overrides"):
            raise
        reason = f"does not work with {name!r}: {_first_sentence(error)}"
        raise wrong_argument("attention", attention, reason) from error
    if task == "causal_lm" and getattr(network, "loss_type", "") is None:
        network.loss_type = "ForCausalLM"  # transformers' fallback, which it would warn of
    is_bidirectional = any(getattr(module, "is_causal", None) is False for module in network.modules())
    if task == "causal_lm" and is_bidirectional and getattr(config, "is_decoder", None) is False:
        raise wrong_argument("name", name, "also sees later tokens; overrides={is_decoder: true} makes it causal")
    return network


def _load_weights(
    auto_class: Any, config: Any, name: str, task: str, revision: str | None, options: Mapping[str, Any]
) -> Any:
    if is_making_by_name():
        network = auto_class.from_config(config, **options)
        try:
            report = defer_weights(network, name, revision)
        except OSError as error:
            raise FileNotFoundError(f"name={name!r}: {_reason(error, name, revision)}") from error
    else:
        options = {**options, "config": config, "revision": revision, "output_loading_info": True}
        options |= {"ignore_mismatched_sizes": True}  # reported below, in one sentence
        loaded = None
        if not is_local(name):
            with suppress(OSError):
                loaded = _load_pretrained(auto_class, name, **options, local_files_only=True)
        network, report = _load_pretrained(auto_class, name, **options) if loaded is None else loaded
    unset = sorted(report["missing_keys"]) + sorted(str(entry[0]) for entry in report["mismatched_keys"])
    prefix = f"{network.base_model_prefix}."  # of weights that a task does not add, except for the pooler
    new = [key for key in unset if task != "causal_lm" and (not key.startswith(prefix) or ".pooler." in key)]
    missing = [key for key in unset if key not in new]
    if missing:
        reason = f"{len(missing)} of the model's weights are missing or have another shape, such as {missing[0]!r}"
        converts = ", or set init_weights=in_order, which also converts weights" if is_making_by_name() else ""
        remedy = f"change overrides, give pretrained=false for new weights{converts}"
        raise wrong_argument("name", name, f"{reason}; {remedy}")
    network.new_weights = frozenset(new)
    if get_global_rank() == 0:
        if new:
            log.info("%d weights of %r are new, for task=%r: %s", len(new), name, task, ", ".join(new))
        elif unused := sorted(report["unexpected_keys"]):
            log.warning("%d weights of %r are not used, such as %r", len(unused), name, unused[0])
    return network


def _load_pretrained(kind: Any, name: str, **options: Any) -> Any:
    """Return the config or model of a name, as `from_pretrained` of transformers' class `kind` returns it.

    Raises:
        FileNotFoundError: transformers finds nothing under that name; the message says what to do.
        ValueError: transformers cannot load the files that it finds.
    """
    try:
        return kind.from_pretrained(name, trust_remote_code=False, **options)
    except OSError as error:
        if options.get("local_files_only") and not is_local(name):
            raise
        raise FileNotFoundError(f"name={name!r}: {_reason(error, name, options['revision'])}") from error
    except ValueError as error:
        if "trust_remote_code" in str(error):
            message = "needs its own code, which is not run; choose a model that is part of transformers"
            raise wrong_argument("name", name, message) from error
        if kind.__name__ == "AutoConfig":
            message = "transformers does not know this model; a newer version may"
            raise wrong_argument("name", name, f"{message} ({_first_sentence(error)})") from error
        raise


def _reason(error: OSError, name: str, revision: str | None) -> str:
    """Return why a model was not found on the Hub, in the cache or in a folder, and what to do."""
    from huggingface_hub import errors

    cause = error.__cause__ or error
    if is_local(name):
        return f"cannot be loaded: {_first_sentence(error)}; pretrained=false needs no weights"
    if isinstance(cause, errors.GatedRepoError):
        return f"accept its terms at https://huggingface.co/{name} first, and log in with `hf auth login`"
    if isinstance(cause, errors.RepositoryNotFoundError):
        return "neither a folder nor a model that the Hub shows you; check the name, or log in with `hf auth login`"
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"the Hub has no revision={revision!r} of it; give another revision, or none"
    if isinstance(cause, errors.HFValidationError):
        return "neither a folder nor a possible name on the Hub, such as 'gpt2' or 'owner/model'"
    if isinstance(cause, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled | ConnectionError):
        return "neither a folder nor in the cache, and the Hub cannot be reached; download it first, or give a folder"
    return f"cannot be loaded: {_first_sentence(error)}"


def _first_sentence(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
