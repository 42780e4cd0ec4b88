"""What is detected of transformer-engine and apex, what the log says, and that training falls back without them."""

from __future__ import annotations

import contextlib
import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from ctpo_megatron.config import OptimizerConfig, PolicyConfig, read_spec
from ctpo_megatron.policy import Trainer, capabilities, destroy_distributed, device, init_distributed
from ctpo_megatron.policy.model import resolve_layer_spec, transformer_config
from tests.policy import models, scenario
from tests.policy.jobs import run_job
from tests.support import ranks
from tests.support.prefork import Prefork

TE, APEX, FUSION, FLASH = "transformer_engine", ("apex", "amp_C"), "fused_weight_gradient_mlp_cuda", "flash_attn"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch):
    """Pretend to be a CUDA machine with exactly these modules of the optional libraries."""
    real = importlib.util.find_spec

    def pretend(*names: str, capability: tuple[int, int] = (9, 0)) -> device.Capabilities:
        optional = {TE, *APEX, FUSION, FLASH}

        def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
            if name in optional:
                return ModuleSpec(name, None) if name in names else None
            return real(name, package)

        monkeypatch.setattr(device, "CUDA", True)
        monkeypatch.setattr(device, "_compute_capability", lambda: capability)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        return capabilities()

    return pretend


def lines(found: device.Capabilities, layer_spec: str = "auto", dtype: str = "bfloat16") -> dict[str, str]:
    return dict(line.split(": ", 1) for line in found.describe(layer_spec, dtype).splitlines())


@pytest.mark.parametrize(
    ("modules", "attention", "adam", "fusion"),
    [
        ((), "torch", "torch AdamW", "off"),
        ((TE,), "TE fused", "TE FusedAdam", "off"),
        (APEX, "torch", "apex FusedAdam", "off"),
        ((TE, *APEX, FUSION), "TE fused", "TE FusedAdam", "apex"),
        ((*APEX, FUSION), "torch", "apex FusedAdam", "apex"),
        (("apex",), "torch", "torch AdamW", "off"),  # PyPI's web toolkit
    ],
)
def test_what_is_installed_is_what_is_logged(
    modules: tuple[str, ...], attention: str, adam: str, fusion: str, installed
) -> None:
    found = lines(installed(*modules))
    assert found["attention"].startswith(attention)
    assert found["norms"].startswith("TE" if TE in modules else "torch")
    assert found["Adam"] == adam
    assert found["gradient accumulation fusion"].startswith(fusion)
    assert found["device"].startswith("cuda")


def test_a_local_layer_spec_keeps_transformer_engine_out_of_the_layers(installed) -> None:
    found = lines(installed(TE), "local")
    assert found["attention"].startswith("torch") and found["norms"].startswith("torch")
    assert found["Adam"] == "TE FusedAdam"  # megatron-core picks it wherever it can be imported


@pytest.mark.parametrize(
    ("modules", "capability", "dtype", "spec", "why"),
    [
        ((TE,), (9, 0), "bfloat16", "transformer_engine", "TE fused"),
        ((TE,), (8, 0), "bfloat16", "local", "needs flash-attn"),
        ((TE, FLASH), (8, 0), "bfloat16", "transformer_engine", "TE fused"),
        ((TE, FLASH), (9, 0), "float32", "local", "no packed attention in float32"),
        ((FLASH,), (9, 0), "bfloat16", "local", "was not found"),
    ],
)
def test_transformer_engine_is_taken_where_it_can_train_packed_sequences(
    modules: tuple[str, ...], capability: tuple[int, int], dtype: str, spec: str, why: str, installed
) -> None:
    found = installed(*modules, capability=capability)
    assert why in lines(found, "auto", dtype)["attention"]
    assert resolve_layer_spec(PolicyConfig(dtype=dtype)) == spec
    if spec == "local":
        with pytest.raises(RuntimeError, match=f"policy.layer_spec=transformer_engine: .*{why}"):
            resolve_layer_spec(PolicyConfig(dtype=dtype, layer_spec="transformer_engine"))


def test_modules_of_transformer_engine_are_not_recomputed_in_local_layers(tmp_path: Path) -> None:
    models.build("qwen3-moe", tmp_path)
    policy = PolicyConfig(recompute="selective", recompute_modules=("core_attn", "moe_act"))
    with pytest.raises(RuntimeError, match=r"policy.recompute_modules=\['moe_act'\] need Transformer Engine"):
        transformer_config(read_spec(tmp_path), policy)


def test_flags_follow_what_is_installed(installed) -> None:
    installed(TE)
    assert device.transformer_flags()["gradient_accumulation_fusion"] is False
    installed(FUSION)
    assert device.transformer_flags()["gradient_accumulation_fusion"] is True


def test_without_cuda_nothing_counts_as_installed(installed, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(TE, *APEX, FUSION)
    monkeypatch.setattr(device, "CUDA", False)
    found = lines(capabilities())
    assert found["Adam"] == "torch AdamW" and found["attention"].startswith("torch")


def test_the_logged_adam_is_the_one_that_steps(tmp_path: Path) -> None:
    models.build("qwen3-tied", tmp_path)
    layout = init_distributed(PolicyConfig(), seed=0)
    try:
        policy = Trainer(PolicyConfig(), layout, tmp_path, temperature=1.0)
        policy.use_optimizer(OptimizerConfig(), total_steps=1)
        (inner,) = [optimizer.optimizer for optimizer in policy._steps.optimizer.chained_optimizers]
    finally:
        destroy_distributed()
    assert f"{type(inner).__module__.split('.')[0]} {type(inner).__name__}" == capabilities().adam


@pytest.mark.slow  # it imports everything anew
def test_the_other_package_called_apex_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core sees a package of that name and believes that it has NVIDIA's norms."""
    foreign = tmp_path / "site" / "apex"
    foreign.mkdir(parents=True)
    (foreign / "__init__.py").write_text('"""A toolkit for Pyramid, an Apache web server, and Velruse."""\n')
    models.build("qwen3-tied", tmp_path / "qwen3-tied")
    plain = run_job(scenario.main, tmp_path, 1, {"run": {}})
    monkeypatch.syspath_prepend(tmp_path / "site")
    with contextlib.closing(Prefork(())) as server:
        (beside,) = ranks.run(scenario.main, tmp_path, {"run": {}}, server=server)
    assert beside["run"]["steps"] == plain["run"]["steps"]


def test_a_rank_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.max_ranks() >= 4
    monkeypatch.setattr(device, "CUDA", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert device.max_ranks() == 2
    with pytest.raises(RuntimeError, match=r"rank 2 of this node has no GPU: 2 are visible; start at most 2"):
        device.local_device(2)
