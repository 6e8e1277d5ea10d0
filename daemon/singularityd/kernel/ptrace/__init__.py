"""Stops single threads of a rank and lets them go: the mechanism that works on every kernel since 5.5 without writing registers.

Each armed fault has a holder (holder.py): a child of the executor that traces one rank. Whatever kills it, the kernel then lets every
thread go; the normal end is its exit too, which detaches without interrupting a system call of the rank.
"""
