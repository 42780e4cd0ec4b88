"""Secrets are in nothing that a run prints, logs or writes, and words that only look like some stay."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ctpo_megatron.base.text import PrintableFormatter, concealed, conceals, hidden, redacted, redacted_words, say
from ctpo_megatron.config import Config, ConfigError, Job, Problem, dump, load_config
from ctpo_megatron.config.rules import check_concealed
from ctpo_megatron.run import open_run_directory, take_over
from tests.tracking.synthetic_run import make_config

CANARY = "canary0815unseen"
CONFIG = Path(__file__).resolve().parents[1] / "configs" / "quickstart.yaml"

SHOWN = {
    f"http://me:{CANARY}@host:80/x": "http://***@host:80/x",
    f"http://me:p@{CANARY}@host": "http://***@host",
    f"https://{CANARY}@host": "https://***@host",
    f"https://host/x?a=1&api_key={CANARY}&b=2": "https://host/x?a=1&api_key=***&b=2",
    f"https://host/x?X-Amz-Signature={CANARY}": "https://host/x?X-Amz-Signature=***",
    f"hf_{CANARY}": "***",
    f"use sk-{CANARY} here": "use *** here",
}
"""Recognised wherever they stand, also in a value that is stored."""
SAID = {
    f"password: {CANARY}, then": "password: ***, then",
    f"{{'hf_token': '{CANARY}'}}": "{'hf_token': ***}",
    f"Authorization: Bearer {CANARY}": "Authorization: Bearer ***",
    f"bearer {CANARY}": "bearer ***",
}
"""Only in what is shown: a system prompt may speak of passwords."""
HARMLESS = ["http://host:80/a@b", "file:///a/b@c", "postgresql://mlflow@db/x", "ssh://git@github.com/x"]
HARMLESS += ["the bearer of news", "a token: 3", "eos_token=<eos>", "***", "?monkey=3"]


@pytest.mark.parametrize(("text", "expected"), [*SHOWN.items(), *SAID.items()])
def test_secrets_of_a_text_are_not_shown(text: str, expected: str) -> None:
    assert hidden(text) == redacted([text])[0] == expected
    assert hidden(expected) == expected


@pytest.mark.parametrize("text", [*SHOWN, *SAID])
def test_what_is_stored_is_changed_only_where_a_secret_is_sure(text: str) -> None:
    assert concealed({"a": [text]}) == {"a": [SHOWN.get(text, text)]}
    assert conceals(concealed(text)) == (text in SHOWN and not text.startswith("use"))


@pytest.mark.parametrize("text", HARMLESS)
def test_ordinary_texts_stay(text: str) -> None:
    assert hidden(text) == redacted(text) == concealed(text) == text


@pytest.mark.parametrize("name", ["api_key", "hf_token", "X-Api-Key", "authorization", "a.b.password", "SESSION_TOKEN"])
def test_values_of_secret_names_are_hidden(name: str) -> None:
    assert redacted({name: CANARY}) == concealed({name: CANARY}) == {name: "***"}
    assert redacted({"x": [{name: {"deep": CANARY}}]}) == {"x": [{name: "***"}]}
    assert concealed({name: None}) == {name: None} and concealed({name: True}) == {name: True}


@pytest.mark.parametrize("name", ["eos_token", "sort_key", "max_tokens", "keys", "monkey"])
def test_values_of_other_names_are_not(name: str) -> None:
    assert redacted({name: CANARY}) == {name: CANARY}


def test_secrets_of_a_command_are_hidden() -> None:
    typed = f"ctpo train a.hf_token={CANARY} b.url=http://me:{CANARY}@h c.d=3 http://me:{CANARY}@h/?a=1"
    shown = "ctpo train a.hf_token=*** b.url=http://***@h c.d=3 http://***@h/?a=1"
    assert redacted_words(typed.split()) == shown.split()


def test_values_of_secret_variables_are_hidden_where_they_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", CANARY)
    monkeypatch.setenv("OTHER_PASSWORD", "models")
    assert concealed(["models/tiny", "models", f"x {CANARY}"]) == ["models/tiny", "***", "x ***"]
    assert hidden(f"x {CANARY}") == "x ***"


def with_secrets(monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setenv("MY_TOKEN", CANARY)
    return load_config(
        CONFIG,
        [
            f"rollout.engine.extra.hf_token={CANARY}",
            f"rollout.engine.extra.hf_overrides={{headers: {{Authorization: {CANARY}}}}}",
            f"sandbox.url=http://user:{CANARY}@127.0.0.1:9",
            "data.system_prompt=${oc.env:MY_TOKEN}",
            "model.chat_template_kwargs={name: 'x ${oc.env:MY_TOKEN}'}",
        ],
    )


def test_no_secret_is_in_what_a_dry_run_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_secrets(monkeypatch)
    assert CANARY in json.dumps(config.model_dump(mode="json"))  # the run itself has them
    assert CANARY not in dump(config) and dump(config).count("***") == 5
    assert "samples_per_prompt: 8" in dump(config)


def test_an_evaluation_asks_for_what_a_run_did_not_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_secrets(monkeypatch)
    assert list(check_concealed(config, None, Job(1))) == []
    read_again = load_config(CONFIG, ["sandbox.url=http://***@127.0.0.1:9", "rollout.engine.extra.hf_token='***'"])
    found = list(check_concealed(read_again, None, Job(1)))
    assert [problem.key for problem in found] == ["rollout.engine.extra.hf_token", "sandbox.url"]
    assert all(problem.failed and "give it again" in problem.fix for problem in found)


@pytest.fixture
def config_in(tmp_path: Path) -> Callable[..., Config]:
    return lambda **sections: make_config(tmp_path / "runs", **sections)


def test_no_secret_is_in_a_run_directory_or_a_resume(
    config_in: Callable[..., Config], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MY_TOKEN", CANARY)
    sections: dict[str, Any] = {
        "sandbox": {"url": f"http://user:{CANARY}@127.0.0.1:9"},
        "rollout": {"engine": {"extra": {"hf_token": CANARY}}},
    }
    directory = open_run_directory(config_in(**sections))
    take_over(config_in(**sections, run={"resume": True}))
    sections["sandbox"]["url"] = f"http://user:{CANARY}@127.0.0.2:9"
    open_run_directory(config_in(**sections, run={"resume": True}))
    take_over(config_in(**sections, run={"resume": True}))
    changed = [record.message for record in caplog.records if "another value" in record.message]
    assert len(changed) == 1 and "sandbox.url = http://***@127.0.0.2:9" in changed[0]
    written = [path for path in directory.rglob("*") if path.is_file()]
    assert len(written) > 2 and not [path for path in written if CANARY in path.read_text(errors="replace")]


def test_no_secret_is_in_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    address = f"http://me:{CANARY}@host"
    problem = Problem("sandbox.url", f"{address} does not answer", f"start {address}", value=address)
    say(f"{address}")
    record = logging.LogRecord("x", logging.INFO, "x", 1, "%s is gone", (address,), None)
    texts = [str(problem), problem.message, problem.fix, str(ConfigError([problem]))]
    texts += [capsys.readouterr().out, PrintableFormatter("%(message)s").format(record)]
    assert [text for text in texts if CANARY in text or "http://***@host" not in text] == []
