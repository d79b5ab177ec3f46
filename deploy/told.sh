#!/bin/sh
# Runs a command, and says every two seconds for how long it has been going on.
# usage: deploy/told.sh WHAT COMMAND...
what=$1; shift
"$@" &
pid=$!
trap 'kill $pid 2> /dev/null' INT TERM
(
  seconds=0
  while sleep 2 && kill -0 $pid 2> /dev/null; do seconds=$((seconds + 2)); echo "$what, $seconds s"; done
) &
teller=$!
wait $pid
code=$?
kill $teller 2> /dev/null
exit $code
