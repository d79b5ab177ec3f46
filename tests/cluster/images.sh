#!/bin/bash
# Builds the images from the project's own Dockerfile, on a Debian base made on the spot, without a registry.
#
#   images.sh FOLDER SOURCE PYTHON [ENGINE...]
#                archives of the images of SOURCE land in FOLDER/images; dependencies get the versions of
#                constraints.txt. ENGINE: vllm or sglang, for its rollout image as well, on the engine's CPU build
set -euo pipefail

folder=$(realpath "${1:?usage: images.sh FOLDER SOURCE PYTHON [ENGINE...]}")
source=$(realpath "${2:?usage: images.sh FOLDER SOURCE PYTHON [ENGINE...]}")
python=${3:?usage: images.sh FOLDER SOURCE PYTHON [ENGINE...]}
shift 3
wheels="$folder/wheels"
base=localhost/slipstream-base:bookworm
mkdir -p "$folder/images" "$wheels"
export BUILDAH_ISOLATION=chroot BUILDAH_FORMAT=docker

make_base() {
  buildah inspect --type image "$base" > /dev/null 2>&1 && return
  local rootfs="$folder/download/rootfs" container
  rm -rf "$rootfs"
  debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$rootfs" \
    "$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | head -1)" > "$folder/download/debootstrap.log"
  container=$(buildah from scratch)
  buildah add -q "$container" "$rootfs" / > /dev/null
  buildah run "$container" ln -sf python3 /usr/bin/python
  buildah commit -q --rm "$container" "$base" > /dev/null
  rm -rf "$rootfs"
}

fetch_wheels() { # the dependencies of all services, for the Python of the base image
  local extras stamp
  extras=$(sed -n 's/.*"EXTRAS": "\(.*\)".*/\1/p' "$source/deploy/docker/bake.json" | tr , '\n' | sort -u | paste -sd,)
  stamp="$wheels/.$({ cat "$source"/{pyproject.toml,constraints.txt,deploy/docker/bake.json}; echo "$extras"; } | sha256sum | cut -c1-16)"
  [ -e "$stamp" ] && return
  "$python" -m pip download -q -d "$wheels" -c "$source/constraints.txt" \
    "$(sed -n 's/^requires = \["\(.*\)"\]/\1/p' "$source/pyproject.toml")" \
    "$(grep -o 'torch==[0-9.]*' "$source/deploy/docker/bake.json" | head -1)" \
    "$source[$extras]" 2> "$folder/download/pip.log"
  touch "$stamp"
}

make_engine_base() { # ENGINE: its CPU build in the Python of the base, where its own image has the one for GPUs
  local engine=$1 lock="$source/tests/engines/locks/$1.txt" tree="$folder/download/$1" parent="$base" packages container
  if [ "$engine" = sglang ]; then # it uses the other's packages, torch among them
    make_engine_base vllm
    parent=$engine_base
  fi
  engine_base="localhost/slipstream-$engine:$(echo "$parent" | cat - "$lock" | sha256sum | cut -c1-16)"
  buildah inspect --type image "$engine_base" > /dev/null 2>&1 && return
  packages="$tree/usr/local/lib/python3.11/dist-packages"
  rm -rf "$tree"
  mkdir -p "$packages"
  "$python" -m pip install -q --no-deps --only-binary=:all: --target "$packages" -r "$lock" 2> "$folder/download/pip.log"
  [ "$engine" = vllm ] || cp -r "$source"/tests/engines/{vllm_cpu,sglang_cpu}/* "$packages/"
  (cd "$tree" && apt-get download -qq libnuma1 2> /dev/null && dpkg-deb -x libnuma1_*.deb . && rm libnuma1_*.deb)
  container=$(buildah from "$parent")
  buildah add -q "$container" "$tree" / > /dev/null
  buildah commit -q --rm "$container" "$engine_base" > /dev/null
  rm -rf "$tree"
}

options_of() { # NAME: the options of an image in bake.json, a line each
  "$python" - "$source/deploy/docker/bake.json" "$1" <<'PY'
import json, sys

targets = json.load(open(sys.argv[1]))["target"]


def merged(name):
    target, merge = targets[name], {"args": {}}
    for parent in target.get("inherits", ()):
        merge = merged(parent)
    return {**merge, **target, "args": {**merge["args"], **target.get("args", {})}}


target = merged(sys.argv[2])
print(f"--file={target['dockerfile']}", f"--target={target['target']}", sep="\n")
for key, value in target["args"].items():
    if key != "BASE":
        print(f"--build-arg={key}={value}")
PY
}

build() { # NAME BASE: build, and export under the tag of the sources
  local name=$1 archive="$folder/images/$1.tar" image="localhost/slipstream/$1:test" old options
  mapfile -t options < <(options_of "$name")
  old=$(buildah images -q "$image" 2> /dev/null || true)
  (cd "$source" && buildah bud -q --layers --volume "$wheels:/wheels:ro" --build-arg BASE="$2" \
    --build-arg PIP_OPTIONS="-q --no-index --find-links /wheels" "${options[@]}" -t "$image" . > /dev/null)
  [ "$old" = "$(buildah images -q "$image")" ] && [ -e "$archive" ] && return
  [ -z "$old" ] || echo "$old" >> "$replaced"
  rm -f "$archive" "$archive.part"
  buildah push -q "$image" "docker-archive:$archive.part:$image" # or a later call would take half an archive for a whole one
  mv "$archive.part" "$archive"
}

make_pause() { # the process that holds a pod's namespaces
  local archive="$folder/images/pause.tar" container
  [ -e "$archive" ] && return
  gcc -static -Os -x c -o "$folder/download/pause" - <<'C'
#include <signal.h>
#include <unistd.h>
static void end(int number) { _exit(0); }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }
C
  container=$(buildah from scratch)
  buildah add -q "$container" "$folder/download/pause" /pause > /dev/null
  buildah config --entrypoint '["/pause"]' "$container"
  buildah commit -q --rm "$container" localhost/pause:1 > /dev/null
  buildah push -q localhost/pause:1 "docker-archive:$archive:localhost/pause:1"
}

remove_replaced() { # or every build would fill the disk further; never beside a build, whose cache has their layers
  sort -u "$replaced" | xargs --no-run-if-empty -n 1 buildah rmi > /dev/null 2>&1 || true
  rm "$replaced"
}

make_pause
make_base
fetch_wheels
replaced=$(mktemp)
builds=() failures=0
for name in controller transferqueue trainer rollout trackers; do
  build "$name" "$base" & # copying dependencies between stages reads all of them, on one core
  builds+=($!)
done
for one in "${builds[@]}"; do
  wait "$one" || failures=$((failures + 1))
done
[ "$failures" = 0 ] || exit 1
for engine in "$@"; do
  make_engine_base "$engine"
  build "rollout-$engine" "$engine_base"
done
remove_replaced
