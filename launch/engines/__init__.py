"""Engines: what starts ranks. Each is one file that tells one launcher what to start, in that launcher's words."""
