"""What `ctpo` answers to a command line: help, version, a verb that was meant, arguments that no verb takes."""

from __future__ import annotations

import re

import pytest

from ctpo_megatron import __version__, cli


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert all(f"  {verb} " in out for verb in ("train", "report", "compare", "doctor", "verify", "export", "sandbox"))


def test_version_says_what_a_bug_report_needs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    said = capsys.readouterr().out
    commit = r"(commit [0-9a-f]{40}(\+changes)?, )?"
    assert re.fullmatch(rf"ctpo-megatron {__version__}, {commit}Python 3\.\d+\.\d+\n", said)


@pytest.mark.parametrize(
    ("typed", "advice"),
    [("trian", "did you mean train?"), ("Evals", "did you mean eval?"), ("fly", "there are train, sweep, eval")],
)
def test_a_verb_that_does_not_exist(typed: str, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([typed, "first.yaml"])
    assert f"no verb '{typed}'; {advice}" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["train", "sweep", "launch"])
def test_overrides_are_not_required(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([verb])
    said = capsys.readouterr().err
    assert "a.b=c ...]" in said and "a.b=c" not in said.rpartition("required: ")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "a.yaml", "--gpu-gib", "{}"],
        ["export", "run", "--tolerance", "{}"],
        ["export", "run", "--tensor-parallel", "{}"],
        ["verify", "--max-ranks", "{}"],
        ["verify", "--tolerance", "{}"],
        ["sandbox", "bench", "--url", "http://127.0.0.1:9", "--seconds", "{}"],
        ["sandbox", "bench", "--url", "http://127.0.0.1:9", "--concurrency", "1", "{}"],
    ],
    ids=lambda arguments: f"{arguments[0]} {arguments[-2]}",
)
@pytest.mark.parametrize("number", ["0", "-1", "nan", "many"])
def test_numbers_that_must_be_positive(arguments: list[str], number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([argument.format(number) for argument in arguments])
    assert f"{number} is not a positive" in capsys.readouterr().err
