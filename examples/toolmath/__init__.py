"""A synthetic task on which a tiny model learns, within minutes on a CPU, to call a code interpreter.

`python -m examples.toolmath DIRECTORY` writes what configs/quickstart.yaml reads: 14 families of arithmetic questions
(train.parquet, heldout.parquet), conversations for SFT (sft.parquet), and a tokenizer with a tiny Qwen3 (model/).
With `--early-choice` the questions leave the first call free, and it decides which later answer is right.
"""

from examples.toolmath.settings import Corruption, EarlyChoice, Task, TinyModel
from examples.toolmath.task import TaskError, write_task

__all__ = ["Corruption", "EarlyChoice", "Task", "TaskError", "TinyModel", "write_task"]
