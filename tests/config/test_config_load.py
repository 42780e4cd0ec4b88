"""Files, defaults, interpolation, overrides; and every mistake in one readable message."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from ctpo_megatron.config import PRESETS, Config, ConfigError, dump, load_config, load_with_sources
from ctpo_megatron.config.keys import known_keys, nearest
from tests.support.prefork import ROOT

Refusal = Callable[..., list[str]]


def problems_of(path: str | Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return [str(problem) for problem in caught.value.problems]


def test_values_overrides_and_interpolation(config_with: Callable[..., Config]) -> None:
    config = config_with(
        "run.root=out", "model.path=${run.root}/model", "policy.optimizer.lr=3e-4", "policy.optimizer.betas=[0.9,0.95]"
    )
    assert config.model.path == "out/model"
    assert config.policy.optimizer.lr == 3e-4
    assert config.policy.optimizer.betas == (0.9, 0.95)
    assert config.run.directory == Path("out/first")


def test_off_is_a_word_where_a_key_has_it(config_with: Callable[..., Config], tmp_path: Path) -> None:
    """YAML 1.1 reads it as false."""
    config = config_with("policy.share_prefixes=off", "tracking.live=off")
    assert (config.policy.share_prefixes, config.tracking.live) == ("off", "off")
    (tmp_path / "again.yaml").write_text(dump(config))
    assert load_config(tmp_path / "again.yaml", []) == config


def test_interpolation_sees_schema_defaults(config_with: Callable[..., Config]) -> None:
    assert config_with("model.path=${run.root}/model").model.path == "runs/model"


def test_partly_given_section_keeps_the_defaults_of_its_place(config_with: Callable[..., Config]) -> None:
    sft = config_with("sft.data=[a]", "sft.steps=5", "sft.optimizer.weight_decay=0.5").sft
    assert sft is not None
    assert sft.optimizer.lr == 3e-3
    assert sft.optimizer.weight_decay == 0.5


@pytest.mark.parametrize(
    ("override", "arguments"),
    [
        ("rollout.tool_parser=fenced", {}),
        ("rollout.tool_parser.name=fenced", {}),
        ("rollout.tool_parser={name: 'a:B', arguments: {most: 2}}", {"most": 2}),
        ("rollout.tool_parser.arguments.parallel_calls=true", {"empty_output": "", "parallel_calls": True}),
    ],
)
def test_another_part_does_not_get_the_arguments_of_the_one_before(
    config_with: Callable[..., Config], override: str, arguments: dict[str, object]
) -> None:
    below = "rollout.tool_parser={name: hermes, arguments: {empty_output: ''}}"
    assert config_with(below, override).rollout.tool_parser.arguments == arguments


def test_config_is_frozen(config_with: Callable[..., Config]) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        config_with().run.steps = 5  # type: ignore[misc]


def test_dump_round_trips(config_with: Callable[..., Config], tmp_path: Path) -> None:
    config = config_with("run.name='1e5'", "sft.data=[a]", "sft.steps=5", "rollout.engine.extra={a_b: [1, x]}")
    (tmp_path / "resolved.yaml").write_text(dump(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_optional_section_can_be_switched_off(base: Path) -> None:
    (base.parent / "child.yaml").write_text("defaults: base.yaml\nsft: {data: [a], steps: 3}\n")
    assert load_config("child.yaml").sft is not None
    assert load_config("child.yaml", ["sft=null"]).sft is None


def test_defaults_are_read_first_and_recursively(base: Path) -> None:
    (base.parent / "sub").mkdir()
    (base.parent / "sub" / "middle.yaml").write_text("defaults: ../base.yaml\nrun: {seed: 1, steps: 9}\n")
    (base.parent / "child.yaml").write_text("defaults: sub/middle.yaml\nrun: {seed: 2}\n")
    config = load_config("child.yaml")
    assert (config.run.name, config.run.steps, config.run.seed) == ("first", 9, 2)


def test_no_defaults_may_be_said(base: Path) -> None:
    (base.parent / "child.yaml").write_text("defaults: null\n" + base.read_text())
    assert load_config("child.yaml") == load_config("base.yaml")


def test_defaults_refuse_a_circle_and_a_missing_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.yaml").write_text("defaults: b.yaml\n")
    Path("b.yaml").write_text("run: {seed: 1}\ndefaults: a.yaml\n")
    assert problems_of("a.yaml") == [
        "a.yaml: defaults: the files include each other: a.yaml -> b.yaml -> a.yaml; remove one"
    ]
    Path("b.yaml").write_text("run: {seed: 1}\ndefaults: c.yaml\n")
    advice = "no such file; write the name of one file, such as those next to it: a.yaml, b.yaml"
    assert problems_of("a.yaml") == [f'b.yaml:2: defaults = "c.yaml": {advice}']
    Path("b.yaml").write_text("defaults: [a, b]\n")
    assert problems_of("a.yaml") == [f'b.yaml:1: defaults = ["a", "b"]: {advice}']


def test_place_of_a_value_in_an_included_file(base: Path) -> None:
    base.write_text(base.read_text() + "polcy: {threads: 2}\n")
    (base.parent / "child.yaml").write_text("defaults: base.yaml\nrun:\n  seed: -1\n")
    assert problems_of("child.yaml") == [
        'base.yaml:11: polcy = {"threads": 2}: unknown key; did you mean policy?',
        "child.yaml:3: run.seed = -1: must be greater than or equal to 0",
    ]


def test_all_problems_at_once_each_with_its_place(refusal: Refusal) -> None:
    problems = refusal(
        "run.seed=-1",
        "objective.preset=gropo",
        append="eval:\n  samples: none\n  evry: 3\ncheckpoint:\n  every: 2.0\n",
    )
    assert problems == [
        "base.yaml:13: eval.evry = 3: unknown key; did you mean eval.every?",
        "command line: run.seed = -1: must be greater than or equal to 0",
        f'command line: objective.preset = "gropo": must be one of {", ".join(PRESETS)}; did you mean grpo?',
        'base.yaml:12: eval.samples = "none": must be an integer; without quotes if it is one',
        "base.yaml:15: checkpoint.every = 2.0: must be an integer, or auto",
    ]


UNREADABLE = [
    ("+policy.threads=3", '+policy.threads = "3": no `+` here; write policy.threads=3; policy.threads=null switches'),
    ("++policy.threads=3", "no `+` here; write policy.threads=3"),
    ("~sft", "~sft: no `~` here; write sft=VALUE; sft=null switches an optional section or value off"),
    ("~sft.data=1", "sft.data=null switches an optional section"),
    ("--policy.threads=3", "no `-` here; write policy.threads=3"),
    ("data.train.0=x", "an item of a list cannot be set alone; give the whole list: data.train=[first,second]"),
    ("data.train[0]=x", "give the whole list: data.train=[first,second]"),
    ("policy.threads", "policy.threads: is no override; write section.key=VALUE"),
    ("policy..threads=3", "is no override; write section.key=VALUE"),
    ("=3", "is no override"),
    ("policy.threads={1", 'policy.threads = "{1": not a YAML value: did not find expected'),
    ("run.name=${run", "not a YAML value: no viable alternative"),
    ("run.root=caf\udce9", 'run.root = "caf\udce9": is not UTF-8; rename'),
]


def test_unreadable_overrides(refusal: Refusal) -> None:
    problems = refusal(*(override for override, _ in UNREADABLE))
    for problem, (_, expected) in zip(problems, UNREADABLE, strict=True):
        assert problem.startswith("command line: ") and expected in problem


def test_unreadable_override_does_not_hide_the_others(refusal: Refusal) -> None:
    assert len(refusal("+run.seed=1", "run.steps=-1", "nothing")) == 3


WRONG_VALUES = {
    "rolout.engines=4": 'rolout = {"engines": 4}: unknown key; did you mean rollout?',
    "checkpoint.best_metrik=x": (
        'checkpoint.best_metrik = "x": unknown key; did you mean checkpoint.best_metric or checkpoint.sft_every?'
    ),
    "extra.section=1": 'extra = {"section": 1}: unknown key; did you mean rollout.engine.extra?',
    "sandbox.xyz=1": "sandbox.xyz = 1: unknown key; sandbox has url, require, slots, run_timeout_s",
    "xyz=1": "xyz = 1: unknown key; the top level has run, model, data",
    "run.name=7": "run.name = 7: must be a string; quote it: \"'7'\" on the command line, '7' in YAML",
    **{f"run.name='{name}'": f'run.name = "{name}": String should match pattern' for name in ("a/b", ".", "..", "...")},
    "run.name.x=3": 'run.name = {"x": 3}: must be a string',
    "run.name=${nothing}": 'run.name = "${nothing}": there is no key nothing',
    "export.directory=../x": (
        "export.directory = \"../x\": String should match pattern '^[A-Za-z0-9._-]+$'; letters, digits, `.`, `_`"
    ),
    "run.steps='4'": 'run.steps = "4": must be an integer; without quotes if it is one',
    "run.steps=true": "run.steps = true: must be an integer",
    "run.steps=1.5": "run.steps = 1.5: must be an integer",
    "run.steps=-1": "run.steps = -1: must be greater than or equal to 0",
    "checkpoint.every=often": 'checkpoint.every = "often": must be an integer, or auto',
    "checkpoint.every=-1": "checkpoint.every = -1: must be greater than or equal to 0, or auto",
    "rollout.engines=true": "rollout.engines = true: must be an integer, or auto",
    "run.overwrite=1": "run.overwrite = 1: must be a boolean",
    "run.resume=yes_please": 'run.resume = "yes_please": must be a boolean, or auto',
    "checkpoint.grace_s=1e12": "checkpoint.grace_s = 1000000000000.0: must be less than or equal to 1000000000",
    "policy.optimizer.lr=.nan": "policy.optimizer.lr = NaN: must be a finite number",
    "policy.optimizer.lr=fast": 'policy.optimizer.lr = "fast": must be a number',
    "policy.optimizer.betas=[0.9]": "policy.optimizer.betas.1: wrong number of items; give 2 numbers",
    "data.train=a.parquet": 'data.train = "a.parquet": must be a list; write [a.parquet]',
    "data.train=null": "data.train = null: must be a list",
    "data.train=[]": "data.train = []: wrong number of items; give at least 1",
    "eval=null": "eval = null: must be an object; write its keys below it, or remove it to take",
    "policy=3": "policy = 3: must be an object",
    "model.chat_template_kwargs=3": "model.chat_template_kwargs = 3: must be an object",
    "rollout.tools={}": "rollout.tools = {}: must be a list",
    "rollout.engine.extra=[x]": 'rollout.engine.extra = ["x"]: must be an object',
    "rollout.top_p=0": "rollout.top_p = 0: must be greater than 0",
    "rollout.weights.transport=[nccl_m2n]": (
        'rollout.weights.transport = ["nccl_m2n"]: must be one of auto, tcp, nccl, ipc'
    ),
    "objective.preset=ppo": 'objective.preset = "ppo": must be one of ctpo, ctpo-paper, ctpo-uniform, ctpo-fixed, ct',
    "sft.steps=3": "sft.data: required, but not given; add it: files with a column `messages` (docs/data.md) (list of",
    "run.root=${run.rot}": 'run.root = "${run.rot}": there is no key run.rot; did you mean run.root?',
    "run.root=${oc.env:CTPO_NO_SUCH_VARIABLE}": (
        'run.root = "${oc.env:CTPO_NO_SUCH_VARIABLE}": KeyError raised while resolving interpolation: "'
        "Environment variable 'CTPO_NO_SUCH_VARIABLE' not found\""
    ),
    "run.root=${run.root}": 'run.root = "${run.root}": Recursive interpolation detected',
    "run.root=${rollout.replay.x}": 'run.root = "${rollout.replay.x}": there is no key rollout.replay.x',
    "run.root=${sft.data}": 'run.root = "${sft.data}": sft.data has no value here; give the value itself, or sft.data',
    "objective.anchor=${run.nam}": 'objective.anchor = "${run.nam}": there is no key run.nam; did you mean run.name?',
}
"""One or more for each rule; the bounds of every key are in docs/reference/configuration.md."""


@pytest.mark.parametrize("override", WRONG_VALUES)
def test_wrong_keys_and_values(refusal: Refusal, override: str) -> None:
    """The message begins with its key and value."""
    assert any(text.startswith(f"command line: {WRONG_VALUES[override]}") for text in refusal(override))


def test_keys_of_a_kl_term_are_told_that_there_is_none(refusal: Refusal) -> None:
    keys = ("kl_coef=.01", "kl_loss_coef=0", "use_kl_loss=false", "kl_penalty=k3", "beta=.1", "kl_ctrl.kl_coef=.1")
    others = ("policy.use_kl_loss=true", "algorithm.kl_ctrl={kl_coef: .1}", "model.reference_model=there")
    problems = refusal(*(f"objective.{key}" for key in keys), *others)
    assert len(problems) == len(keys) + len(others)
    for problem in problems:
        assert "there is no KL term: the published objective has none" in problem
        assert "remove the key (docs/objective.md)" in problem


def test_other_unknown_keys_are_not(refusal: Refusal) -> None:
    for override in ("policy.optimizer.beta=1", "objective.klip_low=1", "policy.skl=1"):
        assert "KL" not in str(refusal(override))


def test_required_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.yaml").write_text("")
    assert problems_of("empty.yaml") == [
        "empty.yaml: run: required, but not given; add it: a section with run.name, run.steps",
        "empty.yaml: model: required, but not given; add it: a section with model.path",
        "empty.yaml: data: required, but not given; add it: a section with data.train",
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("run:\n  name: x\n bad: 1\n", "bad.yaml:3: not valid YAML: "),
        ("run: {name: x\n", "bad.yaml:2: not valid YAML: "),
        ("run:\n\tname: a\n", "bad.yaml:2: not valid YAML: "),
        ("defaults: bad.yaml\n", "bad.yaml: defaults: the files include each other: bad.yaml -> bad.yaml"),
        ("defaults: nowhere.yaml\n", 'bad.yaml:1: defaults = "nowhere.yaml": no such file'),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "bad.yaml:2: not valid YAML: found duplicate key run"),
        ("- run\n", "bad.yaml: the file must be a mapping of sections"),
        ("run:\n  name: ${x\n", "bad.yaml:2: run.name: broken interpolation: "),
        ("run: &a [*a]\n", "bad.yaml: not valid YAML: an alias (*) inside of what it names (&)"),
        ("defaults: 3\n", "bad.yaml:1: defaults = 3: no such file"),
        ("defaults: ${run.name}\n", 'bad.yaml:1: defaults = "${run.name}": no such file'),
    ],
)
def test_unreadable_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.yaml").write_text(text)
    (problem,) = problems_of("bad.yaml")
    assert problem.startswith(expected)


def test_missing_file_says_where_it_looked_and_what_is_near(base: Path) -> None:
    (problem,) = problems_of("bsae.yaml")
    assert problem.startswith("bsae.yaml: no such configuration (looked for bsae.yaml, ")
    assert f"configs{'/'}bsae.yaml" in problem
    assert problem.endswith("did you mean base.yaml?")


@pytest.mark.parametrize("path", ["", ".", "..", "/", "~nobody-of-this-name/a.yaml", "a" * 300])
def test_paths_that_are_no_files_are_refused(path: str) -> None:
    (problem,) = problems_of(path)
    assert "no such configuration (looked for " in problem


def test_configs_of_the_checkout_are_found_from_anywhere(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "sub").mkdir(parents=True)
    base.rename(checkout / "sub" / "mine.yaml")
    monkeypatch.setattr("ctpo_megatron.config.load.config_folders", lambda: [checkout])
    for name in ("sub/mine.yaml", "configs/sub/mine.yaml", "sub/mine"):
        assert load_config(name).run.name == "first"


def test_sources_tell_defaults_from_given_values(base: Path) -> None:
    _, sources = load_with_sources(base, ["run.seed=3"])
    assert sources.where(("run", "seed")) == "command line"
    assert sources.where(("data", "train", "0")) == "base.yaml:4"
    assert not sources.has(("run", "root"))


def test_every_key_is_its_own_nearest_and_has_a_meaning() -> None:
    for key in known_keys():
        assert nearest(key.path)[0] == key.path
        assert key.meaning, f"{key.path} has no description"


@pytest.mark.parametrize("name", ["configs/quickstart.yaml", "configs/quickstart", "quickstart.yaml", "quickstart"])
def test_users_modules_are_next_to_the_file_that_was_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any folder, as the file itself."""
    monkeypatch.chdir(tmp_path)
    assert load_config(name).extensions.path == (str(ROOT / "configs"),)


def test_a_file_of_ones_own_comes_before_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "configs" / "quickstart.yaml"
    mine.parent.mkdir()
    mine.write_text(f"defaults: {os.path.relpath(ROOT / 'configs' / 'quickstart.yaml', mine.parent)}\n")
    assert load_config("configs/quickstart.yaml").extensions.path == (str(mine.parent),)


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_dump_of_what_is_shipped_gives_the_same_configuration(path: Path, tmp_path: Path) -> None:
    below = [str(ROOT / "configs" / "qwen3_4b_tir.yaml"), [str(path)]] if path.stem.startswith("nodes") else [str(path)]
    config = load_config(*below)
    (tmp_path / "whole.yaml").write_text(dump(config))
    assert load_config(tmp_path / "whole.yaml").model_dump() == config.model_dump()
