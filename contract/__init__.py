"""The contract every backend adapter is held to, as checks that anyone can run on an adapter of their own."""
