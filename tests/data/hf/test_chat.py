"""Conversations become batches of tokens, and only the answers are trained."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_tokenizer import CHATML, END, MARKING, make_tokenizer

from runner import LanguageModel
from runner.data.hf.chat import load_chat
from runner.data.hf.conversations import ChatTokenizer

CONTEXT = 96
CHATS = [
    ("user", "the quick brown fox", "assistant", "jumps over"),
    (
        "system",
        "Ö is a letter",
        "user",
        "lazy dog",
        "assistant",
        "Überall",
        "user",
        "and",
        "assistant",
        "the dog sleeps",
    ),
    ("user", "fox", "assistant", "the lazy dog", "user", "sleeps"),
    ("user", "the dog", "assistant", ""),
    ("system", "the", "user", "brown", "assistant", "fox fox fox"),
]


def messages(chat: tuple[str, ...]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in zip(chat[::2], chat[1::2], strict=True)]


def write_chats(chats: list[Any] = CHATS, path: str = "chats.jsonl") -> None:
    Path(path).write_text("".join(json.dumps({"messages": messages(chat)}) + "\n" for chat in chats))


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Write conversations, and return a function that makes the arguments to read all of them in order to evaluate."""
    datasets: Any = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.chdir(tmp_path)
    write_chats()

    def arguments(template: str | None = MARKING, end: str = END) -> dict[str, Any]:
        tokenizer = make_tokenizer(tmp_path / "tokenizer", end=end, template=template)
        sizes = {"context": CONTEXT, "batch_size": 2, "eval_batch_size": 8, "cache": None}
        return {"data_files": "chats.jsonl", "eval_split": "train", "tokenizer": tokenizer, **sizes}

    return arguments


def load_tokenizer(folder: str) -> Any:
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)


def expected_labels(tokenizer: Any, chat: tuple[str, ...], is_marking: bool) -> tuple[list[int], list[int]]:
    """Tokenize a conversation in the format of CHATML, and label the tokens whose text belongs to an answer."""
    text = ""
    answers: list[tuple[int, int]] = []
    for role, content in zip(chat[::2], chat[1::2], strict=True):
        text += f"<|start|>{role}\n"
        if role == "assistant":
            answers.append((len(text), len(text) + len(content) + len("<|end|>")))
        text += f"{content}<|end|>" + ("" if is_marking else "\n")
    if not is_marking and tokenizer.eos_token != "<|end|>":
        answers = [(start, stop + 1) for start, stop in answers]  # the line break belongs to the turn
    text = text[: answers[-1][1]]
    if not text.endswith(tokenizer.eos_token):
        answers.append((len(text), len(text) + len(tokenizer.eos_token)))
        text += tokenizer.eos_token
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [any(start <= first < stop for start, stop in answers) for first, _ in encoding["offset_mapping"]]
    labels = [token if trained else -100 for token, trained in zip(encoding["input_ids"], inside, strict=True)]
    return encoding["input_ids"], labels


def rows_of(batch: Any) -> list[tuple[list[int], list[int]]]:
    """Return the inputs and targets of each conversation in a batch, sorted."""
    rows = []
    for inputs, targets, positions in zip(*batch, strict=True):
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(inputs)]
        for start, stop in pairwise(starts):
            trained = (targets[start:stop] != -100).nonzero()
            if len(trained):
                stop = start + int(trained[-1]) + 1
                rows.append((inputs[start:stop].tolist(), targets[start:stop].tolist()))
    return sorted(rows)


@pytest.mark.parametrize("end", [END, "<|end|>"])
@pytest.mark.parametrize("template", [MARKING, CHATML], ids=["marking", "prefix"])
def test_targets_are_the_tokens_of_answers(files: Any, template: str, end: str):
    arguments = files(template, end)
    (batch,) = load_chat(**arguments)[1]
    tokenizer = load_tokenizer(arguments["tokenizer"])
    pairs = [expected_labels(tokenizer, chat, template == MARKING) for chat in CHATS]
    assert rows_of(batch) == sorted((tokens[:-1], labels[1:]) for tokens, labels in pairs)
    assert len(batch[0]) < len(CHATS)
    assert all(tokens.count(tokenizer.eos_token_id) == 1 for tokens, _ in pairs if end == END)


def test_an_end_of_text_token_after_a_marked_answer_is_trained_once(files: Any):
    outside = MARKING.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>")
    arguments = files(outside, "<|end|>")
    (batch,) = load_chat(**arguments)[1]
    tokenizer = load_tokenizer(arguments["tokenizer"])
    pairs = [expected_labels(tokenizer, chat, True) for chat in CHATS if "" not in chat]
    assert rows_of(batch) == sorted((tokens[:-1], labels[1:]) for tokens, labels in pairs)


