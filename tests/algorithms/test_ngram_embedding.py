from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from runner.algorithms import NGramEmbedding
from runner.algorithms.ngram_embedding import hash_ngrams


@pytest.mark.parametrize("n", [1, 2, 3])
def test_each_ngram_has_its_own_row_if_the_table_is_large_enough(n: int):
    sequences = torch.tensor([*itertools.product(range(5), repeat=n)])
    rows = hash_ngrams(sequences, n, vocab_size=5, table_size=5**n)[:, -1]
    assert sorted(rows.tolist()) == [*range(5**n)]


def test_a_row_depends_on_the_last_n_tokens_alone():
    tokens = torch.randint(50_000, (1, 30))
    rows = hash_ngrams(tokens, 3, vocab_size=50_000, table_size=1000)
    for changed in range(30):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 50_000
        different = hash_ngrams(other, 3, vocab_size=50_000, table_size=1000) != rows
        assert different.nonzero()[:, 1].tolist() == [*range(changed, min(changed + 3, 30))]


def test_rows_of_a_small_table_are_used_evenly():
    tokens = torch.randint(256, (1, 40_000), generator=torch.Generator().manual_seed(0))
    for n in (2, 3, 4):
        counts = hash_ngrams(tokens, n, vocab_size=256, table_size=100).flatten().bincount()
        assert counts.shape == (100,)
        assert counts.min() > 300
        assert counts.max() < 500


def test_large_tables_do_not_overflow():
    tokens = torch.full((1, 8), 2**31 - 2)
    rows = hash_ngrams(tokens, 5, vocab_size=2**31 - 1, table_size=2**31)
    expected = 0
    for _ in range(5):
        expected = (expected * 1_000_003 + 2**31 - 2) % 2**31
    assert rows[0, -1] == expected


def test_outputs_are_bit_identical_before_training(make_trainer, language):
    tokens = torch.randint(11, (3, 12))
    expected = language["build"]().module(tokens)
    with make_trainer(NGramEmbedding(), **language) as trainer:
        gpt = trainer.state.unwrapped_model.module
        torch.testing.assert_close(gpt(tokens), expected, rtol=0, atol=0)
        assert gpt.head.weight is gpt.token_embedding.weight


def test_ngram_vectors_are_added_from_the_first_position_with_an_ngram(make_trainer, language):
    with make_trainer(NGramEmbedding(3, table_size=2000), **language) as trainer:
        embedding = trainer.state.unwrapped_model.module.token_embedding
        for table in embedding.tables:
            nn.init.normal_(table.weight)
        tokens = torch.randint(11, (2, 7))
        expected = F.embedding(tokens, embedding.weight)
        bigrams, trigrams = (table.weight for table in embedding.tables)
        expected[:, 1:] += bigrams[tokens[:, :-1] * 11 + tokens[:, 1:]]
        expected[:, 2:] += trigrams[tokens[:, :-2] * 121 + tokens[:, 1:-1] * 11 + tokens[:, 2:]]
        torch.testing.assert_close(embedding(tokens), expected)
        torch.testing.assert_close(embedding(tokens[:, :1]), expected[:, :1])


def test_only_rows_of_seen_ngrams_are_learned(make_trainer, language):
    tokens = torch.cat([batch[0] for batch in language["eval_dataloader"]])
    with make_trainer(NGramEmbedding(2, table_size=121), **language, max_duration="1ep") as trainer:
        trainer.fit()
        table = trainer.state.unwrapped_model.module.token_embedding.tables[0].weight
        seen = torch.zeros(121, dtype=torch.bool)
        seen[tokens[:, :-1] * 11 + tokens[:, 1:]] = True
        assert 0 < seen.sum() < 121
        assert torch.equal((table != 0).any(dim=1), seen)


def test_weights_keep_their_names_and_an_existing_optimizer_gets_the_new_ones(make_trainer, language):
    model = language["build"]()
    before = [*model.state_dict()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_trainer(NGramEmbedding(3, 100), **language, model=model, optimizers=optimizer) as trainer:
        new = {f"module.token_embedding.tables.{index}.weight" for index in (0, 1)}
        assert set(model.state_dict()) == {*before} | new
        assert {*optimizer.param_groups[0]["params"]} == {*model.parameters()}
        flops = model.module.flops_per_token(12)
        trainer.fit()
    assert flops == language["build"]().module.flops_per_token(12)  # a table lookup takes no multiplications


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_n": 1}, "max_n=1"),
        ({"table_size": 0}, "table_size=0"),
        ({"table_size": 2**31 + 1}, "table_size=21474"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, match: str):
    with pytest.raises(ValueError, match=match):
        NGramEmbedding(**arguments)
