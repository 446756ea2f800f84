"""A transformers model by name, for the tasks whose loss it computes itself."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from runner.failures.checks import check_one_of, check_whole, refuse_if
from runner.failures.errors import wrong_argument
from runner.files.values import HubName, Kernel, KernelOptions
from runner.models.hf.adapters import add_adapters, base_of, leave_out
from runner.models.hf.added_tokens import add_embeddings
from runner.models.hf.loading import check_attention, find_config, is_local, load_network, override, quiet_transformers
from runner.models.hf.quantization import check_quantization, quantization_options
from runner.models.hf.reading import one_sequence_per_row, skip_value_checks
from runner.models.hf.tasks import TASKS


class HFNetwork(nn.Module):
    """A transformers model, called with the entries of a batch by their names.

    Each machine downloads a model on the Hub once, into transformers' own cache (environment variable `HF_HOME`). A
    model in the cache is used without asking the Hub again; `revision` chooses the version. A resumed run takes its
    weights from the checkpoint; if the cache is gone, `model.module.pretrained=false` together with `--allow-changes
    model.module.pretrained` avoids the download. With `lora`, checkpoints hold only what trains, and the digest of the
    frozen weights, which are read again from `name`.

    Weights are float32, whatever type they were saved in; the trainer's precision is the type to compute in. Code that
    comes with a model is not run.

    Args:
        name: a name on the Hub, such as `'google-bert/bert-base-uncased'`, or a folder that `save_pretrained` wrote.
            With `pretrained=False` also an architecture, such as `'bert'`.
        task: task of the model: 'causal_lm', 'masked_lm', 'seq2seq_lm', 'sequence_classification' or
            'token_classification'; 'semantic_segmentation' is for `SegmentationModel`.
        pretrained: whether to load the trained weights; otherwise weights are drawn from torch's generator, and so
            depend on the run's seed alone. The layers that a task adds, such as a classifier, are always drawn.
        num_labels: the number of classes of a classifier, 1 for regression; None takes the number from the model's
            config.
        overrides: entries of the model's config to change, such as `{'hidden_dropout_prob': 0.0}`; in an entry that is
            a mapping, only the named keys change.
        attention: implementation of attention, transformers' `attn_implementation`: `'eager'`, `'sdpa'`,
            `'flash_attention_2'`, ...; None is transformers' choice for the model.
        revision: a branch, tag or commit on the Hub; None is `'main'`.
        lora: arguments of peft's `LoraConfig`, such as `{'r': 8, 'lora_alpha': 16}`: only low-rank adapters and a new
            classifier train, and the other weights are frozen. None trains all weights.
        quantization: type in which linear layers keep their frozen weights, 'nf4' or 'fp4', both four bits wide, with
            the library bitsandbytes (QLoRA); needs `lora`. None keeps float32.
        added_tokens: texts that become tokens of the model's tokenizer, which the data adds too. Their embeddings, and
            their rows of the head, train with `lora` too.

    Attributes:
        network: the transformers model, inside a peft model if there are adapters.
        task: task of the model; a class of transformers may have several.

    Raises:
        FileNotFoundError: there is no model of that name.
        ModuleNotFoundError: transformers, or for `lora` peft, is not installed.
        ValueError: an argument is out of range, or the model is not for that task.
    """

    def __init__(
        self,
        name: HubName,
        task: str = "sequence_classification",
        pretrained: bool = True,
        num_labels: int | None = None,
        overrides: KernelOptions | None = None,
        attention: Kernel | None = None,
        revision: HubName | None = None,
        lora: KernelOptions | None = None,
        quantization: str | None = None,
        added_tokens: Sequence[str] = (),
    ) -> None:
        super().__init__()
        check_one_of("task", task, TASKS)
        self.task = task
        self.added_tokens = [*added_tokens]
        if not isinstance(name, str) or not name:
            raise wrong_argument("name", name, "must be a name on the Hub, such as 'gpt2', or a folder")
        check_whole("num_labels", num_labels, 1, none="the value in the model's config")
        reason = f"belongs to a model on the Hub, but name={name!r} is a folder; leave revision out"
        refuse_if(revision is not None and is_local(name), "revision", revision, reason)
        check_quantization(quantization, lora is not None and pretrained)
        with quiet_transformers():
            config = override(find_config(name, revision, task, pretrained), name, overrides or {})
            if num_labels is not None:
                config.num_labels = num_labels
            self.check_config(config, name)
            check_attention(attention)
            has_base = lora is not None and pretrained
            # On the meta device there are no values to load, and none are needed.
            pretrained = pretrained and torch.get_default_device().type != "meta"
            network = load_network(
                config, name, task, pretrained, attention, revision, quantization_options(quantization)
            ).train()
            skip_value_checks(network)
            base = base_of(network, name, revision, lora) if lora is not None and has_base else None
            if self.added_tokens:
                lora = add_embeddings(network, name, self.added_tokens, lora)
            ids = {id(weight) for key, weight in network.named_parameters() if base is not None and key in base.weights}
            self.network = network if lora is None else add_adapters(network, task, dict(lora))
            if base is not None:
                leave_out(self, base, ids)
        takes_cache = "use_cache" in inspect.signature(network.forward).parameters
        self._options = {"return_dict": True, **({"use_cache": False} if takes_cache else {})}

    def check_config(self, config: Any, name: str) -> None:
        """Check the config of the model before its weights are loaded; a subclass may raise ValueError."""

    @property
    def base(self) -> Any:
        """The transformers model itself."""
        return self.network.get_base_model() if hasattr(self.network, "get_base_model") else self.network

    @property
    def config(self) -> Any:
        """The config of the transformers model."""
        return self.base.config

    def forward(self, **entries: Any) -> Any:
        """Return the outputs of the transformers model, with `loss` if the entries include labels.

        Args:
            **entries: arguments of the model, such as `input_ids` and `attention_mask`, both `(N, T)`, and `labels`.
        """
        with one_sequence_per_row():
            return self.network(**entries, **self._options)
