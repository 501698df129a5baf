"""Pictures of a report: each view has one of its own, and what cannot be drawn is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from compare.report.html import render_html
from tests import pictures
from tests.browser import require_chromium
from tests.sample_results import sample_results


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path = tmp_path / "report.html"
    path.write_text(render_html(sample_results()), encoding="utf-8")
    return path


@pytest.mark.browser
def test_each_view_of_a_report_has_a_picture(report: Path, tmp_path: Path) -> None:
    require_chromium()
    pictures.main([str(report), str(tmp_path / "new" / "pictures")])
    found = {path.name: path.read_bytes() for path in (tmp_path / "new" / "pictures").iterdir()}
    assert {"1300-light.png", "420-dark.png", "print.png", "tritanopia-light.png"} <= set(found)
    assert set(found) == {f"{name}.png" for name in pictures.VIEWS}
    for name, view in pictures.VIEWS.items():
        picture = found[f"{name}.png"]
        assert picture.startswith(b"\x89PNG")
        assert int.from_bytes(picture[16:20], "big") == view.width or view.media == "print"
    assert len(set(found.values())) == len(found)  # every view changes what is seen


def test_a_report_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        pictures.main([str(tmp_path / "report.html"), str(tmp_path / "pictures")])
    assert ended.value.code == 2
    said = f"{tmp_path / 'report.html'}: there is no such file; name the report.html of a race"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()


def test_a_browser_that_is_not_there_is_named(
    report: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as ended:
        pictures.main([str(report), str(tmp_path / "pictures")])
    assert ended.value.code == 2
    assert "none of chromium, chromium-browser, google-chrome is on PATH; install" in capsys.readouterr().err
    assert not (tmp_path / "pictures").exists()


@pytest.mark.browser
def test_a_directory_that_cannot_be_made_is_refused(report: Path, capsys: pytest.CaptureFixture[str]) -> None:
    require_chromium()
    with pytest.raises(SystemExit) as ended:
        pictures.main([str(report), str(report)])
    assert ended.value.code == 2
    assert f"{report}: File exists; name another directory" in capsys.readouterr().err
