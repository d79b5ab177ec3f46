# Sampling and rewards, with the embedded engine; rollout-vllm and rollout-sglang are for the others.
#
# BASE is an image with Python 3.11 or newer, pip and venv; for GPUs with a C compiler too, which makes the
# launchers of Triton's kernels (the slim image has none). PIP_OPTIONS goes to pip, for example
# "--no-index --find-links /wheels" to install from a folder that the build mounts.
ARG BASE=docker.io/library/python:3.12-bookworm

FROM ${BASE} AS dependencies
ARG PIP_OPTIONS=""
WORKDIR /build
COPY pyproject.toml constraints.txt LICENSE ./
# An empty package brings the dependencies, so that a change of code does not install them again.
RUN mkdir -p services proto/gen/slipstream && touch README.md services/__init__.py proto/gen/slipstream/py.typed \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt torch==2.13.0 ".[rollout,tracing]"

FROM ${BASE}
COPY --from=dependencies /opt/venv /opt/venv
WORKDIR /app
COPY services services
COPY proto/gen/slipstream slipstream
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The chart makes the root file system read-only; everything that is written goes to mounted volumes.
USER 10001:10001
EXPOSE 50051 9090
CMD ["python", "-m", "services.rollout"]
