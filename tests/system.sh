#!/usr/bin/env bash
# What a suite needs of the system, each as FILE=PACKAGE or PROGRAM: installed by apt-get where this is root on
# Debian, otherwise named in one line.
# usage: tests/system.sh [--or-skip] NEED...     --or-skip: go on without them, unless CI is set
set -euo pipefail
must=true
if [ "$1" = --or-skip ]; then shift; must=${CI:-}; fi
missing=()
for need in "$@"; do
  file=${need%%=*}
  command -v "$file" > /dev/null || ldconfig -p | grep -qF " $file " || [ -e "$file" ] || missing+=("${need##*=}")
done
[ ${#missing[@]} -eq 0 ] && exit
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" > /dev/null
  exit
fi
echo "missing: ${missing[*]}; on Debian: sudo apt-get install ${missing[*]}" >&2
[ -z "$must" ]
