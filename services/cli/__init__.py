"""The ``slipstream`` command: starts services on this machine, submits runs, follows them and reports."""
