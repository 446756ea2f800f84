"""HFCausalLM, compared with transformers, on small random models in folders: nothing is downloaded."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from random_models import LLAMA, save_random_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from runner.models.hf.causal_lm import HFCausalLM

transformers: Any = pytest.importorskip("transformers")

CONFIG = Path(__file__).parents[3] / "conf" / "model" / "hf_causal_lm.yaml"
COMMON = {"vocab_size": 256, "bos_token_id": 0, "eos_token_id": 0}
GROUPED = {**LLAMA, "num_key_value_heads": 1, "max_position_embeddings": 128}
CONFIGS = {
    "gpt2": ("GPT2Config", {"n_positions": 128, "n_embd": 32, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaConfig", GROUPED),
    "mistral": ("MistralConfig", {**GROUPED, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {**GROUPED, "num_local_experts": 2}),
    "bloom": ("BloomConfig", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "bert": ("BertConfig", LLAMA),
    "t5": ("T5Config", {}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a folder with the config of each model, for GPT-2 and Llama also with weights."""
    root = tmp_path_factory.mktemp("models")
    for name, (config_class, options) in CONFIGS.items():
        config = getattr(transformers, config_class)(**(COMMON if name != "t5" else {}), **options)
        config.save_pretrained(root / name)
        if name in ("gpt2", "llama"):
            save_random_model(config, root / name)
    return {name: str(root / name) for name in CONFIGS}


def draw_tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0))


def test_the_config_has_every_argument_with_the_default_and_a_comment():
    loaded: Any = OmegaConf.to_container(OmegaConf.create({"model": OmegaConf.load(CONFIG)}), resolve=True)
    module = loaded["model"]["module"]
    assert module.pop("_target_") == f"{HFCausalLM.__module__}.{HFCausalLM.__name__}"
    parameters = inspect.signature(HFCausalLM).parameters
    defaults = {name: [] if parameter.default == () else parameter.default for name, parameter in parameters.items()}
    assert module == defaults | {"name": "gpt2"}
    lines = CONFIG.read_text().splitlines()
    assert all(" # " in line for line in lines[1:] if "_target_" not in line and line != "module:")


def test_the_config_takes_the_context_of_the_data_if_they_have_one():
    for data, context in (({"context": 64}, 64), ({}, None)):
        config = OmegaConf.create({"model": OmegaConf.load(CONFIG), "data": data})
        assert config.model.module.context == context


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("attention", [None, "eager"])
def test_logits_equal_those_of_transformers(folders: dict[str, str], name: str, attention: str | None):
    model = HFCausalLM(folders[name], attention=attention)
    assert model.training and model.context == 128
    tokens = draw_tokens(2, 20)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name])
    torch.testing.assert_close(model.eval()(tokens), theirs(input_ids=tokens).logits)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "bloom", "mixtral"])
def test_a_position_does_not_see_later_tokens(folders: dict[str, str], name: str):
    model = HFCausalLM(folders[name], pretrained=False).eval()
    tokens = draw_tokens(2, 20)
    logits = model(tokens)
    assert torch.equal(logits, model.network(input_ids=tokens, use_cache=False).logits)
    changed = tokens.clone()
    changed[:, 10:] = 3
    torch.testing.assert_close(model(changed)[:, :10], logits[:, :10])
    assert not torch.allclose(model(changed)[:, 10:], logits[:, 10:])


