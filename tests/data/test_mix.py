"""Several training files by weight: shares, epochs, resume, and what is refused."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from ctpo_megatron.config import ConfigError, load_config
from ctpo_megatron.data import MixedFile, Prompt, PromptMix, PromptSampler


def prompts(name: str, count: int) -> list[Prompt]:
    return [Prompt(f"{name}{i}", "source", ({"role": "user", "content": "x"},), "1", (i,)) for i in range(count)]


def mix(*weights: float, seed: int = 0, counts: tuple[int, ...] = (7, 50, 9)) -> PromptMix:
    files = [MixedFile(n, w, prompts(n, c)) for n, w, c in zip("abc", weights, counts, strict=False)]
    return PromptMix(files, seed)


def ids(taken: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in taken]


def test_draws_are_in_proportion_to_the_weights() -> None:
    counts = Counter(name[0] for name in ids(mix(1, 3, 0).take(4000)))
    assert set(counts) == {"a", "b"} and abs(counts["a"] - 1000) < 5 * (4000 * 0.25 * 0.75) ** 0.5
    assert counts == Counter(name[0] for name in ids(mix(10, 30, 0).take(4000)))  # weights need no sum


def test_each_file_has_epochs_of_its_own() -> None:
    drawn = ids(mix(1, 1, 1).take(300))
    for name, size in (("a", 7), ("b", 50), ("c", 9)):
        of_file = [each for each in drawn if each[0] == name]
        for start in range(0, len(of_file) - size, size):
            assert len(set(of_file[start : start + size])) == size, "a prompt came twice in an epoch"
    of_a = [each for each in drawn if each[0] == "a"]
    assert of_a[:7] != of_a[7:14], "another epoch, another order"


def test_the_size_of_a_batch_does_not_matter() -> None:
    whole, parts = mix(1, 2, 3), mix(1, 2, 3)
    assert ids(whole.take(60)) == [name for count in (1, 19, 40) for name in ids(parts.take(count))]
    assert ids(mix(1, 2, 3, seed=1).take(60)) != ids(mix(1, 2, 3).take(60))


@pytest.mark.parametrize("taken", [0, 1, 6, 100])
def test_a_mix_resumes_where_it_stopped(taken: int) -> None:
    original, resumed = mix(1, 2, 0), mix(1, 2, 0)
    original.take(taken)
    resumed.load_state_dict(original.state_dict())
    assert resumed.taken == taken and ids(resumed.take(80)) == ids(original.take(80))
    assert resumed.metrics() == original.metrics()


def test_metrics_say_how_often_a_file_was_seen() -> None:
    stream = mix(1, 0)
    stream.take(14)
    assert stream.metrics() == {"data/drawn/a": 14, "data/drawn/b": 0, "data/epochs/a": 2, "data/epochs/b": 0}


def test_another_mix_is_refused() -> None:
    stream, plain = mix(1, 2), PromptSampler(prompts("a", 7), 0)
    stream.take(5)
    plain.take(5)
    state = stream.state_dict()
    for other, message in (
        (mix(1, 3), r"begun with the weights \[1, 2\] in data.train, this one has \[1, 3\]"),
        (mix(1, 2, 3), "weights"),
        (mix(1, 2, seed=1), "seed 0, this run uses seed 1"),
        (mix(1, 2, counts=(7, 51)), "^b: "),
        (plain, "begun with weights in data.train"),
    ):
        with pytest.raises(ValueError, match=message):
            other.load_state_dict(state)
    with pytest.raises(ValueError, match="begun without weights"):
        stream.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="b has a weight, and no prompts"):
        mix(1, 2, counts=(7, 0))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ("[{path: x, weight: -1}]", "data.train.0.weight = -1: must be greater than or equal to 0"),
        ("[{path: x, weight: .nan}]", "data.train.0.weight = NaN: must be a finite number"),
        ("[{path: x, weight: 0}]", "all weights are 0"),
        ("[{path: x, weight: 1}, y]", "some files have a weight"),
        ("[{path: x, weight: 1}, {path: x, weight: 2}]", "x is given twice"),
        ("[{path: x}]", "data.train.0.weight: required"),
    ],
)
def test_bad_weights_are_named(files: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as raised:
        load_config("configs/quickstart.yaml", [f"data.train={files}"])
    assert len(raised.value.problems) == 1
