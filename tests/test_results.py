"""What is committed in docs/results: made by the commands that it names, and without a trace of the machine."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from compare.numbers import rate
from compare.report.html import render_html
from compare.report.markdown import render_markdown
from compare.report.picture import render_picture
from compare.results import Results, read_results
from launch.starters.interface import PROJECT_DIRECTORY
from tests.sample_results import empty_results, sample_results
from tests.sample_standings import HOSTILE

PLACE = PROJECT_DIRECTORY / "docs" / "results"
RACES = sorted(PLACE.glob("race-*/results.json"))
DRAWN = [file for file in RACES if file.with_name("race.svg").exists()]
# The beginning of a path on some machine, as in a command, a message or a log.
_PATH_OF_A_MACHINE = re.compile(rb"""(?<![\w.:/<*)-])/(tmp|root|home|work|usr|var|opt|mnt|data|Users|private)/""")


def test_no_file_has_a_path_of_a_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z", str(PLACE)], cwd=PROJECT_DIRECTORY, capture_output=True)
    files = [PROJECT_DIRECTORY / name for name in listed.stdout.decode().split("\0") if name]
    files = files or [path for path in PLACE.rglob("*") if path.is_file()]  # where there is no repository
    assert len(files) > 5
    found = {
        f"{file.relative_to(PROJECT_DIRECTORY)}: {content[match.start() : match.start() + 60]!r}"
        for file in files
        if file.exists()
        for content in [file.read_bytes()]
        for match in _PATH_OF_A_MACHINE.finditer(content)
    }
    assert found == set()


@pytest.mark.parametrize("text", ["--output-dir=/tmp/run", "in /root/x", '"/home/a/b"', "(/work/main/x)"])
def test_paths_of_machines_are_recognised(text: str) -> None:
    assert _PATH_OF_A_MACHINE.search(text.encode())


@pytest.mark.parametrize("text", ["https://example.org/home/a", "docs/work/a", "runs/tmp/a", "</data/>"])
def test_other_texts_are_no_paths_of_machines(text: str) -> None:
    assert not _PATH_OF_A_MACHINE.search(text.encode())


@pytest.mark.parametrize("file", RACES, ids=lambda file: file.parent.name)
def test_a_committed_report_is_made_of_its_results(file: Path) -> None:
    results = read_results(file)
    page = render_html(results)
    assert file.with_name("report.html").read_text(encoding="utf-8") == page
    assert len(page.encode()) < 1.5e6
    assert file.with_name("report.md").read_text(encoding="utf-8") == render_markdown(results)
    assert file.stat().st_size < 1e6
    if file in DRAWN:
        assert file.with_name("race.svg").read_text(encoding="utf-8") == render_picture(results)
    else:  # one process was not timed beside several ranks
        with pytest.raises(ValueError, match="no backend with several ranks beside one process"):
            render_picture(results)


def _picture(results: Results) -> ElementTree.Element:
    text = render_picture(results)
    assert len(text.encode()) < 60 * 1024
    assert "prefers-color-scheme: dark" in text
    return ElementTree.fromstring(text)


@pytest.mark.parametrize("file", DRAWN, ids=lambda file: file.parent.name)
def test_a_picture_shows_every_backend_beside_one_process(file: Path) -> None:
    results = read_results(file)
    picture = _picture(results)
    texts = [element.text for element in picture.iter("{http://www.w3.org/2000/svg}text")]
    rates = {
        (result.group.precision, entrant.name, result.group.num_processes): rate(entrant.samples_per_second.estimate)
        for result in results.groups
        for entrant in result.entrants
        if result.group.gradient_accumulation_steps == 1 and entrant.samples_per_second and entrant.ranked
    }
    precisions = {precision for precision, _, _ in rates}
    backends = {name for _, name, num_processes in rates if num_processes == 2}
    assert "ddp" in backends
    assert {*precisions, *backends, "samples/s"} <= set(texts)
    for precision in precisions:
        alone, both = rates[precision, "single", 1], rates[precision, "ddp", 2]
        assert {f"one process: {alone}", both} <= set(texts)
        assert f"{precision}: one process {alone} samples/s, ddp on 2 ranks {both}" in picture.attrib["aria-label"]
    # A bar for each backend under each condition, and a background.
    assert len(list(picture.iter("{http://www.w3.org/2000/svg}rect"))) == 1 + len(backends) * len(precisions)
    assert not {element.tag.rpartition("}")[2] for element in picture.iter()} - {"svg", "style", "rect", "line", "text"}


def test_a_picture_takes_names_for_what_they_are() -> None:
    results = sample_results()
    results.groups[0].group.precision = "bf16"
    results.groups[1].group.gradient_accumulation_steps = 1
    texts = [element.text for element in _picture(results).iter("{http://www.w3.org/2000/svg}text")]
    assert HOSTILE in texts


def test_results_without_one_process_make_no_picture(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(empty_results().model_dump_json())
    for file in ("results.json", "none.json"):
        command = [sys.executable, "-m", "compare.report.picture", str(tmp_path / file)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=PROJECT_DIRECTORY)
        assert done.returncode == 2
        assert done.stderr.startswith(f"lockstep: {tmp_path / file}: cannot be drawn")
        assert len(done.stderr.splitlines()) == 1