def test_other_callers_of_the_network_can_pack_several_sequences_into_a_row(folders: dict[str, str]):
    network = HFCausalLM(folders["llama"]).eval().network
    tokens = draw_tokens(1, 20)
    positions = torch.arange(10).repeat(2)[None]
    packed = network(input_ids=tokens, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(packed[:, 10:], network(input_ids=tokens[:, 10:]).logits)


class HostReads(TorchDispatchMode):
    """Counts operations that read values on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(name in str(func) for name in ("_local_scalar_dense", "nonzero", "equal"))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_training_reads_no_value_on_the_host(folders: dict[str, str], name: str):
    model = HFCausalLM(folders[name], overrides={"pad_token_id": 1})
    with HostReads() as reads:
        model(draw_tokens(2, 20)).sum().backward()
    assert reads.count == 0
    with HostReads() as reads:
        model.network(input_ids=draw_tokens(2, 20), use_cache=False)
    assert reads.count > 0  # transformers alone reads values, so the count above is not zero by mistake


@pytest.mark.slow
def test_the_model_compiles_without_graph_breaks(folders: dict[str, str]):
    model = HFCausalLM(folders["llama"]).eval()
    tokens = draw_tokens(2, 20)
    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens), model(tokens))
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "mixtral", "bloom"])
def test_a_model_on_the_meta_device_computes_shapes(folders: dict[str, str], name: str):
    with torch.device("meta"):
        model = HFCausalLM(folders[name], pretrained=name in ("gpt2", "llama"))
    assert all(parameter.is_meta for parameter in model.parameters())
    logits = model(torch.zeros(2, 20, dtype=torch.int64, device="meta"))
    assert logits.shape == (2, 20, 256)
    logits.sum().backward()


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_flops_per_token_equal_what_torch_counts(folders: dict[str, str], name: str):
    model = HFCausalLM(folders[name], attention="eager")
    with FlopCounterMode(display=False) as counter:
        model(draw_tokens(2, 64)).sum().backward()
    # A few percent of the weights belong to biases and norms, which torch does not count.
    assert counter.get_total_flops() / (2 * 64) == pytest.approx(model.flops_per_token(64), rel=0.05)


def test_initial_weights_depend_on_the_seed(folders: dict[str, str]):
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(HFCausalLM(folders["gpt2"], pretrained=False).state_dict())
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)
    assert not torch.equal(weights[0]["network.lm_head.weight"], weights[2]["network.lm_head.weight"])


def test_weights_saved_in_bfloat16_are_loaded_in_float32(folders: dict[str, str], tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    for pretrained in (True, False):
        loaded = HFCausalLM(str(tmp_path), pretrained=pretrained)
        assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


def test_overrides_change_the_config(folders: dict[str, str], caplog: pytest.LogCaptureFixture):
    model = HFCausalLM(folders["gpt2"], overrides={"n_layer": 1, "attn_pdrop": 0.0})
    assert (model.network.config.n_layer, model.network.config.attn_pdrop) == (1, 0.0)
    assert "weights of" in caplog.text and "are not used, such as 'transformer.h.1." in caplog.text
    # transformers translates its common names to those of GPT-2.
    model = HFCausalLM(folders["gpt2"], pretrained=False, overrides={"num_hidden_layers": 3})
    assert len(model.network.transformer.h) == 3
    model = HFCausalLM(folders["llama"], overrides={"rope_parameters": {"rope_theta": 500.0}})
    assert model.network.config.rope_parameters == {"rope_theta": 500.0, "rope_type": "default"}


def test_a_bidirectional_model_needs_is_decoder(folders: dict[str, str]):
    with pytest.raises(ValueError, match=r"name='.*bert': also sees later tokens; overrides=\{is_decoder: true\}"):
        HFCausalLM(folders["bert"], pretrained=False)
    model = HFCausalLM(folders["bert"], pretrained=False, overrides={"is_decoder": True}).eval()
    tokens = draw_tokens(1, 8)
    torch.testing.assert_close(model(tokens)[:, :4], model(tokens[:, :4]))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("t5", {}, "name='.*': transformers has no 't5' model for task='causal_lm'"),
        ("bert", {}, "name='.*': cannot be loaded: .*no file named model.safetensors.*; pretrained=false"),
        ("gpt2", {"overrides": {"n_layers": 2}}, "overrides=.* has no 'n_layers'; did you mean 'n_layer'"),
        ("gpt2", {"overrides": {"n_layer": "two"}}, "overrides=.* rejects them: .*expected int"),
        ("gpt2", {"overrides": {"n_layer": 3}}, "12 of the model's weights are missing .* pretrained=false"),
        ("gpt2", {"overrides": {"n_embd": 64}}, "28 of the model's weights are missing or have another shape"),
        ("gpt2", {"attention": "spda"}, "attention='spda': must be one of None, 'eager', .*; did you mean 'sdpa'"),
        ("bloom", {"attention": "sdpa", "pretrained": False}, "attention='sdpa': does not work with '.*bloom'"),
        ("gpt2", {"context": 129}, "context=129: '.*gpt2' has 128 positions"),
        ("gpt2", {"context": 0}, "context=0: must be a number of tokens, at least 1, or None"),
        ("gpt2", {"revision": "main"}, "revision='main': belongs to a model on the Hub"),
    ],
)
def test_wrong_options_have_an_error_of_one_line(
    folders: dict[str, str], name: str, options: dict[str, Any], message: str
):
    with pytest.raises((ValueError, FileNotFoundError), match=message) as raised:
        HFCausalLM(folders[name], **options)
    assert "\n" not in str(raised.value)


def test_impossible_names_are_refused_without_a_request_to_the_hub(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="name='.*/gone': there is no such folder"):
        HFCausalLM(str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match="name='.*': has no config.json"):
        HFCausalLM(str(tmp_path))
    with pytest.raises(ValueError, match="name='': must be a name on the Hub"):
        HFCausalLM("")
    with pytest.raises(FileNotFoundError, match="neither a folder nor a possible name on the Hub"):
        HFCausalLM("my model")


def test_a_sequence_longer_than_the_context_is_refused(folders: dict[str, str]):
    with pytest.raises(ValueError, match="a sequence of 9 tokens is longer than context=8"):
        HFCausalLM(folders["llama"], context=8)(draw_tokens(1, 9))


def test_the_error_without_transformers_contains_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed here: pip install -e '.\[hf\]'"):
        HFCausalLM("gpt2")


@pytest.mark.slow
def test_importing_the_models_does_not_import_transformers():
    program = "import sys, runner.models, runner.models.hf.causal_lm; assert 'transformers' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
