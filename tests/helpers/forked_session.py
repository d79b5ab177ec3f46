"""Runs the tests of a forked worker: ``execnet`` executes this source there, not that of ``xdist.remote``."""

if __name__ == "__channelexec__":
    from tests.helpers import imported_tests

    if imported_tests.collection is None:
        from inspect import getsource

        from xdist import remote  # type: ignore[import-untyped]

        exec(compile(getsource(remote), remote.__file__, "exec"))
    else:
        imported_tests.collection.run(channel)  # type: ignore[name-defined] # noqa: F821
