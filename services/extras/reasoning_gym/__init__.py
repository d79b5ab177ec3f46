"""Tasks and verifiers of the package reasoning-gym."""
