"""The embedded dataset: short reviews whose labels depend on syntax, not on vocabulary.

Every sentence is derived from its label. An opinion is stated plainly or through a negation, two opposite opinions are
joined by a contrast in which one side wins, and the opinions of other people or about another subject do not count.
Each word of praise or blame is therefore about as frequent in positive as in negative reviews: counting words cannot
tell them apart, but reading can.

Everything is a function of the seed. Only `random.Random.random` is used, the one generator whose sequence Python
guarantees across versions (https://docs.python.org/3/library/random.html#notes-on-reproducibility).
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from tasks.interface import Split

if TYPE_CHECKING:
    import pyarrow as pa

NUM_TRAIN, NUM_VALIDATION = 8000, 1000
LABELS = ("negative", "positive")
POSITIVE_SHARE = 0.55
MIN_WORDS, MAX_WORDS = 4, 60

_ASPECTS = [
    *("plot", "acting", "music", "ending", "camera", "food", "service", "room", "breakfast"),
    *("staff", "view", "battery", "screen", "sound", "keyboard", "story", "menu", "garden"),
]
_ADJECTIVES = {
    True: ["superb", "charming", "delightful", "excellent", "memorable", "wonderful", "fine", "great"],
    False: ["dreadful", "boring", "terrible", "clumsy", "awful", "dull", "poor", "horrible"],
}
_VERBS = {True: ["loved", "enjoyed", "admired", "liked"], False: ["hated", "regretted", "disliked", "resented"]}
_BARE_VERBS = {True: ["love", "enjoy", "admire", "like"], False: ["hate", "regret", "dislike", "resent"]}
_ADVERBS = ["really", "quite", "truly", "rather", "simply"]
_OTHERS = ["my cousin", "the critics", "our neighbours", "her colleagues", "the guide book", "a friend of mine"]
_ELSEWHERE = [
    "in the hotel next door",
    "in the previous model",
    "in his first novel",
    "in the other cinema",
    "last year",
]
_SETTINGS = [
    "we went there on a rainy tuesday evening",
    "i bought it with two colleagues in the spring",
    "it was our third visit this year",
    "the train from the coast took almost four hours",
    "my sister paid for both of us",
    "we stayed until they closed the doors",
    "the whole thing cost about forty euros",
    "someone had recommended it in a small magazine",
    "i wrote these lines on the way home",
    "there were perhaps a dozen people around us",
]


def embedded_tables() -> dict[Split, pa.Table]:
    """Generates the embedded reviews.

    Returns:
        For each split a table with the string columns "text" and "label"; no text occurs twice.
    """
    import pyarrow as pa

    rows = pa.Table.from_pylist(generate(NUM_TRAIN + NUM_VALIDATION, seed=0))
    return {"train": rows.slice(0, NUM_TRAIN), "validation": rows.slice(NUM_TRAIN)}


class _Writer:
    """Derives sentences from one random stream."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def pick(self, options: list[str]) -> str:
        return options[int(self._random.random() * len(options))]

    def judgement(self, positive: bool) -> str:
        """A description of an aspect, taken literally: "superb", "really dull"."""
        adjective = self.pick(_ADJECTIVES[positive])
        return f"{self.pick(_ADVERBS)} {adjective}" if self.chance(0.3) else adjective

    def opinion(self, positive: bool) -> str:
        """One clause whose meaning is `positive`; half of them say so by negating the opposite."""
        aspect = self.pick(_ASPECTS)
        form = self.pick(["copula", "copula", "verb"])
        if self.chance(0.7):
            if form == "verb":
                return f"i {self.pick(_VERBS[positive])} the {aspect}"
            return f"the {aspect} was {self.judgement(positive)}"
        if form == "verb":
            return f"i {self.pick(['did not', 'never did'])} {self.pick(_BARE_VERBS[not positive])} the {aspect}"
        negation = self.pick(["was not", "was never", "was hardly", "was anything but"])
        return f"the {aspect} {negation} {self.judgement(not positive)}"

    def contrast(self, positive: bool) -> str:
        """Two opposite opinions; the conjunction decides which of them counts."""
        wins, loses = self.opinion(positive), self.opinion(not positive)
        return self.pick(
            [
                f"{loses} , but {wins}",
                f"{loses} ; however , {wins}",
                f"although {loses} , {wins}",
                f"{wins} , even though {loses}",
                f"{wins} , despite the fact that {loses}",
            ]
        )

    def scope(self, positive: bool) -> str:
        """A negation, or another speaker, with a whole clause in its scope."""
        if self.chance(0.5):
            holder = self.pick(["i do not think that", "nobody could claim that", "it is not true that"])
            return f"{holder} {self.opinion(not positive)}"
        claim = f"the {self.pick(_ASPECTS)} was {self.judgement(self.chance(0.5))}"
        if self.chance(0.5):
            return f"{self.pick(_OTHERS)} said that {claim} , yet {self.opinion(positive)}"
        return f"{self.opinion(positive)} , while {self.pick(_ELSEWHERE)} {claim}"

    def review(self, positive: bool) -> str:
        kind = self.pick(["opinion", "opinion", "opinion", "contrast", "contrast", "scope"])
        sentences = [getattr(self, kind)(positive)]
        while self.chance(0.3):
            setting = self.pick(_SETTINGS)
            sentences.insert(0 if self.chance(0.5) else len(sentences), setting)
        text = " . ".join(sentences)
        return text if self.chance(0.3) else f"{text} ."


def generate(num_samples: int, *, seed: int) -> list[dict[str, str]]:
    """Derives distinct reviews.

    Args:
        num_samples: How many reviews to derive.
        seed: Reviews of equal seeds are equal.

    Returns:
        For each review `{"text": ..., "label": "negative" | "positive"}`. A text consists of MIN_WORDS to MAX_WORDS
        words and punctuation marks, separated by single spaces.
    """
    writer = _Writer(seed)
    rows: dict[str, str] = {}
    while len(rows) < num_samples:
        # Every run of twenty reviews has exactly this share, so that both splits are balanced alike.
        positive = len(rows) * 11 % 20 < 20 * POSITIVE_SHARE
        text = writer.review(positive)
        # A rejected text is drawn again under the same label, so that rejections do not shift the balance.
        while text in rows or not MIN_WORDS <= len(text.split()) <= MAX_WORDS:
            text = writer.review(positive)
        rows[text] = LABELS[positive]
    return [{"text": text, "label": label} for text, label in rows.items()]
