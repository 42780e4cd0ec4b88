"""What is detected of transformer-engine and apex, what the log says, and that training falls back without them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.transformer.moe import moe_utils

from ctpo_megatron.base.installed import te_trouble
from ctpo_megatron.config import OptimizerConfig, PolicyConfig, read_spec
from ctpo_megatron.policy import (
    Layout,
    Trainer,
    capabilities,
    device,
    replacements,
)
from ctpo_megatron.policy.device import DeviceMemory
from ctpo_megatron.policy.model import resolve_layer_spec, transformer_config
from ctpo_megatron.policy.parallel import usable_threads
from tests.policy import models
from tests.support import ranks
from tests.support.deadlines import scaled

TE, APEX, FUSION, FLASH = "transformer_engine", ("apex", "amp_C"), "fused_weight_gradient_mlp_cuda", "flash_attn"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch):
    """Pretend to be a CUDA machine with exactly these modules of the optional libraries, in files of `site`."""
    real, optional = importlib.util.find_spec, {TE, *APEX, FUSION, FLASH}

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(name, [str(site)]) if name in optional else real(name, package)

    def pretend(*names: str, capability: tuple[int, int] = (9, 0)) -> device.Capabilities:
        shutil.rmtree(site)
        site.mkdir()
        for name in names:
            package(site, name)
        monkeypatch.setattr(device, "CUDA", True)
        monkeypatch.setattr(device, "_compute_capability", lambda: capability)
        monkeypatch.setattr(importlib.util, "find_spec", find_spec)
        monkeypatch.setattr("sysconfig.get_path", lambda _: str(site))
        return capabilities()

    return pretend


def package(site: Path, name: str) -> None:
    """A package of this name with nothing in it; Transformer Engine with its three parts."""
    for folder in (name, f"{name}/pytorch") if name == TE else (name,):
        (site / folder).mkdir()
        (site / folder / "__init__.py").touch()
    if name == TE:
        (site / name / "wheel_lib").mkdir()
        (site / name / "wheel_lib" / "libtransformer_engine.so").touch()
        (site / "transformer_engine_torch.cpython-311-x86_64-linux-gnu.so").touch()


def lines(found: device.Capabilities, layer_spec: str = "auto", dtype: str = "bfloat16") -> dict[str, str]:
    return dict(line.split(": ", 1) for line in found.describe(layer_spec, dtype).splitlines())


@pytest.mark.parametrize(
    ("modules", "layer_spec", "attention", "adam", "fusion"),
    [
        ((), "auto", "torch", "torch AdamW", "off"),
        ((TE,), "auto", "TE fused", "TE FusedAdam", "off"),
        ((TE,), "local", "torch", "TE FusedAdam", "off"),  # megatron-core picks its Adam wherever it can be imported
        (APEX, "auto", "torch", "apex FusedAdam", "off"),
        ((TE, *APEX, FUSION), "auto", "TE fused", "TE FusedAdam", "apex"),
        ((*APEX, FUSION), "auto", "torch", "apex FusedAdam", "apex"),
        (("apex",), "auto", "torch", "torch AdamW", "off"),  # PyPI's web toolkit
    ],
)
def test_what_is_installed_is_what_is_logged(
    modules: tuple[str, ...], layer_spec: str, attention: str, adam: str, fusion: str, installed, monkeypatch
) -> None:
    found = lines(installed(*modules), layer_spec)
    assert found["attention"].startswith(attention)
    assert found["norms"].startswith(attention.split()[0])
    assert found["RoPE"] == "ctpo_kernels" or attention == "TE fused"
    assert found["Adam"] == adam
    assert found["gradient accumulation fusion"].startswith(fusion)
    flags = device.transformer_flags(te_layers=False, experts=False)
    assert flags["gradient_accumulation_fusion"] == (fusion == "apex")
    assert found["device"].startswith("cuda")
    monkeypatch.setattr(device, "CUDA", False)  # where nothing counts as installed
    found = lines(capabilities(), layer_spec)
    assert found["Adam"] == "torch AdamW" and found["attention"].startswith("torch")


@pytest.mark.parametrize(("layer_spec", "fused"), [("local", False), ("auto", True), ("transformer_engine", True)])
def test_megatron_is_asked_for_te_in_te_layers_alone(
    layer_spec: str, fused: bool, installed, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(TE)
    for name in ("fused_apply_rotary_pos_emb", "fused_apply_rotary_pos_emb_thd"):  # TransformerConfig asks for them
        monkeypatch.setattr(rope_utils, name, object())
    config = transformer_config(read_spec(model), PolicyConfig(layer_spec=layer_spec, dtype="bfloat16"))
    assert config.apply_rope_fusion == fused


def test_routers_multiply_by_te_in_te_layers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    product = object()
    monkeypatch.setattr(replacements, "_TE_PRODUCT", product)
    monkeypatch.setattr(moe_utils, "te_general_gemm", None, raising=False)
    replacements.route_with_te(True)
    assert moe_utils.te_general_gemm is product
    replacements.route_with_te(False)
    assert moe_utils.te_general_gemm is None


@pytest.mark.parametrize(
    ("removed", "trouble"),
    [
        ("transformer_engine/__init__.py", "is what an uninstall left of Transformer Engine: pip uninstall "),
        ("transformer_engine/pytorch/__init__.py", "is here without transformer_engine/pytorch"),
        ("transformer_engine_torch.cpython-311-x86_64-linux-gnu.so", "is here without transformer-engine-torch"),
        ("transformer_engine/wheel_lib/libtransformer_engine.so", "is here without transformer-engine-cu13"),
    ],
)
def test_a_transformer_engine_in_pieces_is_none(removed: str, trouble: str, site: Path, installed) -> None:
    assert installed(TE).transformer_engine
    (site / removed).unlink()
    found = capabilities()
    assert lines(found)["Adam"] == "torch AdamW"
    assert trouble in lines(found)["attention"]
    assert resolve_layer_spec(PolicyConfig(dtype="bfloat16")) == "local"
    with pytest.raises(RuntimeError, match=trouble):
        resolve_layer_spec(PolicyConfig(dtype="bfloat16", layer_spec="transformer_engine"))


def test_parts_of_different_versions_are_no_transformer_engine(
    site: Path, installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(site)
    for second, whole in (("2.11.0", True), ("2.10.0", False)):
        installed(TE)
        for name, version in (("transformer_engine", "2.11.0"), ("transformer_engine_torch", second)):
            (site / f"{name}-{version}.dist-info").mkdir()
            metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
            (site / f"{name}-{version}.dist-info" / "METADATA").write_text(metadata)
        assert capabilities().transformer_engine == whole
    assert "different versions (transformer_engine 2.11.0, transformer_engine_torch 2.10.0)" in str(te_trouble())


@pytest.mark.parametrize("name", [*APEX, FUSION, FLASH])
def test_the_folder_of_a_package_is_no_package(name: str, site: Path, installed) -> None:
    whole = installed(*APEX, FUSION, FLASH, capability=(8, 0))
    (site / name / "__init__.py").unlink()
    assert capabilities() != whole


@pytest.mark.slow  # a process that imports everything
def test_what_an_uninstall_left_of_te_stops_nothing(site: Path) -> None:
    """megatron-core takes the folder for Transformer Engine and asks for its version."""
    (site / TE / "common" / "include").mkdir(parents=True)
    code = f"import sys; sys.path.insert(0, {str(site)!r}); import ctpo_megatron.policy.model"
    code += "; from ctpo_megatron.base.installed import te_trouble; print(te_trouble())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=scaled(200))
    assert done.returncode == 0, done.stderr[-2000:]
    assert f"{site / TE} is what an uninstall left" in done.stdout  # still known, for the log


@pytest.mark.parametrize(
    ("modules", "capability", "dtype", "spec", "why"),
    [
        ((TE,), (9, 0), "bfloat16", "transformer_engine", "TE fused"),
        ((TE,), (9, 0), "float16", "transformer_engine", "TE fused"),
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


def test_the_logged_adam_is_the_one_that_steps(model: Path, layout: Layout) -> None:
    policy = Trainer(PolicyConfig(), layout, model, temperature=1.0)
    policy.use_optimizer(OptimizerConfig(), total_steps=1)
    (inner,) = [optimizer.optimizer for optimizer in policy._steps.optimizer.chained_optimizers]
    assert f"{type(inner).__module__.split('.')[0]} {type(inner).__name__}" == capabilities().adam


def test_a_rank_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.max_ranks() >= 4
    monkeypatch.setattr(device, "CUDA", True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert device.max_ranks() == 2
    with pytest.raises(RuntimeError, match=r"rank 2 of this node has no GPU: 2 are visible; start at most 2"):
        device.local_device(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="requests for CUDA are redirected where there is none")
def test_passes_are_outside_of_the_mode_that_redirects_requests_for_cuda() -> None:
    """The mode looks at every call of torch. The one request of the schedules is answered without it."""
    untouched: Any = None
    memory = DeviceMemory(PolicyConfig(), untouched)
    with memory.in_use():
        assert torch.zeros((), device="cuda").device == torch.device("cpu")
    refusals = pytest.raises(
        (AssertionError, RuntimeError), match=r"not compiled with CUDA|no NVIDIA driver|re-initialize CUDA"
    )
    with memory.on_device(), refusals:
        torch.zeros((), device="cuda")
    counter = replacements.TorchOfSchedules().zeros([], dtype=torch.int, device="cuda")
    assert (counter.device, counter.dtype, counter.shape) == (torch.device("cpu"), torch.int32, ())


def wait_and_stream_are_one() -> bool:
    device.install()
    return torch.cuda.synchronize is torch.cuda.current_stream


def test_no_function_of_ours_stands_for_two_of_torch_cuda() -> None:
    """torch.compile makes a table of them in each process, and refuses a function that is in it."""
    assert ranks.run(wait_and_stream_are_one) == [False]


@pytest.mark.parametrize(("wanted", "ranks", "taken"), [(2, None, 2), (3, 2, 3), (8, 2, 4), (4, 8, 1), (1, 16, 1)])
def test_ranks_of_a_node_do_not_take_more_threads_than_it_has_cores(
    monkeypatch: pytest.MonkeyPatch, wanted: int, ranks: int | None, taken: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    assert usable_threads(wanted) == taken