@pytest.mark.parametrize("template", [None, MARKING], ids=["joined", "template"])
def test_only_responses_to_prompts_are_trained(files: Any, template: str | None):
    arguments = files(template) | {"prompt": "question", "response": "answer", "data_files": "pairs.csv", "name": "csv"}
    Path("pairs.csv").write_text("question,answer\nthe lazy,dog\nbrown fox, sleeps\n")
    (batch,) = load_chat(**arguments)[1]
    tokenizer = load_tokenizer(arguments["tokenizer"])
    expected = []
    for prompt, answer in (("the lazy", "dog"), ("brown fox", " sleeps")):
        if template is None:
            before, after = (tokenizer(text)["input_ids"] for text in (prompt, answer))
            tokens = [*before, *after, tokenizer.eos_token_id]
            labels = [-100] * len(before) + tokens[len(before) :]
        else:
            tokens, labels = expected_labels(tokenizer, ("user", prompt, "assistant", answer), True)
        expected.append((tokens[:-1], labels[1:]))
    assert rows_of(batch) == sorted(expected)


def test_every_source_gives_the_same_batches(files: Any):
    datasets: Any = pytest.importorskip("datasets")
    arguments = files()
    (expected,) = load_chat(**arguments)[1]
    rows = datasets.Dataset.from_list([{"messages": messages(chat), "extra": 1} for chat in CHATS])
    rows.to_parquet("chats.parquet")
    datasets.DatasetDict(train=rows).save_to_disk("saved")
    for source in ({"name": "parquet", "data_files": "chats.parquet"}, {"name": "saved", "data_files": None}):
        (batch,) = load_chat(**arguments | source)[1]
        assert all(torch.equal(*pair) for pair in zip(batch, expected, strict=True))


def make_network(kind: str) -> Any:
    sizes = {"vocab_size": 320, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT}
    if kind == "gpt2":
        sizes = {"vocab_size": 320, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT}
        sizes |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    from runner.models.hf.causal_lm import HFCausalLM

    torch.manual_seed(0)
    return HFCausalLM(kind, pretrained=False, overrides=sizes, context=CONTEXT)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("pack", [True, False])
def test_loss_and_gradients_equal_those_of_transformers_for_each_conversation_alone(files: Any, kind: str, pack: bool):
    arguments = files(CHATML)
    (batch,) = load_chat(**arguments, pack=pack)[1]
    assert len(batch) == (3 if pack else 2)
    network = make_network(kind)
    model = LanguageModel(network)
    loss = model.loss(model(batch), batch)
    loss.backward()
    gradients = {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}

    model.zero_grad()
    tokenizer = load_tokenizer(arguments["tokenizer"])
    pairs = [expected_labels(tokenizer, chat, False) for chat in CHATS]
    counts = [sum(label != -100 for label in labels[1:]) for _, labels in pairs]
    total = torch.zeros(())
    for (tokens, labels), count in zip(pairs, counts, strict=True):
        outputs = network.network(input_ids=torch.tensor([tokens]), labels=torch.tensor([labels]))
        total = total + outputs.loss * count / sum(counts)
    total.backward()
    torch.testing.assert_close(loss, total)
    expected_gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    torch.testing.assert_close(gradients, expected_gradients, atol=1e-6, rtol=1e-4)
    assert int(model.loss_weight(batch)) == sum(counts)


def test_long_conversations_are_cut_or_left_out_if_no_answer_remains(files: Any, caplog: Any):
    long = [("user", "fox " * 50, "assistant", "dog"), ("user", "fox", "assistant", "dog " * 50)]
    write_chats([*CHATS, *long, ("user", "a")])
    arguments = files() | {"context": 32}
    pairs = [expected_labels(load_tokenizer(arguments["tokenizer"]), chat, True) for chat in [*CHATS, *long]]
    is_cut = [len(tokens) > 33 for tokens, _ in pairs]
    is_left_out = [all(label == -100 for label in labels[:33]) for _, labels in pairs]
    counts = sum(is_cut), sum(is_left_out)
    assert 2 < counts[0] < len(pairs) and is_left_out[-2:] == [True, False]
    _, evaluation = load_chat(**arguments)
    assert caplog.messages == [  # the same rows are counted for training and for evaluation
        f"{2 * counts[0]} of 16 conversations were cut at data.context=32; {2 * counts[1]} of them left out, as no "
        "answer remains",
        "2 of 16 conversations have no answer, and were left out",
    ]
    (batch,) = evaluation
    kept = [labels[1:33] for (_, labels), left_out in zip(pairs, is_left_out, strict=True) if not left_out]
    trained = sorted([label for label in labels if label != -100] for labels in kept)
    assert sorted([target for target in targets if target != -100] for _, targets in rows_of(batch)) == trained


