"""Singularity's node daemon: watches, and on request disturbs, the collective communication of this host's training ranks."""

__version__ = "0.1.0"
