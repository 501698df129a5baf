"""WordPieceTrainer learns another vocabulary from the same texts in every call.

    python docs/findings/tokenizers_wordpiece_order.py

It numbers the characters inside words as it meets them, in the order of a hash map, and ties among
the pieces it may join are broken by those numbers.
"""

import sys

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

texts = [f"{one}{two} {two}{one}" for one in "abcdefghij" for two in "klmnopqrst"]


def learn() -> dict[str, int]:
    """Trains on the texts and returns the vocabulary."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer.get_vocab()


learned = [learn() for _ in range(5)]
as_described = any(other != learned[0] for other in learned[1:])
entries = {frozenset(vocabulary) for vocabulary in learned}
num_alike = sum(other == learned[0] for other in learned)
print(f"of 5 vocabularies, {num_alike} equal the first; {len(entries)} sets of entries")
print("as described" if as_described else "changed: all five are the same")
sys.exit(0 if as_described else 1)
