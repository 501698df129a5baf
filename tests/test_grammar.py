"""The embedded data: deterministic, balanced, of all lengths, and beyond the reach of word counts."""

from __future__ import annotations

import hashlib
import json

import torch

from tasks.text.grammar import LABELS, MAX_WORDS, MIN_WORDS, embedded_tables, generate


def test_it_is_the_same_everywhere() -> None:
    digest = hashlib.sha256(json.dumps(generate(2000, seed=0)).encode()).hexdigest()
    assert digest == "5ce7d00e590f07d3f8cf9331c8202c89debd1a6189cd4b1d9440951c2f605bd0"
    assert generate(50, seed=0) != generate(50, seed=1)


def test_size_balance_and_lengths() -> None:
    tables = embedded_tables()
    for split, num_samples in (("train", 8000), ("validation", 1000)):
        labels = tables[split]["label"].to_pylist()
        assert len(labels) == num_samples
        assert 0.54 <= labels.count(LABELS[1]) / num_samples <= 0.56
        lengths = [len(text.split()) for text in tables[split]["text"].to_pylist()]
        assert min(lengths) == MIN_WORDS
        assert MAX_WORDS - 15 <= max(lengths) <= MAX_WORDS


def test_no_text_is_in_both_splits_or_twice() -> None:
    tables = embedded_tables()
    texts = [text for table in tables.values() for text in table["text"].to_pylist()]
    assert len(set(texts)) == len(texts)


def test_words_alone_do_not_tell_the_label() -> None:
    """A bag-of-words classifier, trained to its end, stays far below what test_main_job asks of BERT."""
    assert bag_of_words_accuracy() < 0.70


def bag_of_words_accuracy() -> float:
    """Fits logistic regression on word counts by L-BFGS and returns its validation accuracy."""
    tables = embedded_tables()
    vocabulary = {word for text in tables["train"]["text"].to_pylist() for word in text.split()}
    index = {word: number for number, word in enumerate(sorted(vocabulary))}
    counts, labels = {}, {}
    for split, table in tables.items():
        counts[split] = torch.zeros(table.num_rows, len(index))
        for row, text in enumerate(table["text"].to_pylist()):
            for word in text.split():
                if word in index:
                    counts[split][row, index[word]] += 1
        labels[split] = torch.tensor([float(label == LABELS[1]) for label in table["label"].to_pylist()])
    weights = torch.zeros(len(index) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, line_search_fn="strong_wolfe")

    def scores(split: str) -> torch.Tensor:
        return counts[split] @ weights[1:] + weights[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores("train"), labels["train"])
        loss = loss + 1e-5 * weights.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return float(((scores("validation") > 0) == labels["validation"].bool()).float().mean())
