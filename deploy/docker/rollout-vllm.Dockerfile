# Rollouts with vLLM: the engine's own image, and on top of it what rollouts need beside the engine.
#
# BASE is an image with vLLM, Python 3.11 or newer, pip and venv. PIP_OPTIONS goes to pip, for example
# "--no-index --find-links /wheels" to install from a folder that the build mounts.
ARG BASE=docker.io/vllm/vllm-openai:v0.32.0

FROM ${BASE} AS dependencies
ARG PIP_OPTIONS=""
WORKDIR /build
COPY pyproject.toml LICENSE ./
# An empty package brings the dependencies, so that a change of code does not install them again. The environment
# sees the engine's packages, torch among them, which stay as they are, be they in an environment themselves.
RUN mkdir -p services proto/gen/slipstream && touch README.md services/__init__.py proto/gen/slipstream/py.typed \
    && python3 -m venv --system-site-packages /opt/rollout \
    && python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > engine.pth \
    && cp engine.pth /opt/rollout/lib/python3.*/site-packages/ \
    && /opt/rollout/bin/pip install --no-cache-dir ${PIP_OPTIONS} ".[rollout,tracing]"

FROM ${BASE}
COPY --from=dependencies /opt/rollout /opt/rollout
WORKDIR /app
COPY services services
COPY proto/gen/slipstream slipstream
ENV PATH=/opt/rollout/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
# The chart makes the root file system read-only; everything that is written goes to mounted volumes.
USER 10001:10001
EXPOSE 50051 9090
# The engine's image has a program of its own there.
ENTRYPOINT []
CMD ["python", "-m", "services.rollout"]
