"""Causal language models of Hugging Face's transformers by name, and how to save trained ones for transformers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from runner.models.hf.loading import check_attention, find_config, is_local, load_network, override, quiet
from runner.models.hf.reading import one_sequence_a_row, without_reading


class HFCausalLM(nn.Module):
    """A causal language model of transformers: tokens ``(N, T)`` -> logits ``(N, T, V)``.

    A model of the Hub is downloaded once, by each machine, into transformers' own cache (the environment's ``HF_HOME``
    says where). What lies there is used without asking the Hub again: `revision` says which version. A resumed run
    takes its weights from the checkpoint; where the cache is gone, ``model.module.pretrained=false`` together with
    ``resume_allow=[model.module.pretrained]`` spares the download of others.

    Weights are float32, whatever they were saved in; the trainer's precision says what is computed in. Code that comes
    with a model is not run.

    The loss of a language model is all that is trained: what else a model of experts adds to its own loss is left out.

    Args:
        name: on the Hub, such as ``'gpt2'`` or ``'Qwen/Qwen3-0.6B'``, or a folder that ``save_pretrained`` wrote.
        pretrained: whether it has its trained weights, rather than new ones for its architecture, which are drawn from
            torch's generator: from the run's seed alone.
        overrides: entries of its config to change, such as ``{'n_layer': 2, 'attn_pdrop': 0.0}``; of an entry that is
            a mapping, those of its keys that are named.
        attention: how attention is computed, transformers' ``attn_implementation``: ``'eager'``, ``'sdpa'``,
            ``'flash_attention_2'``, ...; None: what transformers takes for the model.
        context: the longest sequence, in tokens; None: as many as the model has positions.
        revision: a branch, tag or commit on the Hub; None: ``'main'``.

    Attributes:
        network: the model of transformers, with its ``config``.

    Raises:
        FileNotFoundError: there is no model of that name.
        ModuleNotFoundError: transformers is not installed.
        ValueError: an argument is out of range, or the model is not causal.
    """

    def __init__(
        self,
        name: str,
        pretrained: bool = True,
        overrides: Mapping[str, Any] | None = None,
        attention: str | None = None,
        context: int | None = None,
        revision: str | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(name, str) or not name:
            raise ValueError(f"name={name!r} must be that of a model on the Hub, such as 'gpt2', or a folder")
        if context is not None and context < 1:
            raise ValueError(f"context={context!r} must be at least 1 token, or None for all positions of the model")
        if revision is not None and is_local(name):
            raise ValueError(
                f"revision={revision!r}: is of a model on the Hub, and name={name!r} is a folder; give none"
            )
        with quiet():
            config = override(find_config(name, revision), name, overrides or {})
            text = config.get_text_config(decoder=True)
            positions = getattr(text, "max_position_embeddings", None)
            if context is not None and positions is not None and context > positions:
                raise ValueError(
                    f"context={context!r}: {name!r} has {positions} positions; give at most so many, or another model"
                )
            check_attention(attention)
            # On the meta device there are no values to load, and nobody asks for them.
            pretrained = pretrained and torch.get_default_device().type != "meta"
            self.network = load_network(config, name, pretrained, attention, revision).train()
        self.context = positions if context is None else context
        without_reading(self.network)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each position's next token, ``(N, T, V)``.

        Args:
            tokens: int64 ``(N, T)`` in [0, V), T at most ``context``. No row holds padding on its left.

        Raises:
            ValueError: the sequence is longer than ``context``.
        """
        if self.context is not None and tokens.shape[1] > self.context:
            raise ValueError(f"a sequence of {tokens.shape[1]} tokens is longer than context={self.context!r}")
        with one_sequence_a_row():
            return self.network(input_ids=tokens, use_cache=False, return_dict=True).logits

    def flops_per_token(self, context: int) -> float:
        """Return the floating-point operations of the forward and backward pass for one token of a sequence.

        Six for each weight that multiplies, and 12 x layers x heads x their width x context for the attention, not
        counting that half of it is masked, that some models attend to fewer positions, or that a token meets only some
        experts. Source: Chowdhery et al. 2022, "PaLM", appendix B, https://arxiv.org/abs/2204.02311.

        Args:
            context: length of the sequence, in tokens.
        """
        config = self.network.config.get_text_config(decoder=True)
        heads = getattr(config, "num_attention_heads", None)
        width = getattr(config, "head_dim", None)
        # Without heads nothing attends; by default they share the width of the model.
        attended = heads * width if heads and width else config.hidden_size if heads else 0
        return 6.0 * self._num_multiplied + 12.0 * config.num_hidden_layers * attended * context

    @cached_property
    def _num_multiplied(self) -> int:
        """The number of weights without embeddings, which are looked up; a tied one multiplies as the head."""
        looked_up = {id(one.weight) for one in self.modules() if isinstance(one, nn.Embedding)}
        looked_up.discard(id(getattr(self.network.get_output_embeddings(), "weight", None)))
        return sum(weight.numel() for weight in self.parameters() if id(weight) not in looked_up)


def save_pretrained(run: str | Path, folder: str | Path, tokenizer: str | None = None) -> Path:
    """Write a trained model for ``AutoModelForCausalLM.from_pretrained`` to load, and return its folder.

    The weights are those that the run's evaluations measured (under an averaging algorithm, the average), in float32.
    From a shell: ``python -c "from runner.models.hf.causal_lm import save_pretrained as s; s('RUN', 'FOLDER')"``.

    Args:
        run: the folder of a run, for its last checkpoint, or of a checkpoint; its model is an :class:`HFCausalLM`.
        folder: the folder to write, new or empty.
        tokenizer: a model, on the Hub or in a folder, whose tokenizer is saved there too; None saves none.

    Raises:
        FileExistsError: the folder is not empty.
        FileNotFoundError: there is no checkpoint, or the config of the model is no longer where the run found it.
        ValueError: the run's model is not an HFCausalLM, or an algorithm has changed its layers.
    """
    from runner.checkpoints.files import CONFIG, find_checkpoint, read_file

    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"folder={str(folder)!r}: is there already; give a new or an empty one")
    checkpoint = find_checkpoint(run)
    config = json.loads((checkpoint / CONFIG).read_text()) if (checkpoint / CONFIG).is_file() else {}
    options = dict(config.get("model", {}).get("module") or {})
    if options.pop("_target_", None) != f"{HFCausalLM.__module__}.{HFCausalLM.__name__}":
        reason = "its model is not model=hf_causal_lm, so there is nothing that transformers could load"
        raise ValueError(f"run={str(run)!r}: {reason}")
    model = HFCausalLM(**{**options, "pretrained": False})
    own = model.state_dict()
    weights = {key.removeprefix("module."): one for key, one in read_file(checkpoint, "model.pt").items()}
    differing = sorted(
        key for key in own.keys() | weights.keys()
        if key not in own or key not in weights or own[key].shape != weights[key].shape
    )  # fmt: skip
    if differing:
        raise ValueError(
            f"run={str(run)!r}: {len(differing)} of its weights are none of transformers' model, such as "
            f"{differing[0]!r}: an algorithm has changed its layers, and transformers could not load them"
        )
    model.load_state_dict(weights)
    with quiet():
        if tokenizer is not None:
            from transformers import AutoTokenizer

            AutoTokenizer.from_pretrained(tokenizer).save_pretrained(str(folder))
        model.network.save_pretrained(str(folder))
    return folder
