"""Calls that megatron-core makes into Transformer Engine and apex, bound to the signatures of the releases it accepts.

Neither package runs without a GPU. `digest.json` holds what their sources say; a test compares it with the sources.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.optional.signatures import EXISTS, EXTENSIONS, WHEELS, committed, of_wheel, parsed
from tests.optional.uses import Use, uses
from tests.support.deadlines import scaled

ROOT = Path(__file__).resolve().parents[2]
ENGINE = "transformer_engine.pytorch"
SPLIT, WORKSPACE = f"{ENGINE}.attention._SplitAlongDim", f"{ENGINE}.module.base.get_workspace"
NOT_THERE: dict[str, set[str]] = {
    "transformer_engine 2.9.0": {SPLIT, f"{SPLIT}.apply", f"{ENGINE}.cpu_offload_v1"},
    "transformer_engine 2.10.0": {SPLIT, f"{SPLIT}.apply", WORKSPACE},
    "transformer_engine 2.11.0": {SPLIT, f"{SPLIT}.apply", WORKSPACE},
    "transformer_engine 2.20.2": {SPLIT, f"{SPLIT}.apply", WORKSPACE},
    "apex 25.09": set(),
}
"""Names inside `try`, which megatron-core does without: by torch.split; by `torch.mm` in the router of experts, where
Transformer Engine's product (`general_gemm`) would need a workspace; by the module before `cpu_offload_v1`."""
ENGINES = [f"transformer_engine {version}" for version in WHEELS]
UNSET = {
    "num_splits": "num_splits",
    "exp_avg_dtype": "use_precision_aware_optimizer",
    "exp_avg_sq_dtype": "use_precision_aware_optimizer",
    "master_weight_dtype": "use_precision_aware_optimizer",
    "use_decoupled_grad": "use_precision_aware_optimizer",
    "store_param_remainders": "use_precision_aware_optimizer",
}
"""Keywords that only some releases know -> the setting of megatron-core that passes them; the trainer sets none."""


def unbound(use: Use, signature: str) -> str | None:
    """Why a call does not fit; None if it does, or if nothing is known of the arguments."""
    if use.arguments < 0 or signature == EXISTS:
        return None
    words = dict.fromkeys(word for word in use.keywords if word not in UNSET)
    known = parsed(signature)
    try:
        (known.bind_partial if use.open else known.bind)(*range(use.arguments), **words)
    except TypeError as error:
        return f"{use.where}: {use.name}{signature}: {error}"
    return None


@cache
def asked(release: str) -> list[Use]:
    """FP8 recipes left out: the configuration offers none."""
    package, version = release.split()
    names = (package, *EXTENSIONS) if package == "apex" else (package,)
    return [use for name in names for use in uses(name, version) if ".recipe." not in use.name]


@pytest.mark.parametrize("release", [*ENGINES, "apex 25.09"])
def test_every_name_and_call_fits(release: str) -> None:
    known = committed()[release]
    missing = {use.name for use in asked(release) if known[use.name] is None}
    assert missing == NOT_THERE[release]
    replaced = missing | ({f"{ENGINE}.cpp_extensions.general_gemm"} if WORKSPACE in missing else set())
    calls = [use for use in asked(release) if use.name not in replaced and use.arguments >= 0]
    assert len(calls) > (30 if "engine" in release else 5)
    assert [problem for use in calls if (problem := unbound(use, str(known[use.name])))] == []


def test_the_trainer_sets_nothing_that_only_some_releases_know() -> None:
    texts = {file: file.read_text(encoding="utf-8") for file in (ROOT / "ctpo_megatron").rglob("*.py")}
    assert [str(file) for file, text in texts.items() for word in set(UNSET.values()) if word in text] == []


def test_what_our_configuration_reaches_is_among_the_calls() -> None:
    called = {use.name for use in asked(ENGINES[-1]) if use.arguments >= 0}
    layers = ("LayerNormLinear", "Linear", "GroupedLinear", "DotProductAttention")
    assert called >= {f"{ENGINE}.{name}.__init__" for name in layers} | {f"{ENGINE}.{name}.forward" for name in layers}
    functions = ("RMSNorm", "optimizers.FusedAdam", "optimizers.multi_tensor_applier", "distributed.checkpoint")
    assert called >= {f"{ENGINE}.{name}" for name in (*functions, "attention.rope.apply_rotary_pos_emb")}
    assert {use.name for use in asked("apex 25.09") if use.arguments >= 0} >= {
        "apex.optimizers.FusedAdam",
        "fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32",
    }


@pytest.mark.network
@pytest.mark.slow
@pytest.mark.parametrize("version", WHEELS)
def test_the_digest_is_what_the_sources_say(version: str, tmp_path: Path) -> None:
    """2 MB from the package index. apex is on none: its digest names the commit that it was read from."""
    command = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp_path)
    done = subprocess.run(
        [*command, f"transformer-engine=={version}"], capture_output=True, text=True, timeout=scaled(300)
    )
    if done.returncode:
        pytest.skip(f"no package registry answers: {done.stderr.strip().splitlines()[-1]}")
    assert of_wheel(next(tmp_path.glob("*.whl"))) == committed()[f"transformer_engine {version}"]
