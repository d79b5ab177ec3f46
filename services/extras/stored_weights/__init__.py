"""Weight versions in a folder or an object store, where rollouts load them at their own pace."""
