"""Backend adapters: each teaches one data-parallel library the interface of `backends.interface`."""
