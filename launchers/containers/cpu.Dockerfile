# The CPU image: the quickstart, the tests' packages, a trainer without GPUs. From the root of a checkout:
#
#     docker build -f launchers/containers/cpu.Dockerfile -t ctpo:cpu .
#     docker run --rm --shm-size 4g --ulimit nofile=65536 -v "$PWD/runs:/ctpo/runs" ctpo:cpu train quickstart.yaml
#
# --build-arg TORCH_INDEX=<the PyTorch CPU wheel index> saves several GB of CUDA libraries. The tag of the base names one
# version in full; pin its digest, too, where images are built unattended (docs/install_cuda.md).
FROM python:3.12.11-slim-bookworm AS packages
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# A compiler: some packages have no wheel. Debian keeps only the newest version of a package, so none can be pinned.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
COPY requirements/cpu-3.12.txt /tmp/lock.txt
# As the Makefile does: CPU builds of torch differ by source, so torch has no hash, and pip wants all or none of them.
RUN grep -v '^torch==' /tmp/lock.txt > /tmp/hashed.txt \
    && grep '^torch==' /tmp/lock.txt > /tmp/torch.txt \
    && pip install --no-deps --require-hashes -r /tmp/hashed.txt
ARG TORCH_INDEX=""
RUN pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -r /tmp/torch.txt

FROM python:3.12.11-slim-bookworm
# vLLM compiles for the CPU that it finds; the sandbox filters system calls through libseccomp.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ libnuma1 libseccomp2 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=packages /opt/venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1
COPY . /opt/ctpo
RUN pip install --no-cache-dir --no-deps --no-build-isolation --editable /opt/ctpo/answers --editable /opt/ctpo/kernels --editable /opt/ctpo \
    && useradd --create-home --uid 1000 ctpo && install --directory --owner=ctpo --group=ctpo /ctpo
USER 1000
WORKDIR /ctpo
ENTRYPOINT ["ctpo"]
CMD ["doctor"]
