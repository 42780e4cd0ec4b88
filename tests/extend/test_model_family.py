"""examples/model_family, a file outside the package: from the configuration to the export."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, SeedOssConfig, SeedOssForCausalLM

from ctpo_megatron.cli import main
from ctpo_megatron.config import Config, ConfigError, OptimizerConfig, family_for, load_config, spec_for
from ctpo_megatron.export import resolve
from ctpo_megatron.objective import PolicyObjective
from ctpo_megatron.policy import Trainer, destroy_distributed, init_distributed, policy_gradient
from ctpo_megatron.verify import batch, job, run
from tests.support import ranks
from tests.support.prefork import ROOT

EXAMPLE = ROOT / "examples" / "model_family" / "seed_oss.py"
VOCAB = 300


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """A configuration next to `seed_oss.py`, and the directory of a small model."""
    shutil.copy(EXAMPLE, tmp_path)
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = SeedOssForCausalLM(
        SeedOssConfig(**shape, num_key_value_heads=2, head_dim=16, vocab_size=VOCAB, max_position_embeddings=256)
    )
    with torch.no_grad():  # a bias is 0 at first, and would hide
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "run.yaml"
    file.write_text(
        f"run: {{name: first, steps: 1, root: {tmp_path}}}\n"
        f"model: {{path: {tmp_path}/model, family: 'seed_oss:SeedOss'}}\n"
        "data: {train: [prompts.parquet]}\n"
    )
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "seed_oss", raising=False)
    yield load_config(file)
    sys.modules.pop("seed_oss", None)


def test_a_family_from_a_file_trains_and_exports(config: Config, tmp_path: Path) -> None:
    source = Path(config.model.path)
    assert spec_for(config).qkv_bias
    reference = SeedOssForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    layout = init_distributed(config.policy, seed=0)
    try:
        policy = Trainer(
            config.policy, layout, source, temperature=1.0, family=family_for(config.model, config.extensions.path)
        )
        policy.use_optimizer(OptimizerConfig(lr=1e-3), total_steps=1)
        (mini_batch,) = policy.distribute(batch.trajectories(VOCAB), batch.advantages(), size=batch.SEQUENCES)
        policy.compute_old_log_probs([mini_batch])
        for micro in mini_batch.micro_batches:
            for _, place in micro.places():
                ids, mask = micro.token_ids[place], micro.response_mask[place][1:]
                with torch.no_grad():
                    expected = reference(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
                torch.testing.assert_close(micro.old_log_probs[place][1:][mask], expected[mask], atol=1e-5, rtol=0)
        update = policy.update(mini_batch, policy_gradient(PolicyObjective.preset("ctpo"), "proximal"))
        assert update.grad_norm > 0
        policy.export(tmp_path / "exported")
        trained = dict(policy.weights())
    finally:
        destroy_distributed()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert isinstance(exported, SeedOssForCausalLM)
    before = reference.state_dict()
    for name, tensor in exported.state_dict().items():
        assert torch.equal(tensor, trained[name]) and not torch.equal(tensor, before[name]), name


def test_an_export_finds_the_family_of_the_run(config: Config, tmp_path: Path) -> None:
    run = config.run.directory
    (run / "model").mkdir(parents=True)
    (run / "config.yaml").write_text((tmp_path / "run.yaml").read_text())
    (run / "model" / "config.json").write_text((tmp_path / "model" / "config.json").read_text())
    shutil.copy(EXAMPLE, run)
    assert resolve(run, None, None).family.architecture == "SeedOssForCausalLM"


def verify_job(path: str, folder: Path, layouts: list[str]) -> None:
    os.chdir(path)
    sys.path.insert(0, path)
    job.main(folder, layouts)


@pytest.mark.xdist_group("ranks")
def test_ctpo_verify_compares_it_with_transformers(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_forked(folder: Path, count: int, layouts: list[str]) -> str:
        """As `run._run_job`, in processes that have imported everything."""
        ranks.run(verify_job, str(tmp_path), folder, layouts, ranks=count)
        return ""

    monkeypatch.setattr(run, "_run_job", run_forked)
    monkeypatch.chdir(tmp_path)
    assert main(["verify", "--model", "model", "--family", "seed_oss:SeedOss", "--layouts", "tp2"]) == 0
    assert "1 of 1 within 1e-05 of the float64 oracle" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (None, "architecture SeedOssForCausalLM is not supported; supported: .* in model.family"),
        ("seed_oss:Missing", 'model.family = "seed_oss:Missing": .*seed_oss has no .Missing.'),
        ("no_such_module:Family", "there is no module 'no_such_module' in extensions.path"),
        ("seed_oss:replace", "model.family = .*replace"),
        ("collections:OrderedDict", "makes a OrderedDict; name a subclass of ctpo_megatron.models.ModelFamily"),
        ({"name": "seed_oss:SeedOss", "arguments": {"bias": True}}, "takes no arguments"),
        ("ctpo_megatron.models.dense:Llama", "SeedOssForCausalLM is not the one of model.family, LlamaForCausalLM"),
    ],
)
def test_families_that_are_refused(config: Config, tmp_path: Path, family: object, expected: str) -> None:
    import yaml

    tree = yaml.safe_load((tmp_path / "run.yaml").read_text())
    tree["model"]["family"] = family
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=expected):
        spec_for(load_config(tmp_path / "run.yaml"))
