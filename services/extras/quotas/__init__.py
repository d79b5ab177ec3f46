"""Command that sets the limits of single projects on the host of the controller."""
