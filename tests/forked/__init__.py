"""Commands and ranks that are forked from one process which has loaded all libraries already.

Most of the time of a small job is the start of Python and torch. Tests that are not about a launcher
let `tests.launching` run the command line in a fork of the server (tests/forked/server.py), which also
starts the ranks: same modules, same environment variables, same rendezvous, but no imports. Tests with
the marker "launchers" have each library's own launcher run in a fork, which starts the ranks through a
program that poses as the Python interpreter (tests/forked/interpreter.py). Each launcher also has tests
that start it in new processes (marker "processes", tests/test_lifetimes.py).
"""
