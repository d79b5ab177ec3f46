"""Engine ``none`` of rollouts that only read rows."""
