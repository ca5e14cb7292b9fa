"""Copies of threads' data that outlive their machine: read and written by nodes, kept in any fsspec storage.

`reading` walks a thread's tree, `saving` writes what is new of it, `restoring` brings it back, `vault` is one thread's
place in the `storage`, `manifest` says what a checkpoint is, and `keeper` decides when a node does which.
"""
