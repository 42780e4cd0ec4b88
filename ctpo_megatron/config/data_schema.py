"""The schema of the section `data`: which files prompts come from, and in which order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, NonNegativeFloat, PositiveInt, Tag, field_validator
from pydantic_core import PydanticCustomError

from ctpo_megatron.config.extension import Extension
from ctpo_megatron.config.reads import Reads
from ctpo_megatron.config.section import Section
from ctpo_megatron.config.texts import is_prompt_file


class WeightedFile(Section):
    """An entry of `data.train` with its weight in the mix."""

    path: Annotated[str, Reads()] = Field(min_length=1, description="a file, a folder, a pattern, or a name of the Hub")
    weight: NonNegativeFloat = Field(description="draws are in proportion to it; 0: none")


WEIGHTED = "weighted"
"""What pydantic's errors call an entry that is no text."""
TrainFile = Annotated[
    Annotated[str, Tag("path")] | Annotated[WeightedFile, Tag(WEIGHTED)],
    Discriminator(lambda value: "path" if isinstance(value, str) else WEIGHTED),
]


class DataConfig(Section):
    """Prompt files in the schema of docs/data.md (`data_source`, `prompt`, `reward_model`, ...)."""

    train: Annotated[tuple[TrainFile, ...], Reads()] = Field(
        min_length=1,
        description="training prompts: parquet or JSON lines, folders of `datasets`, patterns, or names of the Hub; "
        "{path, weight}: with a weight (docs/data.md#a-mix-of-files)",
    )
    eval: Annotated[tuple[str, ...], Reads()] = Field(default=(), description="held-out prompts; empty: no evaluation")
    max_prompt_tokens: PositiveInt = Field(default=1024, description="longest rendered prompt in tokens")
    overlong: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="training prompts longer than that, and conversations that do not fit: an error, or left out",
    )
    unverifiable: Literal["refuse", "drop"] = Field(
        default="refuse",
        description="training prompts whose ground truth math_verify cannot match with any answer: the same",
    )
    shuffle: bool = Field(default=True, description="new order of the training prompts every epoch (seeded)")
    sampler: Extension | None = Field(
        default=None,
        description="`package.module:Name` of a class that chooses the training prompts (docs/extending.md#sampler); "
        "null: the order of `shuffle` and weights",
    )
    tool_in_prompt: bool | None = Field(
        default=None,
        description="give the tools' schemas to the chat template; null: as rollout.tool_parser needs it "
        "(hermes: true, fenced: false)",
    )
    system_prompt: Annotated[str | None, Reads(is_prompt_file)] = Field(
        default=None,
        description="text before every conversation, or a .txt or .md file that holds it; null: from "
        'rollout.tool_parser (`fenced` has one); "": none',
    )
    rerender: bool = Field(
        default=False,
        description="on a resume, continue although rows, tokenizer or chat template have changed (docs/data.md)",
    )

    @property
    def train_files(self) -> tuple[str, ...]:
        """The paths of `train`."""
        return tuple(each if isinstance(each, str) else each.path for each in self.train)

    @property
    def train_weights(self) -> tuple[float, ...] | None:
        """The weights of `train_files`; None: without, all rows are one file."""
        weights = tuple(each.weight for each in self.train if isinstance(each, WeightedFile))
        return weights or None

    @field_validator("train")
    @classmethod
    def _check_mix(cls, train: tuple[TrainFile, ...]) -> tuple[TrainFile, ...]:
        weighted = [each for each in train if isinstance(each, WeightedFile)]
        paths = [each.path for each in weighted]
        if weighted and len(weighted) < len(train):
            raise PydanticCustomError("mix", "some files have a weight; give each of them one, or none")
        if weighted and not any(each.weight for each in weighted):
            raise PydanticCustomError("mix", "all weights are 0, so no prompt can be drawn; give one above 0")
        if twice := [path for path in paths if paths.count(path) > 1]:
            raise PydanticCustomError("mix", "{path} is given twice; give it once, with one weight", {"path": twice[0]})
        return train