def test_tools_and_other_keys_of_messages_are_ignored_with_one_warning(files: Any, caplog: Any):
    entries = [{**message, "name": "x", "tool_calls": None} for message in messages(CHATS[0])]
    Path("chats.jsonl").write_text(json.dumps({"messages": entries, "tools": [{"name": "x"}]}) + "\n")
    load_chat(**files())
    ignored = "tools, messages.name, messages.tool_calls"
    reason = "the chat template sees only the role and content of messages"
    assert caplog.messages == [f"{ignored}: ignored, because {reason}"]


def test_the_sample_puts_brackets_around_trained_tokens(files: Any):
    train = load_chat(**files())[0]
    text = "<|start|>user\nthe quick brown fox<|end|><|start|>assistant\n[[jumps over<|end|><|endoftext|>]]"
    assert vars(train)["sample"] == text


def test_cached_tokens_give_the_same_batches_and_belong_to_their_template(files: Any, tmp_path: Path):
    arguments = files() | {"cache": str(tmp_path / "tokens")}
    first, again = (next(iter(load_chat(**arguments)[1])) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))
    other = next(iter(load_chat(**files(MARKING.replace("<|end|>", "!")) | {"cache": str(tmp_path / "tokens")})[1]))
    assert other[0].shape != first[0].shape or not torch.equal(other[0], first[0])


CHANGED = "{{ message.content if messages|length < 5 or not loop.first else 'x' }}"
NOT_A_PREFIX = CHATML.replace("{{ message.content }}", CHANGED)
REFUSING = CHATML.replace(
    "{% for", "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}{% for", 1
)


@pytest.mark.parametrize(
    ("template", "options", "reason"),
    [
        (
            None,
            {},
            "has no chat template, which messages need; take the tokenizer of a chat model, or give columns of",
        ),
        (
            NOT_A_PREFIX,
            {},
            "messages='messages': row 1: its tokens before message 2 depend on what follows, so no answer can be",
        ),
        (REFUSING, {}, "messages='messages': row 1: the chat template refuses it: no system"),
        (CHATML, {"tokenizer": None}, "tokenizer=None: give a folder, or a name on the Hub: that of the model"),
        (CHATML, {"messages": "chat"}, "messages='chat': no such column; the columns are messages"),
        (CHATML, {"prompt": "a"}, "prompt='a', response=None: give both columns, or neither"),
        (CHATML, {"context": 2}, "no conversation to train on has an answer within context=2 tokens"),
        (CHATML, {"data_files": "texts.jsonl"}, "row 0: must be a list of messages, not a text; for texts give prompt"),
        (
            CHATML,
            {"data_files": "roles.jsonl"},
            "row 0: message 0 must have a role and a content, both texts; it is {'f",
        ),
        (CHATML, {"data_files": "empty.jsonl"}, "row 1: a value is missing; fill it in, or leave the row out"),
        (None, {"prompt": "messages", "response": "messages"}, "row 0: messages need a tokenizer with a chat template"),
    ],
)
def test_a_wrong_argument_or_row_is_an_error_of_one_line(
    files: Any, template: str | None, options: dict[str, Any], reason: str
):
    Path("texts.jsonl").write_text('{"messages": "text"}\n')
    Path("roles.jsonl").write_text('{"messages": [{"from": "human", "value": "x"}]}\n')
    Path("empty.jsonl").write_text(json.dumps({"messages": messages(CHATS[0])}) + '\n{"messages": null}\n')
    with pytest.raises(ValueError) as caught:
        load_chat(**files(template) | options)
    assert reason in str(caught.value) and "\n" not in str(caught.value)


def test_row_numbers_are_those_of_the_file_if_rows_are_held_out(files: Any):
    lines = [json.dumps({"messages": messages(CHATS[0])})] * 30 + ['{"messages": null}']
    Path("chats.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(ValueError, match="row 30: a value is missing"):
        load_chat(**files() | {"eval_split": None})


def test_a_tokenizer_without_an_end_of_text_token_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="has no end-of-text token to end answers with"):
        ChatTokenizer(make_tokenizer(tmp_path, end=None, template=CHATML), needs_template=True)


@pytest.mark.slow
def test_the_tokenizer_of_a_llama_loads_in_a_new_process(tmp_path: Path):
    """Its config makes transformers import torchvision, which can fail as the first import with torch for CPUs."""
    name = make_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    program = f"from runner.data.text.tokenizer import load_pretrained_tokenizer\nload_pretrained_tokenizer({name!r})"
    subprocess.run([sys.executable, "-c", program], check=True)
