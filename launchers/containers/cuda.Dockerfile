# The CUDA image. From the root of a checkout:
#
#     docker build -f launchers/containers/cuda.Dockerfile -t ctpo:cuda .
#     docker run --rm --gpus all --shm-size 64g --ulimit nofile=65536 --ulimit memlock=-1 \
#         -v "$PWD/runs:/ctpo/runs" -v "$PWD/models:/ctpo/models:ro" -v "$PWD/my.yaml:/ctpo/my.yaml:ro" ctpo:cuda train my.yaml
#
# --build-arg VENV=packages leaves Transformer Engine out, which compiles for a while; MAX_JOBS says with how many jobs.
# Shared memory: one copy of the weights and 2 GiB (`ctpo doctor CONFIG` counts); Docker's own 64 MiB are too little for
# NCCL alone. The host needs a driver of branch R580 or newer and the NVIDIA container toolkit. The tags of the base name
# one version in full; pin their digests, too, where images are built unattended (docs/install_cuda.md).
ARG VENV=transformer-engine

FROM nvidia/cuda:13.0.1-devel-ubuntu24.04 AS packages
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# Ubuntu keeps only the newest version of a package in a release, so none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ python3.12-dev python3.12-venv \
    && rm -rf /var/lib/apt/lists/*
RUN python3.12 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/cuda-3.12.txt /tmp/lock.txt
RUN pip install --no-deps --require-hashes -r /tmp/lock.txt

# Transformer Engine: its torch part is source alone and asks the torch of the lock for its version while it builds.
# The same versions, and why: docs/install_cuda.md, step 2.
FROM packages AS transformer-engine
ARG MAX_JOBS=8
ENV CUDA_HOME=/usr/local/cuda
RUN pip install wheel==0.48.0 pybind11==3.1.0 onnx==1.23.2 onnxscript==0.7.2 importlib-metadata==10.2.0 \
    && pip install --no-deps transformer-engine==2.20.2 transformer-engine-cu13==2.20.2
RUN NVIDIA=$(python -c "import nvidia; print(list(nvidia.__path__)[0])") \
    && export CPATH="$NVIDIA/cudnn/include:$NVIDIA/nccl/include:$NVIDIA/cu13/include" \
    && NVTE_PYTORCH_FORCE_BUILD=TRUE pip install --no-deps --no-build-isolation transformer-engine-torch==2.20.2

# hadolint ignore=DL3006
FROM ${VENV} AS venv

# Everything comes with wheels or was compiled above: the toolkit stays behind. Triton compiles its launchers with gcc.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04
# NCCL loads the user libraries of InfiniBand by name, and silently takes TCP where they are not installed.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 libseccomp2 python3.12-dev \
    libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=venv /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
COPY . /opt/ctpo
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/ctpo/answers --editable /opt/ctpo/kernels --editable /opt/ctpo \
    && useradd --create-home --uid 1001 ctpo && install --directory --owner=ctpo --group=ctpo /ctpo
USER 1001
WORKDIR /ctpo
ENTRYPOINT ["ctpo"]
CMD ["doctor"]
