"""`ctpo theory`: its tables, its files, and what it refuses."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ctpo_megatron import cli
from ctpo_megatron.theory import StudySettings, study

FEW = ["--samples", "200"]


def cells(text: str, title: str) -> list[list[str]]:
    """The rows of a printed table, its header first."""
    lines = text[text.index(f"\n{title}") :].strip("\n").split("\n\n")[0].splitlines()[1:]
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    return [row for row in rows if len(row) > 2]


def test_tables_have_the_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["theory", *FEW, "--out", str(tmp_path / "new" / "folder")]) == 0
    out = capsys.readouterr().out
    header, *rows = cells(out, "Proposition 1: relative bias")
    assert header == ["t", "token", "CTPO, prefix", "GSPO", "sequence"] and len(rows) == 4
    assert all(float(row[2]) < 1e-12 for row in rows) and float(rows[0][1]) < 1e-12 < 0.01 < float(rows[3][1])
    rates = {tuple(row[:3]): row[3] for row in cells(out, "Clip rate of both windows")}
    assert rates["widening", "no drift", "8,000"] == "0.1787" and rates["widening", "drift", "8,000"] == "0.4311"
    assert rates["fixed", "no drift", "1,000"] == "0.1899" and rates["fixed", "drift", "100"] == "0.0275"
    said = json.loads((tmp_path / "new" / "folder" / "theory.json").read_text())
    assert said["settings"]["samples"] == 200
    figures = sorted(path.name for path in (tmp_path / "new" / "folder" / "figures").iterdir())
    names = ("bias", "clip_rate_fixed", "clip_rate_widening", "outcome_bias_by_position", "variance")
    assert figures == [f"{name}.{form}" for name in names for form in ("pdf", "png", "svg")]
    assert all(f"{tmp_path / 'new' / 'folder' / 'figures' / name}\n" in out for name in figures)
    assert all(table["title"] in out for table in said["tables"].values())
    expected = study(StudySettings(samples=200))
    for table in expected.tables:
        assert said["tables"][table.name]["rows"] == [list(row) for row in table.rows]
    assert len(said["tables"]["clip_rate_curves"]["rows"]) > 6 * 20


def test_without_out_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["theory", *FEW]) == 0
    assert list(tmp_path.iterdir()) == [] and "Counterexample" in capsys.readouterr().out


def test_settings_change_what_is_computed() -> None:
    first, same, other = (study(StudySettings(seed=seed, samples=200)) for seed in (0, 0, 1))
    assert first == same and first.tables != other.tables
    larger = study(StudySettings(vocabulary=2, horizon=6, shift=0.2, sigma=0.05, samples=200))
    assert larger.table("bias").column("t") == [1, 2, 3, 4, 5, 6]
    assert max(larger.table("bias").column("CTPO, prefix")) < 1e-12
    assert larger.table("variance").column("sequence")[0] < first.table("variance").column("sequence")[0]
    assert larger.table("spread").column("sigma sqrt(t)")[0] == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--seed", "-1"], "--seed -1: give 0 or more"),
        (["--vocabulary", "1"], "--vocabulary 1 --horizon 4: give at least 2 of each"),
        (["--vocabulary", "0", "--horizon", "-1"], "--vocabulary 0 --horizon -1: give at least 2 of each"),
        (["--vocabulary", "9999999999", "--horizon", "9999999999"], "at most 10,000 sequences"),
        (["--vocabulary", "10", "--horizon", "5"], "--vocabulary 10 --horizon 5: at most 10,000 sequences"),
        (["--shift", "nan"], "--shift nan: give 1e-06 to 5"),
        (["--sigma", "inf"], "--sigma inf: give 1e-06 to 1"),
        (["--samples", "99"], "--samples 99: give 100 to 200,000"),
        (["--out", "file"], "--out file: File exists: file; name another folder"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main(["theory", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.startswith("ctpo theory: ")


def test_all_wrong_arguments_are_named_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["theory", "--seed", "-1", "--horizon", "1", "--samples", "5"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_size_at_the_limit_is_taken() -> None:
    assert list(StudySettings(vocabulary=10, horizon=4).problems()) == []
