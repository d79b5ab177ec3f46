# Every service for one machine: the controller starts trainers and rollouts as processes of its container.
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
RUN mkdir -p services proto/gen/slipstream /state && touch README.md services/__init__.py proto/gen/slipstream/py.typed \
    && python3 -m venv /opt/venv \
    && /opt/venv/bin/pip install --no-cache-dir ${PIP_OPTIONS} -c constraints.txt torch==2.13.0 ".[local,tracing]"

FROM ${BASE}
COPY --from=dependencies /opt/venv /opt/venv
# A volume that is mounted there belongs to whom the folder belongs.
COPY --from=dependencies --chown=10001:10001 /state /var/lib/slipstream
WORKDIR /app
COPY services services
COPY services/client/slipstream_client slipstream_client
COPY proto/gen/slipstream slipstream
ENV PATH=/opt/venv/bin:/usr/local/bin:/usr/bin:/bin PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
EXPOSE 8080 9090
CMD ["python", "-m", "services.controller"]
