"""Hand-written training loops, one for each library: what Lockstep's loop and adapters are measured against.

Each is what one would write by hand after the library's documentation, and imports nothing of Lockstep's own loop and
adapters. A loop is the function `train` of the module that has the name of its backend.
"""
