"""The paper's lengths through the whole pipeline: prompts of 16,000 tokens, responses of 8,000, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from ctpo_megatron.config import load_config
from tests.end_to_end.small_run import SMALL, Ctpo, records
from tests.support import children
from tests.support.prefork import ROOT
from tests.support.task import SMALL_TASK, task_files, task_folder

PROMPT, RESPONSE = 16000, 8000
PIECE = "12 + 30 = 42 and "
TASK = task_folder(*SMALL_TASK, "model.max_position_embeddings=32768", "model.rope_theta=100000.0")
LENGTHS = (
    *task_files(TASK),
    f"data.max_prompt_tokens={PROMPT}",
    f"rollout.max_response_tokens={RESPONSE}",
    f"rollout.engine.max_model_len={PROMPT + RESPONSE}",
    f"policy.micro_batch_tokens={PROMPT + RESPONSE}",
    "rollout.engine.kv_cache_mb=512",
    "rollout.engine.max_num_seqs=4",
    "rollout.max_turn_tokens=null",
    "rollout.max_turns=99999",
)
RUN = (
    "run.name=long",
    "run.steps=1",
    "sft=null",
    "data.eval=[]",
    "eval.every=0",
    "checkpoint.every=0",
    "rollout.prompts_per_step=2",
    "rollout.samples_per_prompt=2",
    "policy.mini_batch_prompts=1",
    "rollout.environment=endless_user:EndlessUser",
    "rollout.tools=[]",
    "reward.function=endless_user:even_length_of_last_turn",
    f"extensions.path=[{Path(__file__).parent}]",
)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_16000_token_prompts_and_8000_token_responses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "configs" / "quickstart.yaml", [*SMALL, *LENGTHS, *RUN])
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    repeated = PIECE * ((PROMPT - 100) // len(tokenizer(PIECE).input_ids))
    rows = [
        {
            "id": f"long{number}",
            "data_source": "long",
            "prompt": [{"role": "user", "content": f"{number} + {repeated}"}],
            "reward_model": {"ground_truth": "4"},
        }
        for number in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), "long.parquet")
    ctpo = Ctpo(tmp_path)
    command = ctpo.command(*LENGTHS, *RUN, f"data.train=[{tmp_path / 'long.parquet'}]")
    done = children.run(command, directory=tmp_path, environment=ctpo.environment, deadline_s=1600)
    assert done.returncode == 0, done.stderr[-4000:]
    step = records(tmp_path / "runs" / "long")[-1]
    assert step["rollout/response_length_mean"] == RESPONSE
    assert step["tokens/total"] > 4 * (PROMPT - 200 + RESPONSE)
    assert step["pg_update/first_log_ratio_abs_max"] == 0.0
    assert step["mismatch/log_prob_abs_max"] < 1e-3
