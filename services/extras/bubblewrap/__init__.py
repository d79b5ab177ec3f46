"""Sandbox of episodes in namespaces of this host: bubblewrap, a list of system calls and control groups."""
