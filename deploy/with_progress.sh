#!/bin/sh
# Runs a command and prints its elapsed time every two seconds.
# usage: deploy/with_progress.sh WHAT COMMAND...
what=$1; shift
"$@" &
pid=$!
trap 'kill $pid 2> /dev/null' INT TERM
(
  seconds=0
  while sleep 2 && kill -0 $pid 2> /dev/null; do seconds=$((seconds + 2)); echo "$what, $seconds s"; done
) &
reporter=$!
wait $pid
code=$?
kill $reporter 2> /dev/null
exit $code
