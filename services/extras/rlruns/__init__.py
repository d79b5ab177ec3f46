"""RLRun objects of Kubernetes, each of which is a run of the project named like its namespace."""
