"""Real sentences to train on: ``python -m tests.reviews DIRECTORY`` writes train.csv and validation.csv.

They are 10,604 sentences from film reviews, each with the mean of how positive twenty readers found it (Hutto and
Gilbert 2014, "VADER", ICWSM; the sentences are those of Pang and Lee 2005). The source distribution of
https://pypi.org/project/vaderSentiment carries them under the MIT licence. Those that are neither positive nor negative
are left out.
"""

from __future__ import annotations

import csv
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

_PACKAGE = "vaderSentiment==3.3.2"
_ARCHIVE = "hutto_ICWSM_2014.tar.gz"
_SENTENCES = "movieReviewSnippets_GroundTruth.txt"
# Every tenth sentence is one of the validation split.
_VALIDATION = 10


def main(directory: Path) -> None:
    """Downloads the sentences with pip, and writes both splits."""
    rows = [(text, "positive" if score > 0 else "negative") for score, text in _scored_sentences() if score]
    directory.mkdir(parents=True, exist_ok=True)
    splits = {"validation": rows[::_VALIDATION], "train": [row for i, row in enumerate(rows) if i % _VALIDATION]}
    for split, chosen in splits.items():
        with (directory / f"{split}.csv").open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([("text", "label"), *chosen])
        print(f"{directory / split}.csv: {len(chosen)} sentences")


def _scored_sentences() -> Iterator[tuple[float, str]]:
    with TemporaryDirectory() as scratch:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "-d", scratch]
        subprocess.run([*download, _PACKAGE], check=True)
        (package,) = Path(scratch).glob("*.tar.gz")
        with tarfile.open(package) as outer:
            name = next(name for name in outer.getnames() if name.endswith(_ARCHIVE))
            with tarfile.open(fileobj=outer.extractfile(name)) as inner:
                name = next(name for name in inner.getnames() if name.endswith(_SENTENCES))
                content = inner.extractfile(name)
                assert content is not None
                lines = content.read().decode("latin-1").splitlines()
    for line in lines:
        _, score, text = line.split("\t", 2)
        yield float(score), text.strip()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        print("usage: python -m tests.reviews DIRECTORY", file=sys.stderr)
        sys.exit(2)
    main(Path(sys.argv[1]))
